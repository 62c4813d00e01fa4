"""Keeps what this process holds, and ends what others have abandoned.

One thread per executor renews all held leases in one swap, repeats settles that got no answer, looks for leases whose
holder is gone, and prunes old records. `plan` decides; the loop acts. No error ends the loop, and nothing here calls the
scheduler: its `shutdown` waits for us under its own lock.
"""

from __future__ import annotations

import logging
import random
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from apscheduler_fence.errors import ConfigError, StoreError
from apscheduler_fence.events import EVENT_JOB_LOST, EVENT_LEASE_LOST, EVENT_LEASE_OVERDUE, LeaseEvent, in_time
from apscheduler_fence.lease import Change, Execution, Key, abandon, broken, move_state, orphan, renew
from apscheduler_fence.policy import Instant, elapsed, in_micros, instant
from apscheduler_fence.stores.base import Executions, HeldLeases, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from apscheduler_fence.events import FenceEvent
    from apscheduler_fence.fence import Hold

logger = logging.getLogger(__name__)

T = TypeVar("T")

OVERDUE_AT = 0.8
IDLE = 3600.0
DAY = 86400.0
SWEEP_LIMIT = 200
"""Abandoned leases ended per sweep; a node that finds more goes on at once."""
PRUNE_LIMIT = 1000
"""Records deleted per round; a node that finds more goes on after its next sweep."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is due now, and in how many seconds something is due again."""

    renew: tuple[Hold, ...] = ()
    lost: tuple[Hold, ...] = ()
    overdue: tuple[Hold, ...] = ()
    wait: float = IDLE


def plan(holds: Iterable[Hold], now: Instant, since_round: float, *, failing: bool = False) -> Plan:
    """Decide what to do about the leases held; `since_round` is the time since they were last renewed, in seconds.

    All are renewed together every third of the shortest `lock_at_most`, or much faster while the store does not answer.
    """
    held = [hold for hold in holds if not hold.ended]
    live = [hold for hold in held if not hold.settling]
    lost = tuple(hold for hold in live if hold.remaining() <= 0)
    kept = [hold for hold in live if not hold.lost and _renewable(hold, now)]
    overdue = tuple(hold for hold in live if not hold.overdue and _overdue_in(hold, now) <= 0)
    waits = [_overdue_in(hold, now) for hold in live if not hold.overdue and hold not in overdue]
    waits += [hold.remaining() for hold in live if not hold.lost]
    # Nobody says when the transaction that is to give a lease back has been rolled back instead.
    waits += [hold.policy.lock_at_most.total_seconds() / 6 for hold in held if hold.settling]
    if not kept:
        return Plan((), lost, overdue, max(0.0, min([IDLE, *waits])))
    every = min(hold.policy.lock_at_most for hold in kept).total_seconds() / 3
    if failing:
        every = min(every / 5, 1.0)
    due_in = every - since_round
    if due_in <= 0:
        return Plan(tuple(kept), lost, overdue, max(0.0, min([every, *waits])))
    return Plan((), lost, overdue, max(0.0, min([due_in, *waits])))


def _renewable(hold: Hold, now: Instant) -> bool:
    policy = hold.policy
    if not policy.renew:
        return False
    return policy.max_runtime is None or elapsed(hold.began, now) < policy.max_runtime.total_seconds()


def _overdue_in(hold: Hold, now: Instant) -> float:
    limit = hold.policy.max_runtime or (None if hold.policy.renew else hold.policy.lock_at_most)
    if limit is None:
        return IDLE
    return OVERDUE_AT * limit.total_seconds() - elapsed(hold.began, now)


@dataclass(slots=True)
class _Unsettled:
    hold: Hold
    change: Change
    due: float = 0.0
    tries: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """How often the keeper does what it does unasked."""

    sweep: timedelta = timedelta(seconds=5)
    prune: timedelta = timedelta(minutes=10)
    lock_at_most: timedelta = timedelta(seconds=30)
    patience: float = 10.0
    retention: timedelta = timedelta(days=30)
    orphan_after: timedelta = timedelta(hours=1)
    housekeeping: bool = True
    """Whether to sweep and prune: not in a pool's child, whose words are heard only when it returns from a run."""


def knows_none(_: Execution) -> bool:
    """The `recover` of a node that takes nothing over."""
    return False


@dataclass(eq=False)
class Keeper:
    """The thread that holds on to leases for one executor in one process.

    `emit` is called with events from the keeper's thread and must not block. `recover` is asked to run a waiting
    execution here, and tells whether this node knows its job.
    """

    store: Store
    emit: Callable[[FenceEvent], None]
    nonce: Callable[[], str]
    prepare: Callable[[], object]
    settings: Settings = field(default_factory=Settings)
    clock: Callable[[], Instant] = instant
    recover: Callable[[Execution], bool] = knows_none

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start with nothing held: also in a forked child, to which none of its parent's leases belong."""
        for hold in getattr(self, "_holds", ()):
            hold.lost = hold.ended = True
        self._wake = threading.Condition()
        self._nudged = False
        self._name: str | None = None
        self._holds: list[Hold] = []
        self._unsettled: list[_Unsettled] = []
        self._thread: threading.Thread | None = None
        self._stopping: Instant | None = None
        self._round: Instant = self.clock()
        self._failing = False
        self._misconfigured = False
        self._trouble: Instant | None = None
        self._swept: Instant | None = None
        self._pruned: Instant | None = None
        self._unannounced: list[tuple[Change, str]] = []
        self._freed: set[str] = set()
        self._unknown: dict[tuple[str, str, int], Instant] = {}

    def start(self, name: str) -> None:
        """Start the thread. It does its first I/O by itself."""
        with self._wake:
            self._name, self._stopping = name, None
            self._ensure_thread()

    def _ensure_thread(self) -> None:
        # Also for a run that begins after stop(): a pool that is shut down still works off its queue.
        if self._thread is None and self._name is not None:
            name = f"apscheduler-fence-keeper-{self._name}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()
        self._nudged = True
        self._wake.notify_all()

    def stop(self) -> None:
        """Let the thread end as soon as nothing is held and every settle was answered, and the store be closed."""
        with self._wake:
            self._stopping = self.clock()
            self._nudged = True
            self._wake.notify_all()

    def join(self, timeout: float) -> None:
        """Wait for the thread to end; never on an event loop."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    @property
    def held(self) -> tuple[Hold, ...]:
        """The leases held at this moment."""
        with self._wake:
            return tuple(self._holds)

    def hold(self, hold: Hold) -> None:
        """Renew this lease from now on."""
        with self._wake:
            if not self._holds:
                self._round = hold.since
            self._holds.append(hold)
            self._ensure_thread()

    def drop(self, hold: Hold) -> None:
        """Stop renewing: the run has been settled, or its lease belongs to somebody else."""
        with self._wake:
            if hold in self._holds:
                self._holds.remove(hold)
            if self._stopping is not None:
                self._nudged = True
            self._wake.notify_all()

    def look_behind(self, lease: str) -> None:
        """Have the execution that waits longest for this lease run, if there is one: the lease has just become free."""
        with self._wake:
            self._freed.add(lease)
            self._nudged = True
            self._wake.notify_all()

    def settle_later(self, hold: Hold, change: Change) -> None:
        """Repeat a settle that got no answer until it gets one."""
        with self._wake:
            self._unsettled.append(_Unsettled(hold, change))
            self._ensure_thread()
        self.drop(hold)

    def drain(self, timeout: float) -> None:
        """Wait until every settle was answered, for so many seconds at most."""
        with self._wake:
            self._wake.wait_for(lambda: not self._unsettled, timeout)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._wake:
                self._nudged = False
            wait = self._guarded(self.step, default=1.0)
            with self._wake:
                # What was added while step() was at work is not in its answer.
                if not self._nudged and not self._finished() and wait > 0:
                    self._wake.wait(min(wait, threading.TIMEOUT_MAX))
                if self._finished():
                    self._thread = None
                    break
        self._guarded(self.store.close, default=None)

    def _finished(self) -> bool:
        if self._stopping is None or self._holds:
            return False
        return not self._unsettled or elapsed(self._stopping, self.clock()) > self.settings.patience

    def _guarded(self, act: Callable[[], T], default: T) -> T:
        try:
            return act()
        except StoreError as error:
            self._stumble(error)
        except ConfigError as error:
            if not self._misconfigured:
                logger.error("The store cannot work as it is set up: %s", error)
            self._misconfigured = True
        except Exception:
            logger.exception("The keeper goes on after an error of its own")
        return default

    def _stumble(self, error: StoreError) -> None:
        self._trouble = self.clock()
        if not self._failing:
            logger.error("The store does not answer; trying again until it does: %s", error)
        self._failing = True

    def step(self) -> float:
        """Do what is due, and return in how many seconds something is due again."""
        now = self.clock()
        todo = plan(self.held, now, elapsed(self._round, now), failing=self._failing)
        for hold in todo.lost:
            self._guarded(partial(self._lose, hold), None)
        for hold in todo.overdue:
            self._warn_overdue(hold)
        if not self._guarded(self._ready, default=False):
            return 1.0
        if todo.renew:
            self._round = now
            self._guarded(partial(self._renew, todo.renew), None)
        waits = [todo.wait, self._settle(now)]
        if self._stopping is None and self.settings.housekeeping:
            self._guarded(self._call_up, None)
            waits.append(self._housekeeping(now))
        return max(0.0, min(waits))

    def _ready(self) -> bool:
        self.prepare()
        return True

    def _renew(self, holds: Sequence[Hold]) -> None:
        sent = self.clock()
        grants = [hold.grant for hold in holds]
        changes = [renew(hold.grant, in_micros(hold.policy.lock_at_most)) for hold in holds]
        tokens = self.store.swap(changes)
        self._recovered()
        for hold, grant, token in zip(holds, grants, tokens, strict=True):
            if hold.grant is not grant or hold.regranting:
                continue  # a retry has moved the token meanwhile: what was renewed, or not, was another grant
            if token is not None:
                hold.since = sent
            elif not (hold.ended or hold.settling):
                self._lose(hold)

    def _recovered(self) -> None:
        if self._failing:
            logger.info("The store answers again")
        self._failing = False

    def _lose(self, hold: Hold) -> None:
        hold.lost = True
        if not hold.announced:
            hold.announced = True
            logger.warning(
                "Lease of %s lost: token %s, holder %s; the run goes on here, but another node may start the job",
                hold.execution_id, hold.grant.token, hold.grant.holder,
            )  # fmt: skip
            self.emit(lease_event(EVENT_LEASE_LOST, hold))
        cancel, hold.cancel = hold.cancel, None
        if cancel is not None and (hold.policy.on_lost == "cancel" or hold.policy.overlap == "replace"):
            cancel()

    def _warn_overdue(self, hold: Hold) -> None:
        hold.overdue = True
        limit = hold.policy.max_runtime or hold.policy.lock_at_most
        logger.warning(
            "Run of %s has used 80 %% of %s: token %s, holder %s; its lease ends there, whether the job does or not",
            hold.execution_id, limit, hold.grant.token, hold.grant.holder,
        )  # fmt: skip
        self.emit(lease_event(EVENT_LEASE_OVERDUE, hold))

    # --- settles without an answer ------------------------------------------------------------------------------------

    def _settle(self, now: Instant) -> float:
        with self._wake:
            unsettled = list(self._unsettled)
        for item in unsettled:
            if item.due > now.monotonic:
                continue
            if self._guarded(partial(self._settle_again, item), default=False):
                with self._wake:
                    self._unsettled.remove(item)
                    self._wake.notify_all()
            else:
                item.tries += 1
                item.due = now.monotonic + min(0.2 * 2**item.tries, 5.0) * random.uniform(0.5, 1)  # noqa: S311
        with self._wake:
            return min((max(0.0, item.due - now.monotonic) for item in self._unsettled), default=IDLE)

    def _settle_again(self, item: _Unsettled) -> bool:
        grant = item.hold.grant
        [token] = self.store.swap([item.change])
        if token is None and not item.hold.recorded(
            self.store.read(Key(grant.lease, grant.job, grant.slot)), item.change
        ):
            self.unrecorded(item.hold, item.change)
        else:
            logger.info("Outcome of %s recorded after all: token %s", item.hold.execution_id, grant.token)
        self._recovered()
        return True

    def unrecorded(self, hold: Hold, change: Change) -> None:
        """A run ended after its lease had gone to somebody else: say so, once; its outcome is not recorded."""
        hold.lost = True
        outcome = ", ".join(move_state(move) for move in change.executions)
        logger.warning(
            "Outcome of %s (%s) not recorded: the lease under token %s, holder %s, was gone when it ended",
            hold.execution_id, outcome, hold.grant.token, hold.grant.holder,
        )  # fmt: skip
        if not hold.announced:
            hold.announced = True
            self.emit(lease_event(EVENT_LEASE_LOST, hold))

    # --- what others left behind --------------------------------------------------------------------------------------

    def _housekeeping(self, now: Instant) -> float:
        sweep, prune = self.settings.sweep.total_seconds(), self.settings.prune.total_seconds()
        if self._may_sweep_in(now) <= 0 and (self._swept is None or elapsed(self._swept, now) >= sweep):
            self._swept = now
            if self._guarded(self._sweep, default=0) >= SWEEP_LIMIT:
                self._swept = None
        if self._pruned is None:
            self._pruned = now
        if elapsed(self._pruned, now) >= prune:
            full = self._guarded(self._prune, default=0) >= PRUNE_LIMIT
            self._pruned = self._pruned if full else now
        due_in = 0.0 if self._swept is None else sweep - elapsed(self._swept, now)
        return max(0.05, due_in, self._may_sweep_in(now))

    def _may_sweep_in(self, now: Instant) -> float:
        # Those who held leases through an outage deserve one lease period to come back before they are called lost.
        if self._trouble is None:
            return 0.0
        return self.settings.lock_at_most.total_seconds() - elapsed(self._trouble, now)

    def _sweep(self) -> int:
        for unanswered, holder in [*self._unannounced]:
            lost = unanswered.displaced
            if lost is not None and broken(self.store.read(Key(lost.lease, lost.job, lost.slot)), unanswered):
                self.announce(lost, holder)
            self._unannounced.remove((unanswered, holder))
        with self._wake:
            mine = {hold.grant.holder for hold in [*self._holds, *(item.hold for item in self._unsettled)]}
        # Beside as many as are our own, or those could hide all others.
        found = list(self.store.held_leases(HeldLeases(expired=True, limit=SWEEP_LIMIT + len(mine))))
        others = [seen for seen in found if seen.lease is not None and seen.lease.holder not in mine]
        for seen in others:
            change = abandon(seen, self.nonce(), keep_for=in_micros(self.settings.retention))
            if change is not None:
                self._end(change, (seen.lease and seen.lease.holder) or "")
        strangers = [row for row in self._next_in_line() if not self.recover(row)]
        for row in self._long_unknown(strangers):
            self._give_up(row)
        self._recovered()
        return len(others)

    def _end(self, change: Change, holder: str) -> None:
        """End what others left, and say so; if the answer is lost, the next sweep reads back whether there is anything to say."""
        self._unannounced.append((change, holder))
        [token] = self.store.swap([change])
        self._unannounced.remove((change, holder))
        if token is not None and change.displaced is not None:
            self.announce(change.displaced, holder)

    def _call_up(self) -> None:
        with self._wake:
            freed, self._freed = self._freed, set()
        for lease in freed:
            for row in self.store.executions(Executions(lease=lease, states=("waiting",), limit=1, oldest_first=True)):
                self.recover(row)

    def _next_in_line(self) -> list[Execution]:
        """The oldest waiting execution of each lease that nobody holds."""
        first: dict[str, Execution] = {}
        for row in self.store.executions(Executions(states=("waiting",), oldest_first=True)):
            first.setdefault(row.lease, row)
        if not first:
            return []
        held = {seen.lease.name for seen in self.store.held_leases(HeldLeases()) if seen.lease is not None}
        return [row for lease, row in first.items() if lease not in held]

    def _long_unknown(self, strangers: Iterable[Execution]) -> list[Execution]:
        """Those that have waited here, too, for so long: a node that comes up late may not have been told its jobs yet."""
        now, known = self.clock(), self._unknown
        by_attempt = {(row.job, row.slot, row.attempt): row for row in strangers}
        self._unknown = {attempt: known.get(attempt, now) for attempt in by_attempt}
        limit = self.settings.orphan_after.total_seconds()
        return [row for attempt, row in by_attempt.items() if elapsed(self._unknown[attempt], now) >= limit]

    def _give_up(self, row: Execution) -> None:
        seen = self.store.read(Key(row.lease, row.job, row.slot))
        change = orphan(
            seen, self.nonce(), orphan_after=in_micros(self.settings.orphan_after),
            keep_for=in_micros(self.settings.retention),
        )  # fmt: skip
        if change is not None:
            self._end(change, row.holder or "")

    def announce(self, row: Execution, holder: str | None) -> None:
        """Say what became of a run that was ended from outside, and whose it was.

        Only the node whose swap ended it calls this.
        """
        for hold in self.held:
            if (hold.grant.lease, hold.grant.token) == (row.lease, row.token):
                self._lose(hold)  # it was ours, and need not wait for its renewal to hear of it
        if row.state == "superseded":
            logger.warning(
                "Execution %s gave way to a newer slot: attempt %s, token %s", row.id, row.attempt, row.token
            )
        if row.state != "lost":
            return
        logger.error(
            "Execution %s is lost: attempt %s of holder %s under token %s did not end while its lease lasted, and is not "
            "repeated",
            row.id, row.attempt, holder, row.token,
        )  # fmt: skip
        self.emit(
            LeaseEvent(
                EVENT_JOB_LOST, row.job_id or row.job, row.jobstore or "default", row.id,
                scheduled_run_time=in_time(row.scheduled_at), holder=holder, token=row.token, attempt=row.attempt,
            )
        )  # fmt: skip

    def _prune(self) -> int:
        skew = self.store.read(Key("", "", "")).now / 1e6 - self.clock().wall
        if abs(skew) > DAY:
            logger.warning(
                "Nothing is pruned while the store's clock is %+.0f s from this node's: mend one of them", skew
            )
            return 0
        return self.store.prune(PRUNE_LIMIT)


def lease_event(code: int, hold: Hold) -> LeaseEvent:
    """An event about the lease of a run on this node."""
    return LeaseEvent(
        code, hold.job_id, hold.jobstore, hold.execution_id,
        scheduled_run_time=in_time(hold.slot.scheduled_at),
        holder=hold.grant.holder, token=hold.grant.token, attempt=hold.grant.attempt,
    )  # fmt: skip
