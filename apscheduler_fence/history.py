"""What has run, what runs now and what should have: questions to a store, and an operator's verbs.

The rows that nodes compete for are the history. Nothing is kept beside them, so nothing here can disagree with them.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

from apscheduler_fence.errors import FenceError, StoreError
from apscheduler_fence.events import in_time
from apscheduler_fence.lease import Delivery, Execution, Key, Refusal, Seen, State, is_live, move_state, release, revive
from apscheduler_fence.policy import in_micros
from apscheduler_fence.slots import EPOCH, MICROSECOND, Slot, slots_due
from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.base import Executions, HeldLeases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from apscheduler.triggers.base import BaseTrigger
    from typing_extensions import Self

    from apscheduler_fence.stores.base import Store

DAY = 86400.0
TRIES = 20
"""How often a verb reads and swaps again when the lease moves under it."""
PRUNE_LIMIT = 1000
CHUNK = 5000


@dataclass(frozen=True, slots=True)
class Record:
    """One execution as its row stands: times are the store's, aware and in UTC.

    Attributes:
        id: the execution ID.
        job: the job's name in the cluster.
        slot: the slot's name.
        lease: the lease it runs under.
        state: `waiting`, `running`, `succeeded`, `failed`, `cancelled`, `lost` or `superseded`.
        attempt: the latest attempt; 0 if it has only been waiting so far.
        max_attempts: how many attempts it may have.
        delivery: what happens when its node dies.
        scheduled_at: the run time that the schedule gave it.
        started_at: when the latest attempt was granted.
        finished_at: when it ended, if it has.
        token: the fencing token of the latest attempt.
        holder: `host:pid:nonce` of the latest attempt, or of whoever ended it in its place.
        error: what it raised, with the end of the traceback.
        func: the job's function, as `module:qualname`.
        jobstore: the alias of the job store it came from.
        job_id: its ID there.
        kept_until: when its record may be pruned.
    """

    id: str
    job: str
    slot: str
    lease: str
    state: State
    attempt: int
    max_attempts: int
    delivery: Delivery
    scheduled_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    token: int
    holder: str | None
    error: str | None
    func: str | None
    jobstore: str | None
    job_id: str | None
    kept_until: datetime | None

    @property
    def took(self) -> timedelta | None:
        """How long the latest attempt took; None unless it has ended."""
        if self.started_at is None or self.finished_at is None:
            return None
        return self.finished_at - self.started_at


@dataclass(frozen=True, slots=True)
class Held:
    """A lease that somebody holds.

    Attributes:
        lease: its name.
        execution_id: the run it is held for.
        token: the fencing token of this grant.
        holder: `host:pid:nonce` of who holds it.
        since: when it was granted.
        until: when it ends unless it is renewed.
        over: whether that has passed: its node died or lost the store, and nobody has taken the lease yet.
        attempt: which attempt of the execution it is.
        func: the job's function, as `module:qualname`.
    """

    lease: str
    execution_id: str
    token: int
    holder: str
    since: datetime
    until: datetime
    over: bool
    attempt: int | None
    func: str | None


@dataclass(frozen=True, slots=True)
class Missing:
    """The slots of a schedule that no node has run.

    Attributes:
        job: the job's name in the cluster.
        since: the earliest slot that was looked for.
        until: the latest moment that was looked at.
        expected: how many slots the schedule has in between.
        slots: those of them that have no record.
        pruned: whether `since` is later than asked for, because records before it have been pruned.
    """

    job: str
    since: datetime
    until: datetime
    expected: int
    slots: tuple[Slot, ...]
    pruned: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """A lease that an operator broke.

    Attributes:
        lease: its name.
        token: the token that is stale from now on, as soon as the next one has been seen.
        holder: who held it.
        execution_id: the run that was ended, if one was recorded as running.
        state: what became of it: `lost`, or `waiting` for its next attempt.
        spacing_until: when the next slot may start at the earliest, if `lock_at_least` says so.
    """

    lease: str
    token: int
    holder: str
    execution_id: str | None
    state: State | None
    spacing_until: datetime | None


class History:
    """Questions to one store, for one namespace.

    Jobs, leases and executions are named as the cluster names them; the namespace in front may be left out.

    Args:
        store: a URL, or anything else that `open_store` takes.
        namespace: that of the executors; a store already made has its own.
        retention: how long the record of a run that `release` ends is kept.
        options: options of the store, such as `table_prefix`.

    Raises:
        ConfigError: the store cannot be understood, or it does not know an option.

    Every method raises `StoreError` if the store cannot be reached.
    """

    def __init__(
        self, store: object, namespace: str = "", *, retention: timedelta = timedelta(days=30), **options: Any
    ) -> None:
        self._store: Store = open_store(cast("Any", store), namespace, **options)
        self._ours = self._store is not store
        self._retention = in_micros(retention)
        part = self._store.namespace.replace("%", "%25").replace("/", "%2F")
        self._prefix = f"{part}/" if part else ""

    def close(self) -> None:
        """Give back the store's connections, unless the store was handed in."""
        if self._ours:
            self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> list[str]:
        """Connect, create what is missing, and return warnings about the store's set-up."""
        return self._store.open()

    def full_name(self, name: str) -> str:
        """The name of a job, lease or execution with the namespace in front."""
        return name if name.startswith(self._prefix) else self._prefix + name

    # --- questions ----------------------------------------------------------------------------------------------------

    def now(self) -> datetime:
        """The store's clock."""
        return in_time(self._now())

    def _now(self) -> int:
        return self._store.read(Key("", "", "")).now

    def runs(
        self,
        job: str | None = None,
        states: Sequence[State] = (),
        since: datetime | None = None,
        limit: int | None = 100,
    ) -> Iterator[Record]:
        """Executions, newest slot first.

        Args:
            job: only this job.
            states: only these states.
            since: only slots at or after this time; aware.
            limit: at most so many; None for all.
        """
        return map(_record, self._rows(job, states, since, limit))

    def _rows(
        self, job: str | None, states: Sequence[State] = (), since: datetime | None = None, limit: int | None = None
    ) -> Iterator[Execution]:
        query = Executions(
            job=None if job is None else self.full_name(job),
            states=tuple(states),
            since=None if since is None else _micros(since),
            limit=limit,
        )
        return self._store.executions(query)

    def run(self, execution_id: str) -> Record | None:
        """One execution; None if there is no record of it."""
        row = self._row(execution_id)
        return None if row is None else _record(row)

    def _row(self, execution_id: str) -> Execution | None:
        job, slot = _split(self.full_name(execution_id))
        return next(self._store.executions(Executions(job=job, slot=slot, limit=1)), None)

    def held(self) -> tuple[Held, ...]:
        """The leases that somebody holds, those first that end first."""
        return tuple(_held(seen) for seen in self._store.held_leases(HeldLeases()))

    def counts(self, job: str | None = None, since: datetime | None = None) -> Mapping[str, Mapping[State, int]]:
        """How many executions each job has in each state; every record is looked at, so give `since` where many are."""
        counted: defaultdict[str, Counter[State]] = defaultdict(Counter)
        for row in self._rows(job, since=since):
            counted[row.job][row.state] += 1
        return {name: dict(counted[name]) for name in sorted(counted)}

    def missing(
        self,
        job: str,
        trigger: BaseTrigger,
        since: datetime,
        until: datetime | None = None,
        *,
        slot: Callable[[datetime], datetime] | timedelta | None = None,
        lease: str | None = None,
        grace: timedelta = timedelta(minutes=1),
    ) -> Missing:
        """The slots of a schedule that no node has run, oldest first.

        A slot whose run was lost, failed or is still waiting is on record, and not missing.

        Args:
            job: the job.
            trigger: its schedule; with jitter and intervals, slots are those that the executor computes.
            since: where to begin; aware. Slots whose records were pruned are left out.
            until: where to end; aware. Not later than `grace` before the store's clock, which is the default.
            slot: the policy's `slot=`, if it has one.
            lease: the policy's `lease=`, if it has one.
            grace: how late a node may come to a slot.
        """
        job = self.full_name(job)
        seen = self._store.read(Key(job if lease is None else self.full_name(lease), "", ""))
        end = seen.now - in_micros(grace)
        if until is not None:
            end = min(end, _micros(until))
        begin = wanted = _micros(since)
        if seen.lease is not None:
            begin = max(begin, seen.lease.pruned_through + 1)
        expected, gaps = 0, list[Slot]()
        due = slots_due(job, trigger, begin, end, slot=slot)
        while chunk := list(islice(due, CHUNK)):
            expected += len(chunk)
            times = [each.at for each in chunk]
            recorded = set(self._recorded(job, min(times), max(times)))
            gaps += [each for each in chunk if each.name not in recorded]
        return Missing(job, in_time(begin), in_time(end), expected, tuple(gaps), pruned=begin > wanted)

    def _recorded(self, job: str, since: int, until: int) -> Iterator[str]:
        for row in self._store.executions(Executions(job=job, since=since, oldest_first=True)):
            if row.slot_at > until:
                return
            yield row.slot.partition("~")[0]  # without what once_per_slot=False adds

    # --- verbs --------------------------------------------------------------------------------------------------------

    def release(self, name: str, *, token: int | None = None) -> Released | None:
        """Break a lease, so that another run can start: the next token is larger, and the holder's becomes stale.

        The holder is not stopped. It hears of it at its next renewal; what it writes before that, only a guard refuses.

        Args:
            name: the lease; by default a job's lease has the job's name.
            token: only if it is still held under this token.

        Returns:
            What was released; None if nobody holds the lease (any more).
        """
        name = self.full_name(name)
        for seen in self._reads(Key(name, "", "")):
            held = seen.lease
            change = release(seen, _operator(), keep_for=self._retention)
            if held is None or held.holder is None or change is None or token not in (None, held.token):
                return None
            if self._store.swap([change])[0] is None:
                continue
            ended = change.displaced
            return Released(
                name, held.token, held.holder,
                execution_id=None if ended is None else ended.id,
                state=None if ended is None else move_state(change.executions[0]),
                spacing_until=in_time(held.hold_until) if held.hold_until > seen.now else None,
            )  # fmt: skip
        raise StoreError(f"the lease {name!r} moved at every try")

    def _reads(self, key: Key) -> Iterator[Seen]:
        for tried in range(TRIES):
            time.sleep(0.005 * tried)
            yield self._store.read(key)

    def retry(self, execution_id: str) -> Record | Refusal:
        """Let an execution that was lost, failed or cancelled be run once more: the same ID, the next attempt.

        Returns:
            Its record, now `waiting` for a node that has the job; or a refusal: `done` (it succeeded or was
            superseded), or `running` (it is running or waiting already).

        Raises:
            LookupError: there is no record of it.
        """
        for _ in range(TRIES):
            row = self._row(execution_id)
            if row is None:
                raise LookupError(f"there is no record of {self.full_name(execution_id)!r}")
            change = revive(row)
            if change is None:
                return Refusal("running" if row.state in ("running", "waiting") else "done", row.holder)
            if self._store.swap([change])[0] is not None:
                return _record(self._row(execution_id) or replace(row, state="waiting"))
        raise StoreError(f"the execution {execution_id!r} moved at every try")

    def prune(self) -> int:
        """Delete the records that are past their time, and return how many. Their slots can never run again.

        Raises:
            FenceError: the store's clock and this host's are more than a day apart; nothing was deleted.
        """
        skew = self._now() / 1e6 - time.time()
        if abs(skew) > DAY:
            raise FenceError(
                f"nothing is pruned while the store's clock is {skew:+.0f} s from this host's: mend one of them"
            )
        return sum(_until_short(self._store.prune))


def _until_short(prune: Callable[[int], int]) -> Iterable[int]:
    while True:
        pruned = prune(PRUNE_LIMIT)
        yield pruned
        if pruned < PRUNE_LIMIT:
            return


def _operator() -> str:
    return f"{socket.gethostname()[:64]}:{os.getpid()}:{uuid.uuid4().hex[:16]}"


def _split(execution_id: str) -> tuple[str, str]:
    job, _, slot = execution_id.rpartition("/")
    if ":" not in slot and job.endswith("/manual"):  # a time has colons, and the ID of a run by hand has none
        return job.removesuffix("/manual"), f"manual/{slot}"
    return job, slot


def _micros(moment: datetime) -> int:
    if moment.utcoffset() is None:
        raise ValueError(f"a time needs its UTC offset, and {moment.isoformat()} has none")
    return (moment - EPOCH) // MICROSECOND


def _time(micros: int | None) -> datetime | None:
    return None if micros is None else in_time(micros)


def _record(row: Execution) -> Record:
    return Record(
        id=row.id,
        job=row.job,
        slot=row.slot,
        lease=row.lease,
        state=row.state,
        attempt=row.attempt,
        max_attempts=row.max_attempts,
        delivery=row.delivery,
        scheduled_at=in_time(row.scheduled_at),
        started_at=_time(row.started_at),
        finished_at=_time(row.finished_at),
        token=row.token,
        holder=row.holder,
        error=row.error,
        func=row.func,
        jobstore=row.jobstore,
        job_id=row.job_id,
        kept_until=_time(row.keep_until),
    )


def _held(seen: Seen) -> Held:
    lease, row = seen.lease, seen.holding
    assert lease is not None  # noqa: S101 - a scan of held leases finds leases
    return Held(
        lease=lease.name,
        execution_id=f"{lease.job}/{lease.slot}",
        token=lease.token,
        holder=lease.holder or "",
        since=in_time(lease.acquired_at),
        until=in_time(lease.expires_at or 0),
        over=not is_live(lease, seen.now),
        attempt=None if row is None else row.attempt,
        func=lease.func,
    )
