"""A run by hand: an execution of its own, under the job's lease."""

import asyncio
import threading
import time

import pytest
from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.jobstores.base import JobLookupError
from apscheduler.schedulers.background import BackgroundScheduler
from loops import node_on, shut_down, until
from waiting import eventually, never

from apscheduler_fence import EVENT_JOB_REFUSED, ConfigError, fenced, run_now, unfenced

YEARLY = {"trigger": "interval", "hours": 24 * 365, "id": "job"}


def gated(**policy):
    """A job that runs until the test lets it go, and its fences."""
    fences, go_on = [], threading.Event()

    @fenced(**policy)
    def job(argument=None, *, fence):
        fences.append(fence)
        assert go_on.wait(10)
        return argument

    return job, fences, go_on


def test_a_run_by_hand_is_an_execution_of_its_own(start, rows):
    """`job/manual/<id>`, recorded and fenced as others, with the job's arguments, once for each call."""
    node, (job, fences, go_on) = start(), gated()
    go_on.set()
    node.scheduler.add_job(job, args=["argument"], **YEARLY)
    for number in (1, 2):
        execution = run_now(node.scheduler, "job")
        eventually(lambda number=number: len(node.heard.of(EVENT_JOB_EXECUTED)) == number)
        assert execution.startswith("job/manual/")
        assert fences[-1].execution_id == execution
    assert [event.retval for event in node.heard.of(EVENT_JOB_EXECUTED)] == ["argument"] * 2
    assert [(row.id, row.state) for row in rows()] == [(fence.execution_id, "succeeded") for fence in fences]
    assert fences[0].token < fences[1].token
    assert {fence.lease for fence in fences} == {"job"}


@pytest.mark.parametrize("same_node", [True, False])
def test_a_run_by_hand_is_refused_while_the_lease_is_held(start, rows, same_node):
    """Here or on another node: EVENT_JOB_REFUSED with its own id and reason `held`; nothing is recorded of it."""
    node, (job, fences, go_on) = start(), gated()
    other = node if same_node else start()
    for each in {node, other}:
        each.scheduler.add_job(job, **YEARLY)
    first = run_now(node.scheduler, "job")
    eventually(lambda: fences)
    second = run_now(other.scheduler, "job")
    refused = other.heard.one(EVENT_JOB_REFUSED)
    assert (refused.execution_id, refused.reason) == (second, "held")
    go_on.set()
    eventually(lambda: [(row.id, row.state) for row in rows()] == [(first, "succeeded")])


def test_a_run_by_hand_is_queued_where_the_policy_says_so(start, rows):
    """With `overlap="queue"` it is recorded and runs when the lease is free."""
    node, (job, fences, go_on) = start(sweep="60s"), gated(overlap="queue")
    node.scheduler.add_job(job, **YEARLY)
    ids = []
    ids.append(run_now(node.scheduler, "job"))
    eventually(lambda: fences)
    ids.append(run_now(node.scheduler, "job"))
    assert node.heard.one(EVENT_JOB_REFUSED).reason == "queued"
    go_on.set()
    eventually(lambda: [(row.id, row.state) for row in rows()] == [(each, "succeeded") for each in ids])


def test_runs_by_hand_run_beside_each_other_where_the_policy_allows_it(start, rows):
    """With `overlap="allow"` each has a lease of its own, whatever `max_instances` says."""
    node, (job, fences, go_on) = start(), gated(overlap="allow")
    node.scheduler.add_job(job, **YEARLY)
    ids = {run_now(node.scheduler, "job"), run_now(node.scheduler, "job")}
    eventually(lambda: len(fences) == 2)
    assert {fence.lease for fence in fences} == ids
    go_on.set()
    eventually(lambda: [row.state for row in rows()] == ["succeeded"] * 2)


def test_a_run_by_hand_on_an_event_loop(url, rows):
    """A coroutine runs on the loop, and is refused while the lease is held."""
    fences = []

    @fenced
    async def job(fence):
        fences.append(fence)
        await asyncio.sleep(0.3)

    async def application():
        node = node_on(url)
        node.scheduler.add_job(job, **YEARLY)
        first = run_now(node.scheduler, "job")
        await until(lambda: fences)
        second = run_now(node.scheduler, "job")
        await until(lambda: node.heard.of(EVENT_JOB_REFUSED))
        await until(lambda: node.heard.of(EVENT_JOB_EXECUTED))
        await shut_down(node)
        return node, first, second

    node, first, second = asyncio.run(application())
    assert first.startswith("job/manual/")
    assert [fence.execution_id for fence in fences] == [first]
    refused = node.heard.one(EVENT_JOB_REFUSED)
    assert (refused.execution_id, refused.reason) == (second, "held")
    assert [(row.id, row.state) for row in rows()] == [(first, "succeeded")]


def test_a_run_by_hand_is_kept_from_others_as_any_run(start, rows):
    """Its lease is renewed for as long as it takes."""
    node, (job, fences, go_on) = start(lock_at_most="0.4s"), gated()
    node.scheduler.add_job(job, **YEARLY)
    run_now(node.scheduler, "job")
    eventually(lambda: fences)
    time.sleep(0.8)
    assert not fences[0].lost
    go_on.set()
    eventually(lambda: [row.state for row in rows()] == ["succeeded"])


def test_a_run_by_hand_of_no_job_is_an_error(start):
    """As APScheduler says it."""
    with pytest.raises(JobLookupError):
        run_now(start().scheduler, "nothing")


def test_what_has_no_executions_cannot_be_run_as_one(start):
    """An unfenced job, and a job on another executor, are refused with the reason."""
    node = start()
    node.scheduler.add_job(_free, **YEARLY)
    with pytest.raises(ConfigError, match="unfenced"):
        run_now(node.scheduler, "job")
    plain = BackgroundScheduler()
    plain.start()
    try:
        plain.add_job(_free, **YEARLY)
        with pytest.raises(ConfigError, match="fenced executor"):
            run_now(plain, "job")
    finally:
        plain.shutdown()


@unfenced
def _free():
    raise AssertionError("nobody runs this")


def test_nothing_is_run_by_hand_on_a_scheduler_that_has_been_shut_down(start):
    """It says so, rather than return the id of a run that will not be."""
    node, (job, fences, _) = start(), gated()
    node.scheduler.add_job(job, **YEARLY)
    node.scheduler.shutdown()
    with pytest.raises((ConfigError, JobLookupError)):
        run_now(node.scheduler, "job")
    never(lambda: fences, during=0.1)
