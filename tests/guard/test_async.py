"""The guard in asyncio applications, with psycopg's asynchronous mode."""

import asyncio

import pytest
import sqlalchemy
from guard_bank import TOKEN, Account, add, bearer
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from apscheduler_fence.errors import AlreadyApplied, FenceError, StaleToken
from apscheduler_fence.testing import fake_fence

pytestmark = pytest.mark.backends("postgresql")


def with_engine(bank, test):
    """Run a coroutine function with an asynchronous engine of the bank's database."""

    async def run():
        engine = create_async_engine(bank.url)
        try:
            await test(engine)
        finally:
            await engine.dispose()

    asyncio.run(run())


def test_the_block_guards_an_asynchronous_connection(bank):
    """It applies an operation once, and refuses what is stale on entering and on leaving."""

    async def run(engine):
        blocks = [bank.guard.writing(engine, "account:42", "settle", fence=bearer(token)) for token in (1, 2)]
        for block in blocks:
            async with block as db:
                await db.execute(add())
        assert [block.applied for block in blocks] == [True, False]
        assert blocks[1].already_applied
        with pytest.raises(StaleToken):  # noqa: PT012 - the refusal comes from leaving
            async with bank.guard.writing(engine, "account:43", fence=bearer(1)) as db:
                await bank.guard.claim(engine, "account:43", fence=bearer(2))
                await db.execute(add())
        with pytest.raises(StaleToken):
            async with bank.guard.writing(engine, "account:43", fence=bearer(1)):
                pytest.fail("entered")

    with_engine(bank, run)
    assert bank.balance == 1


def test_the_block_guards_an_asynchronous_session(bank):
    """A sessionmaker's session is flushed before it is checked."""

    async def run(engine):
        sessions = async_sessionmaker(engine)
        for _ in range(2):
            async with bank.guard.writing(sessions, "account:42", "settle", fence=bearer(1)) as db:
                (await db.get(Account, 42)).balance += 5

    with_engine(bank, run)
    assert bank.balance == 5


@pytest.mark.parametrize("kind", ["connection", "session"])
def test_check_runs_on_an_asynchronous_connection_or_session(bank, kind):
    """`run_sync` lends it, and a refusal has rolled it back."""

    async def run(engine):
        make = engine.connect if kind == "connection" else async_sessionmaker(engine)
        async with make() as db:
            await db.execute(add())
            await db.run_sync(bank.guard.check, "account:42", "settle", fence=bearer(1))
            await db.commit()
        async with make() as db:
            await db.execute(add())
            with pytest.raises(AlreadyApplied):
                await db.run_sync(bank.guard.check, "account:42", "settle", fence=bearer(2))
            await db.commit()

    with_engine(bank, run)
    assert bank.balance == 1


def test_a_cancelled_block_is_rolled_back(bank):
    """A task that is cancelled inside the block leaves no write, no token and no open transaction."""

    async def run(engine):
        inside = asyncio.Event()

        async def job():
            async with bank.guard.writing(engine, "account:42", "settle", fence=bearer(1)) as db:
                await db.execute(add())
                inside.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(job())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with engine.connect() as db:
            idle = "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'"
            assert await db.scalar(sqlalchemy.text(idle)) == 0

    with_engine(bank, run)
    assert bank.balance == 0
    assert bank.rows("fence_resource") == []


def test_the_current_fence_and_misuse_are_seen_as_on_threads(bank):
    """The context's fence is found, and an empty block is reported."""

    async def run(engine):
        with fake_fence(token=TOKEN):
            async with bank.guard.writing(engine, "account:42") as db:
                await db.execute(add())
            with pytest.raises(FenceError, match="another connection"):
                async with bank.guard.writing(engine, "account:42"):
                    pass

    with_engine(bank, run)
    assert bank.rows("fence_resource")[0][1:3] == ("job", TOKEN)
