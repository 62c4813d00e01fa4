"""One run of one job: misfire check, slot, claim, call, settle.

The flow is a generator that asks for reads, swaps, calls and sleeps and is told what came of them. A driver answers:
`drive` on a thread, `drive_async` on an event loop, and a simulation under a clock of its own. There is one flow, so
what is simulated is what runs.
"""

from __future__ import annotations

import asyncio
import collections
import inspect
import itertools
import logging
import os
import pickle
import random
import socket
import threading
import traceback
import uuid
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MISSED, JobExecutionEvent

from apscheduler_fence.errors import ConfigError, FenceError, LeaseLost, Retry, StoreError
from apscheduler_fence.events import EVENT_JOB_RECOVERED, EVENT_JOB_REFUSED, JobRefusedEvent, in_time
from apscheduler_fence.fence import Fence, Hold, bind, entered
from apscheduler_fence.keeper import Keeper, Settings, knows_none, lease_event
from apscheduler_fence.lease import (
    Ask,
    Change,
    Execution,
    FinalState,
    Grant,
    Insert,
    Key,
    Refusal,
    Seen,
    broken,
    claim,
    granted,
    is_mine,
    retry,
    settle,
)
from apscheduler_fence.policy import Instant, Policy, elapsed, in_micros, instant, parse_duration
from apscheduler_fence.slots import Slot, slot_of
from apscheduler_fence.stores import open_described
from apscheduler_fence.stores.base import Executions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from concurrent.futures import Executor

    from apscheduler.triggers.base import BaseTrigger

    from apscheduler_fence.events import FenceEvent
    from apscheduler_fence.policy import Claimable
    from apscheduler_fence.stores.base import Store, StoreDescription

logger = logging.getLogger(__name__)

T = TypeVar("T")

CALM_TRIES = 3
"""Swaps that may fail because the lease moved before a claim takes its time between them."""

ERROR_LIMIT = 4000
"""Characters of an error and the tail of its traceback that the execution's record keeps."""


@dataclass(frozen=True, slots=True)
class Run:
    """One submission of one job: what to call, on which terms, for which run times. It can be pickled."""

    job_id: str
    jobstore: str
    job: str
    lease: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    trigger: BaseTrigger
    run_times: tuple[datetime, ...]
    policy: Policy | None
    misfire_grace_time: int | None = None
    by_hand: bool = False
    slot: Slot | None = None
    """Given where it does not follow from a run time: a recorded execution that is to run, or a run by hand."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What all runs of an executor have in common. Durations in seconds unless they say otherwise."""

    store_patience: float = 10.0
    max_early: timedelta = timedelta(minutes=1)
    retention: timedelta = timedelta(days=30)
    keeper: Settings = field(default_factory=Settings)


@dataclass(eq=False)
class Node:
    """One process's part in the cluster: its store, its keeper, and where its events go."""

    store: Store
    terms: Terms
    emit: Callable[[FenceEvent], None]
    clock: Callable[[], Instant] = instant
    recover: Callable[[Execution], bool] = knows_none

    def __post_init__(self) -> None:
        self.keeper = Keeper(
            self.store, self.emit, self.nonce, self.prepare, self.terms.keeper, self.clock, self.recover
        )  # fmt: skip
        self.forget()

    def forget(self) -> None:
        """In a forked child: nothing of the parent's is ours."""
        self._preparing = threading.Lock()
        self.prepared = False
        self._broken: ConfigError | None = None
        self._known_functions: set[tuple[str, str]] = set()
        self.stopping = threading.Event()
        self.forks = getattr(self, "forks", -1) + 1
        self.keeper.forget()

    def nonce(self) -> str:
        """A holder that no other claim will ever have."""
        return f"{socket.gethostname()[:64]}:{os.getpid()}:{uuid.uuid4().hex[:16]}"

    def prepare(self) -> None:
        """Open the store on first use, and pass on what it warns of.

        Raises:
            StoreError: it cannot be reached now.
            ConfigError: it can never work as it is set up.
        """
        with self._preparing:
            if self._broken is not None:
                raise self._broken
            if self.prepared:
                return
            try:
                for warning in self.store.open():
                    logger.warning("%s", warning)
            except ConfigError as error:
                self._broken = error
                raise
            self.prepared = True

    def warn_of_namesake(self, run: Run, found: str) -> None:
        """Another function has run under this job's name: perhaps another application's."""
        if (run.job, found) not in self._known_functions:
            self._known_functions.add((run.job, found))
            logger.warning(
                "The job name %r was last used by %s, and here it is %s: if that is another application's job, the two "
                "suppress each other; give the executors different namespace= options",
                run.job, found, reference(run.function),
            )  # fmt: skip


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """Something that takes time but no store: computing a slot, opening the store."""

    act: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Read:
    """`Store.read`."""

    key: Key


@dataclass(frozen=True, slots=True)
class Swap:
    """`Store.swap` of one change; answered with the token or None."""

    change: Change


@dataclass(frozen=True, slots=True)
class Sleep:
    """Seconds to let pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Call:
    """Claiming the resources, then the job function itself; answered with an `Outcome`, whatever happens."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    fence: Fence | None
    resources: tuple[Claimable, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled rather than failed."""
        return isinstance(self.error, asyncio.CancelledError)


Step: TypeAlias = Work | Read | Swap | Sleep | Call
Event: TypeAlias = JobExecutionEvent | JobRefusedEvent
Flow: TypeAlias = Generator[Step, Any, Event | None]


# --- the flow ---------------------------------------------------------------------------------------------------------


def run_slot(run: Run, run_time: datetime, node: Node) -> Flow:
    """Run one run time of a job, if this node is the one to do it, and return the event to dispatch.

    There is none where a recorded execution was offered to this node and another was quicker.
    """
    late = datetime.fromtimestamp(node.clock().wall, timezone.utc) - run_time
    if run.misfire_grace_time is not None and late > timedelta(seconds=run.misfire_grace_time):
        logger.warning('Run time of job "%s" was missed by %s on this node', run.job_id, late)
        return JobExecutionEvent(EVENT_JOB_MISSED, run.job_id, run.jobstore, run_time)
    if run.policy is None:
        try:
            function, args, kwargs = bind(run.function, run.args, run.kwargs, None)
        except ConfigError as error:
            return executed(run, run_time, Outcome(error=error))
        return executed(run, run_time, (yield Call(function, args, kwargs, None)))
    try:
        if run.slot is not None:
            slot = run.slot
        else:
            slot = yield Work(partial(slot_of, run.job, run.trigger, run_time, slot=run.policy.slot))
            if not run.policy.once_per_slot:
                slot = replace(slot, name=f"{slot.name}~{uuid.uuid4().hex[:12]}")
        won = yield from _claim(run, slot, node)
    except asyncio.CancelledError as cancelled:
        return failed(run, run_time, cancelled)
    except Exception as error:  # noqa: BLE001 - a user's slot= function may raise anything
        logger.error('Job "%s" was not run: %s', run.job_id, error)
        return failed(run, run_time, error)
    if isinstance(won, Refusal):
        refused = _refused(run, run_time, slot, won)
        return None if run.slot is not None and not run.by_hand else refused
    return (yield from _run_held(run, run_time, won, node))


@dataclass(slots=True)
class _Claim:
    """A claim under way.

    `sent` is the moment of the last swap, `first_sent` that of the first, from which trust counts if the nonce turns up
    in the row: whatever the answers said, one of them was applied. `ending` is the last swap that ends a run of another
    holder, while it is not known whether it was applied.
    """

    run: Run
    slot: Slot
    ask: Ask
    node: Node
    sent: Instant | None = None
    first_sent: Instant | None = None
    ending: Change | None = None
    displaced_holder: str | None = None

    def hold(self, token: int, attempt: int, since: Instant) -> Hold:
        run = self.run
        return Hold(
            granted(self.ask, token, attempt), self.slot, run.policy or Policy(), since=since, began=since,
            job_id=run.job_id, jobstore=run.jobstore, clock=self.node.clock,
            settle_in=getattr(self.node.store, "settle_in", None),
        )  # fmt: skip

    def announce_displaced(self) -> None:
        ending, self.ending = self.ending, None
        if ending is not None and ending.displaced is not None:
            self.node.keeper.announce(ending.displaced, self.displaced_holder)


def _claim(run: Run, slot: Slot, node: Node) -> Generator[Step, Any, Hold | Refusal]:
    """Read, decide, swap, until it is clear who runs the slot.

    Raises:
        StoreError: that did not become clear within the store's patience.
    """
    attempt = _Claim(run, slot, _ask(run, slot, node), node)
    started, failures, lost_swaps = node.clock(), 0, 0
    while True:
        try:
            won = yield from _try_claim(attempt)
            if won is not None:
                return won
            lost_swaps += 1
            trouble = StoreError(f"the lease {attempt.ask.lease!r} moved at every try")
        except StoreError as error:
            failures += 1
            trouble = error
        if elapsed(started, node.clock()) >= node.terms.store_patience:
            raise trouble
        if failures:
            logger.warning('Job "%s" waits for the store: %s', run.job_id, trouble)
            yield Sleep(min(0.1 * 2**failures, 2.0) * random.uniform(0.5, 1))  # noqa: S311
        elif lost_swaps > CALM_TRIES:
            yield Sleep(random.uniform(0.01, 0.1))  # noqa: S311


def _try_claim(attempt: _Claim) -> Generator[Step, Any, Hold | Refusal | None]:
    ask, node = attempt.ask, attempt.node
    if not node.prepared:
        yield Work(node.prepare)
    if attempt.ending is not None:
        yield from _read_back_ending(attempt)
    seen: Seen = yield Read(ask.key)
    if attempt.first_sent is not None and is_mine(seen, ask.nonce) and seen.lease and seen.execution:
        return attempt.hold(seen.lease.token, seen.execution.attempt, attempt.first_sent)
    decision = claim(seen, ask)
    if isinstance(decision, Refusal):
        _complain_of_clock(decision, attempt.slot, seen)
        return decision
    if seen.lease is not None and seen.lease.func not in (None, ask.func) and ask.lease == ask.job:
        node.warn_of_namesake(attempt.run, seen.lease.func)
    if decision.enqueues and (yield from _is_full(attempt)):
        return Refusal("full", seen.lease.holder if seen.lease is not None else None)
    attempt.ending = decision if decision.displaced is not None else None
    attempt.displaced_holder = seen.lease.holder if seen.lease is not None else None
    attempt.sent = node.clock()
    attempt.first_sent = attempt.first_sent or attempt.sent
    token: int | None = yield Swap(decision)
    if token is None:
        return None
    attempt.announce_displaced()
    if decision.enqueues:
        return Refusal("queued", attempt.displaced_holder)
    if not decision.grants:
        return None
    begun = decision.executions[-1]
    return attempt.hold(token, begun.row.attempt if isinstance(begun, Insert) else begun.attempt, attempt.sent)


def _read_back_ending(attempt: _Claim) -> Generator[Step, Any, None]:
    """Whether a swap that ends another's run was applied: its answer was lost, or it matched nothing the second time."""
    ending = attempt.ending
    lost = ending.displaced if ending is not None else None
    if ending is not None and lost is not None:
        seen: Seen = yield Read(Key(lost.lease, lost.job, lost.slot))
        if broken(seen, ending):
            attempt.announce_displaced()
    attempt.ending = None


def _is_full(attempt: _Claim) -> Generator[Step, Any, bool]:
    limit = (attempt.run.policy or Policy()).queue_limit
    query = Executions(lease=attempt.ask.lease, states=("waiting",), limit=limit)
    waiting: list[Execution] = yield Work(lambda: list(attempt.node.store.executions(query)))
    return len(waiting) >= limit


def _ask(run: Run, slot: Slot, node: Node) -> Ask:
    policy = run.policy or Policy()
    own_lease = policy.overlap == "allow" and (run.slot is None or run.by_hand)
    return Ask(
        lease=f"{run.lease}/{slot.name}" if own_lease else run.lease,
        job=slot.job,
        slot=slot.name,
        slot_at=slot.at,
        scheduled_at=slot.scheduled_at,
        nonce=node.nonce(),
        lock_at_most=in_micros(policy.lock_at_most),
        lock_at_least=in_micros(policy.lock_at_least),
        delivery=policy.delivery,
        max_attempts=max(policy.max_attempts, policy.retries + 1),
        overlap=policy.overlap,
        max_early=in_micros(node.terms.max_early),
        keep_for=in_micros(node.terms.retention),
        func=reference(run.function),
        jobstore=run.jobstore,
        job_id=run.job_id,
    )


def _complain_of_clock(refusal: Refusal, slot: Slot, seen: Seen) -> None:
    if refusal.reason == "early":
        ahead = (slot.at - seen.now) / 1e6
        raise FenceError(
            f"slot {slot.execution_id} lies {ahead:.1f} s ahead of the store's clock: the clock of this node "
            f"({socket.gethostname()}) is wrong, or the store's is"
        )


def _refused(run: Run, run_time: datetime, slot: Slot, refusal: Refusal) -> Event:
    until = None if refusal.until is None else in_time(refusal.until)
    logger.info(
        'Job "%s" refused for slot %s: %s, holder %s, until %s',
        run.job_id, slot.execution_id, refusal.reason, refusal.holder, until,
    )  # fmt: skip
    return JobRefusedEvent(
        EVENT_JOB_REFUSED, run.job_id, run.jobstore, slot.execution_id, scheduled_run_time=run_time,
        holder=refusal.holder, reason=refusal.reason, until=until,
    )  # fmt: skip


def _run_held(run: Run, run_time: datetime, hold: Hold, node: Node) -> Flow:
    if hold.remaining() <= 0:
        late = LeaseLost(hold.execution_id, hold.grant.token)
        yield from _settle(hold, settle(hold.grant, "cancelled", "the lease ran out before the job was entered"), node)
        return failed(run, run_time, late)
    node.keeper.hold(hold)
    try:
        return (yield from _run_to_end(run, run_time, hold, node))
    except BaseException as error:
        # Whatever went wrong, on our side too: a lease that nobody will give back must not be renewed for ever.
        if not hold.ended:
            hold.ended = True
            state: FinalState = "failed" if isinstance(error, Exception) else "cancelled"
            node.keeper.settle_later(hold, settle(hold.grant, state, type(error).__qualname__))
        raise


def _run_to_end(run: Run, run_time: datetime, hold: Hold, node: Node) -> Flow:
    if hold.grant.attempt > 1:
        node.emit(lease_event(EVENT_JOB_RECOVERED, hold))
    forks = node.forks
    for retries in itertools.count():
        outcome = yield from _attempt(run, hold)
        if node.forks != forks:  # the job forked, and this is the child: what is held here is the parent's
            return ended(run, run_time, outcome)
        wait = _wait_before_retry(hold, outcome, retries)
        if wait is None:
            break
        logger.warning(
            'Job "%s" failed at attempt %s of slot %s, token %s, and runs again in %.1f s: %r',
            run.job_id, hold.grant.attempt, hold.execution_id, hold.grant.token, wait, outcome.error,
        )  # fmt: skip
        try:
            yield Sleep(wait)
            if not (yield from _regrant(hold, outcome, node)):
                break
        except asyncio.CancelledError:
            yield from _settle(hold, settle(hold.grant, "cancelled", describe_error(outcome)), node)
            return ended(run, run_time, outcome)
        except GeneratorExit:
            hold.ended = True
            node.keeper.settle_later(hold, settle(hold.grant, "cancelled", describe_error(outcome)))
            raise
    state: FinalState = "succeeded" if outcome.error is None else "cancelled" if outcome.cancelled else "failed"
    yield from _settle(hold, settle(hold.grant, state, describe_error(outcome)), node)
    return executed(run, run_time, outcome)


def _attempt(run: Run, hold: Hold) -> Generator[Step, Any, Outcome]:
    grant = hold.grant
    fence = Fence(
        grant.token, hold.execution_id, grant.job, grant.lease, grant.slot, in_time(hold.slot.scheduled_at),
        grant.attempt, hold,
    )  # fmt: skip
    logger.info(
        'Running job "%s" for slot %s: token %s, attempt %s, holder %s',
        run.job_id, fence.execution_id, fence.token, fence.attempt, grant.holder,
    )  # fmt: skip
    try:
        function, args, kwargs = bind(run.function, run.args, run.kwargs, fence)
    except Exception as error:  # noqa: BLE001 - whatever is wrong with the arguments is this run's outcome
        return Outcome(error=error)
    outcome: Outcome = yield Call(function, args, kwargs, fence, hold.policy.resources)
    if hold.lost and outcome.cancelled:
        return replace(outcome, error=LeaseLost(fence.execution_id, fence.token))
    return outcome


def _wait_before_retry(hold: Hold, outcome: Outcome, retries: int) -> float | None:
    """Seconds until the next attempt of a run that ended like this after so many retries here; None if there is none."""
    policy, error = hold.policy, outcome.error
    if error is None or outcome.cancelled or hold.lost or hold.settling:
        return None
    if retries >= policy.retries or hold.grant.attempt >= hold.grant.max_attempts:
        return None
    if isinstance(error, Retry):
        try:
            if error.after is not None:
                return max(0.0, parse_duration(error.after, "Retry(after=)").total_seconds())
        except ConfigError as wrong:  # an attempt was asked for: that much is clear
            logger.error("Run of %s: %s; it waits as retry_delay says", hold.execution_id, wrong)
    elif not isinstance(error, policy.retry_on):
        return None
    return policy.retry_delay.wait(retries + 1, random.random())  # noqa: S311


def _regrant(hold: Hold, outcome: Outcome, node: Node) -> Generator[Step, Any, bool]:
    """Begin the next attempt under the same lease; False if the lease is lost, or nobody answers for too long."""
    nonce, grant = node.nonce(), hold.grant
    change = retry(grant, nonce, in_micros(hold.policy.lock_at_most), describe_error(outcome))
    started, failures = node.clock(), 0
    hold.regranting = True
    try:
        while elapsed(started, node.clock()) <= node.terms.store_patience:
            try:
                token = yield Swap(change)
                if token is None and failures:
                    seen: Seen = yield Read(Key(grant.lease, grant.job, grant.slot))
                    token = seen.lease.token if seen.lease is not None and is_mine(seen, nonce) else None
            except StoreError as error:
                failures += 1
                logger.warning("The next attempt of %s waits for the store: %s", hold.execution_id, error)
                try:
                    yield Sleep(min(0.1 * 2**failures, 2.0) * random.uniform(0.5, 1))  # noqa: S311
                except asyncio.CancelledError:
                    yield from _find_regrant(hold, nonce)
                    raise
                continue
            if token is None:
                return False
            hold.grant = _next_grant(grant, token, nonce)
            hold.since = started
            return hold.remaining() > 0
        return False
    finally:
        hold.regranting = False


def _next_grant(grant: Grant, token: int, nonce: str) -> Grant:
    return replace(grant, token=token, holder=nonce, attempt=grant.attempt + 1)


def _find_regrant(hold: Hold, nonce: str) -> Generator[Step, Any, None]:
    """No more answers are waited for: what must be settled is the grant that the row shows, if it can be read."""
    grant = hold.grant
    with suppress(StoreError):
        seen: Seen = yield Read(Key(grant.lease, grant.job, grant.slot))
        if seen.lease is not None and is_mine(seen, nonce):
            hold.grant = _next_grant(grant, seen.lease.token, nonce)


def _settle(hold: Hold, change: Change, node: Node) -> Generator[Step, Any, None]:
    hold.ended = True
    grant = hold.grant
    try:
        token = yield Swap(change)
        if token is None:
            seen = yield Read(Key(grant.lease, grant.job, grant.slot))
            if not hold.recorded(seen, change):
                node.keeper.unrecorded(hold, change)
    except BaseException as error:
        node.keeper.settle_later(hold, change)
        logger.error(
            "Outcome of %s not recorded yet, and repeated until it is: token %s, holder %s: %s",
            hold.execution_id, grant.token, grant.holder, error,
        )  # fmt: skip
        if not isinstance(error, Exception):  # a greenlet is killed, a flow is closed: what was asked of it goes on
            raise
        return
    node.keeper.drop(hold)


# --- events -----------------------------------------------------------------------------------------------------------


def executed(run: Run, run_time: datetime, outcome: Outcome) -> JobExecutionEvent:
    """Log how a call ended, and return APScheduler's own event for it."""
    if outcome.error is None:
        logger.info('Job "%s" executed successfully', run.job_id)
    else:
        logger.error('Job "%s" raised an exception\n%s', run.job_id, describe_error(outcome))
    return ended(run, run_time, outcome)


def ended(run: Run, run_time: datetime, outcome: Outcome) -> JobExecutionEvent:
    """APScheduler's own event for a call that ended."""
    if outcome.error is not None:
        return failed(run, run_time, outcome.error, outcome.traceback)
    return JobExecutionEvent(EVENT_JOB_EXECUTED, run.job_id, run.jobstore, run_time, retval=outcome.value)


def failed(run: Run, run_time: datetime, error: BaseException, formatted: str = "") -> JobExecutionEvent:
    """APScheduler's own event for a job that raised, or that could not be run."""
    return JobExecutionEvent(
        EVENT_JOB_ERROR, run.job_id, run.jobstore, run_time, exception=error, traceback=formatted
    )  # fmt: skip


def describe_error(outcome: Outcome) -> str | None:
    """The tail of the traceback, then type and message: bounded."""
    if outcome.error is None:
        return None
    try:
        line = "".join(traceback.format_exception_only(type(outcome.error), outcome.error)).strip()
    except Exception:  # noqa: BLE001 - an exception that cannot even be formatted must not hide that it was raised
        line = type(outcome.error).__qualname__
    line = line[: ERROR_LIMIT // 2]
    return outcome.traceback[-(ERROR_LIMIT - len(line)) :] + line


def reference(function: Callable[..., Any]) -> str:
    """Where a job's function is defined, as `module:qualname`, seen through partials and objects."""
    while isinstance(function, partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"[:191]


# --- drivers ----------------------------------------------------------------------------------------------------------


def awaits(function: Callable[..., Any]) -> bool:
    """Whether calling it returns a coroutine: seen through partials, methods and callable objects."""
    while isinstance(function, partial):
        function = function.func
    if inspect.iscoroutinefunction(function):
        return True
    return not inspect.isroutine(function) and not inspect.isclass(function) and inspect.iscoroutinefunction(
        type(function).__call__
    )  # fmt: skip


def never_awaited(function: Callable[..., Any]) -> ConfigError:
    """What is wrong with a coroutine function on an executor that only calls."""
    return ConfigError(
        f"{reference(function)} is a coroutine function, which this executor never awaits: use AsyncIOScheduler or "
        "TornadoScheduler, or make it a plain function"
    )


def call(step: Call) -> Outcome:
    """Call a plain function."""
    try:
        if step.fence is None:
            value = step.function(*step.args, **step.kwargs)
        else:
            with entered(step.fence):
                for resource in step.resources:
                    resource.claim(step.fence)
                value = step.function(*step.args, **step.kwargs)
    except BaseException as error:  # noqa: BLE001 - as APScheduler: whatever ends a job is that job's outcome
        return outcome_of(error)
    if inspect.iscoroutine(value):
        value.close()
        return Outcome(error=ConfigError(f"{reference(step.function)} returned a coroutine, which nobody awaits here"))
    return Outcome(value)


async def call_async(step: Call) -> Outcome:
    """Call a coroutine function and await what it returns."""
    try:
        if step.fence is None:
            return Outcome(await step.function(*step.args, **step.kwargs))
        with entered(step.fence):
            for resource in step.resources:
                await asyncio.to_thread(resource.claim, step.fence)
            return Outcome(await step.function(*step.args, **step.kwargs))
    except BaseException as error:  # noqa: BLE001 - as above
        return outcome_of(error)


def outcome_of(error: BaseException) -> Outcome:
    """Keep what a listener needs of an exception, and none of its frames."""
    frames = error.__traceback__
    formatted = "".join(traceback.format_tb(frames and frames.tb_next))
    traceback.clear_frames(frames)
    return Outcome(error=error, traceback=formatted)


def answer(step: Work | Read | Swap, store: Store) -> Any:
    """Do one step that may block."""
    match step:
        case Work(act):
            return act()
        case Read(key):
            return store.read(key)
        case Swap(change):
            return store.swap([change])[0]


def advance(
    flow: Flow, store: Store, reply: Any = None, error: BaseException | None = None
) -> Event | Call | Sleep | None:
    """Run a flow on this thread until it ends, which gives its event, or wants to call or to sleep."""
    while True:
        try:
            step = flow.throw(error) if error is not None else flow.send(reply)
        except StopIteration as end:
            event: Event | None = end.value
            return event
        if isinstance(step, Call | Sleep):
            return step
        reply, error = None, None
        try:
            reply = answer(step, store)
        except Exception as raised:  # noqa: BLE001 - the flow knows what each error means
            error = raised
        except BaseException:
            flow.close()
            raise


def drive(flow: Flow, node: Node) -> Event | None:
    """Run a flow on this thread to its end; a node that stops ends its waits, and so what is waiting."""
    reply: Any = None
    error: BaseException | None = None
    while True:
        step = advance(flow, node.store, reply, error)
        reply, error = None, None
        if isinstance(step, Call):
            reply = call(step)
        elif isinstance(step, Sleep):
            try:
                if node.stopping.wait(step.seconds):
                    error = asyncio.CancelledError("the scheduler has been shut down")
            except BaseException:  # a greenlet is killed
                flow.close()
                raise
        else:
            return step


def run_here(run: Run, node: Node) -> list[Event]:
    """Run a submission on this thread; what an inner executor calls."""
    if awaits(run.function):
        wrong = never_awaited(run.function)
        logger.error('Job "%s" was not run: %s', run.job_id, wrong)
        return [failed(run, run_time, wrong) for run_time in run.run_times]
    events = [drive(run_slot(run, run_time, node), node) for run_time in run.run_times]
    return [event for event in events if event is not None]


async def run_on_loop(run: Run, node: Node, pool: Executor) -> list[Event]:
    """Run a submission of a coroutine function on this event loop, with the store's calls on `pool`.

    When the task is cancelled, what the store must be told still reaches it: through the pool, which outlives the loop.
    """
    events: list[Event] = []
    cancelled = False
    for run_time in run.run_times:
        if cancelled:
            events.append(failed(run, run_time, asyncio.CancelledError()))
            continue
        event, cancelled = await _drive_async(run, run_time, node, pool)
        if event is not None:
            events.append(event)
    return events


async def _drive_async(run: Run, run_time: datetime, node: Node, pool: Executor) -> tuple[Event | None, bool]:
    """Return the event, and whether the task was cancelled."""
    flow = run_slot(run, run_time, node)
    reply: Any = None
    error: Exception | None = None
    while True:
        try:
            step = flow.throw(error) if error is not None else flow.send(reply)
        except StopIteration as end:
            return end.value, False
        if isinstance(step, Call):
            return await _run_on_loop(step, flow, (run, run_time), node, pool)
        reply, error = None, None
        try:
            reply = await _answer_async(step, flow, node.store, pool)
        except asyncio.CancelledError as cancelled:
            return failed(run, run_time, cancelled), True
        except Exception as raised:  # noqa: BLE001 - the flow knows what each error means
            error = raised


async def _run_on_loop(
    step: Call, flow: Flow, run: tuple[Run, datetime], node: Node, pool: Executor
) -> tuple[Event | None, bool]:
    """The part of a flow in which something is held: whatever happens to the task, the store hears how it ended."""
    while True:
        try:
            outcome = await _call_cancellable(step)
        except GeneratorExit:  # the loop has dropped this task: it may await nothing more
            following = _submit(pool, advance, flow, node.store, Outcome(error=asyncio.CancelledError()))
            _submit(pool, _see_through, flow, following, node.store)
            raise
        following = _submit(pool, advance, flow, node.store, outcome)
        try:
            then = await _done(following)
            while isinstance(then, Sleep):
                await asyncio.sleep(then.seconds)
                following = _submit(pool, advance, flow, node.store)
                then = await _done(following)
        except (asyncio.CancelledError, GeneratorExit) as stopped:
            _submit(pool, _see_through, flow, following, node.store)
            if isinstance(stopped, GeneratorExit):
                raise
            return ended(*run, outcome), True
        if not isinstance(then, Call):
            return then, outcome.cancelled and not _is_lost(step)
        step = then


async def _call_cancellable(step: Call) -> Outcome:
    """Call, and let the keeper cancel it when the lease is lost, if its policy says so."""
    hold = None if step.fence is None else step.fence._hold  # noqa: SLF001 - the driver's own
    task = asyncio.current_task()
    if hold is None or task is None:
        return await call_async(step)
    loop, calling, asked = asyncio.get_running_loop(), True, False

    def cancel() -> None:
        nonlocal asked
        if calling:
            asked = task.cancel()

    def cancel_from_thread() -> None:
        with suppress(RuntimeError):  # the loop has been closed, and whatever ran on it has ended
            loop.call_soon_threadsafe(cancel)

    hold.cancel = cancel_from_thread
    try:
        outcome = await call_async(step)
    finally:
        hold.cancel, calling = None, False  # what was asked for too late must not hit what follows
    if asked and hasattr(task, "uncancel"):
        task.uncancel()  # it was not the task that somebody wanted to end
    return outcome


def _is_lost(step: Call) -> bool:
    return step.fence is not None and step.fence.lost


def _see_through(flow: Flow, future: Future[Event | Call | Sleep | None], store: Store) -> None:
    """Bring a flow to its end whose task was cancelled: nothing more is called, and what is held is settled."""
    step = future.result()
    while isinstance(step, Call | Sleep):
        if isinstance(step, Call):
            step = advance(flow, store, Outcome(error=asyncio.CancelledError()))
        else:
            step = advance(flow, store, error=asyncio.CancelledError())


async def _answer_async(step: Work | Read | Swap | Sleep, flow: Flow, store: Store, pool: Executor) -> Any:
    if isinstance(step, Sleep):
        return await asyncio.sleep(step.seconds)
    future = _submit(pool, answer, step, store)
    try:
        return await _done(future)
    except (asyncio.CancelledError, GeneratorExit):
        if isinstance(step, Swap):
            _submit(pool, _give_back, flow, future, store)
        raise


def _submit(pool: Executor, function: Callable[..., T], *args: Any) -> Future[T]:
    try:
        return pool.submit(function, *args)
    except RuntimeError:  # the interpreter is shutting down: better to block the loop now than to leave a lease behind
        done: Future[T] = Future()
        try:
            done.set_result(function(*args))
        except Exception as error:  # noqa: BLE001 - as a pool does
            done.set_exception(error)
        return done


async def _done(future: Future[T]) -> T:
    """Wait for work on another thread; being cancelled stops the waiting, and not the work."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def answered() -> None:
        if not waiter.done():
            waiter.set_result(None)

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(answered)

    future.add_done_callback(wake)
    await waiter
    return future.result()


def _give_back(flow: Flow, future: Future[Any], store: Store) -> None:
    """See a swap through that was in flight when its task was cancelled, and settle what it may have won.

    Nothing new is claimed on the way: the slot is free for another node.
    """
    reply, error, won = None, None, False
    try:
        reply = future.result()
    except Exception as raised:  # noqa: BLE001 - the flow knows what each error means
        error = raised
    try:
        while True:
            step = flow.throw(error) if error is not None else flow.send(reply)
            reply, error = None, None
            match step:
                case Call():
                    reply, won = Outcome(error=asyncio.CancelledError()), True
                case Work() | Read() | Swap() if won or isinstance(step, Read):
                    try:
                        reply = answer(step, store)
                    except Exception as raised:  # noqa: BLE001 - as above
                        error = raised
                case _:
                    return
    except StopIteration:
        return
    finally:
        flow.close()


# --- forks ------------------------------------------------------------------------------------------------------------


class _Forgets(Protocol):
    def forget(self) -> None: ...


def forget_after_fork(*owners: _Forgets) -> None:
    """Have these forget what they hold in every child that this process forks, for as long as they live."""
    if not hasattr(os, "register_at_fork"):
        return
    known = [weakref.ref(owner) for owner in owners]

    def forget() -> None:
        for owner in known:
            alive = owner()
            if alive is not None:
                alive.forget()

    os.register_at_fork(after_in_child=forget)


# --- the other side of a process pool ---------------------------------------------------------------------------------

_nodes: dict[StoreDescription, tuple[int, Node]] = {}
_heard: collections.deque[FenceEvent] = collections.deque()


def run_in_child(run: Run, description: StoreDescription, terms: Terms) -> list[Event | FenceEvent]:
    """Run a submission in a pool's child process, with a store and a keeper of that process."""
    try:
        node = _node_here(description, terms)
        events = run_here(run, node)
        node.keeper.drain(terms.store_patience)
    except BaseException as error:  # noqa: BLE001 - what cannot be pickled would break the whole pool
        events = [failed(run, run_time, error) for run_time in run.run_times]
    heard = [_heard.popleft() for _ in range(len(_heard))]
    return [portable(event) for event in [*heard, *events]]


def _node_here(description: StoreDescription, terms: Terms) -> Node:
    pid, node = _nodes.get(description, (None, None))
    if node is None or pid != os.getpid():
        terms = replace(terms, keeper=replace(terms.keeper, housekeeping=False))
        node = Node(open_described(description), terms, _heard.append)
        _nodes[description] = (os.getpid(), node)
        forget_after_fork(node, node.store)
        node.keeper.start("pool")
    return node


class RemoteError(FenceError):
    """Stands for an exception that cannot be pickled: its type's name and its message are those of the original."""


def portable(event: Any) -> Any:
    """An event that survives pickling: one that does not would break the whole process pool."""
    for attribute in ("exception", "retval"):
        value = getattr(event, attribute, None)
        if value is None or _survives(value):
            continue
        if attribute == "exception":
            event.exception = RemoteError("".join(traceback.format_exception_only(type(value), value)).strip())
        else:
            logger.warning('What job "%s" returned cannot be pickled; listeners get its repr', event.job_id)
            event.retval = _repr(value)
    return event


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - as below
        return f"<{type(value).__qualname__}>"


def _survives(value: object) -> bool:
    try:
        pickle.loads(pickle.dumps(value))  # noqa: S301 - our own bytes of a moment ago
    except Exception:  # noqa: BLE001 - anything may come out of a stranger's __reduce__
        return False
    return True
