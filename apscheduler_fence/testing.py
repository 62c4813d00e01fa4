"""For the unit tests of people who write jobs."""

from __future__ import annotations

from contextlib import ExitStack
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from apscheduler_fence.fence import Fence, Hold, entered
from apscheduler_fence.lease import Grant
from apscheduler_fence.policy import Instant, Policy, instant
from apscheduler_fence.slots import Slot, format_time

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["FakeFence", "fake_fence"]


class FakeFence(Fence):
    """A fence that needs no scheduler and no store. As a context manager it is the current one inside the block."""

    __slots__ = ("_block",)
    _block: ExitStack

    def __enter__(self) -> Self:
        block = ExitStack()
        block.enter_context(entered(self))
        object.__setattr__(self, "_block", block)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._block.close()

    def lose(self) -> None:
        """Let the lease be lost from now on."""
        assert self._hold is not None  # noqa: S101 - fake_fence made it
        self._hold.lost = True


def fake_fence(
    *,
    token: int = 1,
    job: str = "job",
    scheduled_at: datetime = datetime(2026, 1, 1, tzinfo=timezone.utc),
    attempt: int = 1,
    lost: bool = False,
    **policy: Any,
) -> FakeFence:
    """A fence for a unit test: hand it to the job, or enter it so that `current_fence()` finds it.

    Args:
        token: the fencing token.
        job: the job's name; with `scheduled_at` it makes the execution ID.
        scheduled_at: the slot; an aware datetime.
        attempt: which attempt of the execution this is.
        lost: whether its lease is lost from the start; `lose()` loses it later.
        policy: fields of `Policy`, such as `lock_at_most=timedelta(seconds=5)`.
    """
    at = (scheduled_at - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1)
    slot = Slot(job, format_time(at), at, at)
    began: Instant = instant()
    grant = Grant(job, job, slot.name, token, "fake:0:0", attempt)
    hold = Hold(grant, slot, Policy(**policy), since=began, began=began, job_id=job, lost=lost)
    return FakeFence(token, slot.execution_id, job, job, slot.name, scheduled_at, attempt, hold)
