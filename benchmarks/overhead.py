"""What fencing costs in a scheduler: jobs per second and start latency, beside APScheduler's plain thread pool.

Two loads for each executor, all in one run, in turns and in an order that changes from round to round:

    burst     many jobs, all due in the same instant: how many are entered per second
    steady    a run every few milliseconds, far from what the machine can do: from scheduled time to job entry

    python benchmarks/overhead.py                                    # starts servers as the tests do
    python benchmarks/overhead.py --rounds 1 --jobs 50 --seconds 1   # to see it work
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import threading
import time
import uuid
from datetime import datetime, timedelta, timezone
from typing import Any

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from measure import environment, environment_line, percentile, servers

from apscheduler_fence.executor import FencedExecutor

STORES = ("memory", "sqlite", "postgresql", "mariadb", "redis")
WORKERS = 10
PERIOD = 0.5
STEADY_JOBS = 10
PATIENCE = 60.0


class Entries:
    """When jobs were entered."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._changed = threading.Condition()

    def enter(self) -> None:
        """The job."""
        with self._changed:
            self.times.append(time.time())
            self._changed.notify()

    def enter_late(self, first: float) -> None:
        """The job of a steady load: a period is longer than it can be late."""
        with self._changed:
            self.times.append((time.time() - first) % PERIOD)
            self._changed.notify()

    def wait_for(self, count: int) -> None:
        """Wait until so many runs were entered."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.times) >= count, PATIENCE):
                raise SystemExit(f"{len(self.times)} of {count} runs within {PATIENCE:g} s")


def scheduler_on(store: str | None) -> BackgroundScheduler:
    """A scheduler with a plain pool, or with one behind a fenced executor."""
    pool = ThreadPoolExecutor(WORKERS)
    executor = pool if store is None else FencedExecutor(store, namespace=f"b-{uuid.uuid4().hex[:8]}", inner=pool)
    scheduler = BackgroundScheduler(timezone=timezone.utc, executors={"default": executor})
    entries = Entries()
    scheduler.start()
    # The first run opens the store.
    scheduler.add_job(entries.enter, "date", id="warm-up", run_date=datetime.now(timezone.utc))
    entries.wait_for(1)
    return scheduler


def burst(store: str | None, jobs: int) -> float:
    """Runs entered per second when all are due at once."""
    entries, scheduler = Entries(), scheduler_on(store)
    due = datetime.now(timezone.utc) + timedelta(seconds=0.5 + jobs / 1000)
    for number in range(jobs):
        scheduler.add_job(entries.enter, "date", run_date=due, id=f"job-{number}", misfire_grace_time=None)
    entries.wait_for(jobs)
    scheduler.shutdown()
    return jobs / (max(entries.times) - due.timestamp())


def steady(store: str | None, seconds: float) -> list[float]:
    """Start latencies in ms of runs that come one after the other."""
    entries, scheduler = Entries(), scheduler_on(store)
    first = datetime.now(timezone.utc) + timedelta(seconds=0.5)
    runs = round(seconds / PERIOD)
    for number in range(STEADY_JOBS):
        start = first + timedelta(seconds=number * PERIOD / STEADY_JOBS)
        scheduler.add_job(
            entries.enter_late, "interval", seconds=PERIOD, start_date=start, args=[start.timestamp()], id=f"job-{number}",
            end_date=start + timedelta(seconds=(runs - 0.5) * PERIOD), misfire_grace_time=None, coalesce=False,
        )  # fmt: skip
    entries.wait_for(runs * STEADY_JOBS)
    scheduler.shutdown()
    return [late * 1000 for late in entries.times]


def main() -> None:
    """Measure all executors in the same rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=400, help="of a burst")
    parser.add_argument("--seconds", type=float, default=4.0, help="of the steady load")
    parser.add_argument("--only", default=",".join(STORES), help=f"of {', '.join(STORES)}")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    options = parser.parse_args()
    logging.getLogger("apscheduler").setLevel(logging.CRITICAL)
    logging.getLogger("apscheduler_fence").setLevel(logging.CRITICAL)  # it warns of run dates that are "now"
    with servers(*options.only.split(",")) as found:
        stores: dict[str, str | None] = {"plain": None, **{name: found[name] for name in STORES if name in found}}
        rates: dict[str, list[float]] = {name: [] for name in stores}
        latencies: dict[str, list[float]] = {name: [] for name in stores}
        for _ in range(options.rounds):
            for name in random.sample(list(stores), len(stores)):
                rates[name].append(burst(stores[name], options.jobs))
                latencies[name] += steady(stores[name], options.seconds)
    rows: list[dict[str, Any]] = [
        {
            "executor": name,
            "jobs per second": round(statistics.median(rates[name])),
            "p50 ms": round(percentile(latencies[name], 0.5), 2),
            "p99 ms": round(percentile(latencies[name], 0.99), 2),
        }
        for name in stores
    ]
    about = environment()
    if options.json:
        print(json.dumps({**about, "workers": WORKERS, "rows": rows}))
        return
    print(f"{'executor':14}{'jobs per second':>16}{'start latency p50':>20}{'p99':>12}")
    for row in rows:
        print(f"{row['executor']:14}{row['jobs per second']:16}{row['p50 ms']:17.2f} ms{row['p99 ms']:9.2f} ms")
    print(f"\n{WORKERS} threads, {options.rounds} rounds; {environment_line(about)}")


if __name__ == "__main__":
    main()
