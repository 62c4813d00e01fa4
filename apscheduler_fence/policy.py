"""What a user decides per job, how durations are written, and how long a lease may be trusted."""

from __future__ import annotations

import builtins
import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from difflib import get_close_matches
from functools import partial
from types import UnionType
from typing import Any, ForwardRef, Literal, Protocol, TypeAlias, TypeVar, Union, get_args, get_origin, overload

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.lease import Delivery, Overlap
from apscheduler_fence.slots import validate_name

Duration: TypeAlias = timedelta | float | str
"""A `timedelta`, seconds, `"30s"`, `"1h30m"`, `"500ms"`, or ISO 8601 (`"PT9M"`)."""

OnLost = Literal["flag", "cancel"]
SlotRule: TypeAlias = Callable[[datetime], datetime] | timedelta
F = TypeVar("F", bound=Callable[..., Any])

LONGEST = timedelta(days=366)
SHORTEST_LEASE = timedelta(milliseconds=100)

# --- durations --------------------------------------------------------------------------------------------------------

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|[smhdw])\s*", re.ASCII)
_PARTS = re.compile(rf"(?:{_PART.pattern})+", re.ASCII)
_ISO = re.compile(
    r"P(?:(\d+(?:\.\d+)?)W)?(?:(\d+(?:\.\d+)?)D)?"
    r"(?:T(?=\d)(?:(\d+(?:\.\d+)?)H)?(?:(\d+(?:\.\d+)?)M)?(?:(\d+(?:\.\d+)?)S)?)?",
    re.ASCII,
)


def parse_duration(value: object, option: str) -> timedelta:
    """Read a duration as people write it.

    Raises:
        ConfigError: it is none of the forms of `Duration`, or not a number of seconds a computer can count.
    """
    try:
        if isinstance(value, timedelta):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return timedelta(seconds=value)
        if isinstance(value, str):
            return timedelta(seconds=_seconds(value.strip()))
    except (ValueError, OverflowError):
        pass
    raise ConfigError(
        f"{option}={value!r} is not a duration: give a timedelta, seconds, or text such as '30s', '1h30m' or 'PT9M'"
    )


def _seconds(text: str) -> float:
    lower = text.lower()
    if _PARTS.fullmatch(lower):
        return sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(lower))
    iso = _ISO.fullmatch(text.upper())
    if iso is not None and any(iso.groups()):
        return sum(
            float(part or 0) * seconds for part, seconds in zip(iso.groups(), (604800, 86400, 3600, 60, 1), strict=True)
        )
    return float(text)


def _text(duration: timedelta) -> str:
    seconds = duration.total_seconds()
    unit = next((unit for unit in "dhms" if seconds % _UNITS[unit] == 0), "ms") if seconds else "s"
    return f"'{seconds / _UNITS[unit]:g}{unit}'"


def parse_flag(value: object, option: str) -> bool:
    """Read true or false, also as text from an ini file.

    Raises:
        ConfigError: it is neither.
    """
    words = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
    flag = words.get(str(value).strip().lower())
    if flag is None:
        raise ConfigError(f"{option}={value!r} is neither true nor false: give a bool, or text such as 'true' or 'off'")
    return flag


def duration_option(option: str, least: timedelta, most: timedelta = LONGEST) -> Callable[[object], timedelta]:
    """A reader of one duration option, with its limits."""

    def parse(value: object) -> timedelta:
        duration = parse_duration(value, option)
        if not least <= duration <= most:
            raise ConfigError(f"{option}={value!r} is out of range: {_text(least)} to {_text(most)} are allowed")
        return duration

    return parse


def _optional(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    def maybe(value: object) -> Any:
        if value is None or (isinstance(value, str) and value.strip().lower() in ("", "none")):
            return None
        return parse(value)

    return maybe


_slot_period = duration_option("slot", timedelta(milliseconds=1))


def _slot_rule(value: object) -> SlotRule:
    if inspect.iscoroutinefunction(value):
        raise ConfigError(f"slot={value!r} is a coroutine function: a slot is found without awaiting anything")
    if callable(value):
        return value
    try:
        return _slot_period(value)
    except ConfigError as error:
        raise ConfigError(f"{error}; or a function from the scheduled time to the slot's time") from None


def _choice(option: str, allowed: tuple[str, ...]) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in allowed:
            raise ConfigError(f"{option}={value!r} is not one of {', '.join(map(repr, allowed))}")
        return str(value)

    return parse


def _count(option: str, least: int, most: int) -> Callable[[object], int]:
    def parse(value: object) -> int:
        text = str(value).strip()
        if isinstance(value, bool) or not text.isdecimal() or not least <= int(text) <= most:
            raise ConfigError(f"{option}={value!r} is not a whole number from {least} to {most}")
        return int(text)

    return parse


def _backoff(value: object) -> Backoff:
    if isinstance(value, Backoff):
        return value
    return Backoff(duration_option("retry_delay", timedelta(0))(value), factor=1, jitter=0)


def _exceptions(value: object) -> tuple[type[BaseException], ...]:
    classes = value if isinstance(value, tuple | list) else (value,)
    if not classes or not all(isinstance(each, type) and issubclass(each, BaseException) for each in classes):
        raise ConfigError(f"retry_on={value!r} is not an exception class or a tuple of them")
    return tuple(classes)


class Claimable(Protocol):
    """A guarded resource, known by one method only, whatever it is that guards it."""

    def claim(self, fence: Any) -> object:
        """Fence predecessors off, or raise `StaleToken`."""


def _resources(value: object) -> tuple[Claimable, ...]:
    if not isinstance(value, list | tuple) or not all(callable(getattr(each, "claim", None)) for each in value):
        raise ConfigError(f"resources={value!r}: a list of objects with a method claim(fence) is allowed")
    return tuple(value)


# --- the policy -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits that grow from retry to retry.

    Attributes:
        first: before the first retry.
        factor: by how much each wait is longer than the one before (1 to 100).
        cap: the longest wait.
        jitter: the share of a wait that is left to chance, 0 to 1, so that those who failed together do not come back
            together.

    Raises:
        ConfigError: a value is out of range.
    """

    first: Duration = timedelta(seconds=1)
    factor: float = 2.0
    cap: Duration = timedelta(minutes=5)
    jitter: float = 0.5

    def __post_init__(self) -> None:
        for name in ("first", "cap"):
            object.__setattr__(self, name, duration_option(f"Backoff.{name}", timedelta(0))(getattr(self, name)))
        if not 1 <= self.factor <= 100:  # noqa: PLR2004 - as documented above
            raise ConfigError(f"Backoff.factor={self.factor!r} is out of range: 1 to 100 are allowed")
        if not 0 <= self.jitter <= 1:
            raise ConfigError(f"Backoff.jitter={self.jitter!r} is out of range: 0 to 1 are allowed")

    def wait(self, retry: int, chance: float) -> float:
        """Seconds before the `retry`-th retry (from 1); `chance` from 0 to 1 places it within the jitter."""
        first, cap = parse_duration(self.first, "first"), parse_duration(self.cap, "cap")
        # Not factor**retry: that overflows long before a thousand retries.
        longest = min(cap.total_seconds(), first.total_seconds() * self.factor ** min(retry - 1, 100))
        return longest * (1 - self.jitter * chance)


@dataclass(frozen=True, slots=True)
class Policy:
    """How one job is coordinated. The options of `@fenced`, of `policies={...}` and of the executor itself.

    Attributes:
        name: the job's name in the cluster, in place of job-store alias and job ID (at most 191 characters).
        lock_at_most: how long the lease outlives a holder that has died (0.1 s to 366 days). While the holder lives it
            is renewed, so a long job needs no long lease.
        lock_at_least: how long after a run's start no other slot may start, whatever the outcome (0 to 366 days).
        renew: False makes `lock_at_most` a hard limit, as in ShedLock: the lease runs out under a longer job.
        max_runtime: stop renewing a run that has gone on for so long, so that a hung job does not block the rest.
        once_per_slot: False keeps only the lease: a late node may then run the slot again.
        slot: which slot a scheduled time belongs to, where the trigger's own answer is not the right one: a function
            from the scheduled time to an aware datetime, or a fixed period.
        lease: a lease name that several jobs share, so that at most one of them runs at a time.
        delivery: what becomes of a run whose node dies. "at_most_once": it is lost, and announced. "at_least_once":
            another node runs the same execution again.
        max_attempts: with "at_least_once", after how many attempts an execution is lost for good (1 to 1000).
        retries: how many more attempts a run that raised gets, under the same lease (0 to 1000). All attempts of an
            execution, take-overs included, number `max_attempts` or `retries + 1` at most, whichever is more.
        retry_delay: how long to wait before them: a duration, or a `Backoff`.
        retry_on: the exception classes worth a retry.
        overlap: what becomes of a slot while an earlier one still runs anywhere. "skip": it is refused. "queue": it is
            recorded and runs afterwards, in order. "allow": it runs beside the other. "replace": it takes the lease.
        queue_limit: with "queue", beyond how many waiting slots one is refused.
        on_lost: "cancel" cancels a coroutine whose lease is lost. A function sees it at its next `fence.check()`.
        resources: guarded resources to claim before the job is entered, so that predecessors are fenced off: a list of
            objects with a method `claim(fence)`, such as those that a guard's `resource()` gives.
    """

    name: str | None = None
    lock_at_most: timedelta = timedelta(seconds=30)
    lock_at_least: timedelta = timedelta(0)
    renew: bool = True
    max_runtime: timedelta | None = None
    once_per_slot: bool = True
    slot: SlotRule | None = None
    lease: str | None = None
    delivery: Delivery = "at_most_once"
    max_attempts: int = 3
    retries: int = 0
    retry_delay: Backoff = Backoff()
    retry_on: tuple[type[BaseException], ...] = (Exception,)
    overlap: Overlap = "skip"
    queue_limit: int = 1000
    on_lost: OnLost = "flag"
    resources: tuple[Claimable, ...] = ()


_PARSERS: dict[str, Callable[[object], Any]] = {
    "name": _optional(lambda value: validate_name(value, "name")),
    "lock_at_most": duration_option("lock_at_most", SHORTEST_LEASE),
    "lock_at_least": duration_option("lock_at_least", timedelta(0)),
    "renew": lambda value: parse_flag(value, "renew"),
    "max_runtime": _optional(duration_option("max_runtime", SHORTEST_LEASE)),
    "once_per_slot": lambda value: parse_flag(value, "once_per_slot"),
    "slot": _optional(_slot_rule),
    "lease": _optional(lambda value: validate_name(value, "lease")),
    "delivery": _choice("delivery", get_args(Delivery)),
    "max_attempts": _count("max_attempts", 1, 1000),
    "retries": _count("retries", 0, 1000),
    "retry_delay": _backoff,
    "retry_on": _exceptions,
    "overlap": _choice("overlap", get_args(Overlap)),
    "queue_limit": _count("queue_limit", 1, 1_000_000),
    "on_lost": _choice("on_lost", get_args(OnLost)),
    "resources": _resources,
}

OPTIONS = tuple(field.name for field in fields(Policy))


def parse_options(options: Mapping[str, object], where: str) -> dict[str, Any]:
    """Check each option and bring it into its one inner form; `where` names the place for the message.

    Raises:
        ConfigError: an option is unknown or its value is not allowed.
    """
    unknown = [_with_guess(str(name)) for name in options if name not in OPTIONS]
    if unknown:
        raise ConfigError(f"{where}: unknown option {', '.join(unknown)}; there are {', '.join(OPTIONS)}")
    try:
        return {name: _PARSERS[name](value) for name, value in options.items()}
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _with_guess(name: str) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).replace("-", "_").lower()
    guess = get_close_matches(words, OPTIONS, n=1)
    return f"{name} (did you mean {guess[0]}?)" if guess else name


def resolve(*layers: Mapping[str, Any]) -> Policy:
    """The policy that results when later layers of parsed options override earlier ones."""
    merged: dict[str, Any] = {}
    for layer in layers:
        merged.update(layer)
    return Policy(**merged)


# --- labels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Label:
    """What a decorator leaves on a function. `options` None: this function is not to be fenced.

    `signature` is the function's own where parameters that it is handed have been hidden from `add_job`, else None.
    """

    options: Mapping[str, Any] | None
    signature: inspect.Signature | None = None


LABEL = "__fence__"
HANDED_BY_NAME = {"fence": "Fence", "fencing_token": "int", "execution_id": "str"}


@overload
def fenced(function: F, /) -> F: ...
@overload
def fenced(
    *,
    name: str | None = ...,
    lock_at_most: Duration = ...,
    lock_at_least: Duration = ...,
    renew: bool = ...,
    max_runtime: Duration | None = ...,
    once_per_slot: bool = ...,
    slot: Callable[[datetime], datetime] | Duration | None = ...,
    lease: str | None = ...,
    delivery: Delivery = ...,
    max_attempts: int = ...,
    retries: int = ...,
    retry_delay: Duration | Backoff = ...,
    retry_on: type[BaseException] | tuple[type[BaseException], ...] = ...,
    overlap: Overlap = ...,
    queue_limit: int = ...,
    on_lost: OnLost = ...,
    resources: Sequence[Claimable] = ...,
) -> Callable[[F], F]: ...
def fenced(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Say how a job is coordinated. The options are those of `Policy`; those not given are left to the executor.

    The very same function comes back: it can be called, pickled and referred to as before. Its parameters that the
    executor fills in (annotated `Fence`, or named `fence`, `fencing_token` or `execution_id`) need not be given to
    `add_job`, wherever in the signature they stand. Together with a decorator that fills in
    arguments of its own, `@fenced` stands above (below, `add_job` would ask for those) and `fence` is keyword-only.

    Raises:
        ConfigError: an option is unknown or its value is not allowed, or this is nothing that could be labelled.
    """
    if function is not None and not _decorable(function):
        raise ConfigError(f'@fenced takes options by name, as in @fenced(lock_at_most="9m"), and not {function!r}')
    parsed = parse_options(options, "@fenced")

    def label(function: F) -> F:
        target, known = _target(function, "@fenced")
        if known is not None and known.signature is not None:
            _mark(target, Label({**(known.options or {}), **parsed}, known.signature))
            return function
        own = signature_of(target)
        hides = own is not None and any(map(is_handed, own.parameters.values()))
        _mark(target, Label({**(known.options or {} if known else {}), **parsed}, own if hides else None))
        if own is not None and hides:
            target.__signature__ = _advertised(own)  # type: ignore[attr-defined]
        return function

    return label if function is None else label(function)


def unfenced(function: F) -> F:
    """Let every node run this job for itself: housekeeping that belongs to one process.

    Raises:
        ConfigError: this is nothing that could be labelled.
    """
    target, known = _target(function, "@unfenced")
    _mark(target, Label(None, None if known is None else known.signature))
    return function


def _decorable(function: object) -> bool:
    return callable(function) or isinstance(function, classmethod)


def _target(function: Callable[..., Any], decorator: str) -> tuple[Callable[..., Any], Label | None]:
    """The object that carries the label, and the label it carries already (perhaps copied by `functools.wraps`)."""
    if not _decorable(function):
        raise ConfigError(f"{decorator} labels functions, and {function!r} is none")
    if inspect.isclass(function):
        raise ConfigError(
            f"{decorator} labels functions, and {function.__qualname__} is a class: decorate the method that is the "
            "job, `__call__` where instances are"
        )
    target = function.__func__ if isinstance(function, classmethod | staticmethod) else function
    known = getattr(target, "__dict__", {}).get(LABEL)
    return target, known if isinstance(known, Label) else None


def _mark(function: Callable[..., Any], label: Label) -> None:
    try:
        setattr(function, LABEL, label)
    except AttributeError:
        raise ConfigError(
            f"{function!r} cannot carry options: decorate the function where it is defined, or give the executor "
            'policies={"job id": {...}}'
        ) from None


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature that `add_job` checks, or the nearest there is; None where a builtin tells none."""
    try:
        return inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        with suppress(TypeError, ValueError):
            return inspect.signature(function)
    return None


def _advertised(signature: inspect.Signature) -> inspect.Signature:
    """The signature as `add_job` should check it: what the executor fills in is optional and out of the way."""
    given, handed = [], []
    for parameter in signature.parameters.values():
        if is_handed(parameter):
            handed.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=None))
        else:
            given.append(parameter)
    var_keyword = [given.pop()] if given and given[-1].kind is inspect.Parameter.VAR_KEYWORD else []
    return signature.replace(parameters=[*given, *handed, *var_keyword])


def is_handed(parameter: inspect.Parameter) -> bool:
    """Whether the executor fills this parameter in: by its annotation, or by its name unless annotated otherwise."""
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        return False
    if annotates_fence(parameter.annotation):
        return True
    expected = HANDED_BY_NAME.get(parameter.name)
    return expected is not None and not _contradicts(parameter.annotation, expected)


def _contradicts(annotation: object, expected: str) -> bool:
    # Only builtin types do: behind any other name may be an alias of the right one, which text does not tell.
    others = _alternatives(annotation) - {expected, "object"}
    return any(isinstance(getattr(builtins, name, None), type) for name in others)


def annotates_fence(annotation: object) -> bool:
    """Whether an annotation says `Fence`: the class, text that names it, or either of them `| None`."""
    return _alternatives(annotation) == {"Fence"}


def _alternatives(annotation: object) -> set[str]:
    """The names of the types that an annotation allows, None left out. Text is read, not evaluated."""
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        names = {word.rpartition(".")[2] for word in re.findall(r"[\w.]+", annotation)}
        return names - {"None", "Optional", "Union"}
    if get_origin(annotation) in (Union, UnionType):
        return set[str]().union(*map(_alternatives, get_args(annotation)))
    if annotation in (None, type(None)):
        return set()
    if isinstance(annotation, type):
        plain = annotation.__module__.partition(".")[0] in ("builtins", __name__.partition(".")[0])
        return {annotation.__qualname__ if plain else f"{annotation.__module__}.{annotation.__qualname__}"}
    return {str(annotation)}


def label_of(function: Callable[..., Any]) -> Label | None:
    """The label a job's function carries, seen through partials, bound methods and callable objects."""
    label = getattr(function, LABEL, None)
    while not isinstance(label, Label) and isinstance(function, partial):
        function = function.func
        label = getattr(function, LABEL, None)
    if not isinstance(label, Label) and not inspect.isroutine(function) and not inspect.isclass(function):
        label = getattr(type(function).__call__, LABEL, None)
    return label if isinstance(label, Label) else None


# --- trust ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Instant:
    """One moment on this host's three clocks, in seconds."""

    monotonic: float
    boottime: float
    wall: float


def instant() -> Instant:
    """This moment."""
    monotonic = time.monotonic()
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return Instant(monotonic, monotonic if clock is None else time.clock_gettime(clock), time.time())


def elapsed(since: Instant, until: Instant) -> float:
    """Seconds between two moments, by whichever clock has advanced most.

    A suspended host stops the monotonic clock and a restored snapshot only moves the wall clock; a wall clock that was
    set back is outvoted. The answer can be too long, which only shortens trust, but not too short.
    """
    return max(
        until.monotonic - since.monotonic,
        until.boottime - since.boottime,
        until.wall - since.wall,
    )


def trusted_for(lock_at_most: timedelta) -> float:
    """Seconds for which a holder may rely on a lease, counted from before the swap was sent.

    The margin of 0.5 %, at least 2 ms, covers clocks that tick at different rates and a store clock of milliseconds.
    """
    seconds = lock_at_most.total_seconds()
    return seconds - max(0.002, 0.005 * seconds)


def in_micros(duration: timedelta) -> int:
    """A duration in whole microseconds."""
    return duration // timedelta(microseconds=1)
