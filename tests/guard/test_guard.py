"""The check of a token in the caller's own transaction, on each database."""

import datetime as dt
import pickle
import threading
import time

import pytest
import sqlalchemy
from guard_bank import TOKEN, Account, add, bearer
from sqlalchemy import event
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.compiler import compiles

from apscheduler_fence.bearer import TOKEN_LIMIT
from apscheduler_fence.errors import AlreadyApplied, ConfigError, FenceError, InvalidToken, StaleToken
from apscheduler_fence.guard import DAY, Guard
from apscheduler_fence.stores.sql import StoreClock
from apscheduler_fence.stores.sql.engines import is_transient
from apscheduler_fence.testing import fake_fence

every_database = pytest.mark.backends("sqlite", "postgresql", "mariadb")
servers = pytest.mark.backends("postgresql", "mariadb")
postgresql = pytest.mark.backends("postgresql")

# --- tokens -----------------------------------------------------------------------------------------------------------


@every_database
def test_a_write_under_a_newer_token_is_accepted_and_remembered(bank):
    """The highest token accepted rises with the write, in the same transaction."""
    for token in (1, 2, 5):
        with bank.guard.writing(bank.engine, "account:42", fence=bearer(token)) as db:
            db.execute(add())
    assert bank.balance == 3
    assert bank.rows("fence_resource") == [("account:42", "pay", TOKEN + 5, "pay/2026-01-01T00:00:00Z")]


@every_database
def test_a_stale_write_is_refused_before_it_is_made(bank):
    """A token below the highest is refused on entering the block, by a cheap read."""
    bank.guard.claim(bank.engine, "account:42", fence=bearer(2))
    with (
        pytest.raises(StaleToken) as refusal,
        bank.guard.writing(bank.engine, "account:42", fence=bearer(1)),
    ):
        pytest.fail("entered")
    assert (refusal.value.resource, refusal.value.token, refusal.value.highest) == ("account:42", TOKEN + 1, TOKEN + 2)


@every_database
def test_whoever_has_become_stale_inside_the_block_leaves_nothing_behind(bank):
    """A successor that commits first is not waited for, and the one that comes second is undone."""
    block = bank.guard.writing(bank.engine, "other", "pay", fence=bearer(1))
    with pytest.raises(StaleToken), block as paused:  # noqa: PT012 - the refusal comes from leaving
        paused.execute(sqlalchemy.select(Account.balance))
        with bank.guard.writing(bank.engine, "other", fence=bearer(2)) as successor:
            successor.execute(add(10))
        paused.execute(add(1))
    assert bank.balance == 10
    assert not block.applied
    assert bank.rows("fence_operation") == []
    assert bank.rows("fence_resource")[0][2] == TOKEN + 2


@every_database
def test_check_rolls_the_callers_transaction_back(bank):
    """Even if its refusal is swallowed inside a transaction of the caller's own, nothing can be committed any more."""
    bank.guard.claim(bank.engine, "account:42", fence=bearer(2))
    with pytest.raises(InvalidRequestError), bank.engine.begin() as db:  # noqa: PT012 - SQLAlchemy's own refusal
        db.execute(add())
        with pytest.raises(StaleToken):
            bank.guard.check(db, "account:42", fence=bearer(1))
        db.execute(add())
    assert bank.balance == 0


@every_database
def test_an_equal_token_is_accepted_from_the_same_execution_only(bank):
    """A store that lost its data may grant a token twice; the execution that had it first keeps it."""
    for _ in range(2):
        with bank.guard.writing(bank.engine, "account:42", fence=bearer(1)) as db:
            db.execute(add())
    with pytest.raises(StaleToken, match="from another execution"):
        bank.guard.claim(bank.engine, "account:42", fence=bearer(1, "pay/2026-01-01T00:00:01Z"))
    with bank.engine.connect() as db, pytest.raises(StaleToken):  # noqa: PT012 - as in the caller's code
        db.execute(add())
        bank.guard.check(db, "account:42", fence=bearer(1, "pay/2026-01-01T00:00:01Z"))
    assert bank.balance == 2


@every_database
def test_two_leases_do_not_reject_each_other(bank):
    """Tokens of different leases have no order, so a resource keeps one highest token for each."""
    for token, lease in ((9, "pay"), (1, "refund"), (10, "pay"), (2, "refund")):
        with bank.guard.writing(bank.engine, "account:42", fence=bearer(token, f"{lease}/x", lease)) as db:
            db.execute(add())
    assert bank.balance == 4
    assert sorted(row[1:3] for row in bank.rows("fence_resource")) == [("pay", TOKEN + 10), ("refund", TOKEN + 2)]


@every_database
@pytest.mark.parametrize("token", [TOKEN_LIMIT, 0, -1, 1.5, True, "7"])
def test_what_can_be_no_token_is_refused(bank, token):
    """A number that a double cannot hold, or that is none, never reaches the database."""
    with pytest.raises(InvalidToken):
        bank.guard.claim(bank.engine, "account:42", fence=fake_fence(token=token))


@every_database
@pytest.mark.parametrize("known", [False, True], ids=["new resource", "known resource"])
def test_a_token_far_ahead_of_the_resources_clock_is_refused(bank, known):
    """One wild number must not close a resource for ever: a day ahead of the database's clock is the limit."""
    now = time.time_ns() // 1000
    if known:
        bank.guard.claim(bank.engine, "account:42", fence=fake_fence(token=now))
    with pytest.raises(InvalidToken, match="days ahead"):
        bank.guard.claim(bank.engine, "account:42", fence=fake_fence(token=now + DAY + 60_000_000))
    bank.guard.claim(bank.engine, "account:42", fence=fake_fence(token=now + DAY - 60_000_000))


@every_database
def test_names_are_compared_character_by_character(bank):
    """Resources and operations that differ in case or by a space at the end of a part are different ones."""
    bank.guard.claim(bank.engine, "Account", fence=bearer(9))
    bank.guard.claim(bank.engine, "account", fence=bearer(1))
    for operation in ("pay", "PAY"):
        with bank.guard.writing(bank.engine, "account", operation, fence=bearer(1)) as db:
            db.execute(add())
    assert bank.balance == 2
    with pytest.raises(ConfigError):
        bank.guard.claim(bank.engine, "account ", fence=bearer(1))


# --- operations -------------------------------------------------------------------------------------------------------


@every_database
def test_a_retry_with_a_larger_token_does_not_apply_an_operation_twice(bank):
    """The guard rightly accepts the next attempt's token, so the operation's name is what undoes the repeat."""
    first = bank.guard.writing(bank.engine, "account:42", "settle", fence=bearer(1))
    with first as db:
        db.execute(add())
    second = bank.guard.writing(bank.engine, "account:42", "settle", fence=bearer(2))
    with second as db:
        db.execute(add())
    assert (first.applied, first.already_applied) == (True, False)
    assert (second.applied, second.already_applied) == (False, True)
    assert bank.balance == 1


@every_database
def test_other_operations_executions_and_resources_are_applied(bank):
    """An operation is unique within its resource and its execution, and only there."""
    for resource, execution, operation in (
        ("a", "x/1", "pay"),
        ("a", "x/1", "fee"),
        ("a", "x/2", "pay"),
        ("b", "x/1", "pay"),
    ):
        with bank.guard.writing(bank.engine, resource, operation, fence=bearer(1, execution, lease=execution)) as db:
            db.execute(add())
    assert bank.balance == 4


@every_database
def test_a_repeat_in_the_callers_own_transaction_is_reported(bank):
    """`check` raises where the block only says so."""
    for attempt in (1, 2):
        with bank.engine.connect() as db:
            db.execute(add())
            if attempt == 1:
                bank.guard.check(db, "account:42", "settle", fence=bearer(attempt))
                db.commit()
            else:
                with pytest.raises(AlreadyApplied, match="'settle'"):
                    bank.guard.check(db, "account:42", "settle", fence=bearer(attempt))
                db.commit()
    assert bank.balance == 1


@every_database
def test_a_rollback_leaves_no_trace_of_token_or_operation(bank):
    """What was not committed can be done again by the same run."""

    class OfTheBody(Exception):  # noqa: N818 - it is an error of nobody's
        pass

    with pytest.raises(OfTheBody), bank.guard.writing(bank.engine, "account:42", "settle", fence=bearer(5)) as db:  # noqa: PT012
        db.execute(add())
        raise OfTheBody
    with bank.engine.connect() as db:
        db.execute(add())
        bank.guard.check(db, "account:42", "settle", fence=bearer(5))
        db.rollback()
    assert bank.rows("fence_resource") == []
    block = bank.guard.writing(bank.engine, "account:42", "settle", fence=bearer(1))
    with block as db:
        db.execute(add())
    assert block.applied
    assert bank.balance == 1


@every_database
def test_old_operations_can_be_forgotten(bank):
    """Prune deletes operations by the database's clock, and those only that are old enough."""
    with bank.guard.writing(bank.engine, "account:42", "settle", fence=bearer(1)) as db:
        db.execute(add())
    assert bank.guard.prune(bank.engine, "1h") == 0
    time.sleep(0.01)
    assert bank.guard.prune(bank.engine, dt.timedelta(milliseconds=1)) == 1
    assert bank.rows("fence_operation") == []


# --- sessions ---------------------------------------------------------------------------------------------------------


@every_database
@pytest.mark.parametrize("form", ["check", "block"])
def test_a_session_is_flushed_before_it_is_checked(bank, form):
    """The check comes after the session's own writes: it is the last statement before the commit."""
    statements = []
    event.listen(bank.engine, "before_cursor_execute", lambda *heard: statements.append(" ".join(heard[2].split()[:3])))
    if form == "check":
        with bank.session.begin() as db:
            db.get(Account, 42).balance += 5
            bank.guard.check(db, "account:42", operation="settle", fence=bearer(1))
    else:
        with bank.guard.writing(bank.session, "account:42", operation="settle", fence=bearer(1)) as db:
            db.get(Account, 42).balance += 5
    written = [statement for statement in statements if not statement.startswith("SELECT")]
    assert written == ["UPDATE account SET", "INSERT INTO fence_resource", "INSERT INTO fence_operation"]
    assert bank.balance == 5


@every_database
def test_a_stale_session_commits_nothing(bank):
    """In the usual block of a sessionmaker the refusal comes out, and the session's writes do not."""
    bank.guard.claim(bank.engine, "account:42", fence=bearer(2))
    with pytest.raises(StaleToken), bank.session.begin() as db:  # noqa: PT012 - as in the caller's code
        db.get(Account, 42).balance += 5
        bank.guard.check(db, "account:42", fence=bearer(1))
    assert bank.balance == 0


@every_database
def test_the_block_takes_a_sessionmaker(bank):
    """Then it hands out a session, and undoes its repeats as well."""
    for _ in range(2):
        with bank.guard.writing(bank.session, "account:42", "settle", fence=bearer(1)) as db:
            db.get(Account, 42).balance += 5
    assert bank.balance == 5


# --- misuse -----------------------------------------------------------------------------------------------------------


@every_database
def test_a_write_on_another_connection_is_detected_where_it_can_be(bank):
    """Where nothing was executed on the guard's connection, the write went elsewhere."""
    with (
        pytest.raises(FenceError, match="another connection"),
        bank.guard.writing(bank.engine, "account:42", "settle", fence=bearer(1)),
    ):
        pass
    with bank.engine.connect() as db, pytest.raises(FenceError, match="another connection"):
        bank.guard.check(db, "account:42", fence=bearer(1))
    assert bank.rows("fence_resource") == bank.rows("fence_operation") == []


@every_database
def test_a_connection_that_commits_by_itself_is_refused(bank):
    """In AUTOCOMMIT nothing can be undone, so the guard would guard nothing."""
    engine = bank.engine.execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(FenceError, match="AUTOCOMMIT"), bank.guard.writing(engine, "account:42", fence=bearer(1)):
        pytest.fail("entered")
    with engine.connect() as db, pytest.raises(FenceError, match="AUTOCOMMIT"):  # noqa: PT012 - as in the caller's code
        db.execute(sqlalchemy.select(Account.balance))
        bank.guard.check(db, "account:42", fence=bearer(1))


@pytest.mark.backends("sqlite")
def test_sqlite_that_is_told_when_to_begin_is_not_mistaken_for_autocommit(bank):
    """The usual recipe turns the driver's own transactions off and says BEGIN itself."""
    event.listen(bank.engine, "connect", lambda raw, _: setattr(raw, "isolation_level", None))
    event.listen(bank.engine, "begin", lambda db: db.exec_driver_sql("BEGIN IMMEDIATE"))
    bank.engine.dispose()
    for _ in range(2):
        with bank.guard.writing(bank.engine, "account:42", "settle", fence=bearer(1)) as db:
            db.execute(add())
    assert bank.balance == 1


@every_database
def test_without_a_fence_nothing_is_checked_in_anybodys_name(bank):
    """Outside a fenced job the guard says what to do instead of guessing."""
    with pytest.raises(FenceError, match="no fenced job"):
        bank.guard.writing(bank.engine, "account:42")
    with fake_fence(token=TOKEN), bank.guard.writing(bank.engine, "account:42") as db:
        db.execute(add())
    assert bank.rows("fence_resource")[0][1:3] == ("job", TOKEN)


# --- isolation --------------------------------------------------------------------------------------------------------

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


@servers
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("writes", ["block", "check"])
def test_a_holder_that_was_overtaken_is_told_so_at_every_isolation_level(bank, level, writes):
    """Where the database would not serialize the two, the guard reads again and finds the reason."""
    engine = bank.engine.execution_options(isolation_level=level)
    with pytest.raises(StaleToken):  # noqa: PT012 - as in the caller's code
        if writes == "block":
            with bank.guard.writing(engine, "account:42", "settle", fence=bearer(1)) as db:
                db.execute(sqlalchemy.text("SELECT 1"))
                bank.guard.claim(bank.engine, "account:42", fence=bearer(2))
                db.execute(add())
        else:
            with engine.begin() as db:
                db.execute(add())
                bank.guard.claim(bank.engine, "account:42", fence=bearer(2))
                bank.guard.check(db, "account:42", "settle", fence=bearer(1))
    assert bank.balance == 0


@servers
@pytest.mark.parametrize("level", LEVELS)
def test_a_write_that_was_overtaken_itself_is_told_so(bank, level):
    """At the stricter levels the caller's own write is what fails; the block still knows why."""
    engine = bank.engine.execution_options(isolation_level=level)
    with pytest.raises(StaleToken), bank.guard.writing(engine, "account:42", fence=bearer(1)) as db:  # noqa: PT012
        # A read that takes the snapshot, but locks nothing: MariaDB's SERIALIZABLE would lock the account.
        db.execute(sqlalchemy.text("SELECT 1"))
        with bank.guard.writing(bank.engine, "account:42", fence=bearer(2)) as successor:
            successor.execute(add(10))
        db.execute(add())
    assert bank.balance == 10


@postgresql
@pytest.mark.parametrize("level", LEVELS)
def test_an_operation_that_was_overtaken_is_known_as_a_repeat(bank, level):
    """Two attempts of one operation at once: one is applied, the other is undone and says so."""
    engine = bank.engine.execution_options(isolation_level=level)
    block = bank.guard.writing(engine, "account:42", "settle", fence=bearer(1))
    with block as db:
        with bank.guard.writing(bank.engine, "account:42", "settle", fence=bearer(1)) as other:
            other.execute(add(10))
        db.execute(add())
    assert block.already_applied
    assert bank.balance == 10


@postgresql
def test_a_deadlock_that_has_nothing_to_do_with_tokens_stays_what_it_is(bank):
    """Only a reason that was found is given."""
    engine = bank.engine.execution_options(isolation_level="REPEATABLE READ")
    with pytest.raises(DBAPIError) as failure, bank.guard.writing(engine, "account:42", fence=bearer(1)) as db:  # noqa: PT012
        db.execute(sqlalchemy.text("SELECT 1"))
        with bank.engine.begin() as other:
            other.execute(add(10))
        db.execute(add())
    assert is_transient(failure.value)
    assert bank.balance == 10


@every_database
def test_a_paused_holder_does_not_block_its_successor(bank):
    """The guard's row is locked by the last statement only, so whoever pauses before it holds nobody up."""
    done = threading.Event()

    def successor():
        with bank.guard.writing(bank.engine, "account:43", fence=bearer(2)) as db:
            db.execute(sqlalchemy.select(Account.balance))
        done.set()

    with pytest.raises(StaleToken), bank.guard.writing(bank.engine, "account:43", fence=bearer(1)) as db:  # noqa: PT012
        db.execute(sqlalchemy.select(Account.balance))
        thread = threading.Thread(target=successor)
        thread.start()
        assert done.wait(5)
        thread.join()


@every_database
def test_many_first_uses_of_a_resource_meet_without_harm(bank):
    """Those that find no row yet and write it at once all end with the highest token."""
    tokens = list(range(1, 9))
    refused = []

    def claim(token):
        try:
            bank.guard.claim(bank.engine, "new", fence=bearer(token))
        except StaleToken:
            refused.append(token)

    threads = [threading.Thread(target=claim, args=(token,)) for token in tokens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bank.rows("fence_resource") == [("new", "pay", TOKEN + 8, "pay/2026-01-01T00:00:00Z")]
    assert 8 not in refused


# --- set-up -----------------------------------------------------------------------------------------------------------


@every_database
def test_names_and_schema_are_settable_and_creation_may_be_repeated(bank):
    """The tables have the names that were asked for, and creating them again changes nothing."""
    guard = Guard(table_prefix="billing_")
    for _ in range(2):
        guard.create(bank.engine)
    with guard.writing(bank.engine, "account:42", "settle", fence=bearer(1)) as db:
        db.execute(add())
    assert {"billing_resource", "billing_operation"} <= set(sqlalchemy.inspect(bank.engine).get_table_names())
    with pytest.raises(ConfigError):
        Guard(table_prefix="x; DROP")


@postgresql
def test_tables_can_live_in_a_schema(bank):
    """A schema that exists is used for both tables."""
    with bank.engine.begin() as db:
        db.execute(sqlalchemy.schema.CreateSchema("fencing"))
    guard = Guard(schema="fencing")
    guard.create(bank.engine)
    guard.claim(bank.engine, "account:42", fence=bearer(1))
    assert set(sqlalchemy.inspect(bank.engine).get_table_names("fencing")) == {"fence_resource", "fence_operation"}


@postgresql
def test_a_block_costs_three_statements_more_than_its_write(bank):
    """One cheap read, one upsert, one operation."""
    statements = []
    event.listen(bank.engine, "before_cursor_execute", lambda *heard: statements.append(heard[2]))
    with bank.guard.writing(bank.engine, "account:42", "settle", fence=bearer(1)) as db:
        db.execute(add())
    assert len(statements) == 1 + 3, statements


@every_database
def test_a_resource_with_a_url_can_be_pickled_and_claimed(bank):
    """A process pool's child gets it by its URL."""
    resource = pickle.loads(pickle.dumps(Guard().resource(bank.url, "account:42")))
    resource.claim(bearer(2))
    with pytest.raises(StaleToken):
        Guard().resource(bank.engine, "account:42").claim(bearer(1))


class OtherDialect(PGDialect_psycopg):
    """PostgreSQL under a name that is not known here: what stands for a database whose upsert is not."""

    name = "elsewhere"
    supports_statement_cache = True


@postgresql
def test_a_database_without_a_known_upsert_is_guarded_too(bank):
    """The portable path accepts, refuses and repeats like the others, also when two write the first row at once."""
    registry.register("elsewhere.psycopg", __name__, "OtherDialect")
    clock = "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)"
    compiles(StoreClock, "elsewhere")(lambda *_, **__: clock)
    elsewhere = sqlalchemy.create_engine(bank.url.replace("postgresql+", "elsewhere+"))
    try:
        for token, execution, expected in (
            (2, "a/1", None),
            (1, "a/1", StaleToken),
            (2, "a/2", StaleToken),
            (3, "a/2", None),
        ):
            if expected is None:
                bank.guard.claim(elsewhere, "account:42", fence=bearer(token, execution))
            else:
                with pytest.raises(expected):
                    bank.guard.claim(elsewhere, "account:42", fence=bearer(token, execution))
        with pytest.raises(InvalidToken):
            bank.guard.claim(elsewhere, "account:42", fence=fake_fence(token=time.time_ns() // 1000 + 2 * DAY))
        with elsewhere.connect() as first:
            first.execute(sqlalchemy.select(1))
            bank.guard.check(first, "new", fence=bearer(1))
            second = threading.Thread(target=bank.guard.claim, args=(elsewhere, "new"), kwargs={"fence": bearer(2)})
            second.start()
            time.sleep(0.2)
            first.commit()
            second.join()
        assert ("new", "pay", TOKEN + 2, "pay/2026-01-01T00:00:00Z") in bank.rows("fence_resource")
    finally:
        elsewhere.dispose()
