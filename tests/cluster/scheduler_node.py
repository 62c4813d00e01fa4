"""One process of a cluster under test: an ordinary application with a scheduler, reporting as JSON lines.

Usage: scheduler_node.py background|asyncio STORE_URL FOLDER NUMBER
"""

import asyncio
import json
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MISSED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.base import BaseScheduler

from apscheduler_fence import EVENT_JOB_REFUSED, EVENT_LEASE_LOST, Fence, fenced


def say(**message: object) -> None:
    sys.stdout.write(f"{json.dumps(message)}\n")  # in one piece: print() would let threads mix their lines
    sys.stdout.flush()


@fenced(lock_at_most="10s")
def by_cron(*, fence: Fence) -> None:
    say(entered=fence.execution_id, token=fence.token, at=time.time())


@fenced(lock_at_most="10s")
def by_interval(*, fence: Fence) -> None:
    say(entered=fence.execution_id, token=fence.token)


@fenced(lock_at_most="10s")
async def by_cron_async(*, fence: Fence) -> None:
    by_cron(fence=fence)


@fenced(lock_at_most="10s")
async def by_interval_async(*, fence: Fence) -> None:
    by_interval(fence=fence)


def heard(event: object) -> None:
    say(
        event=event.code, run=getattr(event, "execution_id", None), reason=getattr(event, "reason", None),
        error=repr(getattr(event, "exception", None)), at=time.time(),
    )  # fmt: skip


def orders(folder: Path) -> tuple[float, int]:
    """Waits until the test says when to begin, and for how many slots."""
    say(ready=True)
    while not (folder / "go").exists():
        time.sleep(0.02)
    begin, slots = json.loads((folder / "go").read_text())
    return begin, slots


def set_up(scheduler: BaseScheduler, begin: float, slots: int, number: int, *, coroutines: bool) -> None:
    start = datetime.fromtimestamp(begin, timezone.utc)
    end = start + timedelta(seconds=slots - 1)
    phase = timedelta(milliseconds=71 * number)
    settings = {"coalesce": False, "misfire_grace_time": None, "max_instances": 20}
    cron = {"second": "*", "start_date": start, "end_date": end}
    interval = {"seconds": 1, "start_date": start + phase, "end_date": end + phase}
    cron_job, interval_job = (by_cron_async, by_interval_async) if coroutines else (by_cron, by_interval)
    scheduler.add_job(cron_job, "cron", id="cron", **cron, **settings)
    scheduler.add_job(interval_job, "interval", id="interval", **interval, **settings)
    scheduler.add_listener(heard, EVENT_JOB_REFUSED | EVENT_LEASE_LOST | EVENT_JOB_ERROR | EVENT_JOB_MISSED)


def main(kind: str, store: str, folder: Path, number: int) -> None:
    begin, slots = orders(folder)
    lasts = begin + slots + 3 - time.time()
    fenced_executor = {"default": {"type": "fenced", "store": store}}
    if kind == "background":
        scheduler = BackgroundScheduler(timezone=timezone.utc, executors=fenced_executor)
        set_up(scheduler, begin, slots, number, coroutines=False)
        scheduler.start()
        time.sleep(lasts)
        scheduler.shutdown()
    else:

        async def application() -> None:
            scheduler = AsyncIOScheduler(timezone=timezone.utc, executors=fenced_executor)
            set_up(scheduler, begin, slots, number, coroutines=True)
            scheduler.start()
            await asyncio.sleep(lasts)
            scheduler.shutdown()
            await asyncio.sleep(0.1)

        asyncio.run(application())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
