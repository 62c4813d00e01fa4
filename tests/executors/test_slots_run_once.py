"""A slot runs on one node; what listeners hear about it is what APScheduler says, and who was refused why."""

import gc
import logging
import logging.config
import threading
import time
import weakref
from collections import Counter
from datetime import timedelta, timezone
from functools import partial
from zoneinfo import ZoneInfo

import pytest
from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    EVENT_JOB_MAX_INSTANCES,
    EVENT_JOB_MISSED,
    EVENT_JOB_SUBMITTED,
)
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from waiting import eventually, never
from watched import Heard, moment

from apscheduler_fence import EVENT_JOB_REFUSED, ConfigError, current_fence, fenced, unfenced


def test_two_nodes_run_a_slot_once(start, rows):
    """Of two schedulers with the same job, one runs the slot and the other is told who has it."""
    nodes, entered, at = [start(), start()], [], moment()
    for node in nodes:
        node.run(lambda: entered.append(current_fence()), at=at)
    eventually(lambda: sum(len(node.heard.of(EVENT_JOB_EXECUTED | EVENT_JOB_REFUSED)) for node in nodes) == 2)
    [fence], [row] = entered, rows()
    assert (row.id, row.state, row.token, row.attempt) == (fence.execution_id, "succeeded", fence.token, 1)
    [refused] = [event for node in nodes for event in node.heard.of(EVENT_JOB_REFUSED)]
    assert (refused.job_id, refused.jobstore, refused.execution_id) == ("job", "default", row.id)
    assert refused.scheduled_run_time == at
    assert refused.holder == row.holder
    assert refused.reason in ("done", "running")


def test_a_node_that_comes_when_all_is_over_is_refused(start, rows):
    """A job of no length and a node that is late: the slot is taken for good, whatever `lock_at_least` is."""
    early, late, at = start(), start(), moment()
    early.run(int, at=at)
    early.heard.one(EVENT_JOB_EXECUTED)
    late.run(int, at=at)
    assert late.heard.one(EVENT_JOB_REFUSED).reason == "done"
    assert late.heard.of(EVENT_JOB_EXECUTED) == []
    assert [row.state for row in rows()] == ["succeeded"]


def test_a_refusal_during_the_run_says_until_when(start, rows):
    """While the run goes on, the refusal names its holder and the end of its lease as it stands."""
    busy, other, go_on, at = start(), start(), threading.Event(), moment()
    busy.run(go_on.wait, 10, at=at)
    eventually(rows)
    other.run(int, at=at)
    refused = other.heard.one(EVENT_JOB_REFUSED)
    go_on.set()
    assert refused.reason == "running"
    assert refused.holder == rows()[0].holder
    assert moment() < refused.until < moment(31)


def test_a_refused_slot_is_not_logged_as_run(start, caplog):
    """The loser's log says that it was refused, and nothing about running or success."""
    caplog.set_level(logging.DEBUG)
    winner, loser, at = start(), start(), moment()
    winner.run(int, at=at)
    winner.heard.one(EVENT_JOB_EXECUTED)
    caplog.clear()
    loser.run(int, at=at)
    loser.heard.one(EVENT_JOB_REFUSED)
    assert "refused for slot job/" in caplog.text
    assert "executed" not in caplog.text
    assert "Running" not in caplog.text


def test_silence_survives_a_logging_configuration_that_enables_all_loggers(start, caplog):
    """`dictConfig(disable_existing_loggers=False)` enables loggers; the inner executor's stays silent."""
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": False})
    test_a_refused_slot_is_not_logged_as_run(start, caplog)


class OnPurposeError(Exception):
    pass


def fail():
    raise OnPurposeError("on purpose")


class Leave(BaseException):
    pass


def leave():
    raise Leave


def plain_events(function, at, zone):
    """What APScheduler's own thread pool says of one run."""
    heard = Heard()
    scheduler = BackgroundScheduler(timezone=zone)
    scheduler.add_listener(heard, EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
    scheduler.start()
    scheduler.add_job(function, "date", id="job", run_date=at, misfire_grace_time=None)
    eventually(lambda: heard)
    scheduler.shutdown()
    return heard


@pytest.mark.parametrize("function", [dict, fail, leave, lambda: 1 / 0], ids=["returns", "raises", "leaves", "divides"])
def test_listeners_hear_what_apscheduler_says(start, url, function):
    """Return value, exception, traceback from the job's own frame on, and run time with its zone: as without a fence."""
    zone, at = ZoneInfo("Europe/Helsinki"), moment()
    [plain] = plain_events(function, at, zone)
    node = start(scheduler=BackgroundScheduler(timezone=zone))
    node.run(function, at=at)
    event = node.heard.one(EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
    assert type(event) is type(plain)
    assert (event.code, event.job_id, event.jobstore, event.retval) == (plain.code, "job", "default", plain.retval)
    assert event.scheduled_run_time == plain.scheduled_run_time
    assert event.scheduled_run_time.tzinfo is plain.scheduled_run_time.tzinfo
    assert type(event.exception) is type(plain.exception)
    if plain.traceback:
        own_frames = plain.traceback.partition("in run_job")[2].partition("File")[2]
        assert own_frames
        assert event.traceback.partition("File")[2] == own_frames


def test_a_failed_run_is_recorded_with_its_error(start, rows):
    """The record keeps the traceback's tail and the exception."""
    node = start()
    node.run(fail)
    node.heard.one(EVENT_JOB_ERROR)
    [row] = rows()
    assert row.state == "failed"
    assert "in fail" in row.error
    assert row.error.endswith("OnPurposeError: on purpose")


def test_max_instances_counts_runs_of_one_job_on_one_node(start):
    """A second run beside the first is skipped with APScheduler's own event, and possible again afterwards."""
    node, go_on = start(), threading.Event()
    node.scheduler.add_job(go_on.wait, "interval", (10,), seconds=0.1, id="job", max_instances=1)
    eventually(lambda: node.heard.of(EVENT_JOB_MAX_INSTANCES))
    assert len(node.heard.of(EVENT_JOB_SUBMITTED)) == 1
    go_on.set()
    eventually(lambda: len(node.heard.of(EVENT_JOB_EXECUTED)) > 1)


def test_jobs_of_two_stores_with_one_id_do_not_count_together(start, rows):
    """Instances are counted, and slots named, by job store and ID."""
    node, both = start(), threading.Barrier(2)
    node.scheduler.add_jobstore("memory", "archive")
    at = moment()
    node.run(both.wait, 5, at=at)
    node.run(both.wait, 5, at=at, jobstore="archive")
    eventually(lambda: len(node.heard.of(EVENT_JOB_EXECUTED)) == 2)
    assert {row.job for row in rows()} == {"job", "/archive/job"}


def test_missed_here_is_not_missed_in_the_cluster(start, rows):
    """A run time that waited too long in this node's queue is missed on this node only; another still runs the slot."""
    busy, idle, go_on, at = start(inner="threadpool", max_workers=1), start(), threading.Event(), moment(0.2)
    busy.run(go_on.wait, 10, job_id="long")
    busy.run(int, at=at, misfire_grace_time=1)
    eventually(lambda: len(busy.heard.of(EVENT_JOB_SUBMITTED)) == 2)
    time.sleep(1.3)
    go_on.set()
    assert busy.heard.one(EVENT_JOB_MISSED).scheduled_run_time == at
    assert [row.job for row in rows()] == ["long"]
    idle.run(int, at=at)
    idle.heard.one(EVENT_JOB_EXECUTED)
    assert [row.job for row in rows()] == ["long", "job"]


def overdue(node, function, count, **settings):
    """Adds a job with that many run times behind it, a minute apart, which arrive in one submission."""
    begin = moment(-60 * count).replace(second=0, microsecond=0) + timedelta(minutes=1)
    run_times = [begin + timedelta(minutes=number) for number in range(count)]
    node.scheduler.add_job(
        function, "cron", minute="*", id="job", timezone=timezone.utc, next_run_time=begin, end_date=run_times[-1],
        coalesce=False, misfire_grace_time=None, **settings,
    )  # fmt: skip
    return run_times


@pytest.mark.parametrize("once_per_slot", [True, False])
def test_a_backlog_in_one_submission_is_one_run_per_slot(start, rows, once_per_slot):
    """After a suspend, APScheduler hands over several run times at once: each is a slot of its own, run once."""
    node, entered = start(paused=True, once_per_slot=once_per_slot), []
    run_times = overdue(node, lambda: entered.append(current_fence()), 5)
    node.scheduler.resume()
    events = eventually(lambda: len(found := node.heard.of(EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)) >= 5 and found)
    assert [event.scheduled_run_time for event in events] == run_times
    never(lambda: len(entered) > 5, during=0.1)
    assert [fence.scheduled_at for fence in entered] == run_times
    assert Counter(row.state for row in rows()) == {"succeeded": 5}
    assert sorted(fence.token for fence in entered) == [fence.token for fence in entered]


def test_one_slot_of_a_backlog_that_fails_leaves_the_others_alone(start):
    """Each run time of a submission has an outcome of its own, also where a slot= function raises."""
    refused = moment(-60).replace(second=0, microsecond=0)

    def slot(at):
        if at == refused:
            raise OnPurposeError("no slot")
        return at

    node = start(paused=True, slot=slot)
    overdue(node, int, 3)
    node.scheduler.resume()
    eventually(lambda: len(node.heard.of(EVENT_JOB_EXECUTED)) == 2)
    assert isinstance(node.heard.one(EVENT_JOB_ERROR).exception, OnPurposeError)


def test_a_catch_up_is_bounded_and_says_so(start, caplog):
    """Of more run times than `max_catch_up` the newest run, and the log says how many were dropped."""
    node = start(paused=True, max_catch_up="2")
    run_times = overdue(node, int, 7)
    node.scheduler.resume()
    events = eventually(lambda: len(found := node.heard.of(EVENT_JOB_EXECUTED)) >= 2 and found)
    assert [event.scheduled_run_time for event in events] == run_times[-2:]
    assert "7 run times behind: the oldest 5 are dropped" in caplog.text


async def never_called():
    raise AssertionError("nobody awaits this")


def test_a_coroutine_function_on_a_thread_pool_is_an_error_and_claims_nothing(start, rows, caplog):
    """APScheduler would call it "executed" although its body never ran; here the event names the right executor."""
    node = start()
    node.run(never_called)
    event = node.heard.one(EVENT_JOB_ERROR)
    assert isinstance(event.exception, ConfigError)
    assert "never_called is a coroutine function" in str(event.exception)
    assert "AsyncIOScheduler" in str(event.exception)
    assert rows() == []
    assert "executed" not in caplog.text


def test_an_unfenced_job_is_called_with_its_own_arguments(start):
    """A parameter that only a fence could fill keeps its default, wherever it stands."""

    @fenced
    def job(first, fence=None, second=None):
        return first, fence, second

    node = start(policies={"plain": None})
    node.scheduler.add_job(job, "date", id="plain", args=[1, 2], misfire_grace_time=None)
    assert node.heard.one(EVENT_JOB_EXECUTED).retval == (1, None, 2)


def test_an_unfenced_job_that_needs_a_fence_is_an_error_event(start):
    """Nothing else is passed in its place."""

    @fenced
    def job(first, fence, second):
        return first, fence, second

    node = start(policies={"plain": None})
    node.scheduler.add_job(job, "date", id="plain", args=[1, 2], misfire_grace_time=None)
    assert "runs unfenced" in str(node.heard.one(EVENT_JOB_ERROR).exception)


def test_an_unfenced_job_runs_on_every_node(start, rows):
    """`@unfenced`, and None in `policies`, take a job out of the cluster: no claim, no record."""
    nodes, entered, at = [start(policies={"by id": None}), start(policies={"by id": "none"})], [], moment()

    @unfenced
    def housekeeping():
        entered.append("label")

    for node in nodes:
        node.run(housekeeping, at=at, job_id="by label")
        node.run(entered.append, "policies", at=at, job_id="by id")
        eventually(lambda node=node: len(node.heard.of(EVENT_JOB_EXECUTED)) == 2)
    assert Counter(entered) == {"label": 2, "policies": 2}
    assert rows() == []


def test_options_of_the_executor_give_way_to_the_label_and_that_to_policies(start):
    """Executor's defaults < what the label gives < `policies` by job ID."""
    node, seen = start(lock_at_most="7s", lock_at_least=0, policies={"b": {"lock_at_most": "9s"}}), {}

    @fenced(lock_at_most="8s")
    def labelled(job_id):
        seen[job_id] = current_fence().remaining()

    def plain(job_id):
        seen[job_id] = current_fence().remaining()

    node.run(plain, "c", job_id="c")
    node.run(labelled, "a", job_id="a")
    node.run(labelled, "b", job_id="b")
    eventually(lambda: len(seen) == 3)
    assert {job_id: round(left) for job_id, left in seen.items()} == {"c": 7, "a": 8, "b": 9}


def test_a_job_modified_afterwards_runs_on_the_terms_of_its_new_function(start):
    """The policy is read when a run is submitted."""
    node, seen = start(lock_at_most="7s"), []

    @fenced(lock_at_most="20s")
    def labelled():
        seen.append(round(current_fence().remaining()))

    job = node.scheduler.add_job(int, "date", id="job", run_date=moment(60))
    job.modify(func=labelled, next_run_time=moment())
    assert eventually(lambda: seen) == [20]


def test_methods_partials_and_callable_objects_run_and_stay_what_they_are(start):
    """`job.func` is the very function that was given; what the caller passes in kwargs wins over the fence."""
    node, entered = start(), []

    class Work:
        @fenced
        def method(self, what, *, fencing_token):
            entered.append((what, fencing_token))

        def __call__(self, what, fence=None):
            entered.append((what, fence.token))

    work = Work()
    partly = partial(work.method, "partial")
    node.run(work.method, "method", job_id="method")
    node.run(work, "object", job_id="object")
    node.run(partly, job_id="partial")
    node.run(work.method, "given", job_id="given", kwargs={"fencing_token": 7})
    eventually(lambda: len(node.heard.of(EVENT_JOB_EXECUTED)) == 4)
    tokens = dict(entered)
    assert tokens.pop("given") == 7
    assert set(tokens) == {"method", "object", "partial"}
    assert len(set(tokens.values())) == 3
    later = [node.run(function, "x", job_id=str(function), at=moment(60)) for function in (work.method, work)]
    assert [job.func for job in later] == [work.method, work]


def test_jobs_that_share_a_lease_do_not_overlap(start):
    """`lease=` is a lock that several jobs share: while one runs, the others' slots are refused as held."""
    node, go_on = start(lease="ledger"), threading.Event()
    node.run(go_on.wait, 10, job_id="a")
    eventually(lambda: node.executor._node.keeper.held)
    node.run(int, job_id="b")
    refused = node.heard.one(EVENT_JOB_REFUSED)
    go_on.set()
    assert (refused.job_id, refused.reason) == ("b", "held")


def test_without_once_per_slot_a_late_node_may_run_the_slot_again(start, rows):
    """`once_per_slot=False` keeps the lease only."""
    nodes, at = [start(once_per_slot="false"), start(once_per_slot="false")], moment()
    for node in nodes:
        node.run(int, at=at)
        node.heard.one(EVENT_JOB_EXECUTED)
    assert [row.state for row in rows()] == ["succeeded"] * 2


def test_no_frame_of_a_failed_job_is_kept(start):
    """A local of a job that raised dies, although listeners keep the event."""
    node = start()
    kept = []

    class Local:
        pass

    def raises():
        local = Local()
        kept.append(weakref.ref(local))
        raise OnPurposeError

    node.run(raises)
    assert node.heard.one(EVENT_JOB_ERROR).exception is not None
    eventually(lambda: gc.collect() is not None and kept[0]() is None)


def test_nothing_is_kept_of_submissions_that_have_ended(start):
    """Tickets, counts and the inner executor's own counts are gone after many runs."""
    for inner in ("threadpool", "debug"):
        node = start(inner=inner)
        for number in range(20):
            node.run(int, job_id=f"{inner} {number}")
        eventually(lambda node=node: len(node.heard.of(EVENT_JOB_EXECUTED)) == 20)
        eventually(lambda node=node: not node.executor._submitted)
        assert not node.executor._running
        assert dict(node.executor._inner._instances) == {}


def test_submitting_touches_no_store(start, url):
    """I/O in `submit_job` would block the scheduler's lock, and an event loop with it."""
    node = start(inner=ThreadPoolExecutor(1), paused=True)
    go_on = threading.Event()
    node.executor._inner._pool.submit(go_on.wait, 10)
    node.executor._store.read = lambda _: pytest.fail("read")
    node.run(int)
    node.scheduler.resume()
    node.heard.one(EVENT_JOB_SUBMITTED)
    del node.executor._store.read
    go_on.set()
    node.heard.one(EVENT_JOB_EXECUTED)


def test_a_paused_scheduler_submits_nothing_and_then_catches_up(start):
    """Pause and resume are APScheduler's own."""
    node = start()
    node.scheduler.pause()
    node.run(int)
    never(lambda: node.heard.of(EVENT_JOB_SUBMITTED), during=0.2)
    node.scheduler.resume()
    node.heard.one(EVENT_JOB_EXECUTED)
