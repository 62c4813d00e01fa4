"""`run`: a command under lease, slot and fence, with real processes and real signals."""

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from claims import rows
from servers import Node
from waiting import eventually

from apscheduler_fence.history import History
from apscheduler_fence.stores import open_store

SLOT = "2026-01-05T10:00:00Z"
AT = ("--slot", SLOT)
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux is asked")

pytestmark = pytest.mark.backends("sqlite")


@pytest.fixture
def store(store_url):
    """The store that the console script works on."""
    store = open_store(store_url)
    yield store
    store.close()


@pytest.fixture
def started(store_url):
    """Starts a command under `run` that reports in JSON lines, and goes on."""
    nodes = []

    def started(*arguments, script):
        command = ["-m", "apscheduler_fence.cli", "run", *arguments, "--store", store_url, "--", "sh", "-c", script]
        nodes.append(Node(*command))
        return nodes[-1]

    yield started
    for node in nodes:
        node.close()


def only(store):
    """The one row there is."""
    (row,) = rows(store).values()
    return row


def test_the_command_is_told_its_token_and_execution_id(cli, store):
    """In its environment, with what else a job is told."""
    script = 'import json, os; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith("FENCE_")}))'
    told = json.loads(cli("run", "--name", "pay", *AT, "--", sys.executable, "-c", script).stdout)
    assert told == {
        "FENCE_TOKEN": str(only(store).token),
        "FENCE_EXECUTION_ID": f"pay/{SLOT}",
        "FENCE_JOB": "pay",
        "FENCE_SLOT": SLOT,
        "FENCE_SCHEDULED_AT": SLOT,
        "FENCE_ATTEMPT": "1",
        "FENCE_LEASE": "pay",
        "FENCE_IDEMPOTENCY_KEY": f"pay/{SLOT}",
    }
    assert (only(store).state, only(store).func) == ("succeeded", f"command:{os.path.basename(sys.executable)}")  # noqa: PTH119


def test_a_slot_is_run_once_whatever_came_of_it(cli, store):
    """The command's exit code is ours; the next one is refused with another, or with the one asked for."""
    cli("run", "--name", "pay", *AT, "sh", "-c", "exit 3", code=3)
    assert only(store).state == "failed"
    assert only(store).error.endswith("CommandFailed: sh exited with 3")
    refused = cli("run", "--name", "pay", *AT, "echo", "no", code=75)
    assert (refused.stdout, f"pay/{SLOT} has been run by" in refused.stderr) == ("", True)
    assert cli("run", "--name", "pay", *AT, "--refused-code", 0, "echo", "no").stdout == ""


def test_of_hosts_that_start_at_once_one_runs_the_command(cli, store):
    """The others are refused."""

    def host(_):
        env_is_shared = ("run", "--name", "pay", *AT, "--refused-code", 0, "--", "echo", "ran")
        return cli(*env_is_shared).stdout

    with ThreadPoolExecutor(4) as hosts:
        assert sorted(hosts.map(host, range(4))) == ["", "", "", "ran\n"]
    assert only(store).state == "succeeded"


def test_every_is_the_period_that_now_falls_into(cli, store):
    """Two hosts that start a little apart share the slot."""
    cli("run", "--name", "pay", "--every", "366d", "true")
    cli("run", "--name", "pay", "--every", "366d", "true", code=75)
    assert only(store).slot_at % (366 * 86_400_000_000) == 0


def test_without_slot_and_period_only_overlap_is_excluded(cli, store):
    """A later run is a run of its own."""
    cli("run", "--name", "pay", "true")
    cli("run", "--name", "pay", "true")
    assert [row.state for row in rows(store).values()] == ["succeeded", "succeeded"]


def test_lock_at_least_keeps_the_next_slot_back(cli):
    """Whatever its own options are."""
    cli("run", "--name", "pay", *AT, "--lock-at-least", "1h", "true")
    refused = cli("run", "--name", "pay", "true", code=75)
    assert "--lock-at-least keeps it back, until" in refused.stderr


def test_the_lease_is_renewed_while_the_command_runs(cli, started, store, tmp_path):
    """A command may take longer than `--lock-at-most`, and other slots wait for it."""
    script = f"""echo '{{"began": 1}}'; until [ -e {tmp_path}/done ]; do sleep 0.05; done"""
    node = started("--name", "pay", *AT, "--lock-at-most", "1s", script=script)
    node.receive(began=1)
    first = History(store).held()[0].until
    eventually(lambda: History(store).now() > first)
    assert "another slot holds the lease by" in cli("run", "--name", "pay", "true", code=75).stderr
    assert "is being run by" in cli("run", "--name", "pay", *AT, "true", code=75).stderr
    (tmp_path / "done").touch()
    assert node.wait() == 0, node.stderr
    assert only(store).state == "succeeded"


def test_a_shared_lease_keeps_other_jobs_out(cli, started):
    """Jobs that name one lease do not overlap."""
    node = started("--name", "pay", "--lease", "ledger", script="""echo '{"began": 1}'; sleep 30""")
    node.receive(began=1)
    cli("run", "--name", "mail", "--lease", "ledger", "true", code=75)
    cli("run", "--name", "mail", "true")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_reaches_the_command_and_its_answer_counts(started, store, name):
    """It ends in its own time; its run is recorded as cancelled and its lease is free."""
    number = getattr(signal, name)
    script = (
        f"""trap 'echo "{{\\"told\\": 1}}"; exit 5' {name[3:]}; echo '{{"began": 1}}'; while :; do sleep 0.05; done"""
    )
    node = started("--name", "pay", *AT, script=script)
    node.receive(began=1)
    node.signal(number)
    node.receive(told=1)
    assert node.wait() == 5, node.stderr
    assert (only(store).state, History(store).held()) == ("cancelled", ())
    assert f"stopped by {name}" in only(store).error


def test_a_command_that_ends_well_when_told_to_stop_has_succeeded(started, store):
    """Its exit code says so."""
    node = started(
        "--name", "pay", *AT, script="""trap 'exit 0' TERM; echo '{"began": 1}'; while :; do sleep 0.05; done"""
    )
    node.receive(began=1)
    node.signal(signal.SIGTERM)
    assert node.wait() == 0, node.stderr
    assert only(store).state == "succeeded"


def test_a_command_that_dies_by_a_signal_ends_us_as_a_shell_would(cli, store):
    """128 and the signal's number."""
    assert "sh was ended by SIGKILL" in cli("run", "--name", "pay", *AT, "sh", "-c", "kill -9 $$", code=137).stderr
    assert only(store).state == "failed"


@LINUX
def test_a_killed_run_takes_its_command_along_and_frees_its_lease_when_it_is_over(cli, started, store):
    """The kernel tells the command; the next slot runs after `--lock-at-most`, and the killed one is lost."""
    script = """trap 'echo "{\\"told\\": 1}"; exit' TERM; echo '{"began": 1}'; while :; do sleep 0.05; done"""
    node = started("--name", "pay", *AT, "--lock-at-most", "2s", script=script)
    node.receive(began=1)
    os.kill(node.pid, signal.SIGKILL)
    node.receive(told=1)
    stale = only(store).token
    cli("run", "--name", "pay", "--refused-code", 9, "true", code=9)
    eventually(lambda: all(held.over for held in History(store).held()))
    told = cli("run", "--name", "pay", "sh", "-c", "echo $FENCE_TOKEN").stdout
    assert int(told) > stale
    assert rows(store)[f"pay/{SLOT}"].state == "lost"
    assert "was lost with the host that ran it" in cli("run", "--name", "pay", *AT, "true", code=75).stderr


@LINUX
def test_a_later_start_takes_over_from_a_host_that_died_if_it_may(cli, started, store):
    """The same execution, its second attempt, under a larger token."""
    options = ("--name", "pay", *AT, "--lock-at-most", "1s", "--delivery", "at_least_once")
    node = started(*options, script="""echo '{"began": 1}'; exec sleep 30""")
    node.receive(began=1)
    os.kill(node.pid, signal.SIGKILL)
    stale = only(store).token
    eventually(lambda: all(held.over for held in History(store).held()))
    told = cli("run", *options, "sh", "-c", "echo $FENCE_EXECUTION_ID $FENCE_ATTEMPT $FENCE_TOKEN").stdout.split()
    assert told[:2] == [f"pay/{SLOT}", "2"]
    assert int(told[2]) > stale
    assert (only(store).state, only(store).attempt) == ("succeeded", 2)


def test_a_command_that_fails_is_run_again_if_asked_for(cli, store):
    """Under the same lease and the same execution ID."""
    script = "echo $FENCE_ATTEMPT; [ $FENCE_ATTEMPT = 3 ]"
    done = cli("run", "--name", "pay", *AT, "--retries", 5, "--retry-delay", "10ms", "sh", "-c", script)
    assert done.stdout.split() == ["1", "2", "3"]
    assert (only(store).state, only(store).attempt) == ("succeeded", 3)


def test_a_host_that_only_runs_commands_leaves_other_jobs_waiting_executions_alone(cli, store):
    """It does not know their jobs, and others may."""
    cli("run", "--name", "mail", *AT, "false", code=1)
    cli("retry", f"mail/{SLOT}")
    cli("run", "--name", "pay", "sleep", "1")
    assert rows(store)[f"mail/{SLOT}"].state == "waiting"
    assert cli("run", "--name", "mail", *AT, "sh", "-c", "echo $FENCE_ATTEMPT").stdout == "2\n"


def test_a_command_can_be_stopped_when_its_lease_is_lost(cli, started, store):
    """An operator breaks the lease; the command is told at the next renewal, and the record stays as it is."""
    options = ("--lock-at-most", "1s", "--stop-when-lost")
    node = started("--name", "pay", *AT, *options, script="""echo '{"began": 1}'; exec sleep 30""")
    node.receive(began=1)
    cli("release", "pay")
    assert node.wait() == 128 + signal.SIGTERM, node.stderr
    assert only(store).state == "lost"
    assert "Lease of pay/" in node.stderr


def test_a_store_that_is_away_is_exit_code_69_and_the_command_does_not_start(cli):
    """After the patience asked for, and each line of the log is written once."""
    nowhere = ("--store", "postgresql://somebody:secret@127.0.0.1:1/none", "--patience", "1s")
    done = cli("run", "--name", "pay", *AT, *nowhere, "--", "echo", "ran", code=69)
    assert done.stdout == ""
    assert "secret" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(set(lines)) > 0


def test_what_cannot_be_run_claims_no_slot(cli, store):
    """A command that is not there, a wrong option, a time in the future or none at all."""
    assert "no such command" in cli("run", "--name", "pay", *AT, "no-such-command-here", code=127).stderr
    cli("run", "--name", "pay", *AT, "--lock-at-most", "1ms", "true", code=78)
    cli("run", "--name", "pay", "--slot", "tomorrow", "true", code=2)
    cli("run", "--name", "pay", *AT, "--every", "1m", "true", code=2)
    cli("run", "--name", "pay", code=2)
    assert "ahead of the store's clock" in cli("run", "--name", "pay", "--slot", "9000-01-01", "true", code=70).stderr
    assert rows(store) == {}


@LINUX
def test_the_command_inherits_no_ignored_signals(cli):
    """A pipeline whose reader leaves must end, so SIGPIPE is not ignored in it."""
    done = cli("run", "--name", "pay", "sh", "-c", "grep SigIgn /proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        assert not ignored & 1 << (number - 1), number.name


def test_verbose_says_what_was_granted(cli):
    """Token, attempt and holder, on standard error."""
    done = cli("run", "--name", "pay", *AT, "-v", "echo", "ran")
    assert done.stdout == "ran\n"
    assert f"pay/{SLOT}: token" in done.stderr
