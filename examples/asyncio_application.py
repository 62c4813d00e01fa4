"""Coroutine jobs on an AsyncIOScheduler: the lease is held until the coroutine has been awaited to its end.

Run it with: python examples/asyncio_application.py
"""

import asyncio
import tempfile
from pathlib import Path

from apscheduler.events import EVENT_JOB_ERROR, JobExecutionEvent
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from apscheduler_fence import Fence, current_fence, fenced


@fenced(lock_at_most="2s")
async def nightly_export(*, fence: Fence) -> None:
    for part in range(5):
        fence.check()
        await asyncio.sleep(0.6)  # the whole takes longer than lock_at_most: the lease is renewed meanwhile
        print(f"{fence.execution_id} part {part}: {fence.remaining():.1f} s of trust left")
    await asyncio.to_thread(upload)


def upload() -> None:
    print(f"uploading under token {current_fence().token}")


async def main(store: str) -> list[JobExecutionEvent]:
    scheduler = AsyncIOScheduler(executors={"default": {"type": "fenced", "store": store, "timeout": "0.5s"}})
    failures: list[JobExecutionEvent] = []
    scheduler.add_listener(failures.append, EVENT_JOB_ERROR)
    scheduler.add_job(nightly_export, "cron", second="*", id="nightly_export")
    scheduler.start()
    await asyncio.sleep(4.5)
    scheduler.pause()
    await asyncio.sleep(3.5)
    scheduler.shutdown()
    await asyncio.sleep(0.1)
    return failures


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        failures = asyncio.run(main(f"sqlite:///{Path(folder) / 'fence.db'}"))
    raise SystemExit(1 if failures else 0)
