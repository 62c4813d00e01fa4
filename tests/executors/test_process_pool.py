"""Claim, call and settle happen in the pool's child; whatever happens there, the parent's listeners hear of it."""

import contextlib
import multiprocessing
import os
import sqlite3
import time

import pool_jobs
import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from waiting import eventually, never
from watched import moment

from apscheduler_fence import EVENT_JOB_LOST, EVENT_JOB_REFUSED, EVENT_LEASE_LOST, EVENT_LEASE_OVERDUE
from apscheduler_fence.lease import Ask, claim
from apscheduler_fence.runner import RemoteError
from apscheduler_fence.stores import open_store


@pytest.fixture
def url(tmp_path):
    """A store that children can open."""
    return f"sqlite:///{tmp_path / 'fence.db'}"


@pytest.fixture
def pool(start):
    """A node with a pool of spawned children."""

    def starter(workers=1, **options):
        return start(inner="processpool", max_workers=workers, **options)

    return starter


def test_a_run_in_a_child_is_claimed_and_recorded_there(pool, rows):
    """The child is handed its fence, and a second node is refused the slot."""
    node, at = pool(), moment()
    node.run(pool_jobs.identity, at=at)
    execution, token, pid = node.heard.one(EVENT_JOB_EXECUTED, within=20).retval
    [row] = rows()
    assert (row.id, row.token, row.state) == (execution, token, "succeeded")
    assert pid != os.getpid()
    assert row.holder.split(":")[1] == str(pid)
    node.run(pool_jobs.identity, at=at)
    assert node.heard.one(EVENT_JOB_REFUSED).reason == "done"


def test_a_child_keeps_a_lease_as_long_as_it_runs(pool, rows):
    """The child has a keeper of its own: 1.5 s of work under a lease of 0.5 s."""
    node = pool()
    node.run(pool_jobs.longer_than_its_lease, 1.5)
    assert node.heard.one(EVENT_JOB_EXECUTED, within=20).retval == "kept"
    assert rows()[0].state == "succeeded"


def test_what_the_keeper_in_a_child_says_reaches_the_listeners(pool):
    """EVENT_LEASE_OVERDUE and EVENT_LEASE_LOST come with the run's own event."""
    node = pool()
    node.run(pool_jobs.outlives_its_lease)
    assert node.heard.one(EVENT_JOB_EXECUTED, within=20).retval is True
    assert node.heard.one(EVENT_LEASE_OVERDUE).execution_id == node.heard.one(EVENT_LEASE_LOST).execution_id


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (pool_jobs.raise_portable, KeyError, "'portable'"),
        (pool_jobs.raise_not_portable, RemoteError, "pool_jobs.NotPortableError: one and two"),
        (pool_jobs.leave, pool_jobs.LeavingError, "out"),
    ],
    ids=["portable", "not portable", "base exception"],
)
def test_an_exception_of_a_child_is_the_runs_event_and_the_pool_goes_on(pool, rows, function, kind, text):
    """One that does not survive pickling has a stand-in; either way the next job runs in the same child."""
    node = pool()
    node.run(function)
    event = node.heard.one(EVENT_JOB_ERROR, within=20)
    assert type(event.exception) is kind
    assert str(event.exception) == text
    assert f"in {function.__name__}" in event.traceback
    assert rows()[0].state == "failed"
    node.run(pool_jobs.identity, job_id="next")
    assert node.heard.one(EVENT_JOB_EXECUTED).retval[2] == int(rows()[0].holder.split(":")[1])


def test_a_value_that_cannot_be_pickled_arrives_as_its_repr(pool, rows):
    """The run has succeeded, and says so."""
    node = pool()
    node.run(pool_jobs.return_not_portable)
    assert "<lambda>" in node.heard.one(EVENT_JOB_EXECUTED, within=20).retval
    assert rows()[0].state == "succeeded"


def test_a_function_that_cannot_be_pickled_is_an_error(pool):
    """It never reached a child; nothing hangs."""
    node = pool()
    node.run(lambda: None)
    assert "pickle" in str(node.heard.one(EVENT_JOB_ERROR, within=20).exception)


def test_a_coroutine_function_is_an_error_and_claims_nothing(pool, rows):
    """As on a thread pool."""
    node = pool()
    node.run(pool_jobs.coroutine_job)
    assert "is a coroutine function" in str(node.heard.one(EVENT_JOB_ERROR, within=20).exception)
    node.run(pool_jobs.identity, job_id="next")
    node.heard.one(EVENT_JOB_EXECUTED)
    assert [row.job for row in rows()] == ["next"]


def test_a_killed_child_is_an_error_for_each_run_it_took_along(pool, rows):
    """APScheduler says nothing of these; here each is EVENT_JOB_ERROR, the pool works again, the leases end as lost."""
    node = pool(2, lock_at_most="1s", sweep="0.1s")
    # Python's pool watches a child only from its next event on after it was spawned: let both have had one.
    for number in range(2):
        node.run(pool_jobs.sleep, 0.5, job_id=f"warm-up {number}")
    eventually(lambda: len(node.heard.of(EVENT_JOB_EXECUTED)) == 2, within=20)
    node.run(pool_jobs.sleep, 30, job_id="sibling")
    eventually(lambda: len(rows()) == 3)
    node.run(pool_jobs.die, job_id="victim")
    eventually(lambda: len(node.heard.of(EVENT_JOB_ERROR)) == 2, within=20)
    assert {event.job_id for event in node.heard.of(EVENT_JOB_ERROR)} == {"sibling", "victim"}
    assert not node.executor._submitted
    assert not node.executor._inner._instances
    node.run(pool_jobs.identity, job_id="next")
    eventually(lambda: len(node.heard.of(EVENT_JOB_EXECUTED)) == 3, within=20)
    lost = eventually(lambda: len(found := node.heard.of(EVENT_JOB_LOST)) == 2 and found)
    assert {event.job_id for event in lost} == {"sibling", "victim"}
    states = {row.job: row.state for row in rows()}
    assert (states["sibling"], states["victim"], states["next"]) == ("lost", "lost", "succeeded")


def test_a_child_returns_when_its_run_is_recorded(pool, rows, tmp_path):
    """A settle that finds the store locked is repeated before the child goes idle, or ends."""
    node = pool(timeout="0.3s")
    node.run(pool_jobs.sleep, 0.5)
    eventually(rows, within=20)
    with contextlib.closing(sqlite3.connect(tmp_path / "fence.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        never(lambda: node.heard.of(EVENT_JOB_EXECUTED), during=1.5)
        other.execute("ROLLBACK")
    node.heard.one(EVENT_JOB_EXECUTED)
    assert rows()[0].state == "succeeded"


def test_a_child_does_not_sweep(pool, rows, url):
    """Nobody would hear what its keeper has to say while it is idle: the parent's keeper sweeps."""
    node = pool(sweep="0.1s")
    node.executor._node.keeper.stop()
    eventually(lambda: node.executor._node.keeper._thread is None)
    ask = Ask("gone", "gone", "1", slot_at=1, scheduled_at=1, nonce="gone:1:1", lock_at_most=1)
    store = open_store(url)
    store.open()
    store.swap([claim(store.read(ask.key), ask)])
    store.close()
    node.run(pool_jobs.sleep, 0.5)
    node.heard.one(EVENT_JOB_EXECUTED, within=20)
    assert rows()[0].state == "running"


def test_shutdown_waits_for_the_children(pool, rows):
    """`shutdown(wait=True)`: the run has ended and is recorded."""
    node = pool()
    node.run(pool_jobs.sleep, 0.5)
    eventually(rows, within=20)
    node.scheduler.shutdown()
    assert rows()[0].state == "succeeded"
    node.heard.one(EVENT_JOB_EXECUTED)


def test_a_pool_that_forks(start, rows):
    """A forked child has neither its parent's leases nor its connections."""
    node = start(inner="processpool", max_workers=1, pool_kwargs={"mp_context": multiprocessing.get_context("fork")})
    # SQLite itself does not survive a fork in the middle of a transaction: let the keeper's first round pass.
    eventually(lambda: node.executor._node.keeper._swept)
    time.sleep(0.2)
    node.run(pool_jobs.identity)
    assert node.heard.one(EVENT_JOB_EXECUTED, within=20).retval[2] != os.getpid()
    assert rows()[0].state == "succeeded"
