"""What it costs when many nodes want one slot at the same instant: reads, writes, and how long until all know.

Each claimant is a thread with a store and connections of its own. All arrive in the same instant, closer together than
nodes of a real cluster ever come, or spread over a tenth of a second. They take turns in one process on few cores, so
times are an upper bound.

A swap is sent by those who have read before the winner's swap was committed. One of a slot's swaps matches; the others
change no row.

    python benchmarks/herd.py                          # starts servers as the tests do
    python benchmarks/herd.py --rounds 1 --sizes 10    # to see it work
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from measure import environment, environment_line, servers

from apscheduler_fence.lease import Ask, Change, Key, claim, granted, settle
from apscheduler_fence.stores import open_store

if TYPE_CHECKING:
    from apscheduler_fence.stores.base import Store

STORES = ("memory", "sqlite", "postgresql", "mariadb", "redis")
TIMEOUT = 30.0
SPREADS = (0.0, 0.1)
"""Over how many seconds the claimants arrive."""
slots = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Claim:
    """How one claimant fared; `took` is in seconds, from its arrival until it knew."""

    took: float
    reads: int
    swaps: int
    won: bool


def compete(store: Store, slot: int, barrier: threading.Barrier, spread: float) -> Claim:
    """Claim the slot as the runner does: read, decide, swap, until it is won or refused."""
    wait = random.uniform(0, spread)
    name = f"slot-{slot}"
    ask = Ask("herd", "herd", name, slot, slot, f"host:1:{uuid.uuid4().hex[:16]}", 30_000_000, keep_for=2**52)
    reads = swaps = 0
    barrier.wait(TIMEOUT)
    time.sleep(wait)
    arrived = time.perf_counter()
    while True:
        reads += 1
        decision = claim(store.read(ask.key), ask)
        if not isinstance(decision, Change):
            return Claim(time.perf_counter() - arrived, reads, swaps, won=False)
        swaps += 1
        [token] = store.swap([decision])
        if token is not None:
            took = time.perf_counter() - arrived
            store.swap([settle(granted(ask, token, 1), "succeeded")])
            return Claim(took, reads, swaps, won=True)


def round_of(stores: list[Store], pool: ThreadPoolExecutor, spread: float) -> dict[str, float]:
    """One slot that all claim."""
    barrier, slot = threading.Barrier(len(stores)), next(slots)
    claims = list(pool.map(lambda store: compete(store, slot, barrier, spread), stores))
    [winner] = [each for each in claims if each.won]
    return {
        "reads": sum(each.reads for each in claims),
        "swaps": sum(each.swaps for each in claims),
        "winner ms": winner.took * 1000,
        "slowest ms": max(each.took for each in claims) * 1000,
    }


def herd(url: str, size: int, spread: float, rounds: int) -> dict[str, float]:
    """The medians over some slots."""
    namespace = f"herd-{uuid.uuid4().hex[:8]}"
    options = {} if url.startswith("memory") else {"timeout": TIMEOUT}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(size) as pool:
        stores: list[Store] = [open_store(url, namespace, **options) for _ in range(size)]
        for store in stores:
            stack.callback(store.close)
            store.open()
            store.read(Key("herd", "herd", "none"))
        round_of(stores, pool, spread)  # the lease's first row is made
        seen = [round_of(stores, pool, spread) for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in seen) for name in seen[0]}


def main() -> None:
    """Measure each store with each number of claimants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--sizes", default="50,200", help="numbers of claimants")
    parser.add_argument("--only", default=",".join(STORES), help=f"of {', '.join(STORES)}")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    with servers(*options.only.split(",")) as found:
        rows: list[dict[str, Any]] = [
            {"store": name, "claimants": size, "spread": spread, **herd(found[name], size, spread, options.rounds)}
            for name in STORES
            if name in found
            for size in sizes
            for spread in SPREADS
        ]
    about = environment()
    if options.json:
        print(json.dumps({**about, "rounds": options.rounds, "rows": rows}))
        return
    print(f"{'store':12}{'claimants':>10}{'spread':>10}{'reads':>8}{'swaps':>8}{'winner':>13}{'slowest':>13}")
    for row in rows:
        print(
            f"{row['store']:12}{row['claimants']:10}{row['spread'] * 1000:7.0f} ms{row['reads']:8.0f}{row['swaps']:8.0f}"
            f"{row['winner ms']:10.1f} ms{row['slowest ms']:10.1f} ms"
        )
    print(f"\nmedians of {options.rounds} slots; {environment_line(about)}")


if __name__ == "__main__":
    main()
