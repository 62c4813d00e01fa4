"""Events beside APScheduler's own, for `scheduler.add_listener(callback, mask)`.

The codes leave room above APScheduler's 2**16 and are not part of its `EVENT_ALL`: a listener asks for them by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from apscheduler.events import JobEvent

if TYPE_CHECKING:
    from apscheduler_fence.lease import Reason

EVENT_JOB_REFUSED = 2**20
"""The slot is not run here: another node has it or had it, or the rules forbid it. A `JobRefusedEvent`."""
EVENT_LEASE_LOST = 2**21
"""The lease of a run on this node can no longer be trusted. A `LeaseEvent`."""
EVENT_LEASE_OVERDUE = 2**22
"""A run has used up 80 % of `max_runtime`, or of `lock_at_most` where it is not renewed. A `LeaseEvent`."""
EVENT_JOB_LOST = 2**23
"""An execution was given up: its node died or lost its lease, and nobody will run it again. A `LeaseEvent`."""

EVENT_JOB_RECOVERED = 2**24
"""A later attempt of an execution begins on this node: its earlier one died, or an operator asked. A `LeaseEvent`."""

EVENT_FENCE_ALL = (
    EVENT_JOB_REFUSED | EVENT_LEASE_LOST | EVENT_LEASE_OVERDUE | EVENT_JOB_LOST | EVENT_JOB_RECOVERED
)  # fmt: skip


@dataclass(frozen=True)
class FenceEvent(JobEvent):  # type: ignore[misc]
    """What the events of this package have in common.

    Attributes:
        code: which event.
        job_id: APScheduler's ID of the job.
        jobstore: the alias of its job store.
        execution_id: the logical run in question.
        scheduled_run_time: when it was scheduled for (aware, UTC), where that is known.
        holder: `host:pid:nonce` of whoever holds or held the lease.
    """

    code: int
    job_id: str
    jobstore: str
    execution_id: str
    scheduled_run_time: datetime | None = None
    holder: str | None = None
    alias: str | None = None


@dataclass(frozen=True)
class JobRefusedEvent(FenceEvent):
    """A slot that is not run here.

    Attributes:
        reason: `done` or `running` elsewhere, `held` by another slot, `spacing` (within `lock_at_least`), `lost`,
            `pruned` (older than the records kept). With `overlap="queue"`, `queued`: the slot is recorded and will run;
            `full`: so many wait already that it is not.
        until: how long the reason lasts at most (aware, UTC, store time), where there is a limit.
    """

    reason: Reason = "done"
    until: datetime | None = None


@dataclass(frozen=True)
class LeaseEvent(FenceEvent):
    """Something about a lease or the run under it.

    Attributes:
        token: the fencing token of that run.
        attempt: which attempt of the execution it is.
    """

    token: int = 0
    attempt: int = 1


def in_time(micros: int) -> datetime:
    """A store time as an aware datetime in UTC."""
    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=micros)
