"""Two processes, one SQLite file: each slot of the job runs in one of them.

Run it with: python examples/two_processes.py
"""

import multiprocessing
import os
import tempfile
import time
from pathlib import Path

from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_fence import EVENT_JOB_REFUSED, Fence, JobRefusedEvent, fenced


@fenced(lock_at_most="5s")
def send_reminders(*, fence: Fence) -> None:
    print(f"process {os.getpid()} sends reminders for {fence.execution_id}, token {fence.token}", flush=True)


def told_no(event: JobRefusedEvent) -> None:
    print(f"process {os.getpid()} leaves {event.execution_id} alone: {event.reason}", flush=True)


def application(store: str) -> None:
    """What each process of an ordinary application does."""
    scheduler = BackgroundScheduler(executors={"default": {"type": "fenced", "store": store, "timeout": "1s"}})
    scheduler.add_listener(told_no, EVENT_JOB_REFUSED)
    scheduler.add_job(send_reminders, "cron", second="*", id="send_reminders")
    scheduler.start()
    time.sleep(3)
    scheduler.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:///{Path(folder) / 'fence.db'}"
        spawn = multiprocessing.get_context("spawn")
        processes = [spawn.Process(target=application, args=(store,)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        raise SystemExit(max(process.exitcode or 0 for process in processes))
