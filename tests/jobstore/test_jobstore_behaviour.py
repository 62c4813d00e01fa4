"""What a shared job store does for schedulers that work on it at the same time."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone

import jobstore_jobs
import pytest
import sqlalchemy
from apscheduler.events import EVENT_JOB_REMOVED
from apscheduler.jobstores.base import ConflictingIdError, JobLookupError
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.combining import OrTrigger
from jobstore_nodes import SWAPPING, HandScheduler, Recorder, inner_options

from apscheduler_fence.errors import StoreError
from apscheduler_fence.jobstore import SharedJobStore

UTC = timezone.utc
HOUR = timedelta(hours=1)
pytestmark = pytest.mark.backends(*SWAPPING)


def ago(seconds=1.0):
    return datetime.now(UTC) - timedelta(seconds=seconds)


def add(node, job_id="job", trigger="interval", **options):
    """Adds a job that is due now, every hour unless told otherwise, and returns its run time."""
    if trigger == "interval":
        options = {"hours": 1, "next_run_time": ago(), **options}
    return node.scheduler.add_job(jobstore_jobs.nothing, trigger, id=job_id, **options).next_run_time


def add_date(node, job_id="job"):
    return add(node, job_id, "date", run_date=ago())


# --- a job removed by another node -------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_due", [add, add_date], ids=["periodic", "date"])
def test_the_loop_survives_a_job_that_another_node_removed(node, other, add_due):
    """A job that vanishes while the loop has it in hand is gone, and the next one is run."""
    add_due(node, "first")
    add_due(node, "second")
    node.executor.meanwhile = lambda: other.scheduler.get_job("first") and other.scheduler.remove_job("first")
    node.turn()
    assert node.executor.ids == ["first", "second"]
    assert node.scheduler.get_job("first") is None


@pytest.mark.parametrize("add_due", [add, add_date], ids=["periodic", "date"])
@pytest.mark.backends("memory", *SWAPPING)
def test_the_loop_survives_a_job_that_removes_itself(node, add_due, caplog):
    """A function that is called inside the loop may remove its own job, and that is not an error of the store."""
    add_due(node)
    node.executor.meanwhile = lambda: node.scheduler.remove_job("job")
    assert node.turn() <= 1
    assert node.scheduler.get_jobs() == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_who_removes_a_job_that_is_gone_is_told(node, other):
    """`remove_job` of a job that another node removed raises `JobLookupError`."""
    add(node)
    other.scheduler.remove_job("job")
    with pytest.raises(JobLookupError):
        node.scheduler.remove_job("job")


def test_a_finished_job_is_removed_by_whoever_ran_it(node, other):
    """A job without a further run time is gone after its run, and nobody else sees it as due."""
    removed = []
    node.scheduler.add_listener(removed.append, EVENT_JOB_REMOVED)
    add_date(node)
    node.turn()
    other.turn()
    assert node.scheduler.get_jobs() == []
    assert (node.executor.ids, other.executor.ids) == (["job"], [])
    assert [event.job_id for event in removed] == ["job"]


# --- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_due", [add, add_date], ids=["update_job", "remove_job"])
def test_the_loop_survives_a_store_that_fails_in_the_middle_of_a_pass(make_node, broken, add_due, caplog):
    """When the jobs cannot be written back, that is logged and looked at again after `jobstore_retry_interval`."""
    node = make_node(jobstore_retry_interval=3)
    add_due(node)
    with broken_from_submission(node, broken):
        wait = node.turn()
    assert 2.5 < wait <= 3
    assert [record.levelname for record in caplog.records if "tried again in 3.0 s" in record.message]


@pytest.mark.parametrize("add_due", [add, add_date], ids=["update_job", "remove_job"])
def test_a_run_whose_write_failed_is_not_submitted_again(make_node, broken, add_due):
    """Once the store is back, the missing write is made, and the run time is not run a second time."""
    node = make_node()
    add_due(node)
    with broken_from_submission(node, broken):
        node.turn()
    node.turn()
    assert node.executor.ids == ["job"]
    job = node.scheduler.get_job("job")
    assert job is None or job.next_run_time > datetime.now(UTC)
    assert node.turn() > 0.5


def test_a_job_added_anew_runs_although_an_old_write_failed(node, broken):
    """What is remembered of a failed write does not hold back a job that is added again with the same run time."""
    run_time = ago()
    add(node, trigger="date", run_date=run_time)
    with broken_from_submission(node, broken):
        node.turn()
    node.scheduler.remove_job("job")
    add(node, trigger="date", run_date=run_time)
    node.turn()
    assert node.executor.ids == ["job", "job"]


def broken_from_submission(node, broken):
    """Breaks the store when the node submits its first job, until the end of the block."""
    breaking = broken()

    class Breaking:
        def __enter__(self):
            node.executor.meanwhile = self.start

        def start(self):
            node.executor.meanwhile = lambda: None
            breaking.__enter__()

        def __exit__(self, *_):
            breaking.__exit__(None, None, None)

    return Breaking()


def test_errors_are_raised_to_users(node, broken):
    """A user's own call on a store that fails raises the driver's error."""
    add(node)
    with broken():
        for call in (
            lambda: add(node, "new"),
            lambda: node.scheduler.remove_job("job"),
            lambda: node.scheduler.modify_job("job", name="new"),
        ):
            with pytest.raises(Exception, match=r"misplaced|no such|not exist|doesn't|WRONGTYPE"):
                call()


@pytest.mark.backends("sqlite")
@pytest.mark.parametrize("add_due", [add, add_date], ids=["update_job", "remove_job"])
def test_a_database_that_is_down_is_asked_once_in_a_pass(node, broken, add_due):
    """After the first failed write the loop does not wait for the database again and again."""
    for number in range(250):
        add_due(node, f"job {number}")
    with broken_from_submission(node, broken):
        statements = counted_statements(node)
        node.turn()
    assert len(node.executor.ids) == 250
    assert statements[0] <= 4
    assert_written_back_without_a_second_run(node)


def assert_written_back_without_a_second_run(node):
    node.turn()
    assert len(node.executor.ids) == 250
    assert all(job.next_run_time > datetime.now(UTC) for job in node.scheduler.get_jobs())


@pytest.mark.backends("postgresql")
def test_a_broken_connection_is_replaced_within_the_call(node, postgresql):
    """After the database has ended all connections, neither the loop nor a user sees an error."""
    for call in (lambda: add(node), node.turn, lambda: node.scheduler.remove_job("job")):
        postgresql.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname LIKE 'test%'")
        call()
    assert node.executor.ids == ["job"]


@pytest.mark.backends("sqlite", "redis")
def test_a_background_scheduler_goes_on_after_an_outage(store_url, broken):
    """A thread that schedules outlives a store that fails for a while."""
    executor = Recorder()
    scheduler = BackgroundScheduler(
        jobstores={"default": SharedJobStore(poll=0.05, **inner_options(store_url))},
        executors={"default": executor},
        jobstore_retry_interval=0.05,
    )
    scheduler.start()
    scheduler.add_job(jobstore_jobs.nothing, "interval", seconds=0.1, id="job")
    eventually(lambda: executor.submitted)
    with broken():
        time.sleep(0.3)
    seen = len(executor.submitted)
    eventually(lambda: len(executor.submitted) > seen + 1)
    assert scheduler._thread.is_alive()
    scheduler.shutdown()


@pytest.mark.backends("sqlite", "redis")
def test_an_asyncio_scheduler_goes_on_after_an_outage(store_url, broken):
    """A scheduler on an event loop keeps its timer through an outage."""

    async def main():
        executor = Recorder()
        scheduler = AsyncIOScheduler(
            jobstores={"default": SharedJobStore(poll=0.05, **inner_options(store_url))},
            executors={"default": executor},
            jobstore_retry_interval=0.05,
        )
        scheduler.start()
        scheduler.add_job(jobstore_jobs.nothing, "interval", seconds=0.1, id="job")
        await asyncio.sleep(0.3)
        assert executor.submitted
        with broken():
            await asyncio.sleep(0.3)
        seen = len(executor.submitted)
        await asyncio.sleep(0.5)
        assert len(executor.submitted) > seen + 1
        scheduler.shutdown()
        await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 10))


def eventually(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.backends("sqlite", "postgresql", "mariadb")
def test_the_pass_after_shutdown_opens_no_connection(store_url):
    """A thread that turns once more after `shutdown` does not reach for the database again."""
    store = SharedJobStore(**inner_options(store_url))
    scheduler = HandScheduler(jobstores={"default": store}, executors={"default": Recorder()})
    scheduler.start()
    scheduler.shutdown()
    scheduler.turn()
    assert store._inner.engine.pool.checkedin() == 0


# --- changes made on another node --------------------------------------------------------------------------------------


CHANGES = {
    "pause": lambda scheduler: scheduler.pause_job("job"),
    "modify": lambda scheduler: scheduler.modify_job("job", args=(2,), next_run_time=ago(-7200)),
    "reschedule": lambda scheduler: scheduler.reschedule_job("job", trigger="cron", month=1),
    "remove": lambda scheduler: scheduler.remove_job("job"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_stale_node_writes_undoes_nothing(node, other, change):
    """A change made elsewhere while the loop had the job in hand stands, with every attribute."""
    add(node)
    after = []

    def meanwhile():
        change(other.scheduler)
        after.append(state(other, "job"))

    node.executor.meanwhile = meanwhile
    node.turn()
    node.executor.meanwhile = lambda: None
    node.turn()
    assert node.executor.ids == ["job"]
    assert [state(other, "job")] == after


def state(node, job_id):
    job = node.scheduler.get_job(job_id)
    return job and {**job.__getstate__(), "trigger": repr(job.trigger)}


def test_a_change_that_leaves_the_run_time_alone_does_not_bring_the_run_back(node, other):
    """When the loop's write loses against a change of the arguments, the job moves on and keeps the new arguments."""
    add(node)
    node.executor.meanwhile = lambda: other.scheduler.modify_job("job", args=(2,))
    node.turn()
    node.executor.meanwhile = lambda: None
    node.turn()
    assert node.executor.ids == ["job"]
    job = other.scheduler.get_job("job")
    assert (job.args, job.next_run_time > datetime.now(UTC)) == ((2,), True)


def test_a_job_given_a_new_trigger_moves_on_by_it(node, other):
    """When another node changed the trigger but not the run time, the next run time comes from the new trigger."""
    run_time = add(node)
    trigger = other.scheduler._create_trigger("interval", {"hours": 5})
    node.executor.meanwhile = lambda: other.scheduler.modify_job("job", trigger=trigger)
    node.turn()
    node.executor.meanwhile = lambda: None
    node.turn()
    assert node.executor.ids == ["job"]
    assert other.next_run_time("job") == run_time + 5 * HOUR


def test_a_modification_is_made_again_on_top_of_what_moved(node, other):
    """A user's change that meets a job which has just run keeps both: the change and the new run time."""
    run_time = add(node, args=(jobstore_jobs.Opaque(),))
    job = node.store.lookup_job("job")
    other.turn()
    job._modify(name="new")
    node.store.update_job(job)
    found = other.scheduler.get_job("job")
    assert (found.name, found.next_run_time) == ("new", run_time + HOUR)
    assert (job.name, job.next_run_time) == ("new", run_time + HOUR)


def test_two_changes_of_different_attributes_both_stand(node, other):
    """Two users who change different attributes at the same time do not undo each other."""
    add(node, args=(jobstore_jobs.Opaque(),))
    job = node.store.lookup_job("job")
    other.scheduler.modify_job("job", args=("new",))
    job._modify(max_instances=9)
    node.store.update_job(job)
    found = other.scheduler.get_job("job")
    assert (found.args, found.max_instances) == (("new",), 9)


def test_a_job_object_can_be_written_more_than_once(node, other):
    """Writing a job again repeats only what was changed since it was written last."""
    add(node)
    job = node.store.lookup_job("job")
    job._modify(name="mine")
    node.store.update_job(job)
    other.scheduler.modify_job("job", name="theirs")
    job._modify(max_instances=3)
    node.store.update_job(job)
    found = node.scheduler.get_job("job")
    assert (found.name, found.max_instances) == ("theirs", 3)


def test_a_modification_of_a_removed_job_is_refused(node, other):
    """A user who changes a job that was removed meanwhile is told, and does not bring it back."""
    add(node)
    job = node.store.lookup_job("job")
    other.scheduler.remove_job("job")
    job._modify(name="new")
    with pytest.raises(JobLookupError):
        node.store.update_job(job)
    assert other.scheduler.get_jobs() == []


def test_a_change_that_never_gets_through_is_reported(node, other, monkeypatch):
    """A user whose change lost every time gets an error, not silence."""
    add(node)
    job = node.store.lookup_job("job")
    look_up = node.store._shelf._table.get

    def get_and_lose(job_id):
        found = look_up(job_id)
        other.scheduler.modify_job("job", name="theirs")
        return found

    monkeypatch.setattr(node.store._shelf._table, "get", get_and_lose)
    other.scheduler.modify_job("job", name="first")
    job._modify(name="mine")
    with pytest.raises(StoreError, match="100 times"):
        node.store.update_job(job)


def test_a_finished_job_that_was_given_a_new_time_stays(node, other):
    """The loop does not remove a job that another node has scheduled anew."""
    add_date(node)
    node.executor.meanwhile = lambda: other.scheduler.reschedule_job("job", trigger="interval", hours=1)
    node.turn()
    assert other.next_run_time("job") > datetime.now(UTC)


def test_only_one_of_many_stale_nodes_moves_a_job(make_node):
    """Nodes that all had a job in hand move it on once: a periodic job does not skip a run time."""
    nodes = [make_node() for _ in range(4)]
    run_time = add(nodes[0])

    def within(depth):
        if depth < len(nodes):
            nodes[depth].executor.meanwhile = lambda: within(depth + 1)
            nodes[depth].turn()

    within(0)
    assert [node.executor.ids for node in nodes] == [["job"]] * 4
    assert nodes[0].next_run_time("job") == run_time + HOUR


# --- noticing what others did ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poll", [0.25, "0.25", timedelta(milliseconds=250)])
def test_an_idle_scheduler_looks_again_after_poll(make_node, poll):
    """With nothing to do for hours, and with no job at all, the next look is `poll` away."""
    node = make_node(poll=poll)
    assert 0.2 < node.turn() <= 0.25
    add(node, next_run_time=ago(-3600))
    assert 0.2 < node.turn() <= 0.25


def test_a_run_time_before_the_next_poll_is_met(make_node):
    """Polling does not make a job late."""
    node = make_node(poll=600)
    add(node, next_run_time=ago(-30))
    assert 29 < node.turn() <= 30


def test_what_another_node_added_is_run(node, other):
    """A job added on one node is due on the other at its next look."""
    assert node.turn() <= 1
    add(other)
    node.turn()
    assert node.executor.ids == ["job"]


def test_a_background_scheduler_notices_a_job_within_poll(store_url, other):
    """Without any wake-up of its own a scheduler runs what another process has added, at most `poll` later."""
    executor = Recorder()
    scheduler = BackgroundScheduler(
        jobstores={"default": SharedJobStore(poll=0.2, **inner_options(store_url))}, executors={"default": executor}
    )
    scheduler.start()
    time.sleep(0.05)
    add(other)
    asked = time.monotonic()
    eventually(lambda: executor.submitted)
    assert time.monotonic() - asked < 0.6
    scheduler.shutdown()


@pytest.mark.backends("sqlite", "postgresql", "mariadb")
def test_an_idle_look_is_one_statement(node):
    """A scheduler that finds nothing due asks the database one question a `poll`."""
    add(node, next_run_time=ago(-3600))
    statements = counted_statements(node)
    node.turn()
    assert statements == [1]


def counted_statements(node):
    counts = [0]

    def count(*_):
        counts[0] += 1

    sqlalchemy.event.listen(node.store._inner.engine, "before_cursor_execute", count)
    return counts


@pytest.mark.backends("sqlite", "postgresql", "mariadb")
def test_a_run_costs_no_more_statements_than_the_plain_store_needs(node):
    """A pass that was waited for reads the due jobs, writes them back and asks for the next run time."""
    add(node, next_run_time=ago(-0.2))
    time.sleep(node.turn())
    statements = counted_statements(node)
    node.turn()
    assert node.executor.ids == ["job"]
    assert statements == [3]


@pytest.mark.backends("sqlite")
def test_the_jobs_of_one_pass_share_transactions(node):
    """A thousand due jobs are written back in ten statements, not in a thousand."""
    for number in range(1000):
        add(node, f"job {number}")
    statements = counted_statements(node)
    node.turn()
    assert len(node.executor.ids) == 1000
    assert statements[0] <= 13
    assert all(job.next_run_time > datetime.now(UTC) for job in node.scheduler.get_jobs())


@pytest.mark.backends("sqlite")
def test_every_node_writes_in_the_same_order(node):
    """Rows are written in the order of their IDs, whatever the order of their run times, so that nodes never deadlock."""
    for age, job_id in enumerate(["c", "a", "b"]):
        add(node, job_id, next_run_time=ago(age + 1))
    written = []

    def note(_, __, statement, parameters, *___):
        if statement.startswith("UPDATE"):
            written.extend(row[-2] for row in parameters)

    sqlalchemy.event.listen(node.store._inner.engine, "before_cursor_execute", note)
    node.turn()
    assert written == ["a", "b", "c"]


# --- jobs that this node cannot run ------------------------------------------------------------------------------------


@pytest.fixture
def foreign_job(other):
    """A due job whose function only the other node can import."""
    module = types.ModuleType("only_elsewhere")
    module.run = types.FunctionType(jobstore_jobs.nothing.__code__, {}, "run")
    module.run.__module__ = "only_elsewhere"
    sys.modules["only_elsewhere"] = module
    other.scheduler.add_job("only_elsewhere:run", "interval", hours=1, id="foreign", next_run_time=ago())
    del sys.modules["only_elsewhere"]
    yield module
    sys.modules.pop("only_elsewhere", None)


def warnings_about(caplog, job_id):
    return [
        record for record in caplog.records if record.levelno == logging.WARNING and f'"{job_id}"' in record.message
    ]


def test_a_job_that_cannot_be_loaded_is_left_alone(node, foreign_job, caplog):
    """A node without the job's module runs its other jobs, warns once, and removes nothing."""
    add(node)
    for _ in range(3):
        wait = node.turn()
        node.scheduler.get_jobs()
    assert node.executor.ids == ["job"]
    assert [job.id for job in node.scheduler.get_jobs()] == ["job"]
    assert len(warnings_about(caplog, "foreign")) == 1
    assert wait > 0.9, "a job that nobody here can run must not keep the loop busy"
    sys.modules["only_elsewhere"] = foreign_job
    node.turn()
    assert node.executor.ids == ["job", "foreign"]


def test_a_user_is_told_that_a_job_cannot_be_loaded(node, foreign_job):
    """Looking up a job that cannot be loaded raises; removing it works."""
    with pytest.raises(LookupError, match="only_elsewhere"):
        node.scheduler.get_job("foreign")
    node.scheduler.remove_job("foreign")
    assert node.scheduler.get_job("foreign") is None


@pytest.mark.backends("memory", *SWAPPING)
def test_a_job_of_an_executor_that_is_not_here_is_left_alone(node, caplog):
    """A node that lacks the job's executor leaves the job to others, warns once, and runs it once it has one."""
    add(node, executor="gpu")
    add(node, "later", next_run_time=ago(-0.5))
    for _ in range(3):
        wait = node.turn()
    assert [job.id for job in node.scheduler.get_jobs()] == ["job", "later"]
    assert len(warnings_about(caplog, "job")) == 1
    assert 0.2 < wait <= 0.5, "the job that can be run is still met"
    executor = Recorder()
    node.scheduler.add_executor(executor, "gpu")
    node.turn()
    assert executor.ids == ["job"]


def test_an_executor_that_goes_in_the_middle_of_a_pass_takes_no_job_along(node):
    """The loop removes a job whose executor it does not find; the store keeps it for other nodes."""
    node.scheduler.add_executor(Recorder(), "gpu")
    add(node, "first", next_run_time=ago(2))
    add(node, "second", executor="gpu")
    node.executor.meanwhile = lambda: node.scheduler.remove_executor("gpu")
    node.turn()
    assert {job.id for job in node.scheduler.get_jobs()} == {"first", "second"}


def test_a_scheduler_with_an_unknown_job_does_not_spin(store_url, foreign_job):
    """While a job that cannot be run here is due, a real scheduler wakes up once a `poll`."""
    store = SharedJobStore(poll=0.1, **inner_options(store_url))
    looks = []
    look = store.get_due_jobs
    store.get_due_jobs = lambda now: looks.append(now) or look(now)
    scheduler = BackgroundScheduler(jobstores={"default": store})
    scheduler.start()
    time.sleep(0.5)
    scheduler.shutdown()
    assert 2 <= len(looks) <= 7


# --- replace_existing --------------------------------------------------------------------------------------------------


def again(node, trigger, **options):
    return node.scheduler.add_job(jobstore_jobs.nothing, trigger, id="job", replace_existing=True, **options)


SAME = {
    "cron": ("cron", {"minute": "*/5", "jitter": 9}),
    "date": ("date", {"run_date": "2099-01-01 10:00:00"}),
    "interval": ("interval", {"hours": 2}),
    "jittered interval": ("interval", {"hours": 2, "jitter": 60}),
    "anchored interval": ("interval", {"hours": 2, "start_date": "2020-01-01 00:00:00"}),
    "calendar interval": ("calendarinterval", {"months": 1, "hour": 4}),
}


@pytest.mark.parametrize(("trigger", "options"), SAME.values(), ids=SAME)
@pytest.mark.backends("memory", *SWAPPING)
def test_the_same_trigger_keeps_its_next_run_time(node, trigger, options):
    """Adding a job again at every start changes what it does, not when it runs next."""
    add(node, trigger=trigger, **options)
    kept = datetime(2098, 1, 1, tzinfo=UTC)
    node.scheduler.modify_job("job", next_run_time=kept)
    before = repr(node.scheduler.get_job("job").trigger)
    job = again(node, trigger, args=(2,), **options)
    found = node.scheduler.get_job("job")
    assert (found.next_run_time, found.args, repr(found.trigger)) == (kept, (2,), before)
    assert job.next_run_time == kept, "the caller sees what is stored"


def test_a_process_that_restarts_more_often_than_the_period_runs_its_job(make_node):
    """A missed run time outlives a restart that adds the job again, and is run."""
    first = make_node()
    again(first, "interval", hours=1)
    due = ago()
    first.scheduler.modify_job("job", next_run_time=due)
    second = make_node()
    again(second, "interval", hours=1)
    second.turn()
    assert second.executor.submitted == [("job", [due])]


def test_a_combined_trigger_with_an_interval_is_recognised(node):
    """An interval inside another trigger gets a start date of its own each time, and is the same all the same."""
    kept = datetime(2098, 1, 1, tzinfo=UTC)
    for _ in range(2):
        parts = [node.scheduler._create_trigger("interval", {"hours": 3}), node.scheduler._create_trigger("cron", {})]
        job = again(node, OrTrigger(parts, jitter=5))
        if job.next_run_time != kept:
            node.scheduler.modify_job("job", next_run_time=kept)
    assert node.next_run_time("job") == kept


DIFFERENT = {
    "kind": ("cron", {"minute": 0}),
    "period": ("interval", {"hours": 3}),
    "jitter": ("interval", {"hours": 2, "jitter": 3}),
    "start": ("interval", {"hours": 2, "start_date": "2020-01-01 00:00:01"}),
    "end": ("interval", {"hours": 2, "end_date": "2097-01-01 00:00:00"}),
    "a trigger of the user's": (jobstore_jobs.Patient(hours=2), {}),
}


@pytest.mark.parametrize(("trigger", "options"), DIFFERENT.values(), ids=DIFFERENT)
def test_a_changed_trigger_is_scheduled_anew(node, trigger, options):
    """A job that is added again with another trigger gets that trigger's next run time."""
    add(node, hours=2)
    kept = datetime(2098, 1, 1, tzinfo=UTC)
    node.scheduler.modify_job("job", next_run_time=kept)
    again(node, trigger, **options)
    assert node.next_run_time("job") < kept
    assert type(node.scheduler.get_job("job").trigger) is type(node.scheduler._create_trigger(trigger, options))


def test_a_next_run_time_that_the_caller_gives_wins(node):
    """`next_run_time=` of `add_job` is obeyed, whatever the trigger."""
    add(node, trigger="cron", minute=0)
    wanted = ago()
    assert again(node, "cron", minute=0, next_run_time=wanted).next_run_time == wanted
    assert node.next_run_time("job") == wanted
    again(node, "cron", minute=0, next_run_time=None)
    assert node.next_run_time("job") is None


def test_a_paused_job_stays_paused(node):
    """A restart that adds the job again does not resume what an operator paused."""
    add(node)
    node.scheduler.pause_job("job")
    again(node, "interval", hours=1)
    assert node.next_run_time("job") is None


def test_a_job_that_cannot_be_loaded_can_be_replaced(node, foreign_job):
    """Replacing a job whose old function is gone works, and its schedule is kept."""
    job = node.scheduler.add_job(jobstore_jobs.nothing, "interval", hours=1, id="foreign", replace_existing=True)
    assert job.next_run_time < datetime.now(UTC)
    node.turn()
    assert node.executor.ids == ["foreign"]


@pytest.mark.parametrize("job_removed", [False, True], ids=["changed", "removed"])
def test_replacing_is_atomic(node, other, monkeypatch, job_removed):
    """A job that is changed or removed between the attempt to add it and the replacement is replaced nevertheless."""
    add(node)
    kept = datetime(2098, 1, 1, tzinfo=UTC)
    swap = node.store._shelf._table.swap

    def swap_too_late(moves):
        monkeypatch.undo()
        if job_removed:
            other.scheduler.remove_job("job")
        else:
            other.scheduler.modify_job("job", next_run_time=kept)
        return swap(moves)

    monkeypatch.setattr(node.store._shelf._table, "swap", swap_too_late)
    again(node, "interval", hours=1, args=(2,))
    found = other.scheduler.get_job("job")
    assert found.args == (2,)
    assert (found.next_run_time == kept) is not job_removed


def test_workers_that_add_the_same_job_at_once_all_succeed(store_url):
    """With `replace_existing=True` any number of workers may start together, on an empty database."""
    assert outcomes_of_starting_together(store_url, replace_existing=True) == ["added"] * 6


def test_without_replace_existing_one_worker_adds_and_the_others_are_told(store_url):
    """Without `replace_existing` exactly one of the workers that start together adds the job."""
    outcomes = outcomes_of_starting_together(store_url, replace_existing=False)
    assert sorted(outcomes) == ["added"] + ["conflict"] * 5


def outcomes_of_starting_together(store_url, *, replace_existing):
    barrier = threading.Barrier(6, timeout=20)
    # Made here, because SQLAlchemy imports a dialect at first use, and not safely from several threads.
    stores = [SharedJobStore(**inner_options(store_url)) for _ in range(6)]

    def start(store):
        scheduler = HandScheduler(jobstores={"default": store}, executors={"default": Recorder()})
        try:
            barrier.wait()
            scheduler.start()
            barrier.wait()
            scheduler.add_job(jobstore_jobs.nothing, "interval", hours=1, id="job", replace_existing=replace_existing)
        except ConflictingIdError:
            return "conflict"
        except Exception as error:  # noqa: BLE001 - reported as an outcome
            barrier.abort()
            return repr(error)
        finally:
            if scheduler.running:
                scheduler.shutdown()
        return "added"

    with ThreadPoolExecutor(6) as workers:
        return [outcome.result() for outcome in [workers.submit(start, store) for store in stores]]


# --- stores with a format of their own ---------------------------------------------------------------------------------


class OwnFormat(SQLAlchemyJobStore):
    """Keeps jobs in its own way."""

    def _reconstitute_job(self, job_state):
        return super()._reconstitute_job(job_state)


@pytest.mark.backends("sqlite")
def test_a_store_with_its_own_format_is_used_through_its_own_methods(store_url, caplog):
    """A subclass that reads or writes differently is not swapped behind its back, and the loss is logged."""
    store = SharedJobStore(OwnFormat, url=store_url)
    assert any("without compare-and-swap" in record.message for record in caplog.records)
    executor = Recorder()
    scheduler = HandScheduler(jobstores={"default": store}, executors={"default": executor})
    scheduler.start()
    scheduler.add_job(jobstore_jobs.nothing, "interval", hours=1, id="job", next_run_time=ago())
    scheduler.add_job(jobstore_jobs.nothing, "interval", hours=1, id="job", replace_existing=True)
    scheduler.turn()
    assert executor.ids == ["job"]
    executor.meanwhile = lambda: scheduler.remove_job("job")
    scheduler.modify_job("job", next_run_time=ago())
    scheduler.turn()
    assert scheduler.get_jobs() == []
    scheduler.shutdown()
