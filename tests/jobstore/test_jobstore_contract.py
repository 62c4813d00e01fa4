"""What APScheduler documents of its job stores holds for a shared one over every inner store."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import jobstore_jobs
import pytest
from apscheduler.job import Job
from apscheduler.jobstores.base import ConflictingIdError, JobLookupError
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.date import DateTrigger
from jobstore_nodes import SWAPPING, HandScheduler, Recorder, inner_options

from apscheduler_fence.jobstore import SharedJobStore

UTC = timezone.utc
TEN = datetime(2026, 9, 2, 10, tzinfo=UTC)
LONG = timedelta(days=3650)


def minutes(count):
    return timedelta(minutes=count)


@pytest.fixture
def scheduler():
    scheduler = HandScheduler(timezone=UTC, executors={"default": Recorder()})
    scheduler.start()
    yield scheduler
    scheduler.shutdown()


@pytest.fixture
def open_store(store_url, scheduler):
    """Opens a shared store at `store_url` whose poll hides no run time."""
    opened = []

    def open_(**options):
        store = SharedJobStore(poll=LONG, **inner_options(store_url), **options)
        store.start(scheduler, "main")
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.shutdown()


@pytest.fixture
def store(open_store):
    return open_store()


@pytest.fixture
def make_job(scheduler):
    def make(job_id="job", next_run_time=TEN, func=jobstore_jobs.nothing, **options):
        settings = {
            "trigger": DateTrigger(TEN, UTC),
            "executor": "default",
            "func": func,
            "args": (),
            "kwargs": {},
            "misfire_grace_time": 1,
            "coalesce": False,
            "max_instances": 1,
            "next_run_time": next_run_time,
            **options,
        }
        return Job(scheduler, job_id, **settings)

    return make


def test_a_job_comes_back_as_it_was_added(store, make_job):
    """Every attribute of a job survives the store."""
    given = make_job(
        "naïve job/1",
        TEN + timedelta(microseconds=1),
        args=(1, "zwei"),
        kwargs={"three": [3.0]},
        name="a name",
        trigger=CronTrigger(minute="*/5", timezone="Europe/Helsinki", jitter=3),
        misfire_grace_time=None,
        coalesce=True,
        max_instances=7,
    )
    store.add_job(given)
    found = store.lookup_job(given.id)
    was, now = given.__getstate__(), found.__getstate__()
    assert repr(was.pop("trigger")) == repr(now.pop("trigger"))
    assert was == now


@pytest.mark.backends(*SWAPPING)
def test_a_job_knows_where_it_came_from(store, make_job, scheduler):
    """A job that was read names its scheduler and its store's alias, so that `job.modify` works."""
    store.add_job(make_job())
    for job in [store.lookup_job("job"), *store.get_all_jobs(), *store.get_due_jobs(TEN)]:
        assert (job._scheduler, job._jobstore_alias) == (scheduler, "main")


def test_there_is_no_job_that_nobody_added(store):
    """Looking for an unknown job gives None."""
    assert store.lookup_job("job") is None


def test_an_id_belongs_to_one_job(store, make_job):
    """A second job with the same ID is refused, and the first stays as it was."""
    store.add_job(make_job(name="first"))
    with pytest.raises(ConflictingIdError):
        store.add_job(make_job(name="second"))
    assert store.lookup_job("job").name == "first"


def test_a_job_is_not_its_own_excuse(store, make_job):
    """Adding the very same job again is refused too."""
    job = make_job()
    store.add_job(job)
    with pytest.raises(ConflictingIdError):
        store.add_job(job)


def test_due_jobs_come_in_the_order_of_their_run_times(store, make_job):
    """Jobs are due from their run time on, the earliest first; paused jobs never are."""
    for job_id, time in [("third", 3), ("first", 1), ("later", 4), ("second", 2)]:
        store.add_job(make_job(job_id, TEN + minutes(time)))
    store.add_job(make_job("paused", None))
    assert [job.id for job in store.get_due_jobs(TEN)] == []
    assert [job.id for job in store.get_due_jobs(TEN + minutes(2))] == ["first", "second"]
    just_before = TEN + minutes(3) - timedelta(microseconds=1)
    assert [job.id for job in store.get_due_jobs(just_before)] == ["first", "second"]
    assert [job.id for job in store.get_due_jobs(TEN + minutes(3))] == ["first", "second", "third"]


def test_the_next_run_time_is_the_earliest(store, make_job):
    """The next run time is that of the earliest job that is not paused, to the microsecond."""
    expected = TEN + timedelta(microseconds=123_457)
    store.add_job(make_job("paused", None))
    store.add_job(make_job("later", TEN + minutes(1)))
    store.add_job(make_job("next", expected))
    assert store.get_next_run_time() == expected


def test_without_jobs_the_scheduler_looks_again_after_poll(store, make_job):
    """Where nothing will run, the next look is `poll` away: another process may add a job."""
    store.add_job(make_job("paused", None))
    distance = store.get_next_run_time() - datetime.now(UTC)
    assert abs(distance - LONG) < minutes(1)


def test_all_jobs_come_with_the_paused_ones_last(store, make_job):
    """The list of all jobs is ordered by run time, and ends with the paused ones."""
    for job_id, time in [("second", TEN + minutes(2)), ("paused", None), ("first", TEN)]:
        store.add_job(make_job(job_id, time))
    assert [job.id for job in store.get_all_jobs()] == ["first", "second", "paused"]


@pytest.mark.parametrize("time", [TEN + minutes(9), None], ids=["rescheduled", "paused"])
def test_an_update_replaces_the_job(store, make_job, time):
    """After an update the store has the new job, at its new place in the order."""
    store.add_job(make_job(args=(1,)))
    store.add_job(make_job("other", TEN + minutes(5)))
    store.update_job(make_job(next_run_time=time, args=(2,)))
    assert store.lookup_job("job").args == (2,)
    assert store.lookup_job("job").next_run_time == time
    assert [job.id for job in store.get_all_jobs()] == ["other", "job"]
    assert [job.id for job in store.get_due_jobs(TEN + minutes(5))] == ["other"]


def test_a_paused_job_can_be_resumed(store, make_job):
    """A job that was paused is due again once it has a run time."""
    store.add_job(make_job(next_run_time=None))
    job = store.lookup_job("job")
    job._modify(next_run_time=TEN)
    store.update_job(job)
    assert [job.id for job in store.get_due_jobs(TEN)] == ["job"]


def test_only_what_exists_can_be_updated_or_removed(store, make_job):
    """Updating or removing an unknown job raises `JobLookupError`."""
    with pytest.raises(JobLookupError):
        store.update_job(make_job())
    with pytest.raises(JobLookupError):
        store.remove_job("job")


def test_a_removed_job_is_gone(store, make_job):
    """A removed job is neither found nor due, and its ID is free."""
    store.add_job(make_job())
    store.add_job(make_job("other"))
    store.remove_job("job")
    assert store.lookup_job("job") is None
    assert [job.id for job in store.get_due_jobs(TEN)] == ["other"]
    store.add_job(make_job())


def test_all_jobs_can_be_removed(store, make_job):
    """After removing all jobs there are none, paused or not."""
    store.add_job(make_job())
    store.add_job(make_job("paused", None))
    store.remove_all_jobs()
    assert store.get_all_jobs() == []
    assert list(store.get_due_jobs(TEN)) == []


def test_a_thousand_jobs_keep_their_order(store, make_job):
    """Many jobs are due together, each once and in order."""
    for number in range(1000):
        store.add_job(make_job(f"{number * 7919 % 1000:03}", TEN + minutes(number * 7919 % 1000)))
    due = [job.id for job in store.get_due_jobs(TEN + minutes(499))]
    assert due == [f"{number:03}" for number in range(500)]


@pytest.mark.parametrize(
    ("func", "args", "result"),
    [
        (jobstore_jobs.Account(7).settle, (), 7),
        (jobstore_jobs.Account.kind, (), "Account"),
        (jobstore_jobs.Account.currency, (), "EUR"),
        (jobstore_jobs.Account.settle, (jobstore_jobs.Account(8),), 8),
        ("jobstore_jobs:nothing", (1,), ((1,), {})),
    ],
    ids=["bound method", "class method", "static method", "unbound method", "reference"],
)
def test_methods_and_references_can_be_jobs(store, make_job, func, args, result):
    """A job that was read calls what the added one would have called."""
    store.add_job(make_job(func=func, args=args))
    job = store.lookup_job("job")
    assert job.func(*job.args, **job.kwargs) == result


@pytest.mark.backends(*SWAPPING)
def test_a_function_without_a_name_is_refused(store, make_job):
    """A lambda cannot be stored, and is refused with a reason."""
    with pytest.raises(ValueError, match="reference"):
        store.add_job(make_job(func=lambda: None))


@pytest.mark.backends(*SWAPPING)
def test_jobs_outlive_the_store_object(open_store, make_job):
    """What one store object has written, another one at the same place reads."""
    open_store().add_job(make_job())
    assert open_store().lookup_job("job").next_run_time == TEN


@pytest.mark.backends(*SWAPPING)
@pytest.mark.parametrize("protocol", [2, 5])
def test_apschedulers_own_store_reads_and_writes_the_same_jobs(open_store, make_job, scheduler, protocol):
    """The table stays APScheduler's: its own store reads our jobs, and we read those it wrote."""
    store = open_store(pickle_protocol=protocol)
    store.add_job(make_job(args=(1,)))
    plain = store._inner
    assert store.lookup_job("job").state_read[1] == protocol
    job = plain.lookup_job("job")
    assert (job.args, job.next_run_time) == ((1,), TEN)
    job._modify(args=(2,))
    plain.update_job(job)
    assert store.lookup_job("job").args == (2,)
