"""How long it takes from a node's death until another runs its job again, on PostgreSQL.

A node is killed in the middle of an at-least-once run, at a moment of chance, and a node that stands by takes over. From
the kill until the job is entered again are at most `lock_at_most` (the lease was renewed just before) and one `sweep` (the
node that stands by had looked just before the lease was over), and what a claim takes.

Run it with: python benchmarks/takeover.py [--kills 50] [--lock-at-most 2] [--sweep 1] [--url DATABASE_URL]
"""

import argparse
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_fence import Fence, FencedExecutor, fenced

UTC = timezone.utc


@fenced(delivery="at_least_once", max_attempts=2)
def job(*, fence: Fence) -> None:
    """Says when it was entered, on the clock that all processes of a machine share; the first attempt goes on."""
    print(json.dumps({"entered": fence.attempt, "run": fence.execution_id, "at": time.monotonic()}), flush=True)
    if fence.attempt == 1:
        time.sleep(3600)


def run_node(url: str, lock_at_most: float, sweep: float) -> None:
    """A node of the cluster. A line `go` of its input makes it run the job."""
    scheduler = BackgroundScheduler(timezone=UTC)
    scheduler.add_executor(FencedExecutor(url, lock_at_most=lock_at_most, sweep=sweep))
    scheduler.add_job("takeover:job", "interval", hours=24 * 365, id="job")
    scheduler.start()
    print(json.dumps({"ready": True}), flush=True)
    while True:
        time.sleep(3600)


def run_once(url: str, lock_at_most: float) -> None:
    """A node that runs the job at once, and is to be killed. It does not sweep while it lives."""
    scheduler = BackgroundScheduler(timezone=UTC)
    scheduler.add_executor(FencedExecutor(url, lock_at_most=lock_at_most, sweep="1h"))
    scheduler.start()
    now = datetime.now(UTC)
    scheduler.add_job("takeover:job", "date", id="job", run_date=now, misfire_grace_time=None)
    while True:
        time.sleep(3600)


@contextlib.contextmanager
def database(url: str | None) -> Iterator[str]:
    """The URL that was given, or that of a server of one's own that waits for its disk as in production."""
    if url is not None:
        yield url
        return
    from servers import PostgreSQL  # noqa: PLC0415 - only if no database was named

    with PostgreSQL(durable=True) as server:
        yield server.url


def measure(url: str, kills: int, lock_at_most: float, sweep: float) -> list[float]:
    """Seconds from each kill until the job was entered again."""
    from servers import Node  # noqa: PLC0415 - not in the nodes

    times = []
    with Node(__file__, "stand-by", url, str(lock_at_most), str(sweep)) as stand_by:
        stand_by.receive(timeout=30, ready=True)
        for _ in range(kills):
            with Node(__file__, "victim", url, str(lock_at_most)) as victim:
                run = victim.receive(timeout=30, entered=1)["run"]
                time.sleep(random.uniform(0, lock_at_most))
                victim.kill()
                killed = time.monotonic()
            again = stand_by.receive(timeout=lock_at_most + sweep + 30, entered=2)
            if again["run"] != run:
                raise AssertionError(again, run)
            times.append(again["at"] - killed)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--lock-at-most", type=float, default=2.0)
    parser.add_argument("--sweep", type=float, default=1.0)
    parser.add_argument("--url")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    with database(given.url) as url:
        times = measure(url, given.kills, given.lock_at_most, given.sweep)
    bound = given.lock_at_most + given.sweep
    print(
        f"{len(times)} kills: median {statistics.median(times):.2f} s, max {max(times):.2f} s; "
        f"lock_at_most + sweep = {bound:.2f} s; max / bound = {max(times) / bound:.2f}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["stand-by"]:
        run_node(sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
    elif sys.argv[1:2] == ["victim"]:
        run_once(sys.argv[2], float(sys.argv[3]))
    else:
        main()
