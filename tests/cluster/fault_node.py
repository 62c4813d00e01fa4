"""One process of a cluster under faults: a scheduler with one job, which says in JSON lines what becomes of every slot.

Usage: fault_node.py STORE_URL SECONDS_A_RUN_TAKES EXECUTOR_OPTIONS_AS_JSON
"""

import json
import signal
import sys
import threading
import time
from datetime import datetime, timedelta, timezone

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MISSED
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_fence import EVENT_FENCE_ALL, Fence, fenced

PERIOD = timedelta(seconds=0.5)


def say(**message: object) -> None:
    line = json.dumps({**message, "at": time.monotonic()})
    sys.stdout.write(f"{line}\n")  # in one piece: print() would let threads mix their lines
    sys.stdout.flush()


def milliseconds(moment: datetime | None) -> int | None:
    return None if moment is None else round(moment.timestamp() * 1000)


@fenced
def pay(seconds: float, *, fence: Fence) -> None:
    run = {"run": fence.execution_id, "token": fence.token, "slot": milliseconds(fence.scheduled_at)}
    say(what="entered", attempt=fence.attempt, **run)
    time.sleep(seconds)
    say(what="left", lost=fence.lost, **run)


def heard(event: object) -> None:
    say(
        what="event",
        code=event.code,
        run=getattr(event, "execution_id", None),
        slot=milliseconds(event.scheduled_run_time),
        reason=getattr(event, "reason", None),
        error=repr(getattr(event, "exception", None)),
    )


def main(store: str, seconds: float, options: dict[str, object]) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    executor = {"type": "fenced", "store": store, "max_workers": 20, **options}
    scheduler = BackgroundScheduler(timezone=timezone.utc, executors={"default": executor})
    scheduler.add_listener(heard, EVENT_FENCE_ALL | EVENT_JOB_ERROR | EVENT_JOB_MISSED)
    scheduler.add_job(
        pay, "interval", [seconds], id="pay", seconds=PERIOD.total_seconds(),
        start_date=datetime(2026, 1, 1, tzinfo=timezone.utc),  # all nodes in step
        coalesce=False, misfire_grace_time=None, max_instances=20,
    )  # fmt: skip
    scheduler.start()
    stop.wait()
    scheduler.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))
