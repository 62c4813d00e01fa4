"""Payloads that are the same bytes on every attempt."""

import asyncio
import itertools
import threading
import time

import pytest
import sqlalchemy
from guard_bank import bearer
from sqlalchemy.ext.asyncio import create_async_engine

from apscheduler_fence.errors import FenceError
from apscheduler_fence.prepared import Prepared, prepared
from apscheduler_fence.testing import fake_fence

every_database = pytest.mark.backends("sqlite", "postgresql", "mariadb")


@pytest.fixture
def engine(store_url):
    """A database that keeps payloads."""
    engine = sqlalchemy.create_engine(store_url)
    prepared.create(engine)
    prepared.create(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def make():
    """Makes other bytes each time, and none of them text."""
    numbers = itertools.count(1)
    return lambda: b"\x00\xff" + str(next(numbers)).encode() * 80_000


@every_database
def test_a_later_attempt_gets_the_bytes_of_the_first(engine, make):
    """A retry or take-over has another token and the same payload, without making it again."""
    first = prepared(engine, "signed-tx", make, fence=bearer(1))
    assert prepared(engine, "signed-tx", make, fence=bearer(2)) == first == b"\x00\xff" + b"1" * 80_000
    assert make()[2:3] == b"2"


@every_database
def test_other_keys_and_executions_have_payloads_of_their_own(engine, make):
    """A payload belongs to one key of one execution."""
    made = [
        prepared(engine, key, make, fence=bearer(1, execution))
        for key, execution in (("tx", "pay/1"), ("TX", "pay/1"), ("tx", "pay/2"))
    ]
    assert len(set(made)) == 3


@every_database
@pytest.mark.parametrize("level", [None, "SERIALIZABLE"])
def test_concurrent_callers_all_get_one_winners_bytes(engine, make, level):
    """However many make a payload at once, only one of them is ever handed out."""
    bound = engine.execution_options(isolation_level=level) if level else engine
    barrier = threading.Barrier(8)
    got = []

    def meet():
        barrier.wait()
        return make()

    threads = [
        threading.Thread(target=lambda: got.append(prepared(bound, "tx", meet, fence=bearer(1)))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert len(set(got)) == 1


@every_database
def test_what_could_not_be_made_is_not_kept(engine, make):
    """An exception leaves nothing, and something else than bytes is refused."""
    with pytest.raises(ZeroDivisionError):
        prepared(engine, "tx", lambda: 1 // 0, fence=bearer(1))
    with pytest.raises(TypeError, match="not str"):
        prepared(engine, "tx", lambda: "text", fence=bearer(1))
    assert prepared(engine, "tx", make, fence=bearer(1))[2:3] == b"1"


@pytest.mark.backends("sqlite")
def test_a_database_that_is_locked_for_a_moment_is_asked_again(engine, make):
    """Nothing has been sent yet, so there is time."""
    hurried = sqlalchemy.create_engine(engine.url, connect_args={"timeout": 0.1})
    with engine.connect() as other:
        other.exec_driver_sql("BEGIN IMMEDIATE")
        release = threading.Timer(0.2, other.rollback)
        release.start()
        assert prepared(hurried, "tx", make, fence=bearer(1)) == prepared(engine, "tx", make, fence=bearer(1))
        release.join()
    hurried.dispose()


@every_database
def test_old_payloads_can_be_forgotten(engine, make):
    """Prune deletes those only that are old enough."""
    prepared(engine, "tx", make, fence=bearer(1))
    assert prepared.prune(engine, "1h") == 0
    time.sleep(0.01)
    assert prepared.prune(engine, 0.001) == 1


@pytest.mark.backends("sqlite")
def test_the_current_run_is_known_and_the_table_may_have_another_name(engine, make):
    """Outside a job there is no execution to prepare for."""
    mine = Prepared(table_prefix="billing_")
    mine.create(engine)
    with pytest.raises(FenceError, match="no fenced job"):
        mine(engine, "tx", make)
    with fake_fence(token=1):
        first = mine(engine, "tx", make)
    with fake_fence(token=2):
        assert mine(engine, "tx", make) == first


@pytest.mark.backends("postgresql")
def test_an_asynchronous_engine_is_awaited(engine, make):
    """There `make` may be a coroutine function."""

    async def run():
        other = create_async_engine(engine.url, pool_size=1, max_overflow=0)

        async def make_later():
            await asyncio.sleep(0)
            return make()

        try:
            first = await prepared(other, "tx", make_later, fence=bearer(1))
            assert await prepared(other, "tx", pytest.fail, fence=bearer(1)) == first
            both = await asyncio.gather(*(prepared(other, "two", make_later, fence=bearer(1)) for _ in range(2)))
            assert both[0] == both[1]
        finally:
            await other.dispose()

    asyncio.run(run())
