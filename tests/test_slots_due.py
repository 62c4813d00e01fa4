"""The slots of a schedule are those that a node which never stopped would have run."""

from datetime import date, datetime, timedelta, timezone
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from apscheduler.triggers.calendarinterval import CalendarIntervalTrigger
from apscheduler.triggers.combining import AndTrigger, OrTrigger
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_fence.slots import shortest_period, slot_of, slots_due

UTC = timezone.utc
HELSINKI = ZoneInfo("Europe/Helsinki")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TEN = datetime(2026, 9, 2, 10, tzinfo=UTC)
AUTUMN = datetime(2026, 10, 25, tzinfo=UTC)
SPRING = datetime(2026, 3, 29, tzinfo=UTC)
DAY = timedelta(days=1)


def micros(moment):
    return (moment - EPOCH) // timedelta(microseconds=1)


def due(trigger, since, until, **rule):
    return [each.name for each in slots_due("job", trigger, micros(since), micros(until), **rule)]


def run_by_a_node(trigger, since, until, **rule):
    """The slots of the run times that APScheduler computes for a node that runs all along."""
    slots = []
    run_time = trigger.get_next_fire_time(None, since)
    while run_time is not None and run_time <= until:
        slots.append(slot_of("job", trigger, run_time, **rule).name)
        run_time = trigger.get_next_fire_time(run_time, run_time)
    return list(dict.fromkeys(slots))


@pytest.mark.parametrize(
    ("trigger", "since"),
    [
        (CronTrigger(minute="*/7", timezone=UTC), TEN),
        (CronTrigger(hour="3,4", minute=30, timezone=HELSINKI), AUTUMN),
        (CronTrigger(minute="*/20", timezone=HELSINKI), AUTUMN),
        (CronTrigger(minute="*/20", timezone=HELSINKI), SPRING + timedelta(minutes=50)),
        (CronTrigger(hour=3, minute=30, timezone=HELSINKI), SPRING - 3 * DAY),
        (DateTrigger(TEN + timedelta(hours=1)), TEN),
        (DateTrigger(TEN - timedelta(hours=30)), TEN),
        (CalendarIntervalTrigger(days=1, hour=12, start_date=date(2026, 8, 1), timezone=UTC), TEN),
        (
            OrTrigger([CronTrigger(hour=12, timezone=UTC), CronTrigger(hour="*/6", minute="0,30", timezone=UTC)]),
            TEN,
        ),
        (IntervalTrigger(minutes=10, start_date=TEN, timezone=UTC), TEN),
    ],
    ids=str,
)
def test_they_are_what_a_node_that_never_stops_would_run(trigger, since):
    """Without jitter, and on an interval's grid, the two lists are the same."""
    until = since + 2 * DAY
    expected = run_by_a_node(trigger, since, until)
    expected = [name for name in expected if datetime.fromisoformat(name.replace("Z", "+00:00")) >= since]
    slots = due(trigger, since, until)
    assert slots[: len(expected)] == expected[: len(slots)]
    assert abs(len(slots) - len(expected)) <= (1 if isinstance(trigger, IntervalTrigger) else 0)


def test_jitter_changes_no_slot_but_the_last():
    """A jittered schedule has the slots of the bare one, less those whose jitter is not over."""
    bare = CronTrigger(minute="*/10", timezone=UTC)
    jittered = CronTrigger(minute="*/10", timezone=UTC, jitter=120)
    until = TEN + timedelta(minutes=31)
    assert due(bare, TEN, until)[-1] == "2026-09-02T10:30:00Z"
    assert due(jittered, TEN, until) == due(bare, TEN, until)[:-1]


def test_an_interval_s_window_is_due_when_it_is_over():
    """Nodes run an interval anywhere in its window, so the window under way may still be run."""
    every = IntervalTrigger(minutes=10, start_date=TEN + timedelta(minutes=7), timezone=UTC)
    slots = due(every, TEN + timedelta(minutes=1), TEN + timedelta(minutes=39))
    assert slots == ["2026-09-02T10:10:00Z", "2026-09-02T10:20:00Z"]


def test_an_interval_ends_with_its_end_date():
    """Windows after the trigger's end are nobody's to run."""
    every = IntervalTrigger(minutes=10, start_date=TEN, end_date=TEN + timedelta(minutes=15), timezone=UTC)
    assert due(every, TEN, TEN + DAY) == ["2026-09-02T10:00:00Z", "2026-09-02T10:10:00Z"]


def test_an_and_trigger_is_due_where_all_agree_and_the_search_ends():
    """Asked itself, an and-trigger would search for ever past the last agreement."""
    both = AndTrigger([CronTrigger(hour="*/2", timezone=UTC), CronTrigger(hour="*/3", timezone=UTC)])
    assert due(both, TEN, TEN + timedelta(hours=9)) == ["2026-09-02T12:00:00Z", "2026-09-02T18:00:00Z"]
    never = AndTrigger([CronTrigger(minute=1, timezone=UTC), CronTrigger(minute=2, timezone=UTC)])
    assert due(never, TEN, TEN + DAY) == []


def test_an_interval_inside_a_combination_counts_from_its_own_start():
    """There it is the scheduled time that names the slot."""
    either = OrTrigger([IntervalTrigger(hours=4, start_date=TEN, end_date=TEN + timedelta(hours=9), timezone=UTC)])
    names = ["2026-09-02T10:00:00Z", "2026-09-02T14:00:00Z", "2026-09-02T18:00:00Z"]
    assert due(either, TEN, TEN + DAY) == names


def test_the_policy_s_own_rule_names_the_slots():
    """Several fire times of one slot are one slot."""
    often = CronTrigger(minute="*/10", timezone=UTC)
    hours = ["2026-09-02T10:00:00Z", "2026-09-02T11:00:00Z"]
    assert due(often, TEN, TEN + timedelta(minutes=90), slot=timedelta(hours=1)) == hours
    assert due(often, TEN, TEN + timedelta(minutes=90), slot=lambda at: at.replace(minute=0)) == hours


def test_a_long_time_is_not_cut_short():
    """A job of every second has more slots in two days than one walk may take steps."""
    every_second = CronTrigger(second="*", timezone=UTC)
    found = slots_due("job", every_second, micros(TEN), micros(TEN + 2 * DAY))
    beyond = next(islice(found, 100_005, None))
    assert beyond.at == micros(TEN) + 100_005 * 1_000_000


def test_the_shortest_period_is_that_of_the_bare_schedule():
    """What `lock_at_least` has to be shorter than."""
    assert shortest_period(CronTrigger(hour="8,9,17", timezone=UTC), since=TEN) == timedelta(hours=1)
    assert shortest_period(IntervalTrigger(minutes=10, jitter=30), since=TEN) == timedelta(minutes=10)
    assert shortest_period(DateTrigger(TEN), since=TEN) is None
