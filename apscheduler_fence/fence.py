"""What a job is handed: its token, its execution ID, and whether its lease can still be trusted."""

from __future__ import annotations

import hashlib
import inspect
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from apscheduler_fence.errors import FenceError, LeaseLost
from apscheduler_fence.policy import LABEL, annotates_fence, elapsed, instant, is_handed, label_of, trusted_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    from apscheduler_fence.lease import Grant
    from apscheduler_fence.policy import Instant, Policy
    from apscheduler_fence.slots import Slot

KEY_LIMIT = 255
_UNRESERVED = "/:@!$&'()*+,;=-._~ "


@dataclass(slots=True, eq=False)
class Hold:
    """A lease in this process's hands. `since` is the moment before the last swap that the store confirmed was sent."""

    grant: Grant
    slot: Slot
    policy: Policy
    since: Instant
    began: Instant
    job_id: str = ""
    jobstore: str = "default"
    clock: Callable[[], Instant] = instant
    lost: bool = False
    overdue: bool = False
    announced: bool = False
    ended: bool = False

    @property
    def execution_id(self) -> str:
        """The logical run that the lease is held for."""
        return self.slot.execution_id

    def remaining(self) -> float:
        """Seconds for which the lease can still be trusted; 0 once it is lost, and from then on."""
        if self.lost:
            return 0.0
        left = trusted_for(self.policy.lock_at_most) - elapsed(self.since, self.clock())
        if left <= 0:
            self.lost = True
            return 0.0
        return left


@dataclass(frozen=True, slots=True, eq=False)
class Fence:
    """The fencing token and the execution ID of this run.

    Attributes:
        token: larger than that of every earlier grant of this lease. Send it to whatever can refuse an older one.
        execution_id: names the logical run: the same for its retries and take-overs, different for every slot.
        job: the job's name in the cluster.
        lease: the name of the lease; tokens of different leases have no order among themselves.
        slot: the slot's own name, `2026-09-02T10:00:00Z`.
        scheduled_at: when the run was scheduled for, in UTC.
        attempt: 1 for the first attempt of this execution.
    """

    token: int
    execution_id: str
    job: str
    lease: str
    slot: str
    scheduled_at: datetime
    attempt: int = 1
    _hold: Hold | None = field(default=None, repr=False)

    @property
    def lost(self) -> bool:
        """Whether the lease can no longer be trusted. Never becomes False again."""
        return self.remaining() <= 0

    def remaining(self) -> float:
        """Seconds for which the lease can be trusted if no renewal succeeds from now on; 0 when it is lost."""
        return 0.0 if self._hold is None else self._hold.remaining()

    def check(self) -> None:
        """Go on only while the lease can be trusted.

        A pause right after this line is not caught by it: what must not happen twice needs a guard at the resource.

        Raises:
            LeaseLost: it cannot.
        """
        if self.lost:
            raise LeaseLost(self.execution_id, self.token)

    def key(self, operation: str = "") -> str:
        """An idempotency key for one operation of this execution: the same on every attempt.

        ASCII and at most 255 characters, which is what common APIs accept; a longer one is cut and ends in a digest.
        """
        return idempotency_key(self.execution_id, operation)

    def headers(self, operation: str = "") -> dict[str, str]:
        """HTTP headers that let the other side refuse a duplicate or a stale caller.

        `Idempotency-Key` is a quoted string, as draft-ietf-httpapi-idempotency-key-header has it.
        """
        return {"Idempotency-Key": f'"{self.key(operation)}"', "Fencing-Token": str(self.token)}


def idempotency_key(execution_id: str, operation: str = "") -> str:
    """`Fence.key` of an execution that is not at hand as a fence."""
    key = quote(f"{execution_id}:{operation}" if operation else execution_id, safe=_UNRESERVED)
    if len(key) <= KEY_LIMIT:
        return key
    digest = hashlib.sha256(key.encode()).hexdigest()[:40]
    return f"{key[: KEY_LIMIT - 41]}~{digest}"


_current: ContextVar[Fence] = ContextVar("apscheduler_fence.current")


def current_fence() -> Fence:
    """The fence of the run this code is part of, also in threads that `asyncio.to_thread` started.

    Raises:
        FenceError: this code does not run as a fenced job.
    """
    try:
        return _current.get()
    except LookupError:
        raise FenceError(
            "no fenced job is running here: schedule the function on a fenced executor, or in a unit test wrap the call "
            "in `with apscheduler_fence.testing.fake_fence(): ...`"
        ) from None


@contextmanager
def entered(fence: Fence) -> Iterator[Fence]:
    """Make `fence` the current one inside the block."""
    mark = _current.set(fence)
    try:
        yield fence
    finally:
        _current.reset(mark)


# --- handing a job what it declares -----------------------------------------------------------------------------------


def bind(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], fence: Fence | None
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """The call to make: what the caller gave, and from the fence what the function declares and the caller did not give.

    The arguments are bound by the signature that `add_job` checked, then laid out by the function's own.
    """
    while isinstance(function, partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    if fence is None:
        return function, tuple(args), dict(kwargs)
    label = label_of(function)
    try:
        seen = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some builtins tell no signature
        return function, tuple(args), dict(kwargs)
    full = _own_signature(function, label.signature if label is not None else None) or seen
    handed = {name: value for name, value in _offers(full, fence).items() if name in seen.parameters}
    if not handed:
        return function, tuple(args), dict(kwargs)
    given = seen.bind_partial(*args, **kwargs).arguments
    arguments = {
        name: given[name] if name in given else handed[name]
        for name in full.parameters
        if name in given or name in handed
    }
    call = inspect.BoundArguments(full, arguments)
    return function, call.args, call.kwargs


def _own_signature(function: Callable[..., Any], labelled: inspect.Signature | None) -> inspect.Signature | None:
    if labelled is None:
        return None
    parameters = list(labelled.parameters.values())
    bound = inspect.ismethod(function) or not (
        inspect.isroutine(function) or LABEL in getattr(function, "__dict__", ())
    )
    return labelled.replace(parameters=parameters[1:] if bound else parameters)


def _offers(signature: inspect.Signature, fence: Fence) -> dict[str, object]:
    by_name: dict[str, object] = {"fencing_token": fence.token, "execution_id": fence.execution_id}
    return {
        name: fence if annotates_fence(parameter.annotation) else by_name.get(name, fence)
        for name, parameter in signature.parameters.items()
        if is_handed(parameter)
    }
