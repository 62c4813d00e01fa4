"""A run whose lease is lost: flagged or cancelled, and nothing more of it is recorded."""

import asyncio
import threading
import time

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from loops import node_on, shut_down, until
from waiting import eventually
from watched import moment

from apscheduler_fence import EVENT_LEASE_LOST, LeaseLost, fenced
from apscheduler_fence.lease import Key, release
from apscheduler_fence.stores import open_store


def break_lease(store, name="job"):
    """As an operator does."""
    seen = store.read(Key(name, name, ""))
    [token] = store.swap([release(seen, "operator", keep_for=10**12)])
    assert token is not None


def coroutine(**policy):
    """A job that sleeps for 1.2 s, and how each of its runs ended."""
    entered, ended = [], []

    @fenced(lock_at_most="0.6s", **policy)
    async def job(fence):
        entered.append(fence)
        try:
            await asyncio.sleep(1.2)
            fence.check()
        except BaseException as error:
            ended.append(type(error))
            raise

    return job, entered, ended


def run_and_break(url, job, entered, finished=EVENT_JOB_ERROR | EVENT_JOB_EXECUTED):
    async def application():
        node = node_on(url)
        node.run(job)
        await until(lambda: entered)
        break_lease(open_store(url))
        await until(lambda: node.heard.of(finished))
        await asyncio.sleep(0.1)
        await shut_down(node)
        return node

    return asyncio.run(application())


def test_flag_lets_a_coroutine_run_on(url, rows):
    """The default: it learns of the loss at its next `fence.check()`, and is not cancelled."""
    job, entered, ended = coroutine()
    node = run_and_break(url, job, entered)
    assert ended == [LeaseLost]
    assert isinstance(node.heard.one(EVENT_JOB_ERROR).exception, LeaseLost)
    node.heard.one(EVENT_LEASE_LOST)
    assert rows()[0].state == "lost"


def test_cancel_cancels_a_coroutine(url, rows):
    """It ends inside its await; the event says LeaseLost, and the record stays as it was left."""
    job, entered, ended = coroutine(on_lost="cancel")
    began = time.monotonic()
    node = run_and_break(url, job, entered)
    assert ended == [asyncio.CancelledError]
    assert time.monotonic() - began < 1.2
    assert isinstance(node.heard.one(EVENT_JOB_ERROR).exception, LeaseLost)
    node.heard.one(EVENT_LEASE_LOST)
    assert rows()[0].state == "lost"


def test_cancelling_one_run_leaves_the_others_of_its_submission(url):
    """Three run times in one submission: the one whose lease was lost is cancelled, and the next two run."""
    entered = []

    @fenced(lock_at_most="0.6s", on_lost="cancel")
    async def job(fence):
        entered.append(fence.slot)
        if len(entered) == 1:
            await asyncio.sleep(60)

    async def application():
        node = node_on(url)
        node.scheduler.pause()
        node.scheduler.add_job(
            job, "interval", seconds=1, id="job", next_run_time=moment(-2.5), coalesce=False, misfire_grace_time=None
        )
        node.scheduler.resume()
        await until(lambda: entered)
        node.scheduler.remove_job("job")
        break_lease(open_store(url))
        await until(lambda: len(node.heard.of(EVENT_JOB_EXECUTED)) == 2)
        await shut_down(node)
        return node

    node = asyncio.run(application())
    assert len(entered) == len(set(entered)) == 3
    assert isinstance(node.heard.one(EVENT_JOB_ERROR).exception, LeaseLost)


def test_a_coroutine_that_survives_its_cancelling_is_not_cancelled_later(url):
    """It may catch it to clean up: what it returns is its outcome, and the task goes on to its events."""
    entered = []

    @fenced(lock_at_most="0.6s", on_lost="cancel")
    async def job(fence):
        entered.append(fence)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)
            return "cleaned up"

    node = run_and_break(url, job, entered)
    assert node.heard.one(EVENT_JOB_EXECUTED).retval == "cleaned up"
    assert node.heard.of(EVENT_JOB_ERROR) == []


def test_a_cancelling_that_comes_after_the_end_hits_nothing(url):
    """The coroutine has returned when the loop gets to it: the other run times of its submission run."""
    entered = []

    @fenced(on_lost="cancel")
    async def job(fence):
        entered.append(fence.slot)
        if len(entered) == 1:
            fence._hold.cancel()  # as the keeper's thread would, at this moment

    async def application():
        node = node_on(url)
        node.scheduler.pause()
        node.scheduler.add_job(
            job, "interval", seconds=1, id="job", next_run_time=moment(-2.5), coalesce=False, misfire_grace_time=None
        )
        node.scheduler.resume()
        await until(lambda: len(node.heard.of(EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)) >= 3)
        await shut_down(node)
        return node

    assert asyncio.run(application()).heard.of(EVENT_JOB_ERROR) == []
    assert len(set(entered)) >= 3


@pytest.mark.parametrize("on_lost", ["flag", "cancel"])
def test_a_function_gets_lease_lost_at_its_next_check(start, store, rows, on_lost):
    """A thread cannot be cancelled: both settings mean the same to it."""
    node, go_on, entered = start(lock_at_most="0.6s"), threading.Event(), []

    @fenced(on_lost=on_lost)
    def job(fence):
        entered.append(fence)
        eventually(lambda: fence.lost)
        assert go_on.wait(10)
        fence.check()

    node.run(job)
    eventually(lambda: entered)
    break_lease(store)
    node.heard.one(EVENT_LEASE_LOST)
    assert node.heard.of(EVENT_JOB_ERROR) == []
    go_on.set()
    assert isinstance(node.heard.one(EVENT_JOB_ERROR).exception, LeaseLost)
    assert rows()[0].state == "lost"


def test_a_function_that_never_checks_runs_to_its_end_and_that_is_not_recorded(start, store, rows):
    """Only a guard at the resource stops it; its outcome is an event and a warning, not a record."""
    node, go_on, entered = start(), threading.Event(), []

    def job():
        entered.append(True)
        assert go_on.wait(10)

    node.run(job)
    eventually(lambda: entered)
    break_lease(store)
    go_on.set()
    node.heard.one(EVENT_JOB_EXECUTED)
    node.heard.one(EVENT_LEASE_LOST)
    assert rows()[0].state == "lost"
