"""One process of the demo: an ordinary scheduler with one job. Reports as JSON lines on standard output."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR, JobExecutionEvent
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger

from apscheduler_fence.events import EVENT_JOB_LOST, EVENT_JOB_REFUSED, FenceEvent
from apscheduler_fence.fence import Fence  # noqa: TC001 - a job's annotation is read when it runs
from apscheduler_fence.policy import fenced

JOB = "settle"
LOCK_AT_MOST = timedelta(milliseconds=800)
SWEEP = timedelta(seconds=1)
WORK = 0.15


@dataclass(frozen=True, slots=True)
class Orders:
    """What a node is told first: its store, and how late its clock runs."""

    store: str
    namespace: str
    late: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """What it is told once all nodes have started: when the job begins, and how many slots there are."""

    begin: float
    slots: int


def report(what: str, **more: Any) -> None:
    """Write one line that the demo reads."""
    sys.stdout.write(
        json.dumps({"what": what, **more}) + "\n"
    )  # in one piece: print() would let threads mix their lines
    sys.stdout.flush()


@fenced(lock_at_most=LOCK_AT_MOST)
def settle(*, fence: Fence) -> None:
    """The job: says that it was entered, and takes a moment."""
    report("entered", slot=fence.slot, token=fence.token)
    time.sleep(WORK)


class LateThreadPool(ThreadPoolExecutor):  # type: ignore[misc]
    """A thread pool that starts everything late, as a node does whose clock is behind."""

    def __init__(self, late: float) -> None:
        super().__init__(max_workers=10)
        self._late = late

    def _do_submit_job(self, job: Any, run_times: Any) -> None:
        submit = super()._do_submit_job
        if self._late <= 0:
            submit(job, run_times)
        else:
            threading.Timer(self._late, submit, (job, run_times)).start()


def heard(event: FenceEvent | JobExecutionEvent) -> None:
    """Pass on what a listener hears."""
    if isinstance(event, JobExecutionEvent):
        report("error", error=repr(event.exception))
        return
    slot = event.execution_id.rpartition("/")[2]
    report("lost" if event.code == EVENT_JOB_LOST else "refused", slot=slot, reason=getattr(event, "reason", "lost"))


def main() -> None:
    """Wait for orders on standard input, then run until it is closed."""
    logging.getLogger("apscheduler_fence").setLevel(logging.CRITICAL)  # the demo tells it from the events
    orders = Orders(**json.loads(sys.stdin.readline()))
    scheduler = BackgroundScheduler(
        timezone=timezone.utc,
        executors={
            "default": {
                "type": "fenced", "store": orders.store, "namespace": orders.namespace,
                "inner": LateThreadPool(orders.late), "timeout": 0.25, "sweep": SWEEP,
            }
        },
    )  # fmt: skip
    scheduler.add_listener(heard, EVENT_JOB_REFUSED | EVENT_JOB_LOST | EVENT_JOB_ERROR)
    scheduler.start()
    report("ready")
    schedule = Schedule(**json.loads(sys.stdin.readline()))
    begin = datetime.fromtimestamp(schedule.begin, timezone.utc)
    end = begin + timedelta(seconds=schedule.slots - 1)
    scheduler.add_job(
        settle, CronTrigger(second="*", start_date=begin, end_date=end, timezone=timezone.utc),
        id=JOB, max_instances=10, misfire_grace_time=None, coalesce=False,
    )  # fmt: skip
    sys.stdin.read()
    scheduler.shutdown()


if __name__ == "__main__":
    main()
