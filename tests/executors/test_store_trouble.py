"""A store that does not answer means not granted: a job never starts on an unknown outcome."""

import logging
import threading
import time

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from trouble import TroubledStore
from waiting import eventually
from watched import moment

from apscheduler_fence import EVENT_JOB_LOST, EVENT_JOB_REFUSED, EVENT_LEASE_LOST, LeaseLost, StoreError, current_fence
from apscheduler_fence.stores import open_store


@pytest.fixture
def store(url):
    return TroubledStore(open_store(url))


def test_a_store_that_is_down_does_not_stop_the_application_from_starting(start, store, caplog):
    """Neither start nor shutdown waits for it; it is logged once, and what was missing is made up for."""
    store.down = True
    begin = time.monotonic()
    node = start(store)
    assert time.monotonic() - begin < 1
    eventually(lambda: "The store does not answer" in caplog.text)
    store.down = False
    node.run(int)
    node.heard.one(EVENT_JOB_EXECUTED)


def test_a_slot_waits_for_the_store_and_is_then_given_up(start, store, rows, caplog):
    """After `store_patience`: EVENT_JOB_ERROR with StoreError, the job not run; the next slot works."""
    node, entered = start(store, store_patience="0.5s"), []
    store.down = True
    at = moment()
    node.run(entered.append, 1, at=at)
    event = node.heard.one(EVENT_JOB_ERROR)
    assert isinstance(event.exception, StoreError)
    assert event.scheduled_run_time == at
    assert 0.5 <= (moment() - at).total_seconds() < 3
    assert store.calls.count("read") + store.calls.count("open") >= 2
    assert 'Job "job" waits for the store' in caplog.text
    store.down = False
    assert (entered, rows()) == ([], [])
    node.run(entered.append, 2, job_id="next")
    node.heard.one(EVENT_JOB_EXECUTED)
    assert entered == [2]


def test_a_slot_that_finds_the_store_again_in_time_runs(start, store):
    """A short outage delays the run and does not lose it."""
    node = start(store)
    store.down = True
    node.run(int)
    time.sleep(0.4)
    store.down = False
    node.heard.one(EVENT_JOB_EXECUTED)
    assert node.heard.of(EVENT_JOB_ERROR) == []


def test_contended_and_failed_are_different_answers(start, store, url):
    """A refusal is no error, and an error no refusal."""
    winner, node, at = start(url), start(store, store_patience=0), moment()
    winner.run(int, at=at)
    winner.heard.one(EVENT_JOB_EXECUTED)
    node.run(int, at=at)
    node.heard.one(EVENT_JOB_REFUSED)
    store.down = True
    node.run(int, at=at, job_id="other")
    node.heard.one(EVENT_JOB_ERROR)
    assert len(node.heard.of(EVENT_JOB_REFUSED | EVENT_JOB_ERROR)) == 2


@pytest.mark.parametrize("fault", ["losing", "failing"])
def test_a_claim_without_an_answer_is_read_back_and_runs_once(start, store, rows, fault):
    """Applied or not: the nonce in the row tells, and the token that is handed out is the one recorded."""
    node, tokens = start(store), []
    node.run(int, job_id="warm-up")
    node.heard.one(EVENT_JOB_EXECUTED)
    getattr(store, fault)["swap"] = 1
    node.run(lambda: tokens.append(current_fence().token))
    eventually(lambda: len(node.heard.of(EVENT_JOB_EXECUTED)) == 2)
    assert tokens == [row.token for row in rows() if row.job == "job"]
    assert {row.state for row in rows()} == {"succeeded"}
    assert node.heard.of(EVENT_JOB_ERROR | EVENT_JOB_REFUSED | EVENT_LEASE_LOST) == []


def test_a_claim_whose_answer_comes_too_late_is_not_run(start, store, rows):
    """The lease ran out while the outcome was unknown: error event, recorded as cancelled, the job not entered."""
    node, entered = start(store, lock_at_most="0.3s", sweep="60s"), []
    eventually(lambda: "held_leases" in store.calls)
    store.losing["swap"] = 1
    store.failing["read"] = 0
    node.run(lambda: entered.append(1))
    eventually(lambda: "swap" in store.calls)
    store.failing["read"] = 3
    event = node.heard.one(EVENT_JOB_ERROR)
    assert isinstance(event.exception, LeaseLost)
    assert entered == []
    assert [row.state for row in rows()] == ["cancelled"]


def test_a_displaced_run_is_announced_even_if_the_claims_answer_was_lost(start, store, rows):
    """The next slot's claim ends a dead node's run; reading back says that it was this swap that did it."""
    node = start(store, lock_at_most="0.3s", sweep="60s", lease="shared")
    eventually(lambda: "held_leases" in store.calls)
    keeper, go_on = node.executor._node.keeper, threading.Event()
    node.run(go_on.wait, 10, job_id="dead")
    [hold] = eventually(lambda: keeper.held)
    keeper.drop(hold)  # as if its node had died
    time.sleep(0.4)
    store.losing["swap"] = 1
    node.run(int, job_id="next")
    lost = node.heard.one(EVENT_JOB_LOST)
    assert (lost.job_id, lost.holder, lost.token) == ("dead", hold.grant.holder, hold.grant.token)
    eventually(lambda: node.heard.of(EVENT_JOB_EXECUTED))
    go_on.set()
    node.heard.one(EVENT_LEASE_LOST)
    assert {row.job: row.state for row in rows()} == {"dead": "lost", "next": "succeeded"}


@pytest.mark.parametrize("fault", ["losing", "failing"])
def test_a_settle_without_an_answer_does_not_touch_the_jobs_result(start, store, rows, caplog, fault):
    """EXECUTED comes at once with its value; the record follows; nothing is said to be lost."""
    caplog.set_level(logging.INFO)
    node = start(store)
    go_on = threading.Event()
    node.run(lambda: go_on.wait(10) and "value")
    eventually(rows)
    getattr(store, fault)["swap"] = 3
    go_on.set()
    assert node.heard.one(EVENT_JOB_EXECUTED).retval == "value"
    eventually(lambda: rows()[0].state == "succeeded")
    eventually(lambda: node.executor._node.keeper._unsettled == [])
    assert node.heard.of(EVENT_JOB_ERROR | EVENT_LEASE_LOST) == []
    assert "not recorded yet, and repeated until it is" in caplog.text


def test_a_settle_without_an_answer_does_not_touch_the_jobs_exception(start, store, rows):
    """The event carries what the job raised, not what the store did; the record follows."""
    node, go_on = start(store), threading.Event()

    def job():
        go_on.wait(10)
        raise KeyError("mine")

    node.run(job)
    eventually(rows)
    store.failing["swap"] = 2
    go_on.set()
    assert repr(node.heard.one(EVENT_JOB_ERROR).exception) == "KeyError('mine')"
    eventually(lambda: rows()[0].state == "failed")


def test_shutdown_waits_for_what_is_yet_to_be_recorded(start, store, rows):
    """A settle under repetition is not dropped by a shutdown within `store_patience`."""
    node, go_on = start(store), threading.Event()
    node.run(go_on.wait, 10)
    eventually(rows)
    store.failing["swap"] = 3
    go_on.set()
    node.heard.one(EVENT_JOB_EXECUTED)
    node.scheduler.shutdown()
    assert rows()[0].state == "succeeded"
    assert store.closed == 1


def test_shutdown_does_not_wait_for_ever(start, store):
    """A store that never answers is waited for as long as `store_patience`."""
    node, go_on = start(store, store_patience="0.5s"), threading.Event()
    node.run(go_on.wait, 10)
    eventually(lambda: node.executor._node.keeper.held)
    store.down = True
    go_on.set()
    node.heard.one(EVENT_JOB_EXECUTED)
    begin = time.monotonic()
    node.scheduler.shutdown()
    assert time.monotonic() - begin < 3


def test_fifty_slots_find_a_store_that_came_back(start, store, rows):
    """An outage in the middle of the work: each slot before, during and after it has exactly one outcome."""
    node, entered = start(store, store_patience="20s", inner="threadpool", max_workers=5), []

    def job(number):
        time.sleep(0.02)
        entered.append(number)

    for number in range(50):
        node.run(job, number, job_id=f"job {number}")
    eventually(lambda: len(entered) > 5)
    store.down = True
    time.sleep(0.3)
    store.down = False
    eventually(lambda: len(node.heard.of(EVENT_JOB_EXECUTED)) == 50, within=30)
    assert sorted(entered) == list(range(50))
    eventually(lambda: {row.state for row in rows()} == {"succeeded"})
