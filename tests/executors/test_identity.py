"""What can be said about a job when it is added: whether nodes can agree on it, and what to write instead."""

import logging
from datetime import timedelta, timezone

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger
from persistent_jobs import CountedCalls, Recorder, plain
from waiting import eventually
from watched import moment

from apscheduler_fence import ConfigError, fenced


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- IDs --------------------------------------------------------------------------------------------------------------


def test_a_job_without_an_id_of_its_own_is_refused(start, rows, caplog):
    """APScheduler's made-up ID differs on every node: an event and a log line at add, and an error event at run."""
    node = start()
    job = node.scheduler.add_job(plain, "date", run_date=moment(0.3), name="nightly")
    [at_add] = node.heard.of(EVENT_JOB_ERROR)
    assert isinstance(at_add.exception, ConfigError)
    assert "job 'nightly' has no ID of its own" in str(at_add.exception)
    assert "add_job(..., id=...) or @fenced(name=...)" in warnings(caplog)[0]
    eventually(lambda: len(node.heard.of(EVENT_JOB_ERROR)) == 2)
    at_run = node.heard.of(EVENT_JOB_ERROR)[1]
    assert (at_run.job_id, str(at_run.exception)) == (job.id, str(at_add.exception))
    assert node.heard.of(EVENT_JOB_EXECUTED) == []
    assert rows() == []


def test_a_name_makes_up_for_a_missing_id(start, rows):
    """`@fenced(name=…)` names the job in the cluster."""
    node = start()
    node.scheduler.add_job(fenced(name="nightly")(lambda: None), "date", misfire_grace_time=None)
    node.heard.one(EVENT_JOB_EXECUTED)
    assert rows()[0].job == "nightly"


def test_a_made_up_id_in_a_persistent_store_is_the_jobs_own(start, rows, tmp_path):
    """There the ID is recorded once for all nodes."""
    node = start()
    node.scheduler.add_jobstore(SQLAlchemyJobStore(f"sqlite:///{tmp_path / 'jobs.db'}"), "shared")
    job = node.scheduler.add_job(plain, "date", misfire_grace_time=None, jobstore="shared")
    node.heard.one(EVENT_JOB_EXECUTED)
    assert rows()[0].job == f"/shared/{job.id}"
    node.scheduler._jobstores["shared"].engine.dispose()


def test_an_unfenced_job_needs_no_id(start):
    """Nobody has to agree on it."""
    node = start(policies={"x": None})
    node.scheduler.add_job(plain, "date", id="x")
    node.heard.one(EVENT_JOB_EXECUTED)
    assert node.heard.of(EVENT_JOB_ERROR) == []


@pytest.mark.parametrize("job_id", ["x" * 192, "tab\there", " space "])
def test_an_id_that_no_store_could_keep_is_refused(start, rows, job_id):
    """Too long, control characters, surrounding space: an error event at add and at run, not a job that never runs."""
    node = start()
    node.run(plain, job_id=job_id)
    eventually(lambda: len(node.heard.of(EVENT_JOB_ERROR)) == 2)
    assert {type(event.exception) for event in node.heard.of(EVENT_JOB_ERROR)} == {ConfigError}
    assert rows() == []


# --- callable objects in persistent stores -----------------------------------------------------------------------------


@pytest.mark.parametrize("function", [Recorder(), CountedCalls()], ids=["own __call__", "inherited __call__"])
def test_a_callable_object_in_a_persistent_store_is_refused(start, tmp_path, function):
    """The store keeps a reference to its class, so APScheduler would make an object instead of calling one."""
    node = start()
    node.scheduler.add_jobstore(SQLAlchemyJobStore(f"sqlite:///{tmp_path / 'jobs.db'}"), "shared")
    node.run(function, jobstore="shared")
    eventually(lambda: len(node.heard.of(EVENT_JOB_ERROR)) == 2)
    assert all(
        "callable object in a persistent job store" in str(event.exception) for event in node.heard.of(EVENT_JOB_ERROR)
    )
    node.scheduler._jobstores["shared"].engine.dispose()


def test_a_bound_method_in_a_persistent_store_runs(start, tmp_path, rows):
    """APScheduler keeps the object it is bound to."""
    node = start()
    node.scheduler.add_jobstore(SQLAlchemyJobStore(f"sqlite:///{tmp_path / 'jobs.db'}"), "shared")
    node.run(Recorder().record, jobstore="shared")
    assert node.heard.one(EVENT_JOB_EXECUTED).retval == rows()[0].id
    node.scheduler._jobstores["shared"].engine.dispose()


# --- warnings ---------------------------------------------------------------------------------------------------------


def test_triggers_that_nodes_cannot_agree_on_are_warned_about(start, caplog):
    """Calendar interval without a start, a date without a date, an interval inside or, jitter as long as the period."""
    node = start(paused=True)
    node.scheduler.add_job(plain, "calendarinterval", weeks=2, id="calendar")
    node.scheduler.add_job(plain, "date", id="date")
    node.scheduler.add_job(plain, "cron", minute="*", jitter=90, id="jitter")
    node.scheduler.add_job(plain, "cron", minute="*", id="fine")
    assert [line.split('"')[1] for line in warnings(caplog)] == ["calendar", "date", "jitter"]


@pytest.mark.parametrize("slot", [timedelta(hours=1), lambda at: at.replace(second=0)], ids=["period", "function"])
def test_a_slot_rule_of_ones_own_needs_no_warning(start, caplog, slot):
    """`slot=` decides what nodes agree on."""
    node = start(paused=True, slot=slot)
    node.scheduler.add_job(plain, "calendarinterval", weeks=2, id="calendar")
    node.scheduler.add_job(plain, "cron", minute="*", jitter=90, id="jitter")
    node.scheduler.add_job(plain, IntervalTrigger(minutes=1, jitter=90), id="interval")
    assert warnings(caplog) == []


def test_jobs_added_before_the_start_are_looked_at_too(caplog, start, url):
    """Pending jobs are checked when the scheduler starts."""
    scheduler = BackgroundScheduler(timezone=timezone.utc)
    scheduler.add_job(plain, "calendarinterval", weeks=2, id="calendar")
    start(scheduler=scheduler)
    assert 'Job "calendar": a calendar interval without start_date=' in warnings(caplog)[0]


def test_jobs_of_other_executors_are_left_alone(start, caplog):
    """Another executor of the same scheduler is none of ours."""
    node = start(paused=True)
    node.scheduler.add_executor("threadpool", "plain")
    node.scheduler.add_job(plain, "date", executor="plain")
    assert warnings(caplog) == []


@pytest.mark.parametrize(("timeout", "warned"), [("2s", True), ("0.5s", False)])
def test_a_store_timeout_that_is_long_for_the_lease_is_warned_about(start, caplog, tmp_path, timeout, warned):
    """A third of `lock_at_most` is when renewal must be through."""
    node = start(f"sqlite:///{tmp_path / 'fence.db'}", paused=True, timeout=timeout, lock_at_most="3s")
    node.scheduler.add_job(plain, "cron", minute="*", id="job")
    assert (["lower timeout= or raise lock_at_most=" in line for line in warnings(caplog)] == [True]) is warned


def test_two_applications_with_one_job_name_are_told(start, caplog):
    """The lease remembers whose function ran last: another function under the same name is worth a warning, once."""
    mine, theirs = start(), start()
    mine.run(plain, at=moment(-60))
    mine.heard.one(EVENT_JOB_EXECUTED)
    caplog.clear()
    for minutes in range(1, 4):
        theirs.run(int, at=moment(60 * minutes - 200), job_id="job")
        eventually(lambda minutes=minutes: len(theirs.heard.of(EVENT_JOB_EXECUTED)) == minutes)
    [line] = [line for line in warnings(caplog) if "namespace" in line]
    assert "'job' was last used by persistent_jobs:plain, and here it is builtins:int" in line
