"""What listeners hear beside APScheduler's own events."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from datetime import datetime, timezone

import pytest
from apscheduler import events as apscheduler_events
from apscheduler.events import EVENT_ALL, JobEvent, SchedulerEvent
from apscheduler.schedulers.background import BackgroundScheduler

import apscheduler_fence
from apscheduler_fence import (
    EVENT_FENCE_ALL,
    EVENT_JOB_LOST,
    EVENT_JOB_RECOVERED,
    EVENT_JOB_REFUSED,
    EVENT_LEASE_LOST,
    EVENT_LEASE_OVERDUE,
    JobRefusedEvent,
    LeaseEvent,
)
from apscheduler_fence.events import in_time

TEN = datetime(2026, 9, 2, 10, tzinfo=timezone.utc)
ID = "settle/2026-09-02T10:00:00Z"
CODES = {name: getattr(apscheduler_fence, name) for name in apscheduler_fence.__all__ if name.startswith("EVENT_")}
SINGLE = {name: code for name, code in CODES.items() if name != "EVENT_FENCE_ALL"}

REFUSED = JobRefusedEvent(
    EVENT_JOB_REFUSED, "settle", "default", ID, scheduled_run_time=TEN, holder="host:1:nonce", reason="held", until=TEN
)
LOST = LeaseEvent(
    EVENT_LEASE_LOST, "settle", "default", ID, scheduled_run_time=TEN, holder="host:1:nonce", token=42, attempt=2
)


def test_each_code_is_one_bit_of_its_own_above_apschedulers():
    """Codes can be combined to a mask, with APScheduler's too, and leave it room to grow."""
    assert all(code > 2**16 and code.bit_count() == 1 for code in SINGLE.values())
    assert len(set(SINGLE.values())) == len(SINGLE)
    theirs = [code for name, code in vars(apscheduler_events).items() if name.startswith("EVENT_")]
    assert all(ours & code == 0 for ours in SINGLE.values() for code in theirs)


def test_the_numbers_are_those_that_are_documented():
    """They stand in people's configurations and dashboards: they never change."""
    assert SINGLE == {
        "EVENT_JOB_REFUSED": 1048576,
        "EVENT_LEASE_LOST": 2097152,
        "EVENT_LEASE_OVERDUE": 4194304,
        "EVENT_JOB_LOST": 8388608,
        "EVENT_JOB_RECOVERED": 16777216,
    }


def test_the_mask_of_all_is_all_of_them():
    """A code added later must not be forgotten there."""
    assert sum(SINGLE.values()) == EVENT_FENCE_ALL
    assert EVENT_FENCE_ALL & EVENT_ALL == 0


@pytest.mark.parametrize(
    "code", [EVENT_JOB_REFUSED, EVENT_LEASE_LOST, EVENT_LEASE_OVERDUE, EVENT_JOB_LOST, EVENT_JOB_RECOVERED]
)
def test_a_listener_hears_what_it_asked_for_and_nothing_unasked(code):
    """One that was written for APScheduler alone is not surprised by events that it does not know."""
    heard = {"default": [], "all": [], "one": []}
    scheduler = BackgroundScheduler()
    scheduler.add_listener(heard["default"].append)
    scheduler.add_listener(heard["all"].append, EVENT_FENCE_ALL)
    scheduler.add_listener(heard["one"].append, code)
    events = [LeaseEvent(each, "settle", "default", ID) for each in SINGLE.values()]
    for event in events:
        scheduler._dispatch_event(event)
    assert heard == {"default": [], "all": events, "one": [event for event in events if event.code == code]}


@pytest.mark.parametrize("event", [REFUSED, LOST], ids=lambda event: type(event).__name__)
def test_an_event_can_be_sent_to_another_process(event):
    """A process pool's child sends its events home."""
    there = pickle.loads(pickle.dumps(event))
    assert there == event
    assert there is not event
    assert hash(there) == hash(event)


@pytest.mark.parametrize("event", [REFUSED, LOST], ids=lambda event: type(event).__name__)
def test_an_event_has_what_a_listener_of_job_events_reads(event):
    """Code that logs any job event by its usual attributes goes on working."""
    assert isinstance(event, JobEvent)
    assert (event.job_id, event.jobstore, event.scheduled_run_time) == ("settle", "default", TEN)
    assert set(vars(JobEvent(event.code, "settle", "default"))) <= set(vars(event))
    assert event.alias == SchedulerEvent(event.code).alias


def test_an_event_shows_all_that_matters():
    """Printed by a listener, it says what happened to which run, and who holds the lease."""
    assert repr(REFUSED).startswith("JobRefusedEvent(code=1048576, job_id='settle', ")
    for part in (ID, "reason='held'", "holder='host:1:nonce'"):
        assert part in repr(REFUSED)
    for part in (ID, "token=42", "attempt=2", "holder='host:1:nonce'"):
        assert part in repr(LOST)


@pytest.mark.parametrize("event", [REFUSED, LOST], ids=lambda event: type(event).__name__)
def test_an_event_cannot_be_changed(event):
    """One listener does not alter what the next one sees."""
    with pytest.raises(FrozenInstanceError):
        event.holder = "me"


def test_store_time_is_shown_in_utc_and_exactly():
    """To the microsecond, with the zone."""
    assert in_time(1_788_343_200_000_001) == TEN.replace(microsecond=1)
    assert in_time(0).tzinfo is timezone.utc
