"""An application whose loop cannot be restarted in one process: runs a job once and says what it heard.

Usage: one_slot.py gevent|gevent-patched|twisted STORE_URL
"""

# ruff: noqa: PLC0415 - importing gevent or Twisted is what this process is for

import json
import sys

if sys.argv[1] == "gevent-patched":
    from gevent import monkey

    monkey.patch_all()

import threading
from datetime import datetime, timezone

from apscheduler.events import EVENT_ALL

from apscheduler_fence import EVENT_FENCE_ALL, EVENT_LEASE_OVERDUE, fenced

AT = datetime(2026, 9, 2, 10, tzinfo=timezone.utc)
EXECUTORS = {"default": {"type": "fenced", "store": sys.argv[2]}}
told = {"events": [], "threads": []}


def heard(event):
    told["events"].append([event.code, getattr(event, "retval", None)])
    if event.code == EVENT_LEASE_OVERDUE:
        told["threads"].append(threading.current_thread().name)


@fenced(lock_at_most="0.5s", max_runtime="1s")
def job(sleep, fence):
    sleep(1.2)
    return fence.execution_id


async def coroutine_job():
    raise AssertionError("nobody awaits this")


def set_up(scheduler, sleep):
    scheduler.add_listener(heard, EVENT_ALL | EVENT_FENCE_ALL)
    scheduler.add_job(job, "date", [sleep], id="job", run_date=AT, misfire_grace_time=None)
    scheduler.add_job(coroutine_job, "date", id="coroutine", run_date=AT, misfire_grace_time=None)
    scheduler.start()


def main_gevent():
    import gevent
    from apscheduler.schedulers.gevent import GeventScheduler

    scheduler = GeventScheduler(executors=EXECUTORS, timezone=timezone.utc)
    set_up(scheduler, gevent.sleep)
    gevent.sleep(2)
    scheduler.shutdown()


def main_twisted():
    import time

    from apscheduler.schedulers.twisted import TwistedScheduler
    from twisted.internet import reactor

    scheduler = TwistedScheduler(executors=EXECUTORS, timezone=timezone.utc)
    set_up(scheduler, time.sleep)
    reactor.callLater(2, scheduler.shutdown)
    reactor.callLater(2.2, reactor.stop)
    reactor.run()


{"gevent": main_gevent, "gevent-patched": main_gevent, "twisted": main_twisted}[sys.argv[1]]()
print(json.dumps(told))  # noqa: T201 - standard output is the channel
