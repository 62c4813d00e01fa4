"""Messages that are sent if, and only if, the caller's transaction commits."""

import asyncio
import logging
import time

import pytest
import sqlalchemy
from outbox_database import Mail, bearer
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import create_async_engine

from apscheduler_fence.errors import ConfigError, FenceError
from apscheduler_fence.outbox import Outbox
from apscheduler_fence.stores.sql import StoreClock
from apscheduler_fence.testing import fake_fence

pytestmark = pytest.mark.backends("sqlite", "postgresql", "mariadb")


class Boom(Exception):  # noqa: N818 - it is nobody's error
    """What a handler raises."""


def fail(message):
    """A handler whose endpoint is down."""
    raise Boom(message.topic)


# --- adding -----------------------------------------------------------------------------------------------------------


def test_a_committed_message_is_sent_once(mail):
    """Everything `add` was told reaches the handler, with an idempotency key of execution and key."""
    assert mail.add({"to": "Ä", "cents": [1, 2.5, None]}, key="invoice-1", fence=bearer("job/2026-01-01T00:00:00Z"))
    assert mail.relay() == [{"to": "Ä", "cents": [1, 2.5, None]}]
    (message,) = mail.sent
    assert (message.topic, message.attempt) == ("mail", 1)
    assert message.idempotency_key == "job/2026-01-01T00:00:00Z:invoice-1"
    assert mail.relay() == []


def test_a_rolled_back_message_is_never_sent(mail):
    """The message belongs to the transaction, in a connection and in a session."""
    with mail.engine.connect() as db:
        db.execute(sqlalchemy.text("SELECT 1"))
        mail.outbox.add(db, "mail", 1, key="a", fence=bearer())
        db.rollback()
    with pytest.raises(Boom), orm.Session(mail.engine) as session, session.begin():  # noqa: PT012 - the caller's code
        mail.outbox.add(session, "mail", 2, key="b", fence=bearer())
        raise Boom
    assert mail.relay() == []
    assert mail.outbox.entries() == []


@pytest.mark.backends("postgresql", "mariadb")  # SQLite has one writer at a time
def test_a_message_is_not_seen_before_its_transaction_commits(mail):
    """A relay that looks meanwhile sends nothing, and finds it afterwards although later ones were sent."""
    with mail.engine.begin() as db:
        mail.outbox.add(db, "mail", "slow", key="a", fence=bearer())
        mail.add("quick")
        assert mail.relay() == ["quick"]
    assert mail.relay() == ["slow"]


def test_a_later_attempt_of_the_execution_adds_nothing(mail):
    """Execution and key are unique, so a retry that adds its messages again leaves the first ones as they are."""
    assert mail.add("first", key="a", fence=bearer(token=1))
    assert not mail.add("second", key="a", fence=bearer(token=2))
    assert mail.add("other key", key="A", fence=bearer(token=2))
    assert mail.add("other execution", key="a", fence=bearer("job/2"))
    with mail.engine.begin() as db:  # the transaction goes on after a repeat
        assert not mail.outbox.add(db, "mail", "third", key="a", fence=bearer())
        assert mail.outbox.add(db, "mail", "more", key="b", fence=bearer())
    assert mail.relay() == ["first", "other key", "other execution", "more"]
    assert not mail.add("sent already", key="a", fence=bearer(token=3))


def test_what_could_not_be_sent_is_refused_when_it_is_added(mail):
    """Outside a transaction or a job, and for what JSON or a name cannot hold."""
    with mail.engine.connect() as db, pytest.raises(FenceError, match="no transaction"):
        mail.outbox.add(db, "mail", 1, key="a", fence=bearer())
    with mail.engine.begin() as db:
        with pytest.raises(FenceError, match="no fenced job"):
            mail.outbox.add(db, "mail", 1, key="a")
        with pytest.raises(TypeError):
            mail.outbox.add(db, "mail", object(), key="a", fence=bearer())
        with pytest.raises(ValueError, match="JSON"):
            mail.outbox.add(db, "mail", float("nan"), key="a", fence=bearer())
        with pytest.raises(ConfigError):
            mail.outbox.add(db, " mail", 1, key="a", fence=bearer())
        with fake_fence():
            assert mail.outbox.add(db, "mail", 1, key="a")
    assert mail.relay() == [1]


def test_the_columns_are_those_of_debeziums_router(mail):
    """id, aggregatetype, aggregateid, type and payload say what another dispatcher needs."""
    mail.add([1], order_key="customer 7")
    with mail.engine.connect() as db:
        row = db.execute(sqlalchemy.text("SELECT aggregatetype, aggregateid, type, payload FROM fence_outbox")).one()
    assert tuple(row) == ("mail", "customer 7", "mail", "[1]")


# --- sending ----------------------------------------------------------------------------------------------------------


def test_a_failed_message_is_sent_again_under_the_same_key(mail):
    """The attempt grows, the idempotency key stays, and the other messages are not held up."""
    mail.add("a")
    mail.add("b")
    keys = []

    def flaky(message):
        keys.append((message.payload, message.idempotency_key, message.attempt))
        if message.payload == "a" and message.attempt < 3:
            raise Boom

    assert mail.outbox.relay(flaky) == 2
    assert [(payload, attempt) for payload, _, attempt in keys] == [("a", 1), ("b", 1), ("a", 2), ("a", 3)]
    assert len({key for payload, key, _ in keys if payload == "a"}) == 1


def test_failures_wait_longer_each_time(mail):
    """Twice as long, less up to a half at random, and never longer than the longest wait."""
    slow = mail.again(backoff=8, max_backoff=20, max_attempts=99)
    slow.add("a")
    waits = []
    for _ in range(4):
        slow.set(due_at=StoreClock())
        slow.outbox.relay(fail)
        (entry,) = slow.outbox.entries("waiting")
        with slow.engine.connect() as db:
            waits.append(entry.due_at.timestamp() - db.scalar(sqlalchemy.select(StoreClock())) / 1e6)
    for wait, longest in zip(waits, (8, 16, 20, 20), strict=True):
        assert longest / 2 - 1 < wait <= longest


def test_a_message_is_parked_as_dead_after_its_last_attempt(mail, caplog):
    """It says why, is not sent any more, and can be sent again by hand."""
    few = mail.again(max_attempts=3)
    few.add("a")
    with caplog.at_level(logging.WARNING):
        few.outbox.relay(fail)
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR"]
    (entry,) = few.outbox.entries("dead")
    assert (entry.failures, entry.error, entry.sent_at) == (3, "Boom: mail", None)
    assert few.relay() == []
    assert few.outbox.retry("no such id") == 0
    assert few.outbox.retry(entry.message.id) == 1
    assert few.relay() == ["a"]
    assert few.outbox.retry() == 0


def test_messages_of_one_order_key_are_sent_in_order(mail):
    """A later one waits for the earlier one, however often that fails; other keys go on meanwhile."""
    for number in range(4):
        mail.add(f"a{number}", order_key="a")
        mail.add(f"b{number}", order_key="b")
    sent = []

    def flaky(message):
        if message.payload in ("a0", "a2") and message.attempt < 3:
            raise Boom
        sent.append(message.payload)

    assert mail.outbox.relay(flaky) == 8
    assert [payload for payload in sent if payload[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert [payload for payload in sent if payload[0] == "b"] == ["b0", "b1", "b2", "b3"]
    assert sent.index("b1") < sent.index("a1")


def test_a_dead_message_holds_up_its_order_until_somebody_decides(mail):
    """Sending what comes after it would break the order; purging it lets them go."""
    few = mail.again(max_attempts=1)
    few.add("a0", order_key="a")
    few.add("a1", order_key="a")
    few.outbox.relay(lambda message: fail(message) if message.payload == "a0" else None)
    assert few.relay() == []
    assert few.outbox.purge("dead", "1h") == 0
    assert few.outbox.purge("dead") == 1
    assert few.relay() == ["a1"]


def test_what_another_relay_has_claimed_is_left_alone_until_its_claim_is_over(mail):
    """A claim ends by the database's clock; then the message is sent again, with the next attempt's number."""
    mail.add("a")
    mail.claim_as_another()
    assert mail.relay() == []
    mail.claim_as_another(-1)
    mail.set(attempt=1)
    assert mail.relay() == ["a"]
    assert mail.sent[0].attempt == 2


def test_a_relay_does_not_record_what_has_been_claimed_by_another_meanwhile(mail, caplog):
    """The one that came too late leaves the row to its successor, and says so."""
    mail.add("a")

    def slow(_):
        mail.claim_as_another()

    mail.outbox.relay(slow)
    (entry,) = mail.outbox.entries()
    assert entry.state == "waiting"
    assert "longer than its claim" in caplog.text


def test_a_relay_sends_nothing_under_a_claim_that_is_over(mail):
    """Whoever was slow stops, since another relay may be sending the rest by now."""
    short = mail.again(claim_for="300ms")
    for payload in ("a", "b"):
        short.add(payload)
    sent = []

    def slow(message):
        sent.append(message.payload)
        time.sleep(0.4)
        short.claim_as_another()

    short.outbox.relay(slow)
    assert sent == ["a"]


def test_an_interrupted_relay_gives_back_what_it_has_not_sent(mail):
    """Ctrl-C leaves nothing claimed; the message that was on its way counts as an attempt, the others do not."""
    for payload in ("a", "b", "c"):
        mail.add(payload)

    def interrupted(message):
        if message.payload == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mail.outbox.relay(interrupted)
    assert mail.relay() == ["b", "c"]
    assert [message.attempt for message in mail.sent] == [2, 1]


def test_a_relay_ends_when_its_job_has_lost_the_lease(mail):
    """Another node is running it already."""
    for payload in ("a", "b", "c"):
        mail.add(payload)
    with fake_fence() as fence:
        mail.outbox.relay(lambda _: fence.lose())
    assert mail.relay() == ["b", "c"]


def test_sent_messages_are_kept_for_a_while_and_then_pruned(mail):
    """The relay itself deletes those that were sent before the retention, and no others."""
    for payload in ("a", "b"):
        mail.add(payload)
    mail.relay()
    mail.add("c")
    brief = mail.again(retention=0)
    assert [entry.state for entry in mail.outbox.entries()] == ["sent", "sent", "waiting"]
    brief.relay()
    assert brief.outbox.entries() == []
    mail.add("d")
    mail.relay()
    assert mail.outbox.purge("sent", "1h") == 0
    assert mail.outbox.purge("sent") == 1
    with pytest.raises(ConfigError):
        mail.outbox.purge("waiting")
    with pytest.raises(ConfigError):
        mail.outbox.entries("lost")


# --- asynchronous -----------------------------------------------------------------------------------------------------


def test_a_coroutine_handler_is_awaited(mail):
    """By `relay` on a loop of its own."""
    mail.add("a")

    async def send(message):
        await asyncio.sleep(0)
        mail.send(message)

    assert mail.outbox.relay(send) == 1
    assert mail.sent[0].payload == "a"


def test_relay_async_runs_the_handler_on_the_callers_loop(mail):
    """Failures are retried as ever, and a cancelled relay gives back what it has not sent."""
    for payload in ("a", "b"):
        mail.add(payload)

    async def run():
        loop = asyncio.get_running_loop()
        started = asyncio.Event()

        async def hang(message):
            assert asyncio.get_running_loop() is loop
            started.set()
            await asyncio.sleep(60)

        task = asyncio.create_task(mail.outbox.relay_async(hang))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

        async def flaky(message):
            if message.attempt < 3:
                raise Boom
            mail.send(message)

        assert await mail.outbox.relay_async(flaky) == 2

    asyncio.run(run())
    assert sorted(message.payload for message in mail.sent) == ["a", "b"]


@pytest.mark.backends("postgresql")
def test_messages_can_be_added_on_an_asynchronous_connection(mail):
    """`run_sync` lends it."""

    async def run():
        engine = create_async_engine(mail.engine.url)
        try:
            async with engine.begin() as db:
                await db.run_sync(lambda lent: mail.outbox.add(lent, "mail", 1, key="a", fence=bearer()))
        finally:
            await engine.dispose()

    asyncio.run(run())
    assert mail.relay() == [1]


def test_options_are_checked(mail):
    """A batch or a number of attempts below one, or a strange prefix, is refused."""
    for options in ({"batch": 0}, {"max_attempts": 0}, {"table_prefix": "1x"}, {"backoff": "soon"}):
        with pytest.raises(ConfigError):
            Outbox(mail.engine, **options)
    other = Mail(mail.engine, table_prefix="other_")
    other.add("a")
    assert mail.relay() == []
    assert other.relay() == ["a"]
