"""Schedulers that are watched: what they run and what they say."""

import threading
from datetime import datetime, timedelta, timezone

from apscheduler.events import EVENT_ALL
from waiting import eventually

from apscheduler_fence import EVENT_FENCE_ALL


class Heard(list):
    """Every event of one scheduler, and the thread on which its listener was called."""

    def __init__(self):
        self.threads = []

    def __call__(self, event):
        self.threads.append(threading.current_thread().name)
        self.append(event)

    def of(self, code):
        return [event for event in self if event.code & code]

    def one(self, code, within=10.0):
        """The only event of this code, once it has come."""
        eventually(lambda: self.of(code), within)
        [event] = self.of(code)
        return event


class Watched:
    """One node: a scheduler with a fenced executor."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.heard = Heard()
        scheduler.add_listener(self.heard, EVENT_ALL | EVENT_FENCE_ALL)

    @property
    def executor(self):
        return self.scheduler._executors["default"]

    def run(self, function, *args, at=None, job_id="job", **settings):
        """Runs a job once, in the slot `at`."""
        when = at or moment()
        return self.scheduler.add_job(
            function, "date", args, id=job_id, run_date=when, **{"misfire_grace_time": None, **settings}
        )


def moment(seconds=0.0):
    """A time that many seconds from now, in whole milliseconds."""
    now = datetime.now(timezone.utc) + timedelta(seconds=seconds)
    return now.replace(microsecond=now.microsecond // 1000 * 1000)


def own_threads(besides=()):
    return [
        thread.name
        for thread in threading.enumerate()
        if thread.name.startswith("apscheduler-fence") and thread not in besides
    ]
