"""What sharing a job store costs: CPU and statements per slot, beside one node on APScheduler's plain store.

Every configuration is measured in the same run on the same database, so its figures are read as ratios to the first:

    plain    one node, APScheduler's own SQLAlchemy store, an executor that only counts
    shared   one node on the shared store, the same executor: the price of the wrapper
    nodes    several nodes on the shared store, the same executor
    pair     several nodes on the shared store with the fenced executor: every slot must run exactly once

Jobs have one period and are spread evenly over it, or with `--burst` are all due in the same instant.

    python benchmarks/shared_jobstore.py --url postgresql+psycopg://…/scratch
    python benchmarks/shared_jobstore.py --jobs 50 --nodes 2 --seconds 4 --period 2      # a few seconds, to see it work
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import sqlalchemy
from apscheduler.executors.base import BaseExecutor
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_fence.executor import FencedExecutor
from apscheduler_fence.fence import current_fence
from apscheduler_fence.jobstore import SharedJobStore

UTC = timezone.utc
CONFIGURATIONS = ("plain", "shared", "nodes", "pair")
START_UP = 4.0  # seconds from starting the nodes to the first run time
SETTLE = 2.0  # seconds after the last run time for what is still on its way

slots: Counter[str] = Counter()


class Count(BaseExecutor):  # type: ignore[misc]
    """Runs nothing, so that the cost is that of the scheduler and its job store."""

    def _do_submit_job(self, job: Any, run_times: list[datetime]) -> None:
        slots.update(f"{job.id}/{run_time.timestamp()}" for run_time in run_times)
        self._instances[job.id] -= 1


def run_slot() -> None:
    """The job of the pair."""
    import shared_jobstore  # noqa: PLC0415 - the script is `__main__`, and the job lives in its importable twin

    fence = current_fence()
    shared_jobstore.slots[fence.execution_id] += 1


def store_of(configuration: str, url: str) -> Any:
    """A job store over a pool that holds its connection."""
    if configuration == "plain":
        return SQLAlchemyJobStore(url, tablename=f"jobs_{configuration}")
    return SharedJobStore("sqlalchemy", url=url, tablename=f"jobs_{configuration}")


def executor_of(configuration: str, url: str) -> BaseExecutor:
    """The executor of a configuration."""
    return FencedExecutor(url, namespace="benchmark") if configuration == "pair" else Count()


def fill(configuration: str, options: argparse.Namespace, first: datetime) -> None:
    """Adds the jobs, before any node runs."""
    scheduler = BackgroundScheduler(
        timezone=UTC, jobstores={"default": store_of(configuration, options.url)}, executors={"default": Count()}
    )
    scheduler.start(paused=True)
    for number in range(options.jobs):
        offset = 0.0 if options.burst else number * options.period / options.jobs
        scheduler.add_job(
            "shared_jobstore:run_slot",
            "interval",
            seconds=options.period,
            start_date=first + timedelta(seconds=offset),
            id=f"job-{number}",
            misfire_grace_time=None,
        )
    scheduler.shutdown()


def node(given: dict[str, Any]) -> None:
    """Runs one node for the time of the measurement and prints what it did and cost."""
    import shared_jobstore  # noqa: PLC0415

    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    configuration, url = given["configuration"], given["url"]
    store = store_of(configuration, url)
    engine = getattr(store, "_inner", store).engine
    counts = Counter[str]()

    def statement(_: Any, __: Any, ___: Any, parameters: Any, ____: Any, executemany: bool) -> None:
        counts["statements"] += len(parameters) if executemany else 1

    def commit(_: Any) -> None:
        counts["transactions"] += 1

    sqlalchemy.event.listen(engine, "before_cursor_execute", statement)
    sqlalchemy.event.listen(engine, "commit", commit)
    scheduler = BackgroundScheduler(
        timezone=UTC, jobstores={"default": store}, executors={"default": executor_of(configuration, url)}
    )
    scheduler.start()
    time.sleep(max(0.0, given["first"] - 0.5 - time.time()))
    cpu = time.process_time()
    counts.clear()
    time.sleep(max(0.0, given["last"] - time.time()))
    cpu = time.process_time() - cpu
    counted = dict(counts)
    alive = scheduler._thread.is_alive()  # noqa: SLF001
    scheduler.shutdown()
    done = shared_jobstore.slots if configuration == "pair" else slots
    print(json.dumps({"cpu": cpu, "alive": alive, "slots": done, **counted}))


def measure(configuration: str, options: argparse.Namespace) -> dict[str, float]:
    """Runs one configuration and returns its cost per slot."""
    count = options.nodes if configuration in ("nodes", "pair") else 1
    # The time to fill the store comes before the first run time.
    first = datetime.now(UTC) + timedelta(seconds=START_UP + options.jobs / 200)
    fill(configuration, options, first)
    last = first.timestamp() + options.seconds + SETTLE
    given = {"configuration": configuration, "url": options.url, "first": first.timestamp(), "last": last}
    command = [sys.executable, __file__, "--node", json.dumps(given)]
    nodes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    reports = [json.loads(process.communicate()[0]) for process in nodes]
    if not all(report["alive"] for report in reports):
        raise SystemExit(f"{configuration}: a scheduler has died")
    ran: Counter[str] = Counter()
    for report in reports:
        ran.update(report["slots"])
    if configuration == "pair":
        twice = [slot for slot, times in ran.items() if times != 1]
        expected = options.jobs * int(options.seconds / options.period)
        if twice or len(ran) < expected:
            raise SystemExit(f"pair: {len(twice)} slots ran more than once, {len(ran)} of {expected} ran")
    return {
        "slots": len(ran),
        "submitted": sum(ran.values()) / len(ran),
        "cpu": 1e6 * sum(report["cpu"] for report in reports) / len(ran),
        "statements": sum(report.get("statements", 0) for report in reports) / len(ran),
        "transactions": sum(report.get("transactions", 0) for report in reports) / len(ran),
    }


def main() -> None:
    """Measures all configurations and prints them as ratios to the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="an empty scratch database (default: a new SQLite file)")
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long runs are counted")
    parser.add_argument("--period", type=float, default=60.0, help="seconds between two runs of a job")
    parser.add_argument("--burst", action="store_true", help="all jobs are due in the same instant")
    parser.add_argument("--node", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        node(json.loads(options.node))
        return
    with tempfile.TemporaryDirectory() as folder:
        options.url = options.url or f"sqlite:///{Path(folder) / 'benchmark.db'}"
        shape = "all at once" if options.burst else "spread evenly"
        print(f"{options.jobs} jobs every {options.period:g} s, {shape}, {options.nodes} nodes; per slot:")
        print(f"{'':8}{'slots':>8}{'submitted':>11}{'CPU':>12}{'':>8}{'statements':>12}{'transactions':>14}")
        base: dict[str, float] | None = None
        for configuration in CONFIGURATIONS:
            cost = measure(configuration, options)
            base = base or cost
            print(
                f"{configuration:8}{cost['slots']:8.0f}{cost['submitted']:10.2f}x{cost['cpu']:9.0f} us"
                f"{cost['cpu'] / base['cpu']:7.2f}x{cost['statements'] / base['statements']:11.2f}x"
                f"{cost['transactions'] / base['transactions']:13.2f}x",
                flush=True,
            )


if __name__ == "__main__":
    main()
