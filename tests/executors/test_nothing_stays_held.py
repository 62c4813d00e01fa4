"""Whatever goes wrong inside a run, its lease is given back and its slot has an outcome."""

import threading
import time

import pytest
from apscheduler.events import EVENT_JOB_ERROR
from waiting import eventually

from apscheduler_fence import ConfigError, FencedExecutor, Retry, fenced
from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.base import HeldLeases


def held(url):
    return list(open_store(url).held_leases(HeldLeases()))


class UnspeakableError(Exception):
    """An exception that cannot be formatted."""

    def __str__(self):
        raise TypeError("no text")


class TreacherousError(SyntaxError):
    """One that the traceback module stumbles over."""

    def __init__(self):
        super().__init__("bad", ("file", 1, "x", "text", None, None))
        self.offset = "x"


@pytest.mark.parametrize("error", [UnspeakableError, TreacherousError], ids=lambda error: error.__name__)
def test_an_exception_that_cannot_be_formatted_ends_its_run_as_any_other(start, rows, url, error):
    """It is recorded as failed under its type's name, and the next slot can run."""

    @fenced
    def job():
        raise error()

    node = start()
    node.scheduler.add_job(job, "date", id="job", misfire_grace_time=None)
    assert isinstance(node.heard.one(EVENT_JOB_ERROR).exception, error)
    eventually(lambda: rows() and rows()[0].state == "failed")
    assert error.__name__ in rows()[0].error
    assert held(url) == []


def test_an_error_of_our_own_inside_a_run_gives_its_lease_back(start, rows, url, monkeypatch):
    """The outcome is handed to the keeper, and nothing is renewed for ever."""

    def broken(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("apscheduler_fence.runner._wait_before_retry", broken)
    node = start()
    node.scheduler.add_job(fenced(lambda: None), "date", id="job", misfire_grace_time=None)
    assert str(node.heard.one(EVENT_JOB_ERROR).exception) == "a bug"
    eventually(lambda: rows() and rows()[0].state == "failed")
    assert held(url) == []


def test_a_wait_between_retries_ends_with_the_scheduler(start, rows):
    """`shutdown` does not wait for a retry that is minutes away; what waited is settled."""
    entered = threading.Event()

    @fenced(retries=1, retry_delay="5m")
    def job():
        entered.set()
        raise Retry

    node = start()
    node.scheduler.add_job(job, "date", id="job", misfire_grace_time=None)
    assert entered.wait(5)
    eventually(lambda: node.scheduler.get_job("job") is None)  # APScheduler's pass over its jobs has ended, too
    began = time.monotonic()
    node.scheduler.shutdown()
    assert time.monotonic() - began < 5
    assert (rows()[0].state, rows()[0].attempt) == ("cancelled", 1)


def test_a_name_for_all_jobs_is_refused():
    """It would make them suppress each other."""
    with pytest.raises(ConfigError, match="name is one job's"):
        FencedExecutor("memory://", name="same")


def test_two_jobs_of_one_name_are_called_out(start, caplog):
    """They would suppress each other, one of them for ever."""
    node = start()
    for job_id in ("one", "two"):
        node.scheduler.add_job(fenced(name="same")(lambda: None), "date", id=job_id, run_date="2999-01-01")
    assert 'Jobs "one" and "two" have the same name in the cluster' in caplog.text
