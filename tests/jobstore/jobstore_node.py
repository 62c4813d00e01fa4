"""One node of a cluster, as a process of its own: a scheduler on a shared job store with a fenced executor.

Its only argument is a JSON object: `jobstore` are the options of the job store, `store` is the URL of the fenced
executor's store, `scheduler` is "background" or "asyncio", and `stop_inside` makes the process stop itself in the middle
of the first pass that submits a job.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time

from apscheduler.executors.base import BaseExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from jobstore_jobs import tell

from apscheduler_fence.executor import FencedExecutor
from apscheduler_fence.jobstore import SharedJobStore

HEARTBEAT = 0.2


class Counting:
    """Counts the passes that the loop has completed."""

    passes = 0

    def _process_jobs(self):
        wait = super()._process_jobs()
        self.passes += 1
        return wait


class Background(Counting, BackgroundScheduler):
    """A scheduler in a thread."""


class OnLoop(Counting, AsyncIOScheduler):
    """A scheduler on an event loop."""


class Stopping(BaseExecutor):
    """Stops the whole process at the first submission, and runs nothing."""

    stopped = False

    def _do_submit_job(self, job, run_times):
        tell(submitted=job.id)
        self._instances[job.id] -= 1
        if not self.stopped:
            self.stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)
            # The signal may reach another thread first: without this, the stop could land in the write that follows.
            time.sleep(0.2)


def executor(settings):
    if settings.get("stop_inside"):
        return Stopping()
    return FencedExecutor(settings["store"])


def options(settings):
    return {
        "jobstores": {"default": SharedJobStore(**settings["jobstore"])},
        "executors": {"default": executor(settings)},
        "jobstore_retry_interval": 0.3,
        "timezone": "UTC",
        "job_defaults": {"misfire_grace_time": None},
    }


def in_thread(settings):
    scheduler = Background(**options(settings))
    scheduler.start()
    while True:
        tell(passes=scheduler.passes)
        threading.Event().wait(HEARTBEAT)


async def on_loop(settings):
    scheduler = OnLoop(**options(settings))
    scheduler.start()
    while True:
        tell(passes=scheduler.passes)
        await asyncio.sleep(HEARTBEAT)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    if given.get("scheduler") == "asyncio":
        asyncio.run(on_loop(given))
    else:
        in_thread(given)
