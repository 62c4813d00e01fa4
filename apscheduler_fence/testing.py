"""For the unit tests of people who write jobs."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.fence import Fence, Hold, entered
from apscheduler_fence.lease import Grant
from apscheduler_fence.policy import Instant, instant, parse_options, resolve
from apscheduler_fence.slots import Slot, format_time, validate_name

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from typing_extensions import Self

__all__ = ["FakeFence", "fake_fence"]


class FakeFence(Fence):
    """A fence that needs no scheduler and no store. As a context manager it is the current one inside the block."""

    __slots__ = ("_blocks",)
    _blocks: list[AbstractContextManager[Fence]]

    def __enter__(self) -> Self:
        if not hasattr(self, "_blocks"):
            object.__setattr__(self, "_blocks", [])
        self._blocks.append(entered(self))
        self._blocks[-1].__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocks.pop().__exit__(kind, error, trace)

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
        policy: options of `Policy`, such as `lock_at_most="5s"`, as `@fenced` takes them.

    Raises:
        ConfigError: `scheduled_at` is naive, `job` is not a usable name, or an option is wrong.
    """
    if scheduled_at.utcoffset() is None:
        raise ConfigError(f"scheduled_at={scheduled_at!r} needs a time zone: datetime(..., tzinfo=timezone.utc)")
    validate_name(job, "job")
    at = (scheduled_at - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1)
    slot = Slot(job, format_time(at), at, at)
    began: Instant = instant()
    terms = resolve(parse_options(policy, "fake_fence"))
    lease = terms.lease or job
    grant = Grant(lease, job, slot.name, token, "fake:0:0", attempt)
    hold = Hold(grant, slot, terms, since=began, began=began, job_id=job, lost=lost)
    in_utc = scheduled_at.astimezone(timezone.utc)
    return FakeFence(token, slot.execution_id, job, lease, slot.name, in_utc, attempt, hold)
