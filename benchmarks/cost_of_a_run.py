"""What one run costs at the store, claim and settle, beside the least it could cost and beside other locks, in one run.

For each store, in turns:

    floor       two bare upserts through the raw driver, each durable; on Redis two bare EVALSHA
    run         read, swap (claim), swap (settle) of a new slot: token, lease, slot and history
    run again   the same without the read, from what the last settle left: the rules allow it, the runner does not do it
    …Lock       acquire and release of other locks on the same Redis, as far as they are installed

    python benchmarks/cost_of_a_run.py                     # starts servers as the tests do
    python benchmarks/cost_of_a_run.py --rounds 50         # to see it work
    python benchmarks/cost_of_a_run.py --no-disk           # without the waits for the disk, which hide what else there is
    python benchmarks/cost_of_a_run.py --only postgresql --json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sqlite3
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from measure import environment, environment_line, in_turns, servers

from apscheduler_fence.lease import Ask, Change, Lease, Seen, claim, granted, settle
from apscheduler_fence.stores import open_store

if TYPE_CHECKING:
    from apscheduler_fence.stores.base import Store

STORES = ("sqlite", "postgresql", "mariadb", "redis")
LOCK_AT_MOST = 30_000_000

Contenders = dict[str, Callable[[], object]]


class Runs:
    """One job that runs slot after slot on one store."""

    def __init__(self, store: Store, job: str) -> None:
        self.store, self.job = store, job
        self._numbers = itertools.count(time.time_ns() // 1000 - 86_400_000_000)
        self._lease = Lease(job, 0)

    def ask(self) -> Ask:
        """A claim of the next slot."""
        at = next(self._numbers)
        return Ask(
            self.job, self.job, f"slot-{at}", at, at, f"host:1:{uuid.uuid4().hex[:16]}", LOCK_AT_MOST,
            func="jobs:settle", jobstore="default", job_id=self.job,
        )  # fmt: skip

    def run(self) -> None:
        """Claim and settle as the runner does."""
        ask = self.ask()
        self._claim_and_settle(ask, self.store.read(ask.key))

    def run_again(self) -> None:
        """Claim and settle with what the last settle left in place of what a read would see."""
        if not self._lease.token:
            self.run()
            return
        self._claim_and_settle(self.ask(), Seen(time.time_ns() // 1000, self._lease))

    def _claim_and_settle(self, ask: Ask, seen: Seen) -> None:
        change = claim(seen, ask)
        assert isinstance(change, Change), change
        [token] = self.store.swap([change])
        assert token is not None
        [settled] = self.store.swap([settle(granted(ask, token, 1), "succeeded")])
        assert settled == token
        self._lease = replace(self._lease, token=token)


UPSERT = {
    "postgresql": "INSERT INTO floor VALUES (%s, %s) ON CONFLICT (id) DO UPDATE SET value = excluded.value",
    "mariadb": "INSERT INTO floor VALUES (%s, %s) ON DUPLICATE KEY UPDATE value = VALUES(value)",
    "sqlite": "INSERT INTO floor VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET value = excluded.value",
}


def sql_floor(name: str, found: dict[str, Any], stack: contextlib.ExitStack) -> Callable[[], object]:
    """Two upserts of two rows, each committed by itself, through a connection of the bare driver."""
    if name == "sqlite":
        connection: Any = sqlite3.connect(found[name].removeprefix("sqlite:///"), isolation_level=None)
        connection.execute("PRAGMA synchronous=FULL")
    else:
        connection = found[f"{name}_server"].connect("benchmark")
    stack.callback(connection.close)
    cursor = connection.cursor()
    cursor.execute("CREATE TABLE floor (id INTEGER PRIMARY KEY, value BIGINT)")
    options = {"prepare": True} if name == "postgresql" else {}
    values, statement = itertools.count(1), UPSERT[name]

    def floor() -> None:
        value = next(values)
        cursor.execute(statement, (1, value), **options)
        cursor.execute(statement, (2, value), **options)

    return floor


def redis_floor(client: Any) -> Callable[[], object]:
    """Two scripts, each of which writes one hash."""
    script = client.script_load("return redis.call('HSET', KEYS[1], 'value', ARGV[1])")
    values = itertools.count(1)

    def floor() -> None:
        value = next(values)
        client.evalsha(script, 1, "floor:1", value)
        client.evalsha(script, 1, "floor:2", value)

    return floor


def redis_locks(client: Any) -> Contenders:
    """Acquire and release of what else there is for Redis."""

    def redis_py() -> None:
        lock = client.lock("lock:redis-py", timeout=30)
        assert lock.acquire(blocking=False)
        lock.release()

    contenders: Contenders = {"redis-py Lock": redis_py}
    with contextlib.suppress(ImportError):
        import redis_lock  # noqa: PLC0415 - may not be installed

        def python_redis_lock() -> None:
            lock = redis_lock.Lock(client, "python-redis-lock", expire=30)
            assert lock.acquire(blocking=False)
            lock.release()

        contenders["python-redis-lock"] = python_redis_lock
    with contextlib.suppress(ImportError):
        from pottery import Redlock  # noqa: PLC0415 - may not be installed

        def redlock() -> None:
            lock = Redlock(key="pottery", masters={client}, auto_release_time=30)
            assert lock.acquire(blocking=False)
            lock.release()

        contenders["pottery Redlock"] = redlock
    return contenders


def contenders_on(name: str, found: dict[str, Any], stack: contextlib.ExitStack) -> Contenders:
    """What is compared on one store."""
    store = open_store(found[name], "benchmark")
    store.open()
    stack.callback(store.close)
    if name == "redis":
        client = found["redis_server"].client(decode_responses=False)
        stack.callback(client.close)
        contenders: Contenders = {"floor": redis_floor(client)}
    else:
        client = None
        contenders = {"floor": sql_floor(name, found, stack)}
    contenders["run"] = Runs(store, "first").run
    contenders["run again"] = Runs(store, "again").run_again
    return {**contenders, **redis_locks(client)} if client is not None else contenders


def main() -> None:
    """Measure all stores in the same rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--only", default=",".join(STORES), help=f"of {', '.join(STORES)}")
    parser.add_argument("--no-disk", action="store_true", help="servers that do not wait for their disk (not SQLite)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    options = parser.parse_args()
    with servers(*options.only.split(","), durable=not options.no_disk) as found, contextlib.ExitStack() as stack:
        contenders = {
            (name, what): call
            for name in STORES
            if name in found
            for what, call in contenders_on(name, found, stack).items()
        }
        keys = {f"{name} {what}": (name, what) for name, what in contenders}
        medians = in_turns({key: contenders[pair] for key, pair in keys.items()}, options.rounds)
    lock = medians.get("redis redis-py Lock")
    rows = [
        {
            "store": name,
            "what": what,
            "us": round(medians[key], 1),
            "to floor": round(medians[key] / medians[f"{name} floor"], 2),
            "to redis-py Lock": round(medians[key] / lock, 2) if lock else None,
        }
        for key, (name, what) in keys.items()
    ]
    about = environment()
    if options.json:
        print(json.dumps({**about, "rounds": options.rounds, "disk": not options.no_disk, "rows": rows}))
        return
    print(f"{'store':12}{'what':20}{'median':>10}{'to floor':>10}{'to redis-py Lock':>18}")
    for row in rows:
        to_lock = f"{row['to redis-py Lock']:.2f}x" if lock else "-"
        print(f"{row['store']:12}{row['what']:20}{row['us']:7.0f} us{row['to floor']:9.2f}x{to_lock:>18}")
    print(f"\nmedians of {options.rounds} rounds; {environment_line(about)}")


if __name__ == "__main__":
    main()
