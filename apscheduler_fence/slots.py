"""Which slot a run belongs to: the same logical occurrence has the same name on every node.

Nodes share neither a clock nor a random generator, and APScheduler gives each of them run times of its own: jitter is
drawn per node, and an interval starts when its node did. What they do share is the schedule, so a slot is derived from
the trigger and the run time alone:

* A run time without jitter is what the schedule says. It is the slot.
* A jittered run time is traced back to the fire time it was drawn from: the latest one without jitter that lies at most
  the jitter before it.
* A run of an interval belongs to the window of the interval's length, counted from the epoch, in which it falls.

Nothing here reads a clock or a store. A slot's time is a number; its text is for names, and never compared for order.
"""

from __future__ import annotations

import heapq
import re
import unicodedata
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from itertools import groupby, islice, pairwise
from typing import TYPE_CHECKING, TypeVar

from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
from apscheduler.triggers.combining import AndTrigger, BaseCombiningTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from .errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from apscheduler.triggers.base import BaseTrigger

_Trigger = TypeVar("_Trigger")

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MICROSECOND = timedelta(microseconds=1)
SECOND = 1_000_000

NAME_LIMIT = 191
"""The longest job name, in characters: what a unique key over `utf8mb4` text can hold on every supported database."""
SLOT_LIMIT = 63
"""The longest slot name, in characters: an execution ID has 255 at most, so it fits where idempotency keys go."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One scheduled occurrence of a job.

    Attributes:
        job: the job's name in the cluster, as `job_name` wrote it.
        name: the slot's time as text, or `manual/<id>`; with `job` it is the key of the execution.
        at: the slot's time in µs since the epoch; slots are ordered by this.
        scheduled_at: the run time in µs that APScheduler had computed; it differs from `at` for intervals and jitter.
    """

    job: str
    name: str
    at: int
    scheduled_at: int

    @property
    def execution_id(self) -> str:
        """The execution's ID: the same on every node, and for every attempt."""
        return f"{self.job}/{self.name}"


# --- names ------------------------------------------------------------------------------------------------------------


def job_name(job_id: str, *, jobstore: str = "default", namespace: str = "", name: str | None = None) -> str:
    """Return the job's name in the cluster: namespace, job-store alias and job ID, as far as they say anything.

    The default alias and an empty namespace are left out: `settle`, `billing/settle`, `billing/archive/settle`. An
    alias without a namespace keeps the empty first place, `/archive/settle`: otherwise it would read as a namespace,
    and two different jobs could share a name. A policy's `name` stands for the alias and the ID.

    Raises:
        ConfigError: a part is not a usable name, or the whole is longer than `NAME_LIMIT`.
    """
    if name is not None:
        last, jobstore = _part(name, "name"), "default"
    else:
        last = _part(job_id, "id")
    parts = [last]
    if jobstore != "default":
        parts.insert(0, _part(jobstore, "jobstore"))
    if namespace or len(parts) > 1:
        parts.insert(0, _part(namespace, "namespace") if namespace else "")
    whole = "/".join(parts)
    if len(whole) > NAME_LIMIT:
        raise ConfigError(
            f"the job's name {whole!r} has {len(whole)} characters with its namespace, and {NAME_LIMIT} are allowed: "
            "give the job a shorter id= or name="
        )
    return whole


def validate_name(value: object, option: str, *, limit: int = NAME_LIMIT) -> str:
    """Return `value` if it can be a name: visible text that is the same text on every database and in every log.

    Args:
        value: what was given.
        option: the option it was given for, named in the error.
        limit: the most characters allowed.

    Raises:
        ConfigError: it is not a string, empty, too long, surrounded by whitespace, or holds a control character, a line
            break or a surrogate.
    """
    if not isinstance(value, str):
        raise ConfigError(f"{option} must be a string, not {type(value).__name__}")
    if not value:
        raise ConfigError(f"{option} must not be empty")
    if len(value) > limit:
        raise ConfigError(f"{option} has {len(value)} characters, and {limit} are allowed: {value[:40]!r}…")
    if value != value.strip():
        raise ConfigError(f"{option} must not begin or end with whitespace: {value!r}")
    for character in value:
        if unicodedata.category(character) in {"Cc", "Cs", "Zl", "Zp"}:
            raise ConfigError(
                f"{option} must not hold control characters, line breaks or surrogates, "
                f"and {value!r} holds U+{ord(character):04X}"
            )
    return value


_MADE_UP = re.compile(r"[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}")


def generated_id(job_id: str) -> bool:
    """Tell whether APScheduler made this job ID up (a random UUID, version 4), so that no two nodes agree on it."""
    return _MADE_UP.fullmatch(job_id) is not None


def _part(value: object, option: str) -> str:
    return validate_name(value, option).replace("%", "%25").replace("/", "%2F")


# --- time as a number and as text -------------------------------------------------------------------------------------

_TIME = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.([0-9]{3}|[0-9]{6}))?Z",
)


def format_time(us: int) -> str:
    """Return a time in µs since the epoch as UTC text: `2026-09-02T10:00:00Z`, with 0, 3 or 6 digits of a second.

    Raises:
        ValueError: the time lies outside the years 1 to 9999.
    """
    precision = "seconds" if us % SECOND == 0 else "milliseconds" if us % 1000 == 0 else "microseconds"
    return f"{_moment(us).replace(tzinfo=None).isoformat(timespec=precision)}Z"


def parse_time(text: str) -> int:
    """Return the time in µs since the epoch that `format_time` wrote.

    Raises:
        ValueError: the text has another form, or names no time of the calendar.
    """
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"not a UTC time such as 2026-09-02T10:00:00Z or 2026-09-02T10:00:00.250Z: {text!r}")
    *fields, fraction = match.groups(default="")
    try:
        moment = datetime(*map(int, fields), tzinfo=timezone.utc)  # type: ignore[misc, arg-type]
    except ValueError as error:
        raise ValueError(f"no such time: {text!r} ({error})") from error
    return _micros(moment) + int(fraction.ljust(6, "0"))


def _micros(moment: datetime) -> int:
    if moment.utcoffset() is None:
        raise ValueError(f"a time needs its UTC offset, and {moment.isoformat()} has none")
    return (moment - EPOCH) // MICROSECOND


def _moment(us: int) -> datetime:
    try:
        return EPOCH + timedelta(microseconds=us)
    except OverflowError as error:
        raise ValueError(f"{us} µs since the epoch lie outside the years 1 to 9999") from error


# --- slots ------------------------------------------------------------------------------------------------------------


def slot_of(
    job: str,
    trigger: BaseTrigger,
    run_time: datetime,
    *,
    slot: Callable[[datetime], datetime] | timedelta | None = None,
) -> Slot:
    """Return the slot that a run of `job` at `run_time` belongs to.

    A jittered run time that no fire time explains (somebody set `next_run_time` by hand) is a slot of its own.

    Args:
        job: the job's name, from `job_name`.
        trigger: the job's trigger.
        run_time: the run time that APScheduler computed, aware.
        slot: the policy's own rule: a function from the run time to the slot's time, or a period whose windows, counted
            from the epoch, are the slots.

    Raises:
        ValueError: `run_time` is naive.
        ConfigError: `slot` is neither, is not positive, or returned something other than an aware datetime.
    """
    scheduled_at = _micros(run_time)
    if slot is not None:
        at = _overridden(slot, run_time, scheduled_at)
    elif isinstance(trigger, IntervalTrigger):
        at = _window(scheduled_at, trigger.interval // MICROSECOND)
    else:
        jitter = _jitter(trigger)
        fire = _latest_fire(trigger, scheduled_at - jitter, scheduled_at) if jitter > 0 else None
        at = scheduled_at if fire is None else fire
    return Slot(job, format_time(at), at, scheduled_at)


def manual_slot(job: str, manual_id: str, at: int) -> Slot:
    """Return the slot of a run by hand: it is named by its ID, so the same ID runs once.

    Args:
        job: the job's name, from `job_name`.
        manual_id: what names this run.
        at: when it was asked for, in µs since the epoch.

    Raises:
        ConfigError: the ID is not a usable name.
    """
    # An ID that reads like a time would make job "a" at "manual/<time>" and job "a/manual" at "<time>" one execution.
    part = _part(manual_id, "the id of a run by hand").replace(":", "%3A")
    return Slot(job, validate_name(f"manual/{part}", "the slot of a run by hand", limit=SLOT_LIMIT), at, at)


def _overridden(slot: object, run_time: datetime, scheduled_at: int) -> int:
    if isinstance(slot, timedelta):
        if slot <= timedelta(0):
            raise ConfigError(f"slot= needs a period longer than zero, not {slot!r}")
        return _window(scheduled_at, slot // MICROSECOND)
    if not callable(slot):
        raise ConfigError(
            "slot= takes a period (timedelta) or a function from the scheduled time to the slot's time, "
            f"not {type(slot).__name__}"
        )
    chosen = slot(run_time)
    if not isinstance(chosen, datetime) or chosen.utcoffset() is None:
        raise ConfigError(f"the slot= function must return a datetime with a time zone, and returned {chosen!r}")
    return _micros(chosen)


def _window(us: int, period: int) -> int:
    # APScheduler adds intervals as floats, and some job stores keep times as floats: a run on the edge of a window may
    # be written a microsecond before it. Half a millisecond is far above that, and far below what anyone schedules.
    tolerance = min(500, period // 2)
    return (us + tolerance) // period * period


# --- the slots of a schedule ------------------------------------------------------------------------------------------


def slots_due(
    job: str,
    trigger: BaseTrigger,
    since: int,
    until: int,
    *,
    slot: Callable[[datetime], datetime] | timedelta | None = None,
) -> Iterator[Slot]:
    """Yield the slots from `since` on that every node must have come to by `until`, oldest first.

    A slot is left out as long as a run of it may still be ahead: a jittered one until its jitter is over, and an
    interval's until its window is, since a node may run at any moment of it. An interval's start date is not looked at:
    whether somebody gave it cannot be told.

    Args:
        job: the job's name, from `job_name`.
        trigger: the job's trigger.
        since: the earliest slot, in µs since the epoch.
        until: the moment by which runs must have come, in µs since the epoch.
        slot: the policy's own rule, as in `slot_of`.

    Raises:
        ConfigError: as `slot_of`.
    """
    if isinstance(trigger, IntervalTrigger) and slot is None:
        yield from _windows_due(job, trigger, since, until)
        return
    latest = None
    for fire in _fires(trigger, since, until - _jitter(trigger)):
        at = fire if slot is None else _overridden(slot, _moment(fire), fire)
        if at >= since and at != latest:
            latest = at
            yield Slot(job, format_time(at), at, fire)


def _windows_due(job: str, trigger: IntervalTrigger, since: int, until: int) -> Iterator[Slot]:
    period = trigger.interval // MICROSECOND
    until -= period + _jitter(trigger)
    if trigger.end_date is not None:
        until = min(until, _micros(trigger.end_date))
    for at in range(-(-since // period) * period, until + 1, period):
        yield Slot(job, format_time(at), at, at)


# --- fire times without jitter ----------------------------------------------------------------------------------------

_MOST_STEPS = 100_000
_LOOKBACK = 3 * 3600 * SECOND
"""Asked from within the hour that daylight saving leaves out, a cron trigger overlooks its fire times in that hour."""


def _jitter(trigger: BaseTrigger) -> int:
    """Return the most that jitter can add to a fire time, in µs: a trigger's own, and the largest inside it."""
    own = round((getattr(trigger, "jitter", None) or 0) * SECOND)
    if isinstance(trigger, BaseCombiningTrigger):
        return own + max(map(_jitter, trigger.triggers), default=0)
    # Of a trigger that is not APScheduler's nobody knows what its `jitter` means.
    return own if isinstance(trigger, (CronTrigger, CalendarIntervalTrigger, IntervalTrigger)) else 0


def _latest_fire(trigger: BaseTrigger, since: int, until: int) -> int | None:
    """Return the last time in the range at which `trigger` would fire if nothing in it had jitter."""
    latest: int | None
    if isinstance(trigger, OrTrigger):
        return max((f for t in trigger.triggers if (f := _latest_fire(t, since, until)) is not None), default=None)
    if isinstance(trigger, AndTrigger):
        return _latest_agreement(trigger, since, until)
    if isinstance(trigger, IntervalTrigger):
        start, period = _micros(trigger.start_date), trigger.interval // MICROSECOND
        latest = start + (until - start) // period * period if until >= start else None
    elif isinstance(trigger, CalendarIntervalTrigger):
        since -= _repeated(trigger.timezone, since, until)
        latest = _latest_calendar_fire(_without_jitter(trigger), since, until)
    elif isinstance(trigger, CronTrigger):
        since -= _repeated(trigger.timezone, since, until)
        latest = _latest_on_the_clock(_without_jitter(trigger), since, until)
    else:
        latest = _latest_on_the_clock(_without_jitter(trigger), since, until)
    return latest if latest is not None and latest >= since else None


def _repeated(zone: tzinfo, since: int, until: int) -> int:
    """Return by how much the clock of `zone` is set back around this range, in µs.

    APScheduler adds jitter to the local time: across that moment, an hour of jitter takes two.
    """
    before, after = (_moment(us).astimezone(zone).utcoffset() for us in (since - _LOOKBACK, until))
    return max(0, (before - after) // MICROSECOND) if before is not None and after is not None else 0


def _latest_agreement(trigger: AndTrigger, since: int, until: int) -> int | None:
    # Not by asking the and-trigger: once past the last agreement it searches for ever.
    for _ in range(_MOST_STEPS):
        fires = [_latest_fire(each, since, until) for each in trigger.triggers]
        agreed = [fire for fire in fires if fire is not None]
        if not agreed or len(agreed) < len(fires):
            return None
        if min(agreed) == max(agreed):
            return agreed[0]
        until = min(agreed)
    return None


def _latest_calendar_fire(trigger: CalendarIntervalTrigger, since: int, until: int) -> int | None:
    # It always fires at the same time of day, so with less than a day of jitter there is one candidate. That is surer
    # than counting from the start date: a jitter that crosses midnight shifts APScheduler's own count for good.
    daily = _clone(trigger)
    daily.years = daily.months = daily.weeks = 0
    daily.days = 1
    daily.start_date = _moment(since).astimezone(trigger.timezone).date()
    candidates = [fire for fire, _ in _walk(daily, since, until) if fire >= since]
    if len(candidates) > 1:
        counted = _last(trigger, since, until)
        if counted in candidates:
            return counted
    return candidates[-1] if candidates else None


def _latest_on_the_clock(trigger: BaseTrigger, since: int, until: int) -> int | None:
    # Walking all the way from `since` could be thousands of steps for a job of every second. Looking back twice as far
    # each time, the first walk that meets a fire time is a short one.
    furthest = until - since + _LOOKBACK
    span = SECOND
    while True:
        span = min(span, furthest)
        latest = _last(trigger, until - span, until)
        if latest is not None or span == furthest:
            return latest
        span *= 2


def _last(trigger: BaseTrigger, since: int, until: int) -> int | None:
    latest, steps = None, 0
    for latest, steps in _walk(trigger, since, until):  # noqa: B007 - the last one is what is wanted
        pass
    return latest if steps < _MOST_STEPS else None


def _walk(trigger: BaseTrigger, since: int, until: int) -> Iterator[tuple[int, int]]:
    """Yield each fire time from `since` to `until` with its number; it ends where the trigger no longer advances.

    A date or calendar trigger begins where it likes, also before `since`.
    """
    previous, now, latest = None, _moment(since), None
    for step in range(1, _MOST_STEPS + 1):
        moment = trigger.get_next_fire_time(previous, now)
        if moment is None:
            return
        fire = _micros(moment)
        if fire > until or (latest is not None and fire <= latest):
            return
        yield fire, step
        latest, now = fire, _moment(fire + 1)
        # A cron trigger needs no previous time, and adds to it in local time in some versions.
        previous = None if isinstance(trigger, CronTrigger) else moment


def _fires(trigger: BaseTrigger, since: int, until: int) -> Iterator[int]:
    """Yield the times in the range at which `trigger` would fire if nothing in it had jitter, oldest first."""
    if isinstance(trigger, OrTrigger):
        merged = heapq.merge(*(_fires(each, since, until) for each in trigger.triggers))
        yield from (fire for fire, _ in groupby(merged))
    elif isinstance(trigger, AndTrigger):
        first, *others = trigger.triggers
        for fire in _fires(first, since, until):
            if all(_latest_fire(each, fire, fire) == fire for each in others):
                yield fire
    elif isinstance(trigger, IntervalTrigger):
        start, period = _micros(trigger.start_date), trigger.interval // MICROSECOND
        if trigger.end_date is not None:
            until = min(until, _micros(trigger.end_date))
        yield from range(start + max(0, -(-(since - start) // period)) * period, until + 1, period)
    else:
        yield from _fires_on_the_clock(_without_jitter(trigger), since, until)


def _fires_on_the_clock(trigger: BaseTrigger, since: int, until: int) -> Iterator[int]:
    begin = since - _LOOKBACK
    while True:
        fire, step = begin, 0
        for fire, step in _walk(trigger, begin, until):  # noqa: B007 - the last step is looked at below
            if fire >= since:
                yield fire
        if step < _MOST_STEPS or fire < begin:
            return
        begin = fire + 1


def _without_jitter(trigger: _Trigger) -> _Trigger:
    if not getattr(trigger, "jitter", None):
        return trigger
    bare = _clone(trigger)
    bare.jitter = None  # type: ignore[attr-defined]
    return bare


def _clone(trigger: _Trigger) -> _Trigger:
    # `copy.copy` would go through the trigger's pickling, which drops what a subclass has added.
    clone: _Trigger = object.__new__(type(trigger))
    for kind in type(trigger).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in {"__dict__", "__weakref__"} and hasattr(trigger, slot):
                object.__setattr__(clone, slot, getattr(trigger, slot))
    getattr(clone, "__dict__", {}).update(getattr(trigger, "__dict__", {}))
    return clone


# --- what to warn about when a job is added ---------------------------------------------------------------------------

_SAMPLE = 64
_CENTURY = 36_525 * 86_400 * SECOND
_ANY_DAY = datetime(2024, 1, 1, tzinfo=timezone.utc)


def trigger_warnings(trigger: BaseTrigger, *, added_at: datetime | None = None) -> list[str]:
    """Return what will keep nodes from agreeing on this trigger's slots, as sentences that say what to write instead.

    APScheduler does not keep whether a date was given or left out, so a date that looks like the moment of adding is
    taken for one: a deliberate start date of today is warned about as well.

    Args:
        trigger: the job's trigger.
        added_at: when the job was added, aware and in the node's time zone; without it, such dates are not looked for.

    Raises:
        ValueError: `added_at` is naive.
    """
    if added_at is not None:
        _micros(added_at)
    found = list(_date_warnings(trigger, added_at))
    if isinstance(trigger, BaseCombiningTrigger) and any(isinstance(t, IntervalTrigger) for t in _leaves(trigger)):
        found.append(
            "a combined trigger counts its interval from its own last run, which differs on every node: "
            "use a cron trigger in place of the interval, or give the policy slot= (a period or a function)"
        )
    jitter = _jitter(trigger)
    gap = _shortest_gap(trigger, added_at or _ANY_DAY) if jitter > 0 else None
    if gap is not None and jitter >= gap:
        consequence = (
            "so the runs of a node skip whole intervals"
            if isinstance(trigger, IntervalTrigger)
            else "so it cannot be told which of the two a run belongs to"
        )
        found.append(
            f"a jitter of {jitter / SECOND:g} s reaches the next fire time, {gap / SECOND:g} s later, "
            f"{consequence}: use a jitter shorter than that"
        )
    return found


def shortest_period(trigger: BaseTrigger, *, since: datetime) -> timedelta | None:
    """Return the shortest time between two of the next fire times without jitter; None if there are not two.

    Args:
        trigger: the job's trigger.
        since: where to begin looking, aware.
    """
    gap = _shortest_gap(trigger, since)
    return None if gap is None else gap * MICROSECOND


def _date_warnings(trigger: BaseTrigger, added_at: datetime | None) -> Iterator[str]:
    for leaf in _leaves(trigger):
        if isinstance(leaf, DateTrigger) and _read_from_a_clock(leaf.run_date, added_at):
            yield (
                f"the run date {leaf.run_date.isoformat()} looks like this node's clock when the job was added, and "
                "each node would run the job once: give run_date= as a fixed time, or add the job on one node only"
            )
        if isinstance(leaf, CalendarIntervalTrigger) and added_at is not None:
            every_day = leaf.years == leaf.months == leaf.weeks == 0 and leaf.days == 1
            today = {added_at.date(), added_at.astimezone(leaf.timezone).date()}
            if leaf.start_date in today and not every_day:
                yield (
                    "a calendar interval without start_date= counts from the day its node was started: "
                    "give start_date= as a fixed date"
                )


def _read_from_a_clock(run_date: datetime, added_at: datetime | None) -> bool:
    # Nobody writes a fraction of a millisecond by hand.
    if run_date.microsecond % 1000:
        return True
    return added_at is not None and abs(_micros(run_date) - _micros(added_at)) <= SECOND


def _leaves(trigger: BaseTrigger) -> Iterator[BaseTrigger]:
    if isinstance(trigger, BaseCombiningTrigger):
        for each in trigger.triggers:
            yield from _leaves(each)
    else:
        yield trigger


def _shortest_gap(trigger: BaseTrigger, start: datetime) -> int | None:
    """Return the shortest time between two of the next fire times without jitter, in µs; None if there are not two."""
    if isinstance(trigger, IntervalTrigger):
        return int(trigger.interval // MICROSECOND)
    if isinstance(trigger, AndTrigger):
        # Those that agree are among those of each, so they lie at least as far apart as any one's.
        return max((gap for t in trigger.triggers if (gap := _shortest_gap(t, start)) is not None), default=None)
    fires = _next_fires(trigger, _micros(start))
    return min((later - earlier for earlier, later in pairwise(fires)), default=None)


def _next_fires(trigger: BaseTrigger, since: int) -> list[int]:
    if isinstance(trigger, OrTrigger):
        samples = [fires for each in trigger.triggers if (fires := _next_fires(each, since))]
        # A dense trigger's sample ends early; past that end, gaps would only seem to be there.
        horizon = min((sample[-1] for sample in samples if len(sample) == _SAMPLE), default=None)
        merged = {fire for sample in samples for fire in sample if horizon is None or fire <= horizon}
        return sorted(merged)
    if isinstance(trigger, (IntervalTrigger, AndTrigger)):
        return []
    ahead = (fire for fire, _ in _walk(_without_jitter(trigger), since, since + _CENTURY) if fire >= since)
    return list(islice(ahead, _SAMPLE))
