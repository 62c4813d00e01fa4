"""A job store that several schedulers can share.

It stands between the scheduler and one of APScheduler's own stores and keeps that store's table as it is. Two kinds of
caller meet here and need opposite answers:

- The scheduler's *loop* asks for due jobs, hands each to an executor and writes its next run time back. What it writes
  rests on what it read, so its write takes effect only if nobody has changed the job since; a loser has nothing to do,
  because somebody else has moved the job on. An exception would end the loop for good, so there is none.
- A *user* adds, changes and removes jobs. A user's change must not get lost: if the job moved meanwhile, the change is
  made again on top of what is there now. Every failure is raised.

Whoever walks through the list that `get_due_jobs` returned is the loop, and the job that the walk has reached is the
only one that the loop can be writing about. The scheduler's own lock keeps everybody else out in the meantime.

To run each job once, pair it with the `fenced` executor: schedulers that wake up in the same instant all submit a due
job before any of them can write.
"""

from __future__ import annotations

import copy
import inspect
import logging
import pickle
import secrets
import sys
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from apscheduler.job import Job
from apscheduler.jobstores.base import BaseJobStore, ConflictingIdError, JobLookupError
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
from apscheduler.triggers.combining import BaseCombiningTrigger
from apscheduler.triggers.interval import IntervalTrigger
from apscheduler.util import datetime_to_utc_timestamp, ref_to_obj, utc_timestamp_to_datetime
from sqlalchemy import bindparam, func, select
from sqlalchemy.exc import DBAPIError, IntegrityError

from apscheduler_fence.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from apscheduler.schedulers.base import BaseScheduler
    from apscheduler.triggers.base import BaseTrigger
    from sqlalchemy import Connection

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Schedule: TypeAlias = "tuple[BaseTrigger, datetime | None]"

TRIES = 100  # each failed try means that somebody else's write succeeded
BATCH = 100  # writes of the loop that share a transaction
REMEMBERED = 10_000  # jobs that were warned about


class SharedJobStore(BaseJobStore):  # type: ignore[misc]
    """Lets the schedulers of several processes work on one job store.

    Plugin alias: `shared`. Options may be text, as in ini files.

    Args:
        inner: the store to share: an APScheduler alias such as `"sqlalchemy"` or `"redis"`, a class or a reference to
            one (`"package.module:Class"`), or an instance. SQLAlchemy and Redis stores get compare-and-swap; any other
            is only protected from errors in the scheduler's loop.
        poll: after how many seconds (or which `timedelta`) at the latest a scheduler notices what other processes have
            added or changed.
        options: whatever is left goes to the inner store.

    Raises:
        ConfigError: an option is unknown, or its value is not allowed.
    """

    def __init__(
        self,
        inner: str | type[BaseJobStore] | BaseJobStore = "sqlalchemy",
        *,
        poll: timedelta | float | str = 1.0,
        **options: Any,
    ) -> None:
        super().__init__()
        self._inner = _inner_store(inner, options)
        self._poll = _poll_interval(poll)
        table = _table_of(self._inner)
        self._shelf: _Shelf = _Plain(self._inner) if table is None else _Swapped(self._inner, table, self._leave_alone)
        self._open = False
        self._pass = _Pass()
        self._refused: Job | None = None
        self._left_alone: dict[str, str] = {}

    def start(self, scheduler: BaseScheduler, alias: str) -> None:
        """Start the inner store, which creates its table if there is none.

        Raises:
            Exception: whatever the driver raises when the database cannot be reached.
        """
        super().start(scheduler, alias)
        try:
            self._inner.start(scheduler, alias)
        except DBAPIError:
            # Of several processes that create the table at once all but one fail, and find it the second time.
            self._inner.start(scheduler, alias)
        self._open = True

    def shutdown(self) -> None:
        """Release what the inner store holds."""
        self._open = False
        self._inner.shutdown()

    def get_due_jobs(self, now: datetime) -> list[Job]:
        """Return the jobs that are due at `now` and that this process can run, the earliest first.

        Raises:
            Exception: whatever the driver raises; the scheduler logs it and tries again.
        """
        self._pass = _Pass(now=now)
        # A scheduler's thread makes one more pass after `shutdown`; it would open a connection that nobody closes.
        if not self._open:
            return self._pass
        self._pass.extend(job for job in self._shelf.due(now) if self._can_submit(job))
        return self._pass

    def get_next_run_time(self) -> datetime:
        """Return when the scheduler must look again: the next run time or after `poll`, whichever is earlier.

        Jobs that were already due in this pass do not count, so that a job nobody here can run makes no busy loop.
        """
        done, self._pass = self._pass, _Pass()
        upcoming = None
        try:
            if self._open:
                self._shelf.flush()
                upcoming = self._shelf.next_run_time(done.now)
        except Exception as error:  # noqa: BLE001 - an exception here ends the scheduler for good
            self._report(error)
            done.failed = True
        wait = timedelta(seconds=self._scheduler.jobstore_retry_interval) if done.failed else self._poll
        look_again = datetime.now(timezone.utc) + wait
        return look_again if upcoming is None else min(upcoming, look_again)

    def lookup_job(self, job_id: str) -> Job | None:
        """Return the job, or None if there is none.

        Raises:
            Exception: this process cannot load the job, or the driver's own error.
        """
        return self._shelf.get(job_id)

    def get_all_jobs(self) -> list[Job]:
        """Return the jobs that this process can load, by next run time, paused ones last."""
        return self._shelf.all()

    def add_job(self, job: Job) -> None:
        """Add the job.

        Raises:
            ConflictingIdError: there is a job with this ID.
            ValueError: the job's function has no importable name.
        """
        self._refused = None
        try:
            self._shelf.add(job)
        except ConflictingIdError:
            # A scheduler told to replace an existing job now hands this very object to `update_job`.
            self._refused = job
            raise

    def update_job(self, job: Job) -> None:
        """Write the job back; what that means depends on who asks (see the module).

        Raises:
            JobLookupError: there is no such job (any more). Never raised to the scheduler's loop.
            StoreError: the job kept changing under the caller. Never raised to the scheduler's loop.
        """
        refused, self._refused = self._refused, None
        if job is self._pass.in_hand:
            self._in_loop(self._shelf.advance, job)
        elif job is refused:
            self._shelf.replace(job)
        else:
            self._shelf.modify(job)

    def remove_job(self, job_id: str) -> None:
        """Remove the job.

        Raises:
            JobLookupError: there is no such job. Never raised to the scheduler's loop.
        """
        # A function that an executor calls inside the loop and that removes its own job is taken for the loop as well: a
        # change made elsewhere since the pass began then keeps the job.
        job = self._pass.in_hand
        if job is None or job.id != job_id:
            self._shelf.remove(job_id)
        elif self._can_submit(job):  # the loop also removes a job whose executor has just gone
            self._in_loop(self._shelf.finish, job)

    def remove_all_jobs(self) -> None:
        """Remove all jobs."""
        self._inner.remove_all_jobs()

    def _in_loop(self, write: Callable[[Job], None], job: Job) -> None:
        try:
            write(job)
        except JobLookupError:
            logger.info('Job "%s" was removed while it was being run', job.id)
        except Exception as error:  # noqa: BLE001 - an exception here ends the scheduler for good
            if not self._pass.failed:
                self._report(error)
            self._pass.failed = True

    def _report(self, error: Exception) -> None:
        retry = self._scheduler.jobstore_retry_interval
        logger.error('Job store "%s" failed and is tried again in %s s: %s', self._alias, retry, error)

    def _can_submit(self, job: Job) -> bool:
        try:
            self._scheduler._lookup_executor(job.executor)  # noqa: SLF001 - it is what the loop itself asks
        except KeyError:
            self._leave_alone(job.id, f'there is no executor "{job.executor}" here')
            return False
        self._left_alone.pop(job.id, None)
        return True

    def _leave_alone(self, job_id: str, reason: str) -> None:
        if self._left_alone.get(job_id) != reason:
            if len(self._left_alone) >= REMEMBERED:
                self._left_alone.clear()
            self._left_alone[job_id] = reason
            logger.warning('Job "%s" is left to other nodes: %s', job_id, reason)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} (inner={self._inner!r}, poll={self._poll.total_seconds()})>"


class _Pass(list[Job]):
    """The due jobs of one pass of the loop; knows which of them the loop has reached."""

    def __init__(self, now: datetime | None = None) -> None:
        super().__init__()
        self.now = now
        self.in_hand: Job | None = None
        self.failed = False

    def __iter__(self) -> Iterator[Job]:
        try:
            for job in super().__iter__():
                self.in_hand = job
                yield job
        finally:
            self.in_hand = None


# --- what the two kinds of caller ask of a store -----------------------------------------------------------------------


class _Shelf(Protocol):
    def get(self, job_id: str) -> Job | None: ...
    def all(self) -> list[Job]: ...
    def due(self, now: datetime) -> list[Job]: ...
    def next_run_time(self, after: datetime | None) -> datetime | None: ...

    # the user's
    def add(self, job: Job) -> None: ...
    def modify(self, job: Job) -> None: ...
    def replace(self, job: Job) -> None: ...
    def remove(self, job_id: str) -> None: ...

    # the loop's
    def advance(self, job: Job) -> None: ...
    def finish(self, job: Job) -> None: ...
    def flush(self) -> None: ...


class _Plain:
    """Any store, through its own methods: what it overwrites is overwritten."""

    def __init__(self, inner: BaseJobStore) -> None:
        self._inner = inner

    def get(self, job_id: str) -> Job | None:
        return self._inner.lookup_job(job_id)

    def all(self) -> list[Job]:
        jobs: list[Job] = self._inner.get_all_jobs()
        return jobs

    def due(self, now: datetime) -> list[Job]:
        jobs: list[Job] = self._inner.get_due_jobs(now)
        return jobs

    def next_run_time(self, after: datetime | None) -> datetime | None:
        earliest: datetime | None = self._inner.get_next_run_time()
        if after is None or earliest is None or earliest > after:
            return earliest
        times = (job.next_run_time for job in self._inner.get_all_jobs())
        return min((time for time in times if time and time > after), default=None)

    def add(self, job: Job) -> None:
        self._inner.add_job(job)

    def modify(self, job: Job) -> None:
        self._inner.update_job(job)

    def replace(self, job: Job) -> None:
        current = self._inner.lookup_job(job.id)
        if current is not None:
            kept, asked = (current.trigger, current.next_run_time), (job.trigger, job.next_run_time)
            job.trigger, job.next_run_time = _schedule(kept, asked)
        self._inner.update_job(job)

    def remove(self, job_id: str) -> None:
        self._inner.remove_job(job_id)

    def advance(self, job: Job) -> None:
        self._inner.update_job(job)

    def finish(self, job: Job) -> None:
        self._inner.remove_job(job.id)

    def flush(self) -> None:
        pass


class _ReadJob(Job):  # type: ignore[misc]
    """A job that remembers the stored state it was read from."""

    __slots__ = ("run_time_read", "state_read")

    state_read: bytes
    run_time_read: datetime | None


@dataclass(frozen=True, slots=True)
class _Submitted:
    """What this process did with a due job whose write may not have reached the database."""

    run_time: datetime
    trigger: BaseTrigger
    next_run_time: datetime | None


class _Swapped:
    """A table of pickled jobs, changed by compare-and-swap only."""

    def __init__(self, inner: BaseJobStore, table: _Table, leave_alone: Callable[[str, str], None]) -> None:
        self._inner = inner
        self._table = table
        self._leave_alone = leave_alone
        self._earliest: float | None = None
        self._moves: list[_Move] = []
        self._failing = False
        self._submitted: dict[str, _Submitted] = {}

    def get(self, job_id: str) -> Job | None:
        state = self._table.get(job_id)
        return None if state is None else self._load(state)

    def all(self) -> list[Job]:
        last = datetime.max.replace(tzinfo=timezone.utc)
        return sorted(self._loadable(self._table.all()), key=lambda job: job.next_run_time or last)

    def due(self, now: datetime) -> list[Job]:
        self._moves.clear()
        self._failing = False
        timestamp = datetime_to_utc_timestamp(now)
        if not self._is_due(timestamp):
            self._earliest = self._table.earliest(None)
        if not self._is_due(timestamp):
            self._submitted.clear()
            return []
        jobs = []
        submitted: dict[str, _Submitted] = {}
        for job in self._loadable(self._table.due(timestamp)):
            known = self._submitted.get(job.id)
            if known is None or known.run_time != job.next_run_time:
                jobs.append(job)
                continue
            # It was submitted here, but the write failed, or lost against a change that left the run time alone: what
            # remains to be done is that write.
            submitted[job.id] = known
            self._move_on(job, known, now)
        self._submitted = submitted
        return jobs

    def _move_on(self, job: _ReadJob, known: _Submitted, now: datetime) -> None:
        if _same(known.trigger, job.trigger):
            job.next_run_time = known.next_run_time
        else:
            job.next_run_time = job.trigger.get_next_fire_time(known.run_time, now)
        if job.next_run_time is None:
            self._swap([_Move(job.id, job.state_read, b"", None)])
        else:
            self._moves.append(self._move(job, job.state_read))

    def _is_due(self, timestamp: float) -> bool:
        return self._earliest is not None and self._earliest <= timestamp

    def next_run_time(self, after: datetime | None) -> datetime | None:
        timestamp = datetime_to_utc_timestamp(after)
        if after is None or self._is_due(timestamp):
            self._earliest = self._table.earliest(timestamp)
        time: datetime | None = utc_timestamp_to_datetime(self._earliest)
        return time

    def add(self, job: Job) -> None:
        move = self._move(job)
        # A driver that sends a command again after a lost reply finds its own row.
        if not self._table.insert(move) and self._table.get(job.id) != move.new:
            raise ConflictingIdError(job.id)
        self._submitted.pop(job.id, None)

    def modify(self, job: Job) -> None:
        if not isinstance(job, _ReadJob):
            self._until_swapped(job, lambda _: None)
            return
        move = self._move(job, job.state_read)
        if not self._table.swap([move]):
            move = self._apply_again(job, move)
        job.state_read, job.run_time_read = move.new, job.next_run_time

    def _apply_again(self, job: _ReadJob, move: _Move) -> _Move:
        base = pickle.loads(job.state_read)  # noqa: S301 - the store's contract, see docs/jobstore.md
        changes = {name: value for name, value in job.__getstate__().items() if not _equal(value, base[name])}
        for _ in range(TRIES):
            current = self._table.get(job.id)
            if current is None:
                raise JobLookupError(job.id)
            if current == move.new:  # sent twice by the driver, after a lost reply
                return move
            job.__setstate__({**pickle.loads(current), **changes})  # noqa: S301
            move = self._move(job, current)
            if self._table.swap([move]):
                return move
        raise _contended(job.id)

    def replace(self, job: Job) -> None:
        asked = (job.trigger, job.next_run_time)

        def keep_schedule(state: bytes) -> None:
            try:
                current = pickle.loads(state)  # noqa: S301
            except Exception as error:  # noqa: BLE001 - whatever a foreign pickle raises
                logger.warning('Job "%s" is replaced although it cannot be loaded here: %s', job.id, error)
                return
            job.trigger, job.next_run_time = _schedule((current["trigger"], current["next_run_time"]), asked)

        self._until_swapped(job, keep_schedule, insert=True)

    def _until_swapped(self, job: Job, adapt: Callable[[bytes], None], *, insert: bool = False) -> None:
        for _ in range(TRIES):
            current = self._table.get(job.id)
            if current is not None:
                adapt(current)
                if self._table.swap([self._move(job, current)]):
                    return
            elif not insert:
                raise JobLookupError(job.id)
            elif self._table.insert(self._move(job)):
                return
        raise _contended(job.id)

    def remove(self, job_id: str) -> None:
        if not self._table.delete(job_id):
            raise JobLookupError(job_id)

    def advance(self, job: _ReadJob) -> None:
        self._remember(job, job.next_run_time)
        self._moves.append(self._move(job, job.state_read))
        if len(self._moves) >= BATCH:
            self.flush()

    def finish(self, job: _ReadJob) -> None:
        self._remember(job, None)
        # At once, because a listener may be about to add a job with the same ID.
        self._swap([_Move(job.id, job.state_read, b"", None)])

    def _remember(self, job: _ReadJob, next_run_time: datetime | None) -> None:
        if job.run_time_read is not None:
            self._submitted[job.id] = _Submitted(job.run_time_read, job.trigger, next_run_time)

    def flush(self) -> None:
        moves, self._moves = self._moves, []
        if moves:
            # In the same order on every node, or two of them would wait for each other's rows.
            self._swap(sorted(moves, key=lambda move: move.id))

    def _swap(self, moves: Sequence[_Move]) -> None:
        # A database that is down is asked once in a pass, not once for each job: each time may be a timeout.
        if not self._failing:
            self._failing = True
            self._table.swap(moves)
            self._failing = False

    def _move(self, job: Job, old: bytes = b"") -> _Move:
        # The mark makes every write differ from all others, so that equal bytes are the very write that was read.
        # APScheduler ignores keys it does not know.
        state = {**job.__getstate__(), "mark": secrets.token_bytes(8)}
        new = pickle.dumps(state, self._inner.pickle_protocol)
        return _Move(job.id, old, new, datetime_to_utc_timestamp(job.next_run_time))

    def _load(self, state: bytes) -> _ReadJob:
        job = _ReadJob.__new__(_ReadJob)
        job.__setstate__(pickle.loads(state))  # noqa: S301
        job.state_read = state
        job.run_time_read = job.next_run_time
        job._scheduler = self._inner._scheduler  # noqa: SLF001 - a store's duty, by APScheduler's contract
        job._jobstore_alias = self._inner._alias  # noqa: SLF001
        return job

    def _loadable(self, rows: Iterable[tuple[str, bytes]]) -> Iterator[_ReadJob]:
        return filter(None, map(self._load_or_leave, rows))

    def _load_or_leave(self, row: tuple[str, bytes]) -> _ReadJob | None:
        job_id, state = row
        try:
            return self._load(state)
        except Exception as error:  # noqa: BLE001 - whatever importing a module or loading a pickle raises
            self._leave_alone(job_id, f"it cannot be loaded here ({error})")
            return None


def _contended(job_id: str) -> StoreError:
    return StoreError(f'job "{job_id}" was changed by others each of the {TRIES} times that a change of it was tried')


def _equal(one: Any, other: Any) -> bool:
    # Arguments need not define equality; two copies loaded from the same bytes give the same bytes again.
    return bool(one == other) or pickle.dumps(one) == pickle.dumps(other)


# --- tables ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Move:
    """One job from the state it was read in (empty: it is new) to another (empty: it is to go)."""

    id: str
    old: bytes
    new: bytes
    run_time: float | None


class _Table(Protocol):
    def earliest(self, after: float | None) -> float | None: ...
    def due(self, until: float) -> Iterable[tuple[str, bytes]]: ...
    def all(self) -> Iterable[tuple[str, bytes]]: ...
    def get(self, job_id: str) -> bytes | None: ...
    def insert(self, move: _Move) -> bool: ...
    def swap(self, moves: Sequence[_Move]) -> int: ...  # how many found the state they expected
    def delete(self, job_id: str) -> bool: ...


class _SqlTable:
    def __init__(self, inner: SQLAlchemyJobStore) -> None:
        self._engine = inner.engine
        self._jobs = jobs = inner.jobs_t
        unchanged = (jobs.c.id == bindparam("id_"), jobs.c.job_state == bindparam("old"))
        self._update = (
            jobs.update().where(*unchanged).values(next_run_time=bindparam("run_time"), job_state=bindparam("new"))
        )
        self._delete = jobs.delete().where(*unchanged)

    def _run(self, work: Callable[[Connection], T]) -> T:
        try:
            with self._engine.begin() as connection:
                return work(connection)
        except DBAPIError as error:
            if not error.connection_invalidated:
                raise
        # The pool gave out a connection from before a restart of the database. Repeating is safe: a swap that took
        # effect after all does not find its old state again.
        with self._engine.begin() as connection:
            return work(connection)

    def earliest(self, after: float | None) -> float | None:
        query = select(func.min(self._jobs.c.next_run_time))
        if after is not None:
            query = query.where(self._jobs.c.next_run_time > after)
        return self._run(lambda connection: connection.scalar(query))

    def due(self, until: float) -> list[tuple[str, bytes]]:
        return self._rows(self._jobs.c.next_run_time <= until)

    def all(self) -> list[tuple[str, bytes]]:
        return self._rows()

    def _rows(self, *conditions: Any) -> list[tuple[str, bytes]]:
        columns = self._jobs.c
        query = select(columns.id, columns.job_state).where(*conditions).order_by(columns.next_run_time)
        return self._run(lambda connection: [(row.id, row.job_state) for row in connection.execute(query)])

    def get(self, job_id: str) -> bytes | None:
        query = select(self._jobs.c.job_state).where(self._jobs.c.id == job_id)
        return self._run(lambda connection: connection.scalar(query))

    def insert(self, move: _Move) -> bool:
        insert = self._jobs.insert().values(id=move.id, next_run_time=move.run_time, job_state=move.new)
        try:
            self._run(lambda connection: connection.execute(insert))
        except IntegrityError:
            return False
        return True

    def swap(self, moves: Sequence[_Move]) -> int:
        updates = [
            {"id_": move.id, "old": move.old, "new": move.new, "run_time": move.run_time} for move in moves if move.new
        ]
        deletes = [{"id_": move.id, "old": move.old} for move in moves if not move.new]

        def work(connection: Connection) -> int:
            swapped = connection.execute(self._update, updates).rowcount if updates else 0
            return swapped + (connection.execute(self._delete, deletes).rowcount if deletes else 0)

        return self._run(work)

    def delete(self, job_id: str) -> bool:
        delete = self._jobs.delete().where(self._jobs.c.id == job_id)
        return self._run(lambda connection: connection.execute(delete).rowcount) > 0


# An empty run time stands for a paused job.
_SWAP = """
local moved = 0
for i = 1, #ARGV, 4 do
    local id, old, new, run_time = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
    if (redis.call('HGET', KEYS[1], id) or '') == old then
        if new == '' then redis.call('HDEL', KEYS[1], id) else redis.call('HSET', KEYS[1], id, new) end
        if run_time == '' then redis.call('ZREM', KEYS[2], id) else redis.call('ZADD', KEYS[2], run_time, id) end
        moved = moved + 1
    end
end
return moved
"""


class _RedisTable:
    def __init__(self, inner: Any) -> None:
        self._redis = inner.redis
        self._jobs, self._run_times = self._keys = (inner.jobs_key, inner.run_times_key)
        self._swap = self._redis.register_script(_SWAP)

    def earliest(self, after: float | None) -> float | None:
        lowest = "-inf" if after is None else f"({after!r}"
        found = self._redis.zrangebyscore(self._run_times, lowest, "+inf", start=0, num=1, withscores=True)
        return float(found[0][1]) if found else None

    def due(self, until: float) -> list[tuple[str, bytes]]:
        ids = self._redis.zrangebyscore(self._run_times, "-inf", repr(until))
        states = self._redis.hmget(self._jobs, ids) if ids else []
        # A job may be removed between the two commands.
        return [(job_id.decode(), state) for job_id, state in zip(ids, states, strict=True) if state is not None]

    def all(self) -> list[tuple[str, bytes]]:
        return [(job_id.decode(), state) for job_id, state in self._redis.hgetall(self._jobs).items()]

    def get(self, job_id: str) -> bytes | None:
        state: bytes | None = self._redis.hget(self._jobs, job_id)
        return state

    def insert(self, move: _Move) -> bool:
        return self.swap([move]) > 0

    def swap(self, moves: Sequence[_Move]) -> int:
        arguments: list[str | bytes] = []
        for move in moves:
            run_time = "" if move.run_time is None else repr(move.run_time)
            arguments += [move.id, move.old, move.new, run_time]
        return int(self._swap(self._keys, arguments))

    def delete(self, job_id: str) -> bool:
        with self._redis.pipeline() as pipe:
            pipe.hdel(self._jobs, job_id)
            pipe.zrem(self._run_times, job_id)
            return bool(pipe.execute()[0])


def _table_of(store: BaseJobStore) -> _Table | None:
    redis_module = sys.modules.get("apscheduler.jobstores.redis")  # whoever has such a store has imported it
    tables: list[tuple[type[BaseJobStore], Callable[[Any], _Table]]] = [(SQLAlchemyJobStore, _SqlTable)]
    if redis_module is not None:
        tables.append((redis_module.RedisJobStore, _RedisTable))
    for kind, table in tables:
        if isinstance(store, kind):
            # A subclass with a format of its own keeps it.
            changed = [
                name
                for name in ("add_job", "update_job", "lookup_job", "get_due_jobs", "_reconstitute_job")
                if getattr(type(store), name) is not getattr(kind, name)
            ]
            if not changed:
                return table(store)
            logger.warning(
                "%s overrides %s and is shared without compare-and-swap", type(store).__name__, ", ".join(changed)
            )
    return None


# --- what `replace_existing` keeps -------------------------------------------------------------------------------------


def _schedule(kept: _Schedule, asked: _Schedule) -> _Schedule:
    trigger, next_run_time = kept
    if not _same(trigger, asked[0]):
        return asked
    return trigger, next_run_time if _is_by_trigger(*asked) else asked[1]


def _same(old: BaseTrigger, new: BaseTrigger) -> bool:
    """Tell whether two triggers were written alike, whatever start date APScheduler made up for each."""
    if type(old) is not type(new):
        return False
    if isinstance(old, BaseCombiningTrigger):
        return (
            old.jitter == new.jitter
            and len(old.triggers) == len(new.triggers)
            and all(map(_same, old.triggers, new.triggers))
        )
    was, now = _settings(old), _settings(new)
    if _start_is_made_up(old, new):
        was, now = {**was, "start_date": None}, {**now, "start_date": None}
    return bool(was == now)


def _start_is_made_up(old: BaseTrigger, new: BaseTrigger) -> bool:
    if isinstance(old, IntervalTrigger):
        # People write whole seconds; "now plus the interval" has a fraction.
        return all(trigger.start_date.microsecond for trigger in (old, new))
    if isinstance(old, CalendarIntervalTrigger):
        return bool(old.start_date <= new.start_date == date.today())  # noqa: DTZ011 - the very call APScheduler makes
    return False


def _settings(trigger: BaseTrigger) -> Any:
    return trigger.__reduce_ex__(2)[2]


def _is_by_trigger(trigger: BaseTrigger, next_run_time: datetime | None) -> bool:
    """Tell whether the next run time came from the trigger, not from the caller of `add_job`."""
    bare, jitter = _without_jitter(trigger)
    now = datetime.now(timezone.utc)
    if next_run_time is None:
        return bare.get_next_fire_time(None, now) is None
    # It may have come and gone since the scheduler computed it.
    fire_time = bare.get_next_fire_time(None, min(now, next_run_time - jitter))
    return fire_time is not None and bool(fire_time <= next_run_time <= fire_time + jitter)


def _without_jitter(trigger: BaseTrigger) -> tuple[BaseTrigger, timedelta]:
    bare = copy.copy(trigger)
    jitter = timedelta(seconds=getattr(trigger, "jitter", None) or 0)
    if jitter:
        bare.jitter = None
    if isinstance(trigger, BaseCombiningTrigger):
        parts = [_without_jitter(part) for part in trigger.triggers]
        bare.triggers = [part for part, _ in parts]
        jitter += max((more for _, more in parts), default=timedelta(0))
    return bare, jitter


# --- options -----------------------------------------------------------------------------------------------------------


def _poll_interval(poll: timedelta | float | str) -> timedelta:
    try:
        interval = poll if isinstance(poll, timedelta) else timedelta(seconds=float(poll))
    except (TypeError, ValueError, OverflowError):
        interval = timedelta(0)
    if interval <= timedelta(0):
        raise ConfigError(f"poll must be a positive number of seconds or a timedelta, not {poll!r}")
    return interval


def _inner_store(inner: str | type[BaseJobStore] | BaseJobStore, options: dict[str, Any]) -> BaseJobStore:
    if isinstance(inner, BaseJobStore):
        if options:
            raise ConfigError(f"unknown options {_names(options)}: the inner job store is an instance and takes none")
        store = inner
    else:
        store = _create(_inner_class(inner) if isinstance(inner, str) else inner, options)
    if isinstance(store, SharedJobStore):
        raise ConfigError("inner must be the job store to share, not another shared one")
    return store


def _create(kind: Any, options: dict[str, Any]) -> BaseJobStore:
    if not (isinstance(kind, type) and issubclass(kind, BaseJobStore)):
        raise ConfigError(f"inner must be a job store, its class, its alias or a reference to it, not {kind!r}")
    parameters = inspect.signature(kind).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        unknown = options.keys() - parameters.keys()
        if unknown:
            raise ConfigError(f"unknown options {_names(unknown)}: {kind.__name__} takes {_names(parameters)}")
    try:
        return kind(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the inner job store {kind.__name__} cannot be made: {error}") from error


def _inner_class(name: str) -> Any:
    try:
        if ":" in name:
            return ref_to_obj(name)
        plugins = entry_points(group="apscheduler.jobstores")
        found = [plugin for plugin in plugins if plugin.name == name]
        if not found:
            raise ConfigError(f"inner: there is no job store {name!r}; there are {_names(plugins.names)}")
        return found[0].load()
    except (ImportError, LookupError) as error:
        hint = '; pip install "apscheduler-fence[redis]"' if name == "redis" else ""
        raise ConfigError(f"inner: the job store {name!r} cannot be imported: {error}{hint}") from error


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
