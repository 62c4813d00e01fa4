"""`apscheduler-fence outbox`."""

import json
import signal

import pytest
from click.testing import CliRunner
from outbox_database import Mail
from servers import Node
from waiting import eventually

from apscheduler_fence.cli.group import group

pytestmark = pytest.mark.backends("sqlite")

HANDLERS = """
from pathlib import Path

def send(message):
    with Path("sent").open("a") as file:
        file.write(f"{message.payload}\\n")

number = 7
"""


def fail(message):
    """A handler whose endpoint is down."""
    raise ConnectionError(message.topic)


@pytest.fixture
def command(store_url, tmp_path, monkeypatch):
    """Runs the command in a folder that has handlers in it; gives exit code and output."""
    (tmp_path / "handlers_for_cli.py").write_text(HANDLERS)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        result = CliRunner().invoke(group, ["outbox", "--database", store_url, *words])
        return result.exit_code, result.output

    return run


def test_messages_are_listed_by_their_state(mail, command):
    """Each with what went wrong; as JSON with all there is to know."""
    few = Mail(mail.engine, max_attempts=1)
    few.add("a", order_key="customer 7")
    few.outbox.relay(fail)
    few.add("b")
    code, output = command("list", "--state", "dead")
    assert code == 0
    assert "ConnectionError: mail" in output
    both = json.loads(command("list", "--json")[1])
    assert [(entry["state"], entry["order_key"], entry["message"]["payload"]) for entry in both] == [
        ("dead", "customer 7", "a"),
        ("waiting", None, "b"),
    ]


def test_dead_messages_are_sent_again_by_id_or_all(mail, command):
    """Without either, nothing is done by mistake."""
    few = Mail(mail.engine, max_attempts=1)
    for payload in ("a", "b", "c"):
        few.add(payload)
    few.outbox.relay(fail)
    first, *_ = few.outbox.entries("dead")
    assert command("retry")[0] == 2
    assert command("retry", first.message.id)[1] == "1 messages are due again\n"
    assert command("retry", "--all")[1] == "2 messages are due again\n"
    assert command("retry", "--all")[0] == command("retry", "no-such-id")[0] == 1


def test_messages_are_purged_by_state_and_age(mail, command):
    """The state must be said, because what is deleted may be added again."""
    mail.add("a")
    mail.relay()
    assert command("purge")[0] == 2
    assert command("purge", "--state", "sent", "--older-than", "1h")[1] == "0 messages deleted\n"
    assert command("purge", "--state", "sent")[1] == "1 messages deleted\n"


def test_messages_are_relayed_once_with_a_handler_from_the_current_folder(mail, command, tmp_path):
    """The handler is a function that is named by its module."""
    mail.add("a")
    assert command("relay", "handlers_for_cli:send") == (0, "1 messages sent\n")
    assert (tmp_path / "sent").read_text() == "a\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_relay_goes_on_until_it_is_interrupted(mail, store_url, command, tmp_path, number):
    """With --every it looks again and again, and Ctrl-C or the end of its container ends it in order."""
    mail.add("a")
    words = ("--database", store_url, "relay", "handlers_for_cli:send", "--every", "20ms")
    with Node("-m", "apscheduler_fence.cli", "outbox", *words) as relay:
        eventually((tmp_path / "sent").exists, within=30)
        mail.add("b")
        eventually(lambda: not mail.outbox.entries("waiting"))
        relay.signal(number)
        assert relay.wait() == 0
        assert relay.messages[-1]["text"] == "stopped"


@pytest.mark.parametrize(
    "handler", ["no_such_module:send", "handlers_for_cli:nobody", "handlers_for_cli:number", "send", ""]
)
def test_a_handler_that_is_none_is_named(command, handler):
    """Nothing is claimed before it is found."""
    code, output = command("relay", handler)
    assert code == 2
    assert "HANDLER" in output


def test_what_goes_wrong_is_said_in_one_line(command):
    """No table, a wrong URL, a wrong duration."""
    for words, expected, said in (
        (("list",), 69, "no such table"),
        (("--table-prefix", "1x", "list"), 78, "table_prefix"),
        (("purge", "--state", "sent", "--older-than", "soon"), 2, "soon"),
    ):
        code, output = command(*words)
        assert code == expected
        assert said in output
        assert "Traceback" not in output
