"""The end of a scheduler, of a loop, of a process: a lease is released when its job has really ended, and not before."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from apscheduler.events import EVENT_JOB_EXECUTED, EVENT_JOB_SUBMITTED
from trouble import TroubledStore
from waiting import eventually
from watched import own_threads

from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.base import Executions

SCRIPT = Path(__file__).with_name("exits.py")


def test_shutdown_finishes_and_records_what_runs(start, rows):
    """`shutdown(wait=True)` returns when the run has ended and is recorded, and no thread is left."""
    node = start()
    node.run(time.sleep, 0.4)
    eventually(rows)
    node.scheduler.shutdown()
    assert [row.state for row in rows()] == ["succeeded"]
    node.heard.one(EVENT_JOB_EXECUTED)
    assert own_threads() == []


def test_shutdown_without_waiting_leaves_a_run_its_lease(start, rows):
    """`shutdown(wait=False)`: the thread goes on, and so does renewal; released, heard and closed when it has ended."""
    node, go_on = start(lock_at_most="0.4s"), threading.Event()
    node.run(go_on.wait, 10)
    [hold] = eventually(lambda: node.executor._node.keeper.held)
    node.scheduler.shutdown(wait=False)
    time.sleep(1)
    assert hold.remaining() > 0
    assert [row.state for row in rows()] == ["running"]
    go_on.set()
    eventually(lambda: rows()[0].state == "succeeded")
    node.heard.one(EVENT_JOB_EXECUTED)
    eventually(lambda: own_threads() == [])


def test_a_run_that_was_queued_at_shutdown_is_kept_too(start, rows):
    """A pool works off its queue after `shutdown(wait=False)`: what is claimed then is renewed as well."""
    node, go_on, after = start(lock_at_most="0.4s", inner="threadpool", max_workers=1), threading.Event(), []

    def late():
        time.sleep(1)
        after.append(node.executor._node.keeper.held[0].remaining())

    node.run(go_on.wait, 10, job_id="first")
    node.run(late, job_id="late")
    eventually(lambda: len(node.heard.of(EVENT_JOB_SUBMITTED)) == 2)
    node.scheduler.shutdown(wait=False)
    go_on.set()
    eventually(lambda: after)
    assert after[0] > 0
    eventually(lambda: [row.state for row in rows()] == ["succeeded"] * 2)


def test_a_scheduler_restarted_while_a_run_goes_on_shares_nothing_but_the_lease(start, rows):
    """The old run keeps its lease, the new life its threads, and both end well."""
    node, go_on = start(lock_at_most="0.4s"), threading.Event()
    node.run(go_on.wait, 10, job_id="old")
    eventually(rows)
    node.scheduler.shutdown(wait=False)
    node.scheduler.start()
    node.run(time.sleep, 1, job_id="new")
    eventually(lambda: node.heard.of(EVENT_JOB_EXECUTED))
    go_on.set()
    eventually(lambda: len(node.heard.of(EVENT_JOB_EXECUTED)) == 2)
    eventually(lambda: [row.state for row in rows()] == ["succeeded"] * 2)


def test_a_lease_taken_while_the_keeper_was_busy_is_renewed_in_time(start, url):
    """The keeper does not sleep over what was added during its round."""

    class SlowSweep(TroubledStore):
        def held_leases(self, query):
            found = super().held_leases(query)
            at_gate.set()
            gate.wait(10)
            return found

    at_gate, gate = threading.Event(), threading.Event()
    node = start(SlowSweep(open_store(url)), lock_at_most="0.6s", sweep="60s")
    assert at_gate.wait(10)
    go_on = threading.Event()
    node.run(go_on.wait, 10)
    [hold] = eventually(lambda: node.executor._node.keeper.held)
    gate.set()
    time.sleep(1.2)
    assert hold.remaining() > 0
    go_on.set()


# --- the end of the process -------------------------------------------------------------------------------------------


def ended(case, url):
    """Runs an application to its end; returns what it said, in how many seconds, and what was recorded."""
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", SCRIPT, case, url],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    end = time.time()
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    store = open_store(url)
    states = [row.state for row in store.executions(Executions())]
    store.close()
    began, *said = [json.loads(line) for line in done.stdout.splitlines()]
    return said, end - began["began"], states


@pytest.fixture
def file(tmp_path):
    """A store for processes."""
    return f"sqlite:///{tmp_path / 'fence.db'}"


EXITS = {
    "no shutdown": [{"main": True}, {"ended": True}],
    "shutdown": [{"ended": True}, {"main": True}],
    "shutdown without waiting": [{"main": True}, {"ended": True}],
    "asyncio without shutdown": [{"main": True}],
    "asyncio with shutdown": [{"main": True}],
    "idle": [{"main": True}],
}


@pytest.mark.parametrize("case", EXITS)
def test_an_application_exits_promptly_and_what_it_ran_is_recorded(case, file):
    """With and without shutdown: a thread finishes its job, a coroutine is cancelled, nobody waits for the keeper."""
    said, took, states = ended(case, file)
    assert said == EXITS[case]
    expected = [] if case == "idle" else ["cancelled" if "asyncio" in case else "succeeded"]
    assert states == expected
    assert took < 6


def test_a_forked_child_holds_nothing(file):
    """Neither leases nor threads nor runs; its fence is lost, and its return from the job settles nothing."""
    said, _, states = ended("fork", file)
    assert said == [
        {"held": 0, "lost": True, "thread": False, "submitted": 0},
        {"parent_lost": False},
        {"event": "parent"},
        {"main": True},
    ]
    assert states == ["succeeded"]
