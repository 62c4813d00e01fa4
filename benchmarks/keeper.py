"""What a node pays to hold a thousand leases: round trips, CPU and time of one round of renewals.

The keeper renews all its leases together every third of the shortest `lock_at_most`. Here it is stepped with a clock that
is moved on by as much between two rounds.

    python benchmarks/keeper.py                                   # starts servers as the tests do
    python benchmarks/keeper.py --leases 20 --rounds 2            # to see it work
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import sqlalchemy
from measure import environment, environment_line, servers

from apscheduler_fence.fence import Hold
from apscheduler_fence.keeper import Keeper, Settings
from apscheduler_fence.lease import Ask, Change, claim, granted
from apscheduler_fence.policy import Instant, Policy, in_micros, instant
from apscheduler_fence.slots import Slot
from apscheduler_fence.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from apscheduler_fence.stores.base import Store

STORES = ("memory", "sqlite", "postgresql", "mariadb", "redis")
POLICY = Policy(lock_at_most=timedelta(minutes=5))
EVERY = POLICY.lock_at_most.total_seconds() / 3


@dataclass(slots=True)
class Clock:
    """This host's clocks, moved on by as much as they are told to."""

    ahead: float = 0.0

    def __call__(self) -> Instant:
        now = instant()
        return Instant(now.monotonic + self.ahead, now.boottime + self.ahead, now.wall + self.ahead)


def hold_one(store: Store, number: int, clock: Clock) -> Hold:
    """Claim a lease of its own."""
    name, at = f"job-{number}", 1_700_000_000_000_000 + number
    ask = Ask(
        name, name, "slot", at, at, f"host:1:{uuid.uuid4().hex[:16]}", in_micros(POLICY.lock_at_most), keep_for=2**52
    )
    since = clock()
    change = claim(store.read(ask.key), ask)
    assert isinstance(change, Change), change
    [token] = store.swap([change])
    assert token is not None
    return Hold(granted(ask, token, 1), Slot(name, "slot", at, at), POLICY, since, since, name, clock=clock)


def round_trips_of(name: str, store: Any, server: Any) -> Callable[[], int]:
    """A count of what was sent so far; statements of SQL, commands of Redis."""
    if name == "redis":
        client = server.client()

        def commands() -> int:
            stats = client.info("commandstats")
            return sum(stats.get(f"cmdstat_{command}", {}).get("calls", 0) for command in ("evalsha", "eval"))

        return commands
    sent: list[None] = []
    if name != "memory":
        sqlalchemy.event.listen(store._engine, "before_cursor_execute", lambda *_: sent.append(None))  # noqa: SLF001 - a store tells nobody
    return lambda: len(sent)


def measure(name: str, found: dict[str, Any], leases: int, rounds: int) -> dict[str, Any]:
    """Medians over some rounds of renewals."""
    store = open_store(found[name], "keeper")
    store.open()
    clock, lost = Clock(), []
    keeper = Keeper(
        store, lost.append, lambda: uuid.uuid4().hex, lambda: None, Settings(housekeeping=False), clock
    )  # fmt: skip
    for number in range(leases):
        keeper.hold(hold_one(store, number, clock))
    count = round_trips_of(name, store, found.get(f"{name}_server"))
    trips, cpu, wall = [], [], []
    for _ in range(rounds + 1):
        clock.ahead += EVERY + 1
        before = count(), time.process_time(), time.perf_counter()
        keeper.step()
        took = time.perf_counter() - before[2], time.process_time() - before[1], count() - before[0]
        wall.append(took[0] * 1000)
        cpu.append(took[1] * 1000)
        trips.append(took[2])
    store.close()
    if lost:
        raise SystemExit(f"{name}: {len(lost)} leases were lost")
    busy = statistics.median(cpu[1:])
    return {
        "store": name,
        "round trips": statistics.median(trips[1:]),
        "time ms": round(statistics.median(wall[1:]), 1),
        "cpu ms": round(busy, 1),
        "cpu at 30 s leases": round(busy / 10_000, 4),
    }


def main() -> None:
    """Measure each store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leases", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default=",".join(STORES), help=f"of {', '.join(STORES)}")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    options = parser.parse_args()
    with servers(*options.only.split(",")) as found:
        rows = [measure(name, found, options.leases, options.rounds) for name in STORES if name in found]
    about = environment()
    if options.json:
        print(json.dumps({**about, "leases": options.leases, "rounds": options.rounds, "rows": rows}))
        return
    print(f"{'store':12}{'round trips':>12}{'time':>12}{'CPU':>12}{'of a core at 30 s leases':>27}")
    for row in rows:
        share = f"{row['cpu at 30 s leases']:.2%}"
        print(f"{row['store']:12}{row['round trips']:12.0f}{row['time ms']:9.1f} ms{row['cpu ms']:9.1f} ms{share:>27}")
    print(f"\n{options.leases} leases, medians of {options.rounds} rounds; {environment_line(about)}")


if __name__ == "__main__":
    main()
