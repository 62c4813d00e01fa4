"""What the records say, and what an operator may do, over every store."""

from datetime import datetime, timedelta, timezone

import pytest
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger
from claims import HOUR, SECOND, ask, run, win

from apscheduler_fence.errors import FenceError
from apscheduler_fence.history import History
from apscheduler_fence.lease import Key, Refusal, claim, settle
from apscheduler_fence.slots import format_time, manual_slot, slot_of
from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.memory import MemoryStore

UTC = timezone.utc
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TEN = datetime(2026, 9, 2, 10, tzinfo=UTC)
WHENEVER = timedelta(days=-36500)
"""A grace that makes slots due whatever the store's clock says."""
MINUTELY = CronTrigger(minute="*", timezone=UTC)


@pytest.fixture
def store(store_url):
    """An empty store, in the namespace `app`."""
    store = open_store(store_url, "app")
    store.open()
    yield store
    store.close()


@pytest.fixture
def history(store):
    """Questions to that store."""
    return History(store)


def micros(moment):
    return (moment - EPOCH) // timedelta(microseconds=1)


def at(minute, job="app/pay", **terms):
    """A claim of the slot so many minutes after ten."""
    slot = slot_of(job, MINUTELY, TEN + timedelta(minutes=minute))
    times = {"slot": slot.name, "slot_at": slot.at, "scheduled_at": slot.scheduled_at, "max_early": 10**18}
    return ask(job, **{**times, **terms})


def ids(records):
    return [record.id for record in records]


def test_runs_come_newest_first_and_by_job_state_and_time(store, history):
    """Each filter leaves out what it does not name, and the namespace in front of a job may be left out."""
    run(store, at(0), error=None)
    run(store, at(1), "failed", "boom")
    run(store, at(2))
    run(store, at(1, job="app/mail"))
    assert ids(history.runs("pay")) == [f"app/pay/2026-09-02T10:0{minute}:00Z" for minute in (2, 1, 0)]
    assert ids(history.runs("app/pay", states=["failed"])) == ["app/pay/2026-09-02T10:01:00Z"]
    assert ids(history.runs(since=TEN + timedelta(minutes=2))) == ["app/pay/2026-09-02T10:02:00Z"]
    assert len(list(history.runs(limit=3))) == 3
    assert len(list(history.runs(limit=None))) == 4


def test_a_record_tells_the_whole_story_of_a_run(store, history):
    """Its times are datetimes of the store's clock."""
    before = history.now()
    grant = run(store, at(0, func="pay:pay", job_id="pay", jobstore="default"), "failed", "ValueError: boom")
    record = history.run("pay/2026-09-02T10:00:00Z")
    assert record.id == "app/pay/2026-09-02T10:00:00Z"
    assert (record.job, record.slot, record.lease) == ("app/pay", "2026-09-02T10:00:00Z", "app/pay")
    assert (record.state, record.attempt, record.error) == ("failed", 1, "ValueError: boom")
    assert (record.token, record.holder, record.func) == (grant.token, grant.holder, "pay:pay")
    assert record.scheduled_at == TEN
    assert before - timedelta(seconds=1) <= record.started_at <= record.finished_at
    assert record.took == record.finished_at - record.started_at
    assert record.kept_until > record.finished_at


def test_an_execution_that_was_never_recorded_is_none(history):
    """Not an error: nobody ran it."""
    assert history.run("pay/2026-09-02T10:00:00Z") is None
    assert history.run("no execution id at all") is None


def test_a_run_by_hand_is_found_by_its_id(store, history):
    """Its slot has a slash of its own, which is no part of the job's name."""
    slot = manual_slot("app/pay", "ticket/12:b", micros(TEN))
    run(store, ask("app/pay", slot=slot.name))
    record = history.run(slot.execution_id)
    assert (record.job, record.slot) == ("app/pay", slot.name)


def test_held_leases_are_shown_with_who_holds_them(store, history):
    """Those that end first come first, and those that are over say so."""
    dead = win(store, at(0, job="app/dead", lock_at_most=1))
    alive = win(store, at(0, lock_at_most=HOUR))
    first, second = history.held()
    assert (first.lease, first.execution_id, first.over) == ("app/dead", "app/dead/2026-09-02T10:00:00Z", True)
    assert (second.lease, second.token, second.holder, second.over) == ("app/pay", alive.token, alive.holder, False)
    assert second.attempt == 1
    assert timedelta(minutes=59) < second.until - second.since <= timedelta(hours=1, seconds=1)
    assert first.token == dead.token
    store.swap([settle(alive, "succeeded"), settle(dead, "succeeded")])
    assert history.held() == ()


def test_counts_are_by_job_and_state(store, history):
    """Also for one job, or from a time on."""
    run(store, at(0))
    run(store, at(1))
    run(store, at(2), "failed")
    win(store, at(0, job="app/mail"))
    assert history.counts() == {"app/mail": {"running": 1}, "app/pay": {"succeeded": 2, "failed": 1}}
    assert history.counts("mail") == {"app/mail": {"running": 1}}
    assert history.counts(since=TEN + timedelta(minutes=1)) == {"app/pay": {"succeeded": 1, "failed": 1}}


def test_another_namespace_is_not_looked_into(store, store_url):
    """Two applications on one store do not see each other."""
    run(store, at(0))
    with History(store_url, "other") as others:
        assert list(others.runs()) == []
        assert others.run("pay/2026-09-02T10:00:00Z") is None


def test_a_naive_time_is_refused(history):
    """Nobody could say which moment it means."""
    with pytest.raises(ValueError, match="UTC offset"):
        history.runs(since=datetime(2026, 9, 2))  # noqa: DTZ001 - that is the point


# --- missing ----------------------------------------------------------------------------------------------------------


def test_missing_are_the_slots_without_a_record(store, history):
    """Whatever became of those that have one."""
    run(store, at(0))
    run(store, at(2), "failed")
    win(store, at(3))
    since, until = TEN, TEN + timedelta(minutes=4)
    missing = history.missing("pay", MINUTELY, since, until, grace=WHENEVER)
    assert [slot.name for slot in missing.slots] == ["2026-09-02T10:01:00Z", "2026-09-02T10:04:00Z"]
    assert (missing.job, missing.since, missing.until) == ("app/pay", since, until)
    assert (missing.expected, missing.pruned) == (5, False)


def test_a_slot_is_not_missing_while_a_node_may_still_come_to_it(history):
    """The store's clock, less the grace, ends the search."""
    now = history.now()
    missing = history.missing("pay", CronTrigger(second="*", timezone=UTC), now - timedelta(minutes=2))
    assert now - timedelta(minutes=1) <= missing.until <= now - timedelta(seconds=50)
    assert all(slot.at <= micros(missing.until) for slot in missing.slots)
    assert 58 <= missing.expected <= 71


def test_intervals_are_matched_by_their_windows(store, history):
    """Nodes that started at different moments fill the same window."""
    every = IntervalTrigger(minutes=10, timezone=UTC)
    seven = slot_of("app/pay", every, TEN + timedelta(minutes=7))
    run(store, ask("app/pay", slot=seven.name, slot_at=seven.at, max_early=10**18))
    missing = history.missing("pay", every, TEN, TEN + timedelta(minutes=30), grace=WHENEVER)
    assert [slot.name for slot in missing.slots] == ["2026-09-02T10:10:00Z", "2026-09-02T10:20:00Z"]


def test_a_lease_only_run_fills_its_slot(store, history):
    """With `once_per_slot=False` a nonce follows the slot's time."""
    run(store, at(0, slot="2026-09-02T10:00:00Z~1234567890ab"))
    assert history.missing("pay", MINUTELY, TEN, TEN, grace=WHENEVER).slots == ()


@pytest.mark.backends("memory")
def test_many_slots_are_matched_in_pieces(store, history):
    """What was recorded on the seam of two pieces is found."""
    for minute in (4999, 5000, 5001):
        run(store, at(minute))
    missing = history.missing("pay", MINUTELY, TEN, TEN + timedelta(days=5), grace=WHENEVER)
    assert missing.expected == 5 * 1440 + 1
    assert len(missing.slots) == missing.expected - 3


def test_what_was_pruned_is_not_called_missing(store, history):
    """Its records are gone, so nobody can say; the answer begins after them and says so."""
    run(store, at(0, keep_for=-SECOND))
    assert history.prune() == 1
    missing = history.missing("pay", MINUTELY, TEN, TEN + timedelta(minutes=1), grace=WHENEVER)
    assert [slot.name for slot in missing.slots] == ["2026-09-02T10:01:00Z"]
    assert missing.pruned
    shared = history.missing("pay", MINUTELY, TEN, TEN, lease="another", grace=WHENEVER)
    assert not shared.pruned


# --- verbs ------------------------------------------------------------------------------------------------------------


def test_releasing_a_lease_ends_its_run_and_fences_its_holder(store, history):
    """The next token is larger, and what the old holder reports changes nothing."""
    stale = win(store, at(0, lock_at_least=HOUR))
    released = history.release("pay")
    assert (released.lease, released.token, released.holder) == ("app/pay", stale.token, stale.holder)
    assert (released.execution_id, released.state) == ("app/pay/2026-09-02T10:00:00Z", "lost")
    assert released.spacing_until > history.now()
    assert history.held() == ()
    assert history.run("pay/2026-09-02T10:00:00Z").state == "lost"
    assert store.swap([settle(stale, "succeeded")]) == [None]


def test_after_a_release_the_next_slot_is_granted_a_larger_token(store, history):
    """Without `lock_at_least` at once."""
    stale = win(store, at(0))
    assert history.release("app/pay").spacing_until is None
    assert win(store, at(1)).token > stale.token


def test_a_released_run_that_may_be_repeated_waits_for_its_next_attempt(store, history):
    """At-least-once executions are not lost to an operator."""
    win(store, at(0, delivery="at_least_once", max_attempts=3))
    assert history.release("pay").state == "waiting"


def test_only_what_the_operator_saw_is_released(store, history):
    """A token that is no longer the lease's releases nothing, and a free lease is none to release."""
    assert history.release("pay") is None
    old = run(store, at(0))
    assert history.release("pay") is None
    new = win(store, at(1))
    assert history.release("pay", token=old.token) is None
    assert history.release("pay", token=new.token).token == new.token


@pytest.mark.parametrize("state", ["lost", "failed", "cancelled"])
def test_what_ended_without_success_may_run_once_more(store, history, state):
    """The same execution, with the next attempt and a larger token."""
    grant = run(store, at(0), state)
    record = history.retry("pay/2026-09-02T10:00:00Z")
    assert (record.state, record.attempt, record.max_attempts) == ("waiting", 1, 2)
    again = at(0)
    assert win(store, again).attempt == 2
    assert history.run("pay/2026-09-02T10:00:00Z").token > grant.token


def test_what_succeeded_or_still_runs_is_not_run_again(store, history):
    """A refusal says which of the two, and what nobody recorded is an error."""
    run(store, at(0))
    win(store, at(1))
    assert history.retry("pay/2026-09-02T10:00:00Z").reason == "done"
    assert history.retry("pay/2026-09-02T10:01:00Z").reason == "running"
    with pytest.raises(LookupError, match="app/pay/2026-09-02T10:02:00Z"):
        history.retry("pay/2026-09-02T10:02:00Z")


def test_pruning_goes_on_until_nothing_is_left_and_keeps_what_is_not_due(store, history, monkeypatch):
    """And the pruned slot stays closed."""
    monkeypatch.setattr("apscheduler_fence.history.PRUNE_LIMIT", 2)
    for minute in range(5):
        run(store, at(minute, keep_for=-SECOND))
    run(store, at(9))
    assert history.prune() == 5
    assert ids(history.runs()) == ["app/pay/2026-09-02T10:09:00Z"]
    refusal = claim(store.read(Key("app/pay", "app/pay", "2026-09-02T10:03:00Z")), at(3))
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "pruned"


@pytest.mark.backends("memory")
def test_nothing_is_pruned_while_the_clocks_disagree():
    """A wrong clock must not delete what it takes for old."""
    store = MemoryStore(clock=lambda: micros(datetime.now(UTC)) + 48 * HOUR)
    run(store, at(0, keep_for=-SECOND))
    with pytest.raises(FenceError, match="nothing is pruned"):
        History(store).prune()
    assert len(list(History(store).runs())) == 1


@pytest.mark.backends("sqlite")
def test_a_store_that_was_handed_in_stays_open(store, store_url):
    """Who opened it closes it."""
    with History(store) as history:
        history.now()
    assert store.read(Key("", "", "")).now
    with History(store_url, "app", table_prefix="fence_") as mine:
        assert mine.open() is not None
        assert format_time(micros(mine.now()))
