"""`doctor`: what it finds, and that it finds nothing where nothing is wrong."""

import json
import textwrap

import pytest
from claims import SECOND, ask, run

from apscheduler_fence.stores import open_store

pytestmark = pytest.mark.backends("sqlite")

WELL = """
import os
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler_fence import fenced, unfenced

def scheduler(cls=BackgroundScheduler, **options):
    fence = {"type": "fenced", "store": os.environ["APSCHEDULER_FENCE_STORE"], **options}
    return cls(executors={"default": fence, "plain": {"type": "threadpool"}})

def pay(): ...
def mail(): ...
async def fetch(): ...
@unfenced
def clear_cache(): ...

well = scheduler()
well.add_job(pay, "cron", minute="*/10", id="pay")
well.add_job(mail, "interval", minutes=10, id="mail", jitter=30)
well.add_job(clear_cache, "cron", minute="*", id="clear")
"""


@pytest.fixture
def examine(cli, tmp_path):
    """Writes an application with one scheduler `it` and returns the findings about it."""

    def examine(source, code=1):
        (tmp_path / "app.py").write_text(WELL + "\nit = scheduler()\n" + textwrap.dedent(source))
        found = json.loads(cli("doctor", "app:it", "--json", code=code).stdout)["findings"]
        return [(each["level"], each["where"], each["message"]) for each in found]

    return examine


def test_nothing_is_found_where_nothing_is_wrong(cli, tmp_path):
    """Exit code 0, also for a function that makes the scheduler."""
    (tmp_path / "app.py").write_text(WELL + "\ndef make():\n    return well\n")
    assert cli("doctor", "app:well").stdout == "jobs: 3, stores: 1, errors: 0, warnings: 0, notes: 0\n"
    assert json.loads(cli("doctor", "app:make", "--json").stdout)["jobs"] == ["pay", "mail", "clear"]


@pytest.mark.parametrize(
    ("job", "level", "words"),
    [
        ('pay, "cron", minute="*"', "error", "no ID of its own"),
        ('pay, "cron", minute="*", id=" pay"', "error", "whitespace"),
        ('fetch, "cron", minute="*", id="fetch"', "error", "never awaits"),
        ('pay, "calendarinterval", months=1, id="pay"', "warning", "start_date="),
        ('pay, "date", id="pay"', "warning", "run_date="),
        ('pay, "cron", minute="*", jitter=90, id="pay"', "warning", "jitter of 90 s"),
        ('fenced(lock_at_least="2m")(pay), "cron", minute="*", id="pay"', "warning", "lock_at_least (2m00s)"),
        ('fenced(lock_at_most="3s")(pay), "cron", minute="*", id="pay"', "warning", "the store may take 2.00s"),
    ],
)
def test_a_job_that_will_go_wrong_is_found(examine, job, level, words):
    """One finding, which says what to write instead."""
    [(found, _, message)] = examine(f"it.add_job({job})")
    assert found == level
    assert words in message


def test_a_coroutine_function_is_right_on_a_scheduler_that_awaits(examine):
    """An asyncio scheduler's default executor does."""
    source = """
        from apscheduler.schedulers.asyncio import AsyncIOScheduler
        it = scheduler(AsyncIOScheduler)
        it.add_job(fetch, "cron", minute="*", id="fetch")
        """
    assert examine(source, code=0) == []


def test_two_jobs_under_one_name_are_found(examine):
    """Each slot would run only one of them."""
    source = """
        it.add_job(fenced(name="ledger")(pay), "cron", minute="*", id="one")
        it.add_job(fenced(name="ledger")(mail), "cron", minute="*", id="two")
        """
    [(level, where, message)] = examine(source)
    assert (level, where) == ("error", "ledger")
    assert "one (app:pay), two (app:mail)" in message


def test_a_job_on_an_executor_without_a_fence_is_noted(examine):
    """Perhaps that is meant, so it is no reason to fail."""
    [(level, where, message)] = examine('it.add_job(pay, "cron", minute="*", id="pay", executor="plain")', code=0)
    assert (level, where) == ("note", "pay")
    assert "every node runs it" in message


@pytest.mark.parametrize(
    ("option", "said"), [("renew=False, lock_at_most", "lock_at_most"), ("max_runtime", "max_runtime")]
)
def test_a_limit_that_runs_have_reached_is_found(examine, store_url, option, said):
    """By what the store has recorded; the same limits pass where runs are short."""
    source = f'it.add_job(fenced({option}="10s")(pay), "cron", minute="*", id="pay")'
    _recorded(store_url, took=5)
    assert examine(source, code=0) == []
    _recorded(store_url, took=9)
    assert [level for level, _, _ in examine(source)] == ["warning"]
    _recorded(store_url, took=11)
    [(level, _, message)] = examine(source)
    assert level == "error"
    assert f"and {said} is 10s" in message


def _recorded(store_url, took):
    """A run of `pay` that took so many seconds."""
    store = open_store(store_url)
    grant = run(store, ask("pay", func="app:pay"))
    with store._engine.begin() as connection:
        row = {"token": grant.token, "took": took * SECOND}
        connection.exec_driver_sql(
            "UPDATE fence_execution SET finished_at = started_at + :took WHERE token = :token", row
        )
    store.close()


def test_a_name_that_another_application_uses_is_found(examine, store_url):
    """By the function that its lease names."""
    store = open_store(store_url)
    run(store, ask("pay", func="elsewhere:pay"))
    store.close()
    [(level, _, message)] = examine('it.add_job(pay, "cron", minute="*", id="pay")')
    assert level == "warning"
    assert "elsewhere:pay" in message


def test_what_cannot_be_read_is_said(examine):
    """A job store with earlier jobs, and a module that starts its scheduler."""
    source = """
        from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
        it.add_jobstore(SQLAlchemyJobStore("sqlite:///jobs.db"), "kept")
        it.add_job(pay, "cron", minute="*", id="pay")
        """
    assert [(level, where) for level, where, _ in examine(source, code=0)] == [("note", "kept")]
    started = 'it.add_job(pay, "cron", hour="*", id="pay")\nit.start(paused=True)'
    [(level, where, message)] = examine(started)
    assert (level, where) == ("warning", "scheduler")
    assert "starts the scheduler" in message


def test_a_wrong_clock_is_found(cli):
    """The store's clock against this host's: SQLite's is this host's own, so it is right."""
    assert "errors: 0, warnings: 0" in cli("doctor").stdout


@pytest.mark.backends("redis")
def test_redis_without_persistence_and_with_eviction_is_found(cli, redis_server):
    """A claim that was evicted or forgotten could be granted again."""
    with redis_server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            text = " ".join(cli("doctor", code=1).stdout.split())
        finally:
            client.config_set("maxmemory-policy", "noeviction")
    assert "maxmemory-policy" in text
    assert "append-only" in text


def test_a_store_that_is_away_is_exit_code_69_and_the_rest_is_checked(cli, tmp_path):
    """The findings about the jobs are printed all the same."""
    (tmp_path / "app.py").write_text(WELL + '\nwell.add_job(fetch, "cron", minute="*", id="fetch")\n')
    done = cli("doctor", "app:well", store="postgresql://somebody:secret@127.0.0.1:1/none", code=69)
    assert "never awaits" in " ".join(done.stdout.split())
    assert "secret" not in done.stdout + done.stderr


@pytest.mark.parametrize("reference", ["app", "app:nothing", "nowhere:it", "app:pay", "app:WELL"])
def test_a_reference_that_leads_nowhere_is_exit_code_78(cli, tmp_path, reference):
    """And the message names it."""
    (tmp_path / "app.py").write_text(WELL + "\nWELL = 1\n")
    assert reference in cli("doctor", reference, code=78).stderr


def test_neither_reference_nor_store_is_a_usage_error(cli):
    """There would be nothing to check."""
    cli("doctor", store="", code=2)
