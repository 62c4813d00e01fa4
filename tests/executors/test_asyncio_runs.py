"""Coroutines on an event loop: the store's answers are awaited beside it, and being cancelled leaves nothing behind."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timezone

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from trouble import TroubledStore
from waiting import eventually
from watched import Watched, moment, own_threads

from apscheduler_fence import EVENT_LEASE_LOST, EVENT_LEASE_OVERDUE, FencedExecutor, current_fence, fenced
from apscheduler_fence.runner import _submit, run_on_loop
from apscheduler_fence.stores import open_store


def node_on(store, **options):
    node = Watched(AsyncIOScheduler(timezone=timezone.utc))
    node.scheduler.add_executor(FencedExecutor(store, **options))
    node.scheduler.start()
    return node


async def until(condition, within=10.0):
    """As `eventually`, without blocking the loop."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


async def shut_down(node):
    node.scheduler.shutdown()
    await until(lambda: not node.scheduler.running)


def test_the_lease_is_held_until_the_coroutine_has_been_awaited(url, rows):
    """A coroutine function returns at once; its run has ended when what it returned was awaited."""

    async def application():
        node = node_on(url, lock_at_most="0.4s")
        go_on = asyncio.Event()
        node.run(go_on.wait)
        await until(rows)
        await asyncio.sleep(1)
        assert rows()[0].state == "running"
        assert node.executor._node.keeper.held[0].remaining() > 0
        go_on.set()
        await until(lambda: node.heard.of(EVENT_JOB_EXECUTED))
        await shut_down(node)

    asyncio.run(application())
    assert rows()[0].state == "succeeded"


def test_a_slow_store_does_not_hold_up_the_loop(url):
    """Reads and swaps are done on threads of the executor's own."""

    class SlowStore(TroubledStore):
        def _through(self, verb, *args):
            time.sleep(0.3)
            return super()._through(verb, *args)

    async def application():
        node = node_on(SlowStore(open_store(url)))
        node.run(asyncio.sleep, 0)
        longest = 0.0
        while not node.heard.of(EVENT_JOB_EXECUTED):
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)
        await shut_down(node)
        return longest

    assert asyncio.run(application()) < 0.25


def test_the_current_fence_follows_into_threads_and_tasks(url):
    """`current_fence()` works below `asyncio.to_thread` and in tasks, and not beside the run."""

    async def job(fence):
        in_thread = await asyncio.to_thread(current_fence)
        in_task = await asyncio.create_task(_fence())
        return in_thread is in_task is fence

    async def application():
        node = node_on(url)
        node.run(fenced(job))
        await until(lambda: node.heard.of(EVENT_JOB_EXECUTED | EVENT_JOB_ERROR))
        await shut_down(node)
        return node.heard.one(EVENT_JOB_EXECUTED).retval

    assert asyncio.run(application()) is True


async def _fence():
    return current_fence()


@pytest.mark.parametrize("ending", ["shutdown", "end of asyncio.run"])
def test_a_cancelled_coroutine_is_recorded_as_cancelled_and_its_lease_given_back(url, rows, ending):
    """The settle does not run on the loop that is going away."""

    async def application():
        node = node_on(url)
        node.run(asyncio.sleep, 60)
        await until(lambda: node.executor._node.keeper.held)
        if ending == "shutdown":
            await shut_down(node)
            await until(lambda: node.heard.of(EVENT_JOB_ERROR))
        return node

    node = asyncio.run(application())
    [row] = eventually(lambda: (found := rows()) and found[0].state != "running" and found)
    assert row.state == "cancelled"
    assert node.executor._node.keeper.held == ()
    if ending == "shutdown":
        assert isinstance(node.heard.one(EVENT_JOB_ERROR).exception, asyncio.CancelledError)
    else:
        node.executor.shutdown()


class GatedStore(TroubledStore):
    """Its next call of one verb waits at a gate, after it was applied."""

    def __init__(self, store, verb):
        super().__init__(store)
        self.verb, self.at_gate, self.gate = verb, threading.Event(), threading.Event()

    def _through(self, verb, *args):
        if verb == self.verb and threading.current_thread().name.startswith("apscheduler-fence-store"):
            answer = super()._through(verb, *args)
            self.at_gate.set()
            self.gate.wait(10)
            return answer
        return super()._through(verb, *args)


def test_a_claim_in_flight_when_its_task_is_cancelled_is_given_back(url, rows):
    """The swap was applied and its answer comes after the shutdown: recorded as cancelled, the job not entered."""
    store, entered = GatedStore(open_store(url), "swap"), []

    async def job():
        entered.append(1)

    async def application():
        node = node_on(store)
        node.run(job)
        await until(store.at_gate.is_set)
        await shut_down(node)
        await until(lambda: node.heard.of(EVENT_JOB_ERROR))
        assert rows()[0].state == "running"
        store.gate.set()

    asyncio.run(application())
    [row] = eventually(lambda: (found := rows()) and found[0].state != "running" and found)
    assert row.state == "cancelled"
    assert entered == []


def test_a_claim_that_failed_while_its_task_was_cancelled_is_not_tried_again(url, rows):
    """The swap in flight found the lease moved: for a run that will not be, nobody asks a second time."""

    class MovedLease(GatedStore):
        def swap(self, changes):
            if self.at_gate.is_set():
                return super().swap(changes)
            self._through("swap", [])
            return [None]

    store = MovedLease(open_store(url), "swap")

    async def application():
        node = node_on(store)
        node.run(asyncio.sleep, 0)
        await until(store.at_gate.is_set)
        await shut_down(node)
        await until(lambda: node.heard.of(EVENT_JOB_ERROR))
        store.gate.set()

    asyncio.run(application())
    eventually(lambda: not own_threads())
    assert rows() == []


def test_a_task_cancelled_before_its_claim_leaves_the_slot_to_others(url, rows):
    """Only reading so far: nothing is claimed for a run that will not be."""
    store, at = GatedStore(open_store(url), "read"), moment()

    async def application():
        node = node_on(store)
        node.run(asyncio.sleep, 0, at=at)
        await until(store.at_gate.is_set)
        await shut_down(node)
        await until(lambda: node.heard.of(EVENT_JOB_ERROR))
        store.gate.set()

    async def other_application():
        node = node_on(url)
        node.run(asyncio.sleep, 0, at=at)
        await until(lambda: node.heard.of(EVENT_JOB_EXECUTED))
        await shut_down(node)

    asyncio.run(application())
    assert rows() == []
    asyncio.run(other_application())
    assert [row.state for row in rows()] == ["succeeded"]


def test_every_run_time_of_a_cancelled_submission_has_an_event(url, rows):
    """Those that had not begun are errors, and are not claimed."""

    async def application():
        node = node_on(url)
        begin = moment(-180).replace(second=0, microsecond=0)
        node.scheduler.add_job(
            asyncio.sleep, "cron", (60,), minute="*", id="job", next_run_time=begin, coalesce=False,
            misfire_grace_time=None,
        )  # fmt: skip
        await until(lambda: node.executor._node.keeper.held)
        await shut_down(node)
        await until(lambda: node.heard.of(EVENT_JOB_ERROR))
        return node

    node = asyncio.run(application())
    events = node.heard.of(EVENT_JOB_ERROR)
    assert len({event.scheduled_run_time for event in events}) == len(events) >= 3
    assert {type(event.exception) for event in events} == {asyncio.CancelledError}
    assert [row.state for row in rows()] == ["cancelled"]


def test_a_plain_function_outlives_the_shutdown_and_its_real_outcome_is_heard(url, rows):
    """The loop's pool goes on, so the lease is kept and renewed, and the event says how the job really ended."""
    go_on = threading.Event()

    async def application():
        node = node_on(url, lock_at_most="0.5s")
        node.run(lambda: go_on.wait(10) and "really")
        await until(lambda: node.executor._node.keeper.held)
        await shut_down(node)
        await asyncio.sleep(1)
        assert node.heard.of(EVENT_JOB_EXECUTED | EVENT_JOB_ERROR) == []
        assert node.executor._node.keeper.held[0].remaining() > 0
        go_on.set()
        await until(lambda: node.heard.of(EVENT_JOB_EXECUTED | EVENT_JOB_ERROR))
        return node

    node = asyncio.run(application())
    assert node.heard.one(EVENT_JOB_EXECUTED).retval == "really"
    assert rows()[0].state == "succeeded"


def test_the_keepers_events_are_heard_on_the_loop(url):
    """Listeners of an asyncio application are never called on the keeper's thread."""

    async def application():
        node = node_on(url)
        node.run(fenced(lock_at_most="0.3s", renew=False)(_nap))
        await until(lambda: len(node.heard.of(EVENT_LEASE_OVERDUE | EVENT_LEASE_LOST)) == 2)
        await shut_down(node)
        return node

    assert set(asyncio.run(application()).heard.threads) == {"MainThread"}


async def _nap():
    await asyncio.sleep(0.6)


def test_events_after_the_loop_was_closed_are_heard_on_another_thread(url):
    """A lease that is lost, and a run that ends, when there is no loop any more: heard, and not on the keeper's thread."""
    store, go_on = TroubledStore(open_store(url)), threading.Event()

    async def application():
        node = node_on(store, lock_at_most="0.3s")
        node.run(go_on.wait, 10)
        await until(lambda: node.executor._node.keeper.held)
        await shut_down(node)
        return node

    loop = asyncio.new_event_loop()
    node = loop.run_until_complete(application())
    loop.close()
    store.down = True
    lost = node.heard.one(EVENT_LEASE_LOST)
    store.down = False
    go_on.set()
    executed = node.heard.one(EVENT_JOB_EXECUTED)
    assert {node.heard.threads[node.heard.index(event)] for event in (lost, executed)} == {"apscheduler-fence-events"}


def test_a_coroutine_that_is_destroyed_is_recorded_as_cancelled(url, rows):
    """A loop that is dropped closes its coroutines: there is nothing to await with, and the lease is given back."""

    async def application():
        node = node_on(url)
        node.scheduler.pause()
        job = node.run(asyncio.sleep, 60)
        submission = run_on_loop(node.executor._run_of(job, [moment()]), node.executor._node, node.executor._pool)
        waits_for = submission.send(None)
        while not node.executor._node.keeper.held:
            await asyncio.sleep(0.005)
            if waits_for.done():
                waits_for = submission.send(None)
        submission.close()
        await until(lambda: rows()[0].state != "running")
        assert node.executor._node.keeper.held == ()
        await shut_down(node)

    asyncio.run(application())
    assert rows()[0].state == "cancelled"


def test_without_a_pool_the_store_is_told_on_the_loop():
    """At the end of the interpreter pools take no more work; a lease is given back all the same."""
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    assert _submit(pool, int, "7").result() == 7
    with pytest.raises(ValueError):
        _submit(pool, int, "x").result()
