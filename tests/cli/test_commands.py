"""The commands that look and operate, as programs on real stores."""

import json
from datetime import datetime, timedelta, timezone

import pytest
from apscheduler.schedulers.background import BackgroundScheduler
from claims import HOUR, SECOND, ask, rows, run, win
from waiting import eventually

from apscheduler_fence import fenced
from apscheduler_fence.slots import format_time
from apscheduler_fence.stores import open_store

MINUTE = 60 * SECOND
NOW = int(datetime.now(timezone.utc).timestamp()) // 60 * MINUTE
COMMANDS = ["demo", "doctor", "init", "missing", "outbox", "prune", "release", "retry", "run", "runs", "show", "status"]

pytestmark = pytest.mark.backends("sqlite")


@pytest.fixture
def store(store_url):
    """The store that the console script works on."""
    store = open_store(store_url)
    store.open()
    yield store
    store.close()


def slot(minutes_ago):
    return format_time(NOW - minutes_ago * MINUTE)


def at(minutes_ago, job="settle", **terms):
    """A claim of the slot of so many minutes ago."""
    when = NOW - minutes_ago * MINUTE
    return ask(job, slot=slot(minutes_ago), slot_at=when, scheduled_at=when, **terms)


def answer(done):
    """The one JSON document that a command prints."""
    return json.loads(done.stdout)


# --- looking ----------------------------------------------------------------------------------------------------------


def test_status_shows_who_holds_what_until_when_and_how_jobs_fared(cli, store):
    """Leases held, dead ones among them, and counts by job."""
    run(store, at(5))
    run(store, at(4), "failed", "boom")
    win(store, at(3, job="dead", lock_at_most=1))
    alive = win(store, at(2))
    shown = answer(cli("status", "--json"))
    assert [(each["lease"], each["over"]) for each in shown["leases"]] == [("dead", True), ("settle", False)]
    assert (shown["leases"][1]["holder"], shown["leases"][1]["token"]) == (alive.holder, alive.token)
    assert shown["jobs"] == {"dead": {"running": 1}, "settle": {"running": 1, "failed": 1, "succeeded": 1}}
    text = cli("status", "--since", "2h").stdout
    assert f"settle/{slot(2)}" in text
    assert "over" in text


def test_status_counts_from_since_on(cli, store):
    """Older slots are left out."""
    run(store, at(50))
    run(store, at(5))
    assert answer(cli("status", "--since", "30m", "--json"))["jobs"] == {"settle": {"succeeded": 1}}


def test_runs_filters_by_job_state_time_and_number(cli, store):
    """The newest come first."""
    for minutes in (9, 8, 7):
        run(store, at(minutes))
    run(store, at(6), "failed", "boom")
    run(store, at(5, job="mail"))

    def ids(*filters):
        return [each["id"] for each in answer(cli("runs", "--json", *filters))]

    assert ids("--job", "settle") == [f"settle/{slot(minutes)}" for minutes in (6, 7, 8, 9)]
    assert ids("--state", "failed", "--state", "lost") == [f"settle/{slot(6)}"]
    assert ids("--since", slot(7)) == [f"mail/{slot(5)}", f"settle/{slot(6)}", f"settle/{slot(7)}"]
    assert ids("--limit", "1") == [f"mail/{slot(5)}"]


def test_runs_can_be_read_on_eighty_columns_without_colour(cli, store):
    """Lines are short and hold neither colours nor what a job's error may have put there."""
    run(store, at(5, job="a-rather-long-job-name/with [brackets] :smile: and more of it than fits"))
    text = cli("runs", COLUMNS="80").stdout
    assert "\x1b" not in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    whole = "".join(text.split())
    assert "[brackets]:smile:" in whole
    assert "succeeded" in text


def test_show_tells_all_of_one_execution_and_its_error(cli, store):
    """With control characters written out; the JSON keeps them."""
    run(store, at(5, func="pay:settle"), "failed", "ValueError: \x1b[31mboom")
    text = cli("show", f"settle/{slot(5)}").stdout
    assert "pay:settle" in text
    assert "ValueError: \\x1b[31mboom" in text
    record = answer(cli("show", f"settle/{slot(5)}", "--json"))
    assert (record["state"], record["error"]) == ("failed", "ValueError: \x1b[31mboom")
    assert record["took"] >= 0
    assert record["scheduled_at"] == slot(5)


def test_show_ends_with_1_if_there_is_no_record(cli):
    """And says so on standard error."""
    assert "no record of settle/never" in cli("show", "settle/never", code=1).stderr


def test_missing_lists_the_slots_without_a_record_and_ends_with_1(cli, store):
    """By a crontab or by an interval, as the executor would compute them."""
    for minutes in (10, 9, 7):
        run(store, at(minutes))
    options = ["missing", "--job", "settle", "--since", slot(10), "--until", slot(6), "--cron", "* * * * *"]
    shown = answer(cli(*options, "--json", code=1))
    assert [each["slot"] for each in shown["slots"]] == [slot(8), slot(6)]
    assert shown["expected"] == 5
    assert f"settle/{slot(8)}\nsettle/{slot(6)}\n2 of 5 slots missing" in cli(*options, code=1).stdout
    every = cli("missing", "--job", "settle", "--every", "1m", "--since", slot(10), "--until", slot(8), "--json")
    assert answer(every)["slots"] == []


def test_missing_reads_a_crontab_in_the_given_zone(cli):
    """The slots are in UTC all the same."""
    since, until = "2026-01-05", "2026-01-06T00:00:00+00:00"
    options = ["--job", "settle", "--cron", "30 9 * * mon", "--timezone", "Asia/Tokyo", "--grace", "0s"]
    shown = answer(cli("missing", *options, "--since", since, "--until", until, "--json", code=1))
    assert [each["slot"] for each in shown["slots"]] == ["2026-01-05T00:30:00Z"]


@pytest.mark.parametrize(
    "options",
    [
        ["--since", "1h"],
        ["--since", "1h", "--cron", "* * * * *", "--every", "1m"],
        ["--since", "1h", "--cron", "often"],
        ["--since", "1h", "--cron", "* * * * *", "--timezone", "Mars/Olympus"],
        ["--since", "2026-01-05T10:00:00", "--every", "1m"],
        ["--since", "yesterday", "--every", "1m"],
        ["--since", "1h", "--every", "0s"],
    ],
)
def test_a_schedule_or_time_that_cannot_be_read_is_a_usage_error(cli, options):
    """Exit code 2, before the store is asked."""
    assert "Error" in cli("missing", "--job", "settle", *options, code=2, store="sqlite:////nowhere/at.all").stderr


# --- operating --------------------------------------------------------------------------------------------------------


def test_retry_lets_a_failed_execution_run_once_more(cli, store):
    """It waits for its next attempt, and cannot be revived twice."""
    run(store, at(5), "failed", "boom")
    assert cli("retry", f"settle/{slot(5)}").stdout == f"settle/{slot(5)} waits for attempt 2\n"
    assert rows(store)[f"settle/{slot(5)}"].state == "waiting"
    assert "running or waiting" in cli("retry", f"settle/{slot(5)}", code=1).stderr


@pytest.mark.parametrize("delivery", ["at_most_once", "at_least_once"])
def test_a_retried_execution_is_run_by_a_node_that_has_its_job(cli, store, store_url, delivery):
    """A scheduler that goes on running finds it: the same execution, the next attempt, a larger token."""
    attempts = []

    @fenced
    def flaky(fence):
        attempts.append((fence.execution_id, fence.attempt, fence.token))
        if len(attempts) == 1:
            raise ValueError("boom")

    executor = {"type": "fenced", "store": store_url, "sweep": 0.1, "delivery": delivery}
    scheduler = BackgroundScheduler(executors={"default": executor}, timezone=timezone.utc)
    noon = datetime(2026, 1, 5, 12, tzinfo=timezone.utc)
    scheduler.add_job(flaky, "date", id="flaky", run_date=noon, misfire_grace_time=None)
    scheduler.start()
    try:
        name = "flaky/2026-01-05T12:00:00Z"
        eventually(lambda: name in rows(store) and rows(store)[name].state == "failed")
        cli("retry", name)
        eventually(lambda: rows(store)[name].state == "succeeded")
    finally:
        scheduler.shutdown()
    assert [(name, attempt) for name, attempt, _ in attempts] == [(name, 1), (name, 2)]
    assert attempts[1][2] > attempts[0][2]


def test_retry_refuses_what_succeeded_and_what_nobody_knows(cli, store):
    """Exit code 1 for both."""
    run(store, at(5))
    assert "succeeded" in cli("retry", f"settle/{slot(5)}", code=1).stderr
    assert "no record" in cli("retry", f"settle/{slot(4)}", "--json", code=1).stderr


def test_release_breaks_a_lease_and_says_what_became_of_the_run(cli, store):
    """Once; then nobody holds it."""
    held = win(store, at(5, lock_at_least=HOUR))
    assert "nobody holds the lease settle under token 7" in cli("release", "settle", "--token", 7, code=1).stderr
    text = cli("release", "settle", "--token", held.token).stdout
    assert f"released settle: token {held.token}" in text
    assert f"settle/{slot(5)} is lost" in text
    assert "lock_at_least keeps the next slot back until" in text
    assert "nobody holds the lease settle" in cli("release", "settle", code=1).stderr


def test_prune_deletes_what_is_past_its_time(cli, store):
    """And nothing else."""
    run(store, at(5, keep_for=-SECOND))
    run(store, at(4))
    assert cli("prune").stdout == "1 records deleted\n"
    assert answer(cli("prune", "--json")) == {"pruned": 0}
    assert set(rows(store)) == {f"settle/{slot(4)}"}


def test_init_makes_the_tables_or_prints_them(cli, store_url, tmp_path):
    """In a database of its own: nothing else has made them."""
    other = f"sqlite:///{tmp_path / 'other.db'}"
    assert "CREATE TABLE" in cli("init", "--sql", "--table-prefix", "app_", store=other).stdout
    assert not (tmp_path / "other.db").exists()
    assert cli("init", store=other).stdout == "ready\n"
    assert answer(cli("runs", "--json", store=other)) == []


# --- all of them ------------------------------------------------------------------------------------------------------


def test_every_command_has_its_help_and_no_other_is_there(cli):
    """Each names its options."""
    listed = cli("--help").stdout.partition("Commands:")[2]
    assert [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2] != " "] == COMMANDS
    for command in COMMANDS:
        assert "Options:" in cli(command, "--help").stdout


def test_a_store_that_cannot_be_reached_is_exit_code_69(cli):
    """The password in its URL is not shown."""
    nowhere = "postgresql://somebody:secret@127.0.0.1:1/none"
    done = cli("status", "--json", store=nowhere, code=69)
    assert (done.stdout, "secret" in done.stderr) == ("", False)


def test_a_wrong_setting_is_exit_code_78(cli):
    """A URL that is none, an option that the store does not know, a namespace that is no name."""
    cli("status", store="nonsense", code=78)
    cli("status", "--table-prefix", "x_", store="redis://127.0.0.1:1", code=78)
    cli("status", "--namespace", " x", code=78)


def test_no_store_is_a_usage_error(cli):
    """Unless the variable names one."""
    assert "--store" in cli("status", store="", code=2).stderr


@pytest.mark.backends("postgresql", "mariadb", "redis")
def test_every_command_works_on_every_kind_of_store(cli, store_url):
    """One story through all of them, in a namespace."""
    mine = ("--namespace", "billing")
    store = open_store(store_url, "billing")
    store.open()
    run(store, at(9, job="billing/settle"), "failed", "boom")
    win(store, at(8, job="billing/settle"))
    run(store, at(7, job="billing/old", keep_for=-SECOND))
    store.close()
    cli("init", *mine)
    assert [each["lease"] for each in answer(cli("status", "--json", *mine))["leases"]] == ["billing/settle"]
    assert "billing/settle" in cli("status", *mine).stdout
    assert len(answer(cli("runs", "--job", "settle", "--json", *mine))) == 2
    assert answer(cli("show", f"settle/{slot(9)}", "--json", *mine))["error"] == "boom"
    schedule = ("--cron", "* * * * *", "--since", slot(9), "--until", slot(7))
    gaps = answer(cli("missing", "--job", "settle", *schedule, "--json", *mine, code=1))
    assert [each["execution_id"] for each in gaps["slots"]] == [f"billing/settle/{slot(7)}"]
    assert answer(cli("release", "settle", "--json", *mine))["state"] == "lost"
    assert answer(cli("retry", f"settle/{slot(9)}", "--json", *mine))["state"] == "waiting"
    assert answer(cli("prune", "--json", *mine)) == {"pruned": 1}
    told = cli("run", "--name", "report", "--every", "1d", *mine, "--", "sh", "-c", "echo $FENCE_EXECUTION_ID").stdout
    midnight = datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    assert told in {f"billing/report/{midnight - timedelta(days=back):%Y-%m-%dT%H:%M:%SZ}\n" for back in (0, 1)}
    cli("run", "--name", "report", "--slot", told.strip().rpartition("/")[2], *mine, "--", "false", code=75)
    findings = answer(cli("doctor", "--json", *mine, code=1 if store_url.startswith("redis") else 0))["findings"]
    assert all("append-only" in each["message"] for each in findings)
