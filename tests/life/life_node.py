"""One process of a cluster: a job whose first attempt never ends, on a scheduler that never does.

Usage: life_node.py STORE_URL DELIVERY JOBSTORE_URL|memory add|add-now|-
"""

import json
import sys
import time
from datetime import datetime, timezone

from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_fence import EVENT_FENCE_ALL, Fence, fenced


def say(**message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")  # in one piece: print() would let another thread in before the newline
    sys.stdout.flush()


@fenced(lock_at_most="0.6s")
def endless_at_first(*, fence: Fence) -> int:
    say(entered=fence.execution_id, attempt=fence.attempt, token=fence.token)
    if fence.attempt == 1:
        time.sleep(60)
    return fence.attempt


def main(store: str, delivery: str, jobstore: str, add: str) -> None:
    scheduler = BackgroundScheduler(timezone=timezone.utc)
    if jobstore != "memory":
        scheduler.add_jobstore("sqlalchemy", url=jobstore)
    scheduler.add_executor("fenced", store=store, delivery=delivery, sweep="0.1s")
    scheduler.add_listener(
        lambda event: say(event=event.code, run=getattr(event, "execution_id", None)),
        EVENT_FENCE_ALL | EVENT_JOB_EXECUTED,
    )
    scheduler.start()
    if add != "-":
        now = {"next_run_time": datetime.now(timezone.utc)} if add == "add-now" else {}
        # By its name as a module: a job store hands it to processes in which this file is not the main program.
        scheduler.add_job("life_node:endless_at_first", "interval", hours=1, id="job", misfire_grace_time=None, **now)
    time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
