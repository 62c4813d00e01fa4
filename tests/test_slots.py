"""The same logical occurrence has the same slot on every node, whatever its clock, its jitter and its start."""

from __future__ import annotations

import random
from datetime import date, datetime, timedelta, timezone
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.base import BaseTrigger
from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from hypothesis import example, given
from hypothesis import strategies as st

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.slots import (
    format_time,
    generated_id,
    job_name,
    manual_slot,
    parse_time,
    slot_of,
    trigger_warnings,
    validate_name,
)

UTC = timezone.utc
HELSINKI = ZoneInfo("Europe/Helsinki")
NEW_YORK = ZoneInfo("America/New_York")
LORD_HOWE = ZoneInfo("Australia/Lord_Howe")

TEN = datetime(2026, 9, 2, 10, tzinfo=UTC)
MICRO = timedelta(microseconds=1)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def micros(moment):
    return (moment - EPOCH) // MICRO


def name(trigger, run_time, **options):
    return slot_of("job", trigger, run_time, **options).name


def runs(trigger, start, count):
    """The run times that APScheduler gives one node that was started at `start`."""
    run_time = trigger.get_next_fire_time(None, start)
    for _ in range(count):
        if run_time is None:
            return
        yield run_time
        run_time = trigger.get_next_fire_time(run_time, run_time)


def fires(trigger, start, count):
    """The fire times of a cron trigger, each found from the moment after the last one.

    APScheduler 3.11.0 loses its way in the hour that comes twice when it is given the previous run time.
    """
    moment = start.astimezone(UTC)
    for _ in range(count):
        fire = trigger.get_next_fire_time(None, moment)
        yield fire
        moment = fire.astimezone(UTC) + MICRO


class EveryQuarter(BaseTrigger):
    """A trigger of a user's own, which has a jitter that means nothing to us."""

    jitter = 60

    def get_next_fire_time(self, previous_fire_time, now):
        return (previous_fire_time or now) + timedelta(minutes=15)


class Stuck(BaseTrigger):
    """A user's trigger that never advances."""

    def get_next_fire_time(self, previous_fire_time, now):
        return TEN


class Counted(CronTrigger):
    """A cron trigger with an attribute that its pickling doesn't know, and a rule that needs it."""

    def __init__(self, offset, **fields):
        super().__init__(**fields)
        self.offset = offset

    def get_next_fire_time(self, previous_fire_time, now):
        return super().get_next_fire_time(previous_fire_time, now) + self.offset


# --- without jitter: the scheduled time -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "run_time", "expected"),
    [
        (CronTrigger(minute="*/10", timezone=UTC), TEN, "2026-09-02T10:00:00Z"),
        (
            CronTrigger(hour=13, timezone=HELSINKI),
            datetime(2026, 9, 2, 13, tzinfo=HELSINKI),
            "2026-09-02T10:00:00Z",
        ),
        (CronTrigger(minute=0, timezone=UTC, jitter=0), TEN, "2026-09-02T10:00:00Z"),
        (
            DateTrigger(datetime(2026, 9, 2, 10, 0, 0, 250_000, tzinfo=UTC)),
            TEN + timedelta(milliseconds=250),
            "2026-09-02T10:00:00.250Z",
        ),
        (
            CalendarIntervalTrigger(months=1, hour=10, start_date="2020-01-02", timezone=UTC),
            TEN,
            "2026-09-02T10:00:00Z",
        ),
        (EveryQuarter(), TEN + 7 * MICRO, "2026-09-02T10:00:00.000007Z"),
        (
            OrTrigger([CronTrigger(minute=0, timezone=UTC), CronTrigger(minute=30, timezone=UTC)]),
            TEN,
            "2026-09-02T10:00:00Z",
        ),
        (
            AndTrigger([CronTrigger(hour="*/2", timezone=UTC), CronTrigger(hour="*/5", timezone=UTC)]),
            TEN,
            "2026-09-02T10:00:00Z",
        ),
    ],
)
def test_without_jitter_the_slot_is_the_scheduled_time_in_utc(trigger, run_time, expected):
    """Without jitter the slot is the scheduled time in UTC."""
    slot = slot_of("job", trigger, run_time)
    assert slot.name == expected
    assert slot.at == slot.scheduled_at == micros(run_time)


def test_a_time_without_an_offset_is_refused():
    """A run time without an offset is refused: nobody knows when it is."""
    with pytest.raises(ValueError, match="UTC offset"):
        slot_of("job", CronTrigger(timezone=UTC), datetime(2026, 9, 2, 10))  # noqa: DTZ001


def test_a_fixed_offset_zone_converts_like_any_other():
    """A run time from a zone of fixed offsets, as pytz makes them, lands in the same slot as one in UTC."""
    run_time = datetime(2026, 9, 2, 13, tzinfo=timezone(timedelta(hours=3), "EEST"))
    assert name(CronTrigger(timezone=UTC), run_time) == name(CronTrigger(timezone=UTC), TEN)


# --- daylight saving --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jitter", [None, 600])
@pytest.mark.parametrize(
    ("zone", "start", "fields", "expected"),
    [
        (
            HELSINKI,
            datetime(2026, 10, 24, 23, tzinfo=UTC),
            {"minute": 30},
            ["2026-10-24T23:30:00Z", "2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z", "2026-10-25T02:30:00Z"],
        ),
        (
            HELSINKI,
            datetime(2026, 10, 24, 22, tzinfo=UTC),
            {"hour": 3, "minute": 30},
            ["2026-10-25T00:30:00Z", "2026-10-25T01:30:00Z", "2026-10-26T01:30:00Z"],
        ),
        (
            NEW_YORK,
            datetime(2026, 11, 1, 4, tzinfo=UTC),
            {"hour": 1, "minute": 30},
            ["2026-11-01T05:30:00Z", "2026-11-01T06:30:00Z", "2026-11-02T06:30:00Z"],
        ),
    ],
)
def test_the_hour_that_comes_twice_has_two_slots(zone, start, fields, expected, jitter):
    """In autumn 03:30 comes twice, and the two are different slots, with jitter and without."""
    run_times = fires(CronTrigger(**fields, timezone=zone), start, len(expected))
    late = [
        (run_time.astimezone(UTC) + timedelta(seconds=(jitter or 0) * 0.9)).astimezone(zone) for run_time in run_times
    ]
    assert [name(CronTrigger(**fields, timezone=zone, jitter=jitter), run_time) for run_time in late] == expected


def test_jitter_that_is_added_in_local_time_across_the_change_leads_back_too():
    """APScheduler adds jitter to the local time, so in autumn two hours of it can be three: the slot is still found."""
    for trigger in (
        CronTrigger(hour=2, minute=30, timezone=HELSINKI, jitter=7200),
        CalendarIntervalTrigger(days=1, hour=2, minute=30, timezone=HELSINKI, jitter=7200),
    ):
        fire = datetime(2026, 10, 25, 2, 30, tzinfo=HELSINKI)
        for drawn in (0, 1800, 3599, 5400, 7199):
            assert name(trigger, fire + timedelta(seconds=drawn)) == "2026-10-24T23:30:00Z"


def test_a_second_run_that_jitter_dates_into_the_first_hour_is_no_new_slot():
    """Adding jitter to the second 03:30 makes APScheduler date it into the first hour: the first one's slot, once more."""
    trigger = CronTrigger(hour=3, minute=30, timezone=HELSINKI, jitter=600)
    start = datetime(2026, 10, 25, 0, tzinfo=UTC)
    assert {name(trigger, run_time) for run_time in runs(trigger, start, 20)} == {"2026-10-25T00:30:00Z"}


@pytest.mark.parametrize("zone", [HELSINKI, NEW_YORK, LORD_HOWE], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {"minute": "*/20"},
        {"hour": 2, "minute": 10},
        {"hour": 2, "minute": 30},
        {"hour": 3, "minute": 30},
        {"hour": "1-4", "minute": "5,35"},
        {"day_of_week": "sun", "hour": "3", "minute": "15,45"},
        {"hour": "*/2"},
    ],
    ids=str,
)
@pytest.mark.parametrize("jitter", [59, 299])
def test_a_jittered_run_is_traced_to_its_fire_time_around_both_changes_of_the_clock(zone, fields, jitter):
    """On the days when the clock changes, every jittered run has the slot of the fire time it was drawn from."""
    steady = CronTrigger(**fields, timezone=zone)
    jittered = CronTrigger(**fields, timezone=zone, jitter=jitter)
    for day in (date(2026, 3, 7), date(2026, 3, 28), date(2026, 4, 4), date(2026, 10, 3), date(2026, 10, 24)):
        start = datetime(day.year, day.month, day.day, tzinfo=zone)
        for fire in fires(steady, start, 40):
            for drawn in (0, 0.000001, jitter / 2, jitter):
                run_time = (fire.astimezone(UTC) + timedelta(seconds=drawn)).astimezone(zone)
                assert slot_of("job", jittered, run_time).at == micros(fire)


# --- with jitter: the fire time it came from --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trigger", "seconds", "expected"),
    [
        (CronTrigger(minute="*/10", timezone=UTC, jitter=30), 0, "2026-09-02T10:00:00Z"),
        (CronTrigger(minute="*/10", timezone=UTC, jitter=30), 29.999999, "2026-09-02T10:00:00Z"),
        (CronTrigger(minute="*/10", timezone=UTC, jitter=599), 599, "2026-09-02T10:00:00Z"),
        (CronTrigger(minute="*/10", timezone=UTC, jitter=1 / 3), 0.333333, "2026-09-02T10:00:00Z"),
        (CronTrigger(minute="*/10", timezone=UTC, jitter=2 / 3), 0.666667, "2026-09-02T10:00:00Z"),
        (CronTrigger(second="*", timezone=UTC, jitter=0.5), 7.4, "2026-09-02T10:00:07Z"),
        (CronTrigger(day=1, timezone=UTC, jitter=86400), 9, "2026-09-02T10:00:09Z"),
        (CronTrigger(day=1, timezone=UTC, jitter=3 * 86400), 0, "2026-09-01T00:00:00Z"),
        (CalendarIntervalTrigger(days=1, hour=10, timezone=UTC, jitter=900), 899, "2026-09-02T10:00:00Z"),
        (
            CalendarIntervalTrigger(days=1, hour=23, minute=59, timezone=UTC, jitter=54_000),
            3600,
            "2026-09-01T23:59:00Z",
        ),
        (
            CalendarIntervalTrigger(weeks=1, hour=10, start_date="1996-09-01", timezone=UTC, jitter=4 * 86400),
            0,
            "2026-08-30T10:00:00Z",
        ),
        (
            CalendarIntervalTrigger(days=400, hour=10, start_date="2026-09-01", timezone=UTC, jitter=4 * 86400),
            3600,
            "2026-09-01T10:00:00Z",
        ),
        (
            OrTrigger([CronTrigger(minute=0, timezone=UTC), CronTrigger(minute=5, timezone=UTC)], jitter=60),
            305,
            "2026-09-02T10:05:00Z",
        ),
        (
            OrTrigger([CronTrigger(minute=0, timezone=UTC, jitter=60), CronTrigger(minute=5, timezone=UTC)]),
            59,
            "2026-09-02T10:00:00Z",
        ),
        (OrTrigger([DateTrigger(TEN), CronTrigger(hour=8, timezone=UTC)], jitter=60), 42, "2026-09-02T10:00:00Z"),
        (
            OrTrigger(
                [
                    IntervalTrigger(minutes=7, start_date=TEN - timedelta(minutes=70), timezone=UTC),
                    CronTrigger(hour=8, timezone=UTC),
                ],
                jitter=60,
            ),
            42,
            "2026-09-02T10:00:00Z",
        ),
        (
            AndTrigger([CronTrigger(hour="*/2", timezone=UTC), CronTrigger(hour="*/5", timezone=UTC)], jitter=9000),
            8000,
            "2026-09-02T10:00:00Z",
        ),
        (
            AndTrigger([CronTrigger(minute="*", timezone=UTC), CronTrigger(hour="10", timezone=UTC)], jitter=1800),
            1700,
            "2026-09-02T10:00:00Z",
        ),
        (Counted(timedelta(seconds=7), minute="*/10", timezone=UTC, jitter=30), 20, "2026-09-02T10:00:07Z"),
    ],
)
def test_a_jittered_run_has_the_slot_of_the_fire_time_it_was_drawn_from(trigger, seconds, expected):
    """A jittered run has the slot of the fire time it was drawn from, and keeps its own time for people."""
    run_time = TEN + timedelta(seconds=seconds)
    slot = slot_of("job", trigger, run_time)
    assert slot.name == expected
    assert slot.scheduled_at == micros(run_time)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CronTrigger(minute="*/10", timezone=HELSINKI, jitter=599),
        lambda: CronTrigger(minute="*/10", end_date=TEN + timedelta(hours=5), timezone=UTC, jitter=599),
        lambda: CronTrigger(second="*/2", timezone=UTC, jitter=1.9),
        lambda: CronTrigger(day="last", hour=4, timezone=HELSINKI, jitter=7200),
        lambda: CalendarIntervalTrigger(
            days=1, hour=3, minute=30, start_date="2026-09-02", timezone=HELSINKI, jitter=900
        ),
        lambda: CalendarIntervalTrigger(months=1, hour=10, start_date="2026-09-02", timezone=UTC, jitter=900),
        lambda: OrTrigger([CronTrigger(minute=5, timezone=UTC), CronTrigger(minute=40, timezone=UTC)], jitter=600),
        lambda: AndTrigger([CronTrigger(minute="*/5", timezone=UTC), CronTrigger(minute="*/5", timezone=UTC)], 200),
    ],
)
def test_two_nodes_that_draw_different_jitter_agree_on_every_slot(make):
    """Two nodes that draw different jitter from the same schedule agree on the slot of every run."""
    random.seed(0)
    here = [name(make(), run_time) for run_time in runs(make(), TEN, 60)]
    random.seed(1)
    there = [name(make(), run_time) for run_time in runs(make(), TEN, 60)]
    assert here == there
    assert len(set(here)) == len(here) >= 30


def test_a_jitter_that_crosses_midnight_does_not_lose_the_slot():
    """A calendar interval whose jitter crosses midnight shifts its own count, and its runs still have their slots."""
    trigger = CalendarIntervalTrigger(days=2, hour=23, minute=59, start_date="2026-09-02", timezone=UTC, jitter=600)
    random.seed(0)
    for run_time in runs(trigger, TEN, 50):
        slot = slot_of("job", trigger, run_time)
        assert slot.name.endswith("T23:59:00Z")
        assert 0 <= slot.scheduled_at - slot.at <= 600_000_000


@pytest.mark.parametrize(
    "trigger",
    [
        CronTrigger(hour=8, timezone=UTC, jitter=60),
        CalendarIntervalTrigger(days=1, hour=8, timezone=UTC, jitter=60),
        OrTrigger([DateTrigger(TEN + timedelta(hours=1)), CronTrigger(hour=8, timezone=UTC)], jitter=60),
        OrTrigger([IntervalTrigger(hours=1, start_date=TEN + timedelta(days=1), timezone=UTC)], jitter=60),
        AndTrigger([CronTrigger(minute=0, timezone=UTC), CronTrigger(minute=1, timezone=UTC)], jitter=7200),
        AndTrigger([], jitter=60),
        OrTrigger([EveryQuarter()], jitter=60),
    ],
)
def test_a_run_that_no_fire_time_explains_is_a_slot_of_its_own(trigger):
    """A run time set by hand, which no fire time plus jitter explains, never takes the slot of an earlier run."""
    assert name(trigger, TEN + timedelta(minutes=17, seconds=5)) == "2026-09-02T10:17:05Z"


def test_a_trigger_that_never_advances_does_not_hang_the_walk():
    """A user's trigger that answers the same time for ever ends the walk instead of hanging it."""
    assert name(OrTrigger([Stuck()], jitter=60), TEN + timedelta(seconds=5)) == "2026-09-02T10:00:00Z"


def test_stripping_jitter_leaves_the_trigger_itself_alone():
    """Tracing a run looks at copies: the scheduler's own trigger keeps its jitter."""
    inner = CronTrigger(minute=0, timezone=UTC, jitter=60)
    trigger = OrTrigger([inner], jitter=30)
    slot_of("job", trigger, TEN + timedelta(seconds=5))
    assert (inner.jitter, trigger.jitter) == (60, 30)


def test_a_job_of_every_second_is_traced_in_few_steps():
    """Tracing a jittered run asks the trigger a few dozen times, also if it fires every second of a long jitter."""
    asked = 0

    class Asked(CronTrigger):
        def get_next_fire_time(self, previous_fire_time, now):
            nonlocal asked
            asked += 1
            return super().get_next_fire_time(previous_fire_time, now)

    slot_of("job", Asked(second="*", timezone=UTC, jitter=3600), TEN + timedelta(seconds=0.5))
    assert 1 <= asked < 50


@given(
    period=st.sampled_from([1, 2, 5, 10, 30]),
    minutes=st.integers(0, 60 * 24 * 365),
    zone=st.sampled_from([UTC, HELSINKI, NEW_YORK]),
    data=st.data(),
)
def test_any_jitter_shorter_than_the_period_leads_back_to_the_same_slot(period, minutes, zone, data):
    """Whatever jitter shorter than the period was drawn, on whatever day, the slot is the same."""
    jitter = period * 60 - 0.001
    drawn = data.draw(st.integers(0, int(jitter * 1_000_000)))
    steady = CronTrigger(minute=f"*/{period}", timezone=zone)
    fire = steady.get_next_fire_time(None, TEN + timedelta(minutes=minutes)).astimezone(UTC)
    run_time = (fire + drawn * MICRO).astimezone(zone)
    slot = slot_of("job", CronTrigger(minute=f"*/{period}", timezone=zone, jitter=jitter), run_time)
    assert (slot.at, slot.scheduled_at) == (micros(fire), micros(run_time))


# --- intervals: windows of the epoch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [0.1, 1, 7, 60, 3600, 86400])
def test_an_interval_never_lands_in_the_neighbouring_window(period):
    """Over 100,000 steps of an interval, from five phases, each run lands in the window after the last one's."""
    length = round(period * 1_000_000)
    edge = -(-micros(TEN) // length) * length
    for phase in (0, 1, length // 3, length - 500, length - 1):
        start = EPOCH + timedelta(microseconds=edge + phase)
        trigger = IntervalTrigger(seconds=period, start_date=start, timezone=UTC)
        windows = [slot_of("job", trigger, run_time).at for run_time in runs(trigger, start, 20_000)]
        assert windows == list(range(windows[0], windows[0] + 20_000 * length, length))
        assert windows[0] % length == 0
        assert abs(windows[0] - edge) in {0, length}


@pytest.mark.parametrize("offset", [-2, -1, 0, 1, 2])
@pytest.mark.parametrize("period", [0.1, 1, 7, 60, 3600, 86400])
def test_a_run_a_microsecond_off_the_edge_belongs_to_the_edge(period, offset):
    """A run on the edge of a window belongs to it, also if a float wrote it two microseconds too early or too late."""
    length = round(period * 1_000_000)
    edge = micros(TEN) // length * length
    trigger = IntervalTrigger(seconds=period, start_date=TEN, timezone=UTC)
    assert slot_of("job", trigger, EPOCH + timedelta(microseconds=edge + offset)).at == edge


@pytest.mark.parametrize("length", [1, 2, 3, 999, 1000])
def test_a_period_below_a_millisecond_still_has_a_window_for_each_run(length):
    """Even with periods of microseconds, neighbouring runs have neighbouring windows, and each is its run's own."""
    slots = [slot_of("job", IntervalTrigger(), TEN + n * length * MICRO, slot=length * MICRO) for n in range(100)]
    assert [b.at - a.at for a, b in pairwise(slots)] == [length] * 99
    assert all(abs(slot.at - slot.scheduled_at) < length for slot in slots)


@pytest.mark.parametrize("jitter", [None, 20])
def test_nodes_that_started_at_different_moments_share_an_interval_windows(jitter):
    """Nodes that started at different moments share the windows of an interval, though never a run time."""
    names = []
    for started in (3, 41.5):
        start = TEN + timedelta(seconds=started)
        trigger = IntervalTrigger(minutes=5, start_date=start, timezone=HELSINKI, jitter=jitter)
        names.append([name(trigger, run_time) for run_time in runs(trigger, start, 5)])
    assert names[0] == names[1]
    assert names[0][:2] == ["2026-09-02T10:00:00Z", "2026-09-02T10:05:00Z"]


def test_an_interval_keeps_the_real_time_for_people():
    """The slot of an interval is its window, and its scheduled time is when it really was to run."""
    slot = slot_of("job", IntervalTrigger(minutes=5), TEN + timedelta(seconds=77))
    assert (slot.at, slot.scheduled_at) == (micros(TEN), micros(TEN) + 77_000_000)


# --- the policy's own rule --------------------------------------------------------------------------------------------


def test_a_period_given_by_the_policy_makes_windows_of_any_trigger():
    """`slot=` as a period makes windows of the epoch grid, whatever the trigger."""
    assert name(EveryQuarter(), TEN + timedelta(minutes=59), slot=timedelta(hours=1)) == "2026-09-02T10:00:00Z"


def test_a_function_given_by_the_policy_decides_the_slot():
    """`slot=` as a function is given the scheduled time, and what it returns is the slot."""
    slot = slot_of("job", EveryQuarter(), TEN + timedelta(hours=5), slot=lambda at: at.replace(hour=0))
    assert slot.name == "2026-09-02T00:00:00Z"
    assert slot.scheduled_at == micros(TEN + timedelta(hours=5))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (timedelta(0), "longer than zero"),
        (timedelta(seconds=-1), "longer than zero"),
        (3600, "not int"),
        (lambda at: at.replace(tzinfo=None), "with a time zone"),
        (lambda at: at.date(), "with a time zone"),
        (lambda _at: None, "with a time zone"),
    ],
)
def test_a_rule_that_gives_no_time_is_a_configuration_error(rule, message):
    """A `slot=` that is no period and no function to an aware time is refused, and the message says what is."""
    with pytest.raises(ConfigError, match=message):
        slot_of("job", EveryQuarter(), TEN, slot=rule)


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job_id", "options", "expected"),
    [
        ("settle", {}, "settle"),
        ("settle", {"namespace": "billing"}, "billing/settle"),
        ("settle", {"jobstore": "other"}, "/other/settle"),
        ("settle", {"namespace": "billing", "jobstore": "other"}, "billing/other/settle"),
        ("a/b", {"namespace": "50%"}, "50%25/a%2Fb"),
        ("0f" * 16, {"jobstore": "other", "namespace": "billing", "name": "settle"}, "billing/settle"),
        ("größe", {}, "größe"),
    ],
)
def test_a_job_is_named_by_what_distinguishes_it(job_id, options, expected):
    """A job's name is namespace, alias and id as far as they say anything; the policy's name replaces the last two."""
    assert job_name(job_id, **options) == expected


PART = st.text(st.sampled_from("ab/%2F5."), min_size=1, max_size=6)


@given(
    one=st.tuples(PART | st.just(""), PART | st.just("default"), PART),
    other=st.tuples(PART | st.just(""), PART | st.just("default"), PART),
)
@example(one=("a", "default", "b"), other=("", "a", "b"))
@example(one=("a/b", "default", "c"), other=("a", "b", "c"))
@example(one=("", "default", "a%2Fb"), other=("", "default", "a/b"))
def test_different_jobs_never_share_a_name(one, other):
    """Two jobs that differ in namespace, job store or id never have the same name."""
    names = {job_name(job_id, jobstore=alias, namespace=namespace) for namespace, alias, job_id in (one, other)}
    assert len(names) == len({one, other})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "id must be a string, not int"),
        (None, "id must be a string"),
        ("", "must not be empty"),
        ("x" * 192, "192 characters, and 191 are allowed"),
        (" settle", "whitespace"),
        ("settle\u00a0", "whitespace"),
        ("set\ttle", r"U\+0009"),
        ("set\x00tle", r"U\+0000"),
        ("set\x85tle", r"U\+0085"),
        ("set\u2028tle", r"U\+2028"),
        ("set\ud800tle", r"U\+D800"),
    ],
)
def test_a_name_that_a_store_or_a_log_would_mangle_is_refused(value, message):
    """A name that a database or a log could mangle is refused, and the message names the option and what is allowed."""
    with pytest.raises(ConfigError, match=f"^id .*{message.removeprefix('id ')}"):
        validate_name(value, "id")


@pytest.mark.parametrize("options", [{"jobstore": " x"}, {"namespace": " x"}, {"name": " x"}, {"name": ""}])
def test_every_part_of_a_name_is_validated(options):
    """Every part of a job's name is validated, and the message names the option it came from."""
    with pytest.raises(ConfigError, match=f"^{next(iter(options))} "):
        job_name("settle", **options)


def test_the_limit_holds_for_the_whole_name_as_it_is_stored():
    """A name that only becomes too long with its namespace, or by encoding, is refused as well."""
    assert len(job_name("x" * 191)) == 191
    with pytest.raises(ConfigError, match="192 characters with its namespace"):
        job_name("x" * 188, namespace="abc")
    with pytest.raises(ConfigError, match="300 characters"):
        job_name("/" * 100)


@pytest.mark.parametrize(
    ("job_id", "expected"),
    [
        ("9f1c2d3e4b5a4c6d8e7f001122334455", True),
        ("9f1c2d3e4b5a4c6dce7f001122334455", False),
        ("9f1c2d3e4b5a1c6d8e7f001122334455", False),
        ("9F1C2D3E4B5A4C6D8E7F001122334455", False),
        ("9f1c2d3e-4b5a-4c6d-8e7f-001122334455", False),
        ("settle", False),
        ("", False),
    ],
)
def test_an_id_that_apscheduler_made_up_is_recognised(job_id, expected):
    """An id that APScheduler made up, and only such an id, is recognised."""
    assert generated_id(job_id) is expected


def test_the_execution_id_is_the_job_and_the_slot():
    """An execution's id reads as the job and its slot."""
    assert slot_of("billing/settle", CronTrigger(timezone=UTC), TEN).execution_id == (
        "billing/settle/2026-09-02T10:00:00Z"
    )


def test_a_run_by_hand_is_named_by_its_id():
    """A run by hand is named by its id, so that asking twice is one run, and it is ordered by when it was asked for."""
    slot = manual_slot("settle", "ticket/7", micros(TEN))
    assert slot.execution_id == "settle/manual/ticket%2F7"
    assert slot.at == slot.scheduled_at == micros(TEN)


def test_a_run_by_hand_never_has_the_execution_id_of_a_scheduled_one():
    """An id that reads like a time cannot make a run by hand look like a scheduled run of another job."""
    by_hand = manual_slot(job_name("a"), "2026-09-02T10:00:00Z", 0)
    scheduled = slot_of(job_name("manual", namespace="a"), CronTrigger(timezone=UTC), TEN)
    assert by_hand.execution_id != scheduled.execution_id


def test_an_execution_id_fits_into_255_characters():
    """The longest execution id there can be has 255 characters, as many as idempotency keys may have."""
    assert len(manual_slot(job_name("x" * 191), "y" * 56, 0).execution_id) == 255
    with pytest.raises(ConfigError, match="by hand has 64 characters, and 63 are allowed"):
        manual_slot("settle", "y" * 57, 0)


# --- times as text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0, "1970-01-01T00:00:00Z"),
        (-1, "1969-12-31T23:59:59.999999Z"),
        (250_000, "1970-01-01T00:00:00.250Z"),
        (1_000, "1970-01-01T00:00:00.001Z"),
        (250_001, "1970-01-01T00:00:00.250001Z"),
        (micros(TEN), "2026-09-02T10:00:00Z"),
        (micros(datetime(1, 1, 1, tzinfo=UTC)), "0001-01-01T00:00:00Z"),
    ],
)
def test_a_time_has_the_shortest_of_three_forms(us, text):
    """A time is written with 0, 3 or 6 digits of a second, whichever is the shortest that says it all."""
    assert format_time(us) == text
    assert parse_time(text) == us


@pytest.mark.parametrize(
    "text",
    [
        "",
        "2026-09-02",
        "2026-09-02T10:00:00",
        "2026-09-02T10:00:00+00:00",
        "2026-09-02T10:00:00.25Z",
        "2026-09-02T10:00:00Z\n",
        "2026-13-02T10:00:00Z",
        "2026-09-02T24:00:00Z",
        "٢٠٢٦-09-02T10:00:00Z",
        "manual/7",
    ],
)
def test_text_that_is_no_time_is_refused_with_itself_in_the_message(text):
    """Text that is no time is refused, and the message shows it."""
    with pytest.raises(ValueError, match=r"no(t a UTC| such) time") as caught:
        parse_time(text)
    assert repr(text) in str(caught.value)


def test_a_time_outside_the_calendar_is_refused():
    """A time outside the years 1 to 9999 is refused instead of overflowing."""
    with pytest.raises(ValueError, match="years 1 to 9999"):
        format_time(2**62)


CALENDAR = st.datetimes(timezones=st.sampled_from([UTC, HELSINKI, NEW_YORK, timezone(timedelta(hours=-11))])).filter(
    lambda moment: 1 < moment.year < 9999
)


@given(CALENDAR)
def test_every_slot_name_parses_back(moment):
    """The name of every slot parses back to its time."""
    slot = slot_of("job", DateTrigger(moment), moment)
    assert parse_time(slot.name) == slot.at == micros(moment)


@given(CALENDAR, CALENDAR)
def test_slots_are_ordered_as_their_times_are(one, other):
    """Slots are ordered by number exactly as their times are, though their names need not be."""
    here, there = (slot_of("job", DateTrigger(moment), moment).at for moment in (one, other))
    assert (here < there) == (one.astimezone(UTC) < other.astimezone(UTC))
    assert (here == there) == (one.astimezone(UTC) == other.astimezone(UTC))


# --- warnings ---------------------------------------------------------------------------------------------------------

ADDED = TEN + timedelta(microseconds=123_456)


@pytest.mark.parametrize(
    ("trigger", "message"),
    [
        (CalendarIntervalTrigger(months=1, start_date=TEN.date(), timezone=UTC), "give start_date= as a fixed date"),
        (CalendarIntervalTrigger(days=2, start_date=TEN.date(), timezone=UTC), "give start_date="),
        (DateTrigger(ADDED - timedelta(milliseconds=3)), "give run_date= as a fixed time"),
        (DateTrigger(TEN), "give run_date="),
        (DateTrigger(ADDED + timedelta(minutes=5)), "give run_date="),
        (OrTrigger([IntervalTrigger(hours=1), CronTrigger(hour=8, timezone=UTC)]), "slot="),
        (OrTrigger([OrTrigger([IntervalTrigger(hours=1)])]), "slot="),
        (CronTrigger(minute="*", timezone=UTC, jitter=60), "jitter of 60 s reaches the next fire time, 60 s later"),
        (CronTrigger(hour=9, minute="0,1", timezone=UTC, jitter=90), "60 s later"),
        (CalendarIntervalTrigger(days=1, start_date="2020-01-01", timezone=UTC, jitter=86400), "86400 s later"),
        (IntervalTrigger(minutes=1, jitter=60), "skip whole intervals"),
        (
            OrTrigger([CronTrigger(minute=0, timezone=UTC), CronTrigger(minute=1, timezone=UTC)], jitter=60),
            "60 s later",
        ),
        (
            OrTrigger([CronTrigger(minute="*", timezone=UTC), CronTrigger(hour=8, timezone=UTC)], jitter=60),
            "60 s later",
        ),
        (
            AndTrigger([CronTrigger(minute="*/5", timezone=UTC), CronTrigger(minute="*/10", timezone=UTC)], jitter=600),
            "600 s later",
        ),
    ],
)
def test_what_keeps_nodes_from_agreeing_is_warned_about(trigger, message):
    """A trigger on whose slots nodes may not agree gets one warning, which says what to write instead."""
    (warning,) = trigger_warnings(trigger, added_at=ADDED)
    assert message in warning


@pytest.mark.parametrize(
    "trigger",
    [
        CronTrigger(minute="*", timezone=UTC),
        CronTrigger(minute="*", timezone=UTC, jitter=59),
        CronTrigger(year=2020, timezone=UTC, jitter=59),
        CronTrigger(hour="9,17", timezone=HELSINKI, jitter=3600),
        CalendarIntervalTrigger(days=1, start_date=TEN.date(), timezone=UTC),
        CalendarIntervalTrigger(months=1, start_date="2020-01-01", timezone=UTC, jitter=60),
        DateTrigger(TEN + timedelta(days=1)),
        DateTrigger(TEN + timedelta(days=1, milliseconds=250)),
        IntervalTrigger(minutes=1),
        IntervalTrigger(minutes=1, jitter=30),
        OrTrigger([CronTrigger(hour=8, timezone=UTC), CronTrigger(hour=9, timezone=UTC)], jitter=60),
        AndTrigger([CronTrigger(minute="*", timezone=UTC), CronTrigger(hour="*", timezone=UTC)], jitter=600),
        EveryQuarter(),
    ],
)
def test_a_trigger_that_nodes_agree_on_is_not_warned_about(trigger):
    """A trigger whose slots are the same on every node is not warned about."""
    assert trigger_warnings(trigger, added_at=ADDED) == []


def test_today_is_judged_in_the_zones_of_node_and_trigger():
    """A start date counts as left out if it is today for the node or for the trigger."""
    late = datetime(2026, 9, 2, 22, 30, tzinfo=UTC)
    for day in (date(2026, 9, 2), date(2026, 9, 3)):
        assert trigger_warnings(CalendarIntervalTrigger(weeks=1, start_date=day, timezone=HELSINKI), added_at=late)
    earlier = CalendarIntervalTrigger(weeks=1, start_date=date(2026, 9, 1), timezone=HELSINKI)
    assert not trigger_warnings(earlier, added_at=late)


def test_without_a_time_of_adding_only_what_the_trigger_itself_shows_is_warned_about():
    """Without the time of adding no clock is read: a date with microseconds is still told, one of today is not."""
    assert trigger_warnings(DateTrigger(ADDED))
    assert not trigger_warnings(CalendarIntervalTrigger(weeks=1, timezone=UTC))
    assert trigger_warnings(CronTrigger(minute="*", timezone=UTC, jitter=60))


def test_a_time_of_adding_without_an_offset_is_refused():
    """A time of adding without an offset is refused."""
    with pytest.raises(ValueError, match="UTC offset"):
        trigger_warnings(CronTrigger(timezone=UTC), added_at=datetime(2026, 9, 2))  # noqa: DTZ001
