"""A scheduler on a shared job store, whose loop a test turns by hand."""

from __future__ import annotations

from datetime import timezone

from apscheduler.executors.base import BaseExecutor
from apscheduler.schedulers.base import BaseScheduler
from sqlalchemy.engine import make_url

UTC = timezone.utc
SWAPPING = ("sqlite", "postgresql", "mariadb", "redis")


def inner_options(url):
    """The options of the shared store whose jobs are kept at a URL."""
    if url.startswith("memory:"):
        return {"inner": "memory"}
    if url.startswith("redis:"):
        parsed = make_url(url)
        return {"inner": "redis", "host": parsed.host, "port": parsed.port, "db": int(parsed.database)}
    return {"inner": "sqlalchemy", "url": url}


class Recorder(BaseExecutor):
    """Notes what it is given, and runs whatever a test put into `meanwhile`: the loop is in the middle of a pass."""

    def __init__(self):
        super().__init__()
        self.submitted = []
        self.meanwhile = lambda: None

    def _do_submit_job(self, job, run_times):
        self.submitted.append((job.id, run_times))
        self._instances[job.id] -= 1
        self.meanwhile()

    @property
    def ids(self):
        return [job_id for job_id, _ in self.submitted]


class HandScheduler(BaseScheduler):
    """A scheduler without a thread; `turn` is one pass of its loop."""

    def shutdown(self, wait=True):
        super().shutdown(wait)

    def wakeup(self):
        pass

    def turn(self):
        return self._process_jobs()


class Node:
    """One member of the cluster under test."""

    def __init__(self, store, **options):
        self.store = store
        self.executor = Recorder()
        self.scheduler = HandScheduler(
            timezone=UTC, executors={"default": self.executor}, jobstores={"default": store}, **options
        )
        self.scheduler.start()

    def turn(self):
        return self.scheduler.turn()

    def next_run_time(self, job_id):
        return self.scheduler.get_job(job_id).next_run_time
