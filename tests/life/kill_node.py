"""One process that will be killed: three jobs of one period, each with a guarded effect, reporting as JSON lines.

Usage: kill_node.py STORE_URL FOLDER BEGIN SLOTS. It shuts down in good order once FOLDER/stop exists.
"""

import json
import random
import sqlite3
import sys
import time
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MISSED
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_fence import EVENT_JOB_LOST, EVENT_JOB_RECOVERED, EVENT_LEASE_LOST, Fence, fenced

PERIOD = timedelta(milliseconds=300)
FOLDER = Path(sys.argv[2])
TERMS = {"lock_at_most": "1s", "max_attempts": 50}


def resource() -> sqlite3.Connection:
    """What the jobs write to: it keeps the newest token of each lease and one effect of each execution."""
    connection = sqlite3.connect(FOLDER / "resource.db", timeout=20, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    return connection


def create() -> None:
    with closing(resource()) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE entered (lease, execution, attempt, token, at)")
        db.execute("CREATE TABLE newest (lease PRIMARY KEY, token)")
        db.execute("CREATE TABLE effect (execution PRIMARY KEY, token)")


def work(fence: Fence) -> None:
    with closing(resource()) as db:
        db.execute(
            "INSERT INTO entered VALUES (?, ?, ?, ?, ?)",
            (fence.lease, fence.execution_id, fence.attempt, fence.token, time.monotonic()),
        )
        time.sleep(random.uniform(0.05, 0.2))
        db.execute("BEGIN IMMEDIATE")
        newest = db.execute("SELECT token FROM newest WHERE lease = ?", (fence.lease,)).fetchone()
        if newest is not None and newest[0] > fence.token:
            db.execute("ROLLBACK")
            return
        db.execute("INSERT OR REPLACE INTO newest VALUES (?, ?)", (fence.lease, fence.token))
        db.execute("INSERT OR IGNORE INTO effect VALUES (?, ?)", (fence.execution_id, fence.token))
        db.execute("COMMIT")


@fenced(delivery="at_least_once", **TERMS)
def least(*, fence: Fence) -> None:
    work(fence)


@fenced(delivery="at_most_once", **TERMS)
def most(*, fence: Fence) -> None:
    work(fence)


@fenced(delivery="at_least_once", overlap="queue", queue_limit=10_000, **TERMS)
def queued(*, fence: Fence) -> None:
    work(fence)


def heard(event: object) -> None:
    say(
        event=event.code, run=getattr(event, "execution_id", None), job=event.job_id,
        error=repr(getattr(event, "exception", None)), attempt=getattr(event, "attempt", None),
    )  # fmt: skip


def say(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")  # in one piece: print() would let another thread in before the newline
    sys.stdout.flush()


def main(store: str, begin: float, slots: int) -> None:
    scheduler = BackgroundScheduler(timezone=timezone.utc)
    scheduler.add_executor("fenced", store=store, sweep="0.25s", store_patience="5s")
    scheduler.add_listener(
        heard, EVENT_JOB_LOST | EVENT_JOB_RECOVERED | EVENT_LEASE_LOST | EVENT_JOB_ERROR | EVENT_JOB_MISSED
    )
    start = datetime.fromtimestamp(begin, timezone.utc)
    times = {"seconds": PERIOD.total_seconds(), "start_date": start, "end_date": start + PERIOD * (slots - 1)}
    for job in (least, most, queued):
        scheduler.add_job(
            job, "interval", id=job.__name__, coalesce=False, misfire_grace_time=None, max_instances=5, **times
        )
    scheduler.start()
    say(ready=True)
    while not (FOLDER / "stop").exists():
        time.sleep(0.05)
    scheduler.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[3]), int(sys.argv[4]))
