"""What a job is handed: its token, its execution ID, and whether its lease can still be trusted."""

from __future__ import annotations

import hashlib
import inspect
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

from apscheduler_fence.errors import ConfigError, FenceError, LeaseLost
from apscheduler_fence.lease import settle, settled
from apscheduler_fence.policy import (
    LABEL,
    annotates_fence,
    elapsed,
    instant,
    is_handed,
    label_of,
    signature_of,
    trusted_for,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import datetime

    from apscheduler_fence.lease import Change, Grant, Seen
    from apscheduler_fence.policy import Instant, Policy
    from apscheduler_fence.slots import Slot

KEY_LIMIT = 255

SettleIn: TypeAlias = "Callable[[Any, Change, Callable[[], None]], bool]"
"""Applies a change in a transaction of the caller's, calls the function if that is rolled back, says whether it matched."""
# No quote, backslash or control character: a key needs no escaping inside a header's quoted string.
_READABLE = "/:@!$&'()*+,;="


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
    regranting: bool = False
    cancel: Callable[[], object] | None = None
    settle_in: SettleIn | None = None
    settling: bool = False
    settled_in: bool = False

    @property
    def execution_id(self) -> str:
        """The logical run that the lease is held for."""
        return self.slot.execution_id

    def recorded(self, seen: Seen, change: Change) -> bool:
        """Whether the store shows the outcome that `change` was to record, or the one the job has recorded by itself."""
        return settled(seen, self.grant, change) or (
            self.settled_in and settled(seen, self.grant, settle(self.grant, "succeeded"))
        )

    def resume(self) -> None:
        """Renew this lease again: the transaction that was to give it back has been rolled back."""
        self.settling = False

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

    def settle_in(self, db: Any) -> None:
        """Record in a transaction of the store's own database that this execution has succeeded.

        Then the record commits or rolls back together with what the job has written there, with its outbox messages and
        with a guard's check. Committed, it is final whatever the job does afterwards, and its lease is free: let it be the
        last the job does. After a rollback the run is recorded by how it ends, as ever. Nothing renews the lease while the
        transaction is open.

        Args:
            db: an SQLAlchemy connection or session in a transaction; of an asynchronous one, `await
                db.run_sync(fence.settle_in)` lends it.

        Raises:
            LeaseLost: another holder has taken over; the transaction has been rolled back.
            ConfigError: the store is not in an SQL database, or not in this one.
            FenceError: there is no transaction here.
        """
        hold = self._hold
        if hold is None or hold.settle_in is None:
            raise ConfigError("settle_in needs a store in an SQL database, and this run's store is none")
        if hold.grant.token != self.token:  # an earlier attempt's fence: what it stands for is over
            db.rollback()
            raise LeaseLost(self.execution_id, self.token)
        hold.settling = hold.settled_in = True
        try:
            applied = hold.settle_in(db, settle(hold.grant, "succeeded"), hold.resume)
        except BaseException:
            hold.resume()
            raise
        if not applied:
            hold.resume()
            raise LeaseLost(self.execution_id, self.token)

    def key(self, operation: str = "") -> str:
        """An idempotency key for one operation of this execution: the same on every attempt.

        ASCII and at most 255 characters, which is what common APIs accept; a longer one is cut and ends in a digest.
        Different executions, and different operations of one, have different keys.
        """
        return idempotency_key(self.execution_id, operation)

    def headers(self, operation: str = "") -> dict[str, str]:
        """HTTP headers that let the other side refuse a duplicate or a stale caller.

        `Idempotency-Key` is a quoted string, as draft-ietf-httpapi-idempotency-key-header has it.
        """
        return {"Idempotency-Key": f'"{self.key(operation)}"', "Fencing-Token": str(self.token)}


def idempotency_key(execution_id: str, operation: str = "") -> str:
    """`Fence.key` of an execution that is not at hand as a fence."""
    key = quote(execution_id, safe=_READABLE)
    if operation:
        # Where the operation begins must be plain: it holds neither of the two that structure an execution ID.
        name = quote(operation, safe=_READABLE.translate({ord("/"): None, ord(":"): None}), errors="surrogatepass")
        key = f"{key}:{name}"
    if len(key) <= KEY_LIMIT:
        return key
    digest = hashlib.sha256(key.encode("ascii")).hexdigest()[:40]
    return f"{key[: KEY_LIMIT - 41]}|{digest}"  # a bar is in no key that was not cut


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

    Positional arguments count by the signature that `add_job` checked, from which a label hides what is handed; here
    that is put back into its own place. With no fence (the job runs unfenced) the function's own defaults stand there.

    Raises:
        ConfigError: there is no fence, and the function cannot do without.
    """
    args, kwargs = tuple(args), dict(kwargs)
    while isinstance(function, partial) and LABEL not in vars(function):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    declared = _declared(function, args, kwargs)
    if declared is None:
        return function, args, kwargs
    signature, hidden = declared
    if fence is None:
        _check_unfenced(function, signature, kwargs)
    offers = {} if fence is None else _offers(signature, fence)
    return function, *_laid_out(signature, args, kwargs, offers, hidden=hidden)


def _declared(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[inspect.Signature, bool] | None:
    """The signature that declares what is to be handed, and whether the caller's positional arguments pass that over."""
    label = label_of(function)
    if label is not None and label.signature is not None:
        return _own_signature(function, label.signature), True
    signature = signature_of(function)
    if signature is None or _hands(signature):
        return None if signature is None else (signature, False)
    if _has_var_keyword(signature):
        # A wrapper that passes on whatever it is given: what it wraps may declare something.
        wrapped = inspect.signature(function)
        if _hands(wrapped):
            labelled = label is not None and label.options is not None
            return wrapped, labelled and _fits(wrapped, args, kwargs)
    return None


def _own_signature(function: Callable[..., Any], labelled: inspect.Signature) -> inspect.Signature:
    parameters = list(labelled.parameters.values())
    carries_it = inspect.isroutine(function) or LABEL in getattr(function, "__dict__", ())
    if inspect.ismethod(function) or not carries_it:
        del parameters[0]
    shown = signature_of(function)
    if shown is not None and not _has_var_keyword(shown):
        # A wrapper that fills a parameter in itself leaves it out of the signature that it shows.
        parameters = [each for each in parameters if each.name in shown.parameters or not is_handed(each)]
    return labelled.replace(parameters=parameters)


def _hands(signature: inspect.Signature) -> bool:
    return any(map(is_handed, signature.parameters.values()))


def _has_var_keyword(signature: inspect.Signature) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def _fits(wrapped: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what the caller gave is all that the wrapped function needs: a wrapper may add arguments of its own."""
    parameters = wrapped.parameters
    rest = wrapped.replace(parameters=[each for each in parameters.values() if not is_handed(each)])
    try:
        rest.bind(*args, **{k: v for k, v in kwargs.items() if k not in parameters or not is_handed(parameters[k])})
    except TypeError:
        return False
    return True


def _check_unfenced(function: Callable[..., Any], signature: inspect.Signature, kwargs: dict[str, Any]) -> None:
    for name, parameter in signature.parameters.items():
        if is_handed(parameter) and parameter.default is inspect.Parameter.empty and name not in kwargs:
            called = getattr(function, "__qualname__", type(function).__qualname__)
            raise ConfigError(
                f"{called} needs {name}, and this job runs unfenced, where there is none: give the parameter a "
                f"default ({name}=None), or fence the job"
            )


def _offers(signature: inspect.Signature, fence: Fence) -> dict[str, object]:
    by_name: dict[str, object] = {"fencing_token": fence.token, "execution_id": fence.execution_id}
    return {
        name: fence if annotates_fence(parameter.annotation) else by_name.get(name, fence)
        for name, parameter in signature.parameters.items()
        if is_handed(parameter)
    }


def _laid_out(
    signature: inspect.Signature,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    offers: dict[str, object],
    *,
    hidden: bool,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # What is wrong with the caller's own arguments is passed on as it is: nobody says it better than Python.
    named = {**offers, **kwargs}
    placed: list[Any] = []
    rest = list(args)
    for parameter in signature.parameters.values():
        by_position = parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        if not by_position and parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            break
        passed_over = hidden and is_handed(parameter)
        if rest and not passed_over:
            placed.append(rest.pop(0))
            if parameter.name not in kwargs:
                named.pop(parameter.name, None)
        elif not rest and not by_position:
            break
        elif is_handed(parameter) and parameter.name in named:
            placed.append(named.pop(parameter.name))
        elif parameter.default is not inspect.Parameter.empty:
            placed.append(parameter.default)
    return (*placed, *rest), named
