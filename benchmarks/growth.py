"""What a claim and a sweep cost when the store has grown, on PostgreSQL, in one run.

A small store (1,000 executions) and a large one (1,000,000) lie in one database and are measured in turns:

    claim     a read, a claim and its settle of a new slot: the cost at the large one as a ratio to the small one
    sweep     what a keeper asks at each sweep, with ten overdue leases and ten waiting executions: time, rows that
              PostgreSQL fetched for it, and the plans it runs with

Run it with: python benchmarks/growth.py [database URL]; without one it starts a server as the tests do.
"""

import contextlib
import statistics
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import sqlalchemy as sa

from apscheduler_fence.lease import Ask, Change, claim, granted, settle
from apscheduler_fence.stores.base import Executions, HeldLeases
from apscheduler_fence.stores.sql import SqlStore
from apscheduler_fence.stores.sql.statements import Statements
from apscheduler_fence.stores.sql.tables import tables

SIZES = {"small_": 1_000, "large_": 1_000_000}
JOBS = 100
ROUNDS = 1000
SWEEPS = 30
OVERDUE = WAITING = 10
KEEP_UNTIL = "9000000000000000"

FINISHED = """
INSERT INTO {p}execution (job, slot, lease, slot_at, scheduled_at, state, attempt, token, holder, delivery, max_attempts,
    started_at, finished_at, keep_until, func, jobstore, job_id, namespace)
SELECT 'job' || n % {jobs}, 's' || n, 'job' || n % {jobs}, n, n, 'succeeded', 1, n, 'host:1:' || n, 'at_least_once', 3,
    n, n, {keep} + n, 'application:job', 'default', 'job' || n % {jobs}, ''
FROM generate_series(1, {rows}) n"""
OPEN = """
INSERT INTO {p}execution (job, slot, lease, slot_at, scheduled_at, state, attempt, token, holder, delivery, max_attempts,
    started_at, func, jobstore, job_id, namespace)
SELECT '{state}' || n, 's', '{state}' || n, n, n, '{state}', 1, n, 'host:1:x', 'at_least_once', 3,
    n, 'application:job', 'default', '{state}' || n, ''
FROM generate_series(1, {rows}) n"""
LEASES = """
INSERT INTO {p}lease (name, token, holder, job, slot, acquired_at, expires_at, hold_until, pruned_through, namespace)
SELECT DISTINCT ON (lease) lease, token, CASE state WHEN 'running' THEN holder END, job, slot, slot_at,
    CASE state WHEN 'running' THEN slot_at END, 0, 0, ''
FROM {p}execution ORDER BY lease, slot_at DESC"""


@contextlib.contextmanager
def database() -> Iterator[str]:
    """The URL that was given, or that of a server of one's own that waits for its disk as in production."""
    if len(sys.argv) > 1:
        yield sys.argv[1]
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from servers import PostgreSQL  # noqa: PLC0415 - only if no database was named

    with PostgreSQL(durable=True) as server:
        yield server.url


def grow(engine: sa.Engine, prefix: str, size: int) -> None:
    """Fill a store."""
    with engine.connect() as connection:
        for statement in (
            FINISHED.format(p=prefix, jobs=size // 10, keep=KEEP_UNTIL, rows=size),
            OPEN.format(p=prefix, state="running", rows=OVERDUE),
            OPEN.format(p=prefix, state="waiting", rows=WAITING),
            LEASES.format(p=prefix),
            f"VACUUM ANALYZE {prefix}execution",
            f"VACUUM ANALYZE {prefix}lease",
        ):
            connection.exec_driver_sql(statement.replace("%", "%%"))


def run_slot(store: SqlStore, number: int) -> float:
    """Microseconds of one run's claim and settle."""
    job = f"job{number % JOBS}"
    at = 10_000_000 + number
    ask = Ask(job, job, f"t{number}", at, at, f"host:1:{uuid.uuid4().hex[:16]}", 60_000_000)
    began = time.perf_counter()
    change = claim(store.read(ask.key), ask)
    assert isinstance(change, Change)
    [token] = store.swap([change])
    assert token
    assert store.swap([settle(granted(ask, token, 1), "succeeded")]) == [token]
    return (time.perf_counter() - began) * 1e6


def sweep(store: SqlStore) -> float:
    """Milliseconds of one sweep's questions."""
    began = time.perf_counter()
    overdue = list(store.held_leases(HeldLeases(expired=True, limit=200)))
    waiting = list(store.executions(Executions(states=("waiting",), oldest_first=True)))
    list(store.held_leases(HeldLeases()))
    took = (time.perf_counter() - began) * 1e3
    assert (len(overdue), len(waiting)) == (OVERDUE, WAITING)
    return took


def fetched(engine: sa.Engine, prefix: str) -> int:
    """Rows of the execution table that PostgreSQL has looked at so far, by whatever plan."""
    time.sleep(0.5)
    question = f"SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = '{prefix}execution'"
    with engine.connect() as connection:
        return int(connection.exec_driver_sql(question).scalar_one())


def plans(engine: sa.Engine, prefix: str) -> Iterator[str]:
    """How PostgreSQL runs a sweep's questions."""
    made = Statements(tables(prefix))
    questions = [
        made.held(HeldLeases(expired=True, limit=200), ""),
        made.page(Executions(states=("waiting",), oldest_first=True), "", 500, None),
    ]
    with engine.connect() as connection:
        for statement, parameters in questions:
            compiled = statement.compile(engine)
            values = {key: parameters.get(key, value) for key, value in compiled.params.items()}
            yield "\n".join(connection.exec_driver_sql(f"EXPLAIN (ANALYZE, COSTS OFF) {compiled}", values).scalars())


def main() -> None:
    with database() as url:
        engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
        stores = {prefix: SqlStore(url, prefix=prefix) for prefix in SIZES}
        for prefix, store in stores.items():
            store.open()
            grow(engine, prefix, SIZES[prefix])
        # In turns, so that a busy machine is equally busy for both.
        claims = [[run_slot(store, n) for store in stores.values()] for n in range(ROUNDS)][20:]
        small, large = (statistics.median(column) for column in zip(*claims, strict=True))
        print(f"claim and settle: {small:.0f} us at 1,000 rows, {large:.0f} us at 1,000,000 rows: x{large / small:.2f}")
        for store in stores.values():
            store.close()  # the end of a connection brings out all that it has counted
        before = {prefix: fetched(engine, prefix) for prefix in stores}
        sweeps = [[sweep(store) for store in stores.values()] for _ in range(SWEEPS)]
        small, large = (statistics.median(column) for column in zip(*sweeps, strict=True))
        print(
            f"a sweep of {OVERDUE} overdue and {WAITING} waiting: {small:.2f} ms and {large:.2f} ms: x{large / small:.2f}"
        )
        for store in stores.values():
            store.close()
        for prefix in stores:
            rows = (fetched(engine, prefix) - before[prefix]) / SWEEPS
            print(f"  {prefix.strip('_')}: {rows:.0f} execution rows fetched for it")
        print(*plans(engine, "large_"), sep="\n\n")
        engine.dispose()


if __name__ == "__main__":
    main()
