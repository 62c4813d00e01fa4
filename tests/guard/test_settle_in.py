"""An execution is recorded as succeeded in the transaction of its own effect."""

import asyncio
import contextlib
import threading
import time

import pytest
import sqlalchemy
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from guard_bank import Account, add
from one_run import record, run, scheduled
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import create_async_engine

from apscheduler_fence import current_fence, fenced
from apscheduler_fence.errors import ConfigError, FenceError, LeaseLost
from apscheduler_fence.lease import Key, release
from apscheduler_fence.outbox import Outbox
from apscheduler_fence.stores import open_store
from apscheduler_fence.testing import fake_fence

every_database = pytest.mark.backends("sqlite", "postgresql", "mariadb")


class Boom(Exception):  # noqa: N818 - it is nobody's error
    """What goes wrong in a job."""


@every_database
def test_effect_message_guard_and_record_commit_together(bank):
    """When the transaction has committed, the run is recorded, before its function has returned."""
    outbox = Outbox(bank.engine)
    outbox.create()

    def pay():
        with bank.engine.begin() as db:
            db.execute(add())
            outbox.add(db, "paid", 42, key="paid")
            bank.guard.check(db, "account:42", "pay")
            current_fence().settle_in(db)
        seen = record(bank.url, "pay")
        return seen.state, seen.finished_at

    ran = run(bank.url, pay)
    assert ran.event.code == EVENT_JOB_EXECUTED
    assert ran.event.retval == ("succeeded", ran.record.finished_at)
    assert ran.others == []
    assert bank.balance == 1
    assert len(outbox.entries()) == 1


@every_database
def test_a_session_can_settle(bank):
    """The session's transaction is the one that counts."""

    def pay():
        with orm.Session(bank.engine) as session, session.begin():
            session.get(Account, 42).balance += 1
            current_fence().settle_in(session)

    assert run(bank.url, pay).record.state == "succeeded"
    assert bank.balance == 1


@every_database
def test_a_rollback_takes_the_record_back(bank):
    """The run is then recorded by how it ends: as failed here."""

    def pay():
        with bank.engine.begin() as db:
            db.execute(add())
            current_fence().settle_in(db)
            raise Boom

    ran = run(bank.url, pay)
    assert (ran.event.code, ran.others, ran.record.state) == (EVENT_JOB_ERROR, [], "failed")
    assert bank.balance == 0


@pytest.mark.backends("sqlite", "postgresql")
@pytest.mark.parametrize("undo", ["rollback", "close", "savepoint"])
def test_after_a_rollback_the_lease_is_renewed_again(bank, undo):
    """Whichever way the transaction ended, a run that goes on keeps its lease for as long as it takes."""

    @fenced(lock_at_most="900ms")
    def pay():
        with bank.engine.connect() as db:
            db.execute(add())
            inner = db.begin_nested() if undo == "savepoint" else None
            current_fence().settle_in(db)
            time.sleep(0.35)  # a renewal falls due meanwhile
            if undo == "rollback":
                db.rollback()
            if inner is not None:
                inner.rollback()
                db.commit()
        time.sleep(1.3)
        current_fence().check()

    ran = run(bank.url, pay)
    assert (ran.event.code, ran.others, ran.record.state) == (EVENT_JOB_EXECUTED, [], "succeeded")


@every_database
def test_an_exception_after_the_commit_does_not_change_the_record(bank):
    """The effect is there, so the execution has succeeded; the event still tells of the exception."""

    def pay():
        with bank.engine.begin() as db:
            db.execute(add())
            current_fence().settle_in(db)
        raise Boom

    ran = run(bank.url, pay)
    assert (ran.event.code, ran.others, ran.record.state) == (EVENT_JOB_ERROR, [], "succeeded")
    assert bank.balance == 1


@every_database
def test_a_job_that_lingers_after_its_commit_has_lost_nothing(bank):
    """Its lease was given back, so its end is no loss, however late."""

    @fenced(lock_at_most="300ms")
    def pay():
        with bank.engine.begin() as db:
            db.execute(add())
            current_fence().settle_in(db)
        time.sleep(0.9)

    ran = run(bank.url, pay)
    assert (ran.event.code, ran.others, ran.record.state) == (EVENT_JOB_EXECUTED, [], "succeeded")


@every_database
def test_whoever_has_lost_the_lease_can_not_settle(bank):
    """His transaction is rolled back, so it is a guard, too."""

    def pay():
        fence = current_fence()
        with contextlib.closing(open_store(bank.url)) as store:
            seen = store.read(Key(fence.lease, fence.job, fence.slot))
            store.swap([release(seen, "operator", keep_for=10**12)])
        with bank.engine.begin() as db:
            db.execute(add())
            fence.settle_in(db)

    ran = run(bank.url, pay)
    assert isinstance(ran.event.exception, LeaseLost)
    assert ran.record.state == "lost"
    assert bank.balance == 0


@pytest.mark.backends("postgresql", "mariadb")
def test_an_open_transaction_does_not_hold_up_the_renewal_of_other_leases(bank):
    """The lease that is about to be given back is locked, so it is left out when all others are renewed."""
    settled = threading.Event()

    def pay():
        with bank.engine.begin() as db:
            db.execute(add())
            current_fence().settle_in(db)
            settled.set()
            time.sleep(1.5)

    @fenced(lock_at_most="600ms")
    def other():
        settled.wait(10)
        time.sleep(1.2)
        current_fence().check()

    with scheduled(bank.url, (pay, ()), (other, ())) as event:
        ends = [event(), event()]
    assert [each.code for each in ends] == [EVENT_JOB_EXECUTED, EVENT_JOB_EXECUTED]


@every_database
def test_settling_where_it_can_not_belong_to_the_effect_is_refused(bank, tmp_path):
    """In another database, in no transaction, and with a store that is no database."""
    elsewhere = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'elsewhere.db'}")

    def pay():
        fence = current_fence()
        with bank.engine.connect() as db, pytest.raises(FenceError, match="no transaction"):
            fence.settle_in(db)
        with elsewhere.begin() as db:
            db.execute(sqlalchemy.text("CREATE TABLE mine (id INTEGER)"))
            with pytest.raises(ConfigError, match="not in the store's database"):
                fence.settle_in(db)

    ran = run(bank.url, pay)
    elsewhere.dispose()
    assert (ran.event.exception, ran.record.state) == (None, "succeeded")

    def stay():
        with bank.engine.begin() as db:
            current_fence().settle_in(db)

    assert isinstance(run("memory://settle", stay).event.exception, ConfigError)


@pytest.mark.backends("sqlite")
def test_a_refused_attempt_to_settle_leaves_the_lease_as_it_was(bank):
    """It goes on being renewed."""

    @fenced(lock_at_most="900ms")
    def pay():
        with bank.engine.connect() as db, pytest.raises(FenceError):
            current_fence().settle_in(db)
        time.sleep(1.5)
        current_fence().check()

    ran = run(bank.url, pay)
    assert (ran.event.code, ran.others, ran.record.state) == (EVENT_JOB_EXECUTED, [], "succeeded")


@pytest.mark.backends("postgresql")
def test_an_asynchronous_transaction_can_settle(bank):
    """`run_sync` lends it."""

    def pay():
        async def work():
            engine = create_async_engine(bank.url)
            try:
                async with engine.begin() as db:
                    await db.execute(add())
                    await db.run_sync(current_fence().settle_in)
                    raise Boom
            finally:
                await engine.dispose()

        asyncio.run(work())

    assert run(bank.url, pay).record.state == "failed"
    assert bank.balance == 0


def test_a_fake_fence_settles_nothing():
    """A unit test of a job that settles by itself needs no store."""
    fake_fence().settle_in(object())


@every_database
def test_an_attempt_that_has_settled_is_not_repeated(bank):
    """Its effect is there; the exception that came afterwards is no reason to run again."""

    def pay():
        with bank.engine.begin() as db:
            db.execute(add())
            current_fence().settle_in(db)
        raise Boom

    ran = run(bank.url, pay, retries=3, retry_delay="1m")
    assert (ran.event.code, ran.others, ran.record.state, ran.record.attempt) == (EVENT_JOB_ERROR, [], "succeeded", 1)
    assert bank.balance == 1


@every_database
def test_an_attempt_that_was_rolled_back_is_repeated_and_settles(bank):
    """The fence of the earlier attempt settles nothing any more."""
    earlier = []

    def pay():
        fence = current_fence()
        earlier.append(fence)
        with bank.engine.connect() as db, pytest.raises(LeaseLost) if fence.attempt > 1 else contextlib.nullcontext():
            db.execute(add(100))
            earlier[0].settle_in(db)
        with bank.engine.begin() as db:
            db.execute(add())
            fence.settle_in(db)
            if fence.attempt == 1:
                raise Boom

    ran = run(bank.url, pay, retries=3, retry_delay=0)
    assert (ran.event.code, ran.others, ran.record.state, ran.record.attempt) == (
        EVENT_JOB_EXECUTED,
        [],
        "succeeded",
        2,
    )
    assert bank.balance == 1
