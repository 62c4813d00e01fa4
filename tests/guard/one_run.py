"""One run of one job on a scheduler of its own, and what was heard and recorded of it."""

import contextlib
import queue
from dataclasses import dataclass
from datetime import datetime, timezone

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_fence import EVENT_FENCE_ALL, FencedExecutor
from apscheduler_fence.lease import Execution
from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.base import Executions


@dataclass
class Ran:
    """How a run ended: APScheduler's event for it, the codes of the others, and the record."""

    event: object
    others: list[int]
    record: Execution


@contextlib.contextmanager
def scheduled(store_url, *jobs, scheduler=BackgroundScheduler, inner=None, **options):
    """Run each `(function, args)` once, on one scheduler; gives a function that waits for the next event."""
    events = queue.Queue()
    executor = FencedExecutor(store_url, inner=inner, sweep="1h", **options)
    running = scheduler(executors={"default": executor}, timezone=timezone.utc)
    running.add_listener(events.put, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR | EVENT_FENCE_ALL)
    for function, args in jobs:
        now = datetime.now(timezone.utc)
        running.add_job(function, "date", run_date=now, args=args, id=function.__name__, misfire_grace_time=None)
    running.start()
    try:
        yield lambda: events.get(timeout=20)
    finally:
        running.shutdown()


def run(store_url, function, *args, **options):
    """Run a function once, to its end."""
    heard = []
    with scheduled(store_url, (function, args), **options) as event:
        while True:
            heard.append(event())
            if heard[-1].code in (EVENT_JOB_EXECUTED, EVENT_JOB_ERROR):
                break
    return Ran(heard[-1], [each.code for each in heard[:-1]], record(store_url, function.__name__))


def record(store_url, job):
    """The newest record of a job."""
    with contextlib.closing(open_store(store_url)) as store:
        return next(iter(store.executions(Executions(job=job))))
