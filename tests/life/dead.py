"""Runs whose node has died: claimed under a short lease that nobody renews."""

from claims import HOUR, ask, win

from apscheduler_fence.slots import format_time


def leave(store, at, *, job="job", lease=None, lasts=300_000, **terms):
    """Claims the slot of a job at a time, as a node does that dies at once; `lasts` is the lease's time in µs."""
    micros = round(at.timestamp() * 1e6)
    settings = {"delivery": "at_least_once", "max_attempts": 3, "jobstore": "default", "job_id": job, **terms}
    claim = ask(
        lease or job, format_time(micros), job=job, slot_at=micros, scheduled_at=micros, lock_at_most=lasts,
        keep_for=24 * HOUR, **settings,
    )  # fmt: skip
    return win(store, claim)
