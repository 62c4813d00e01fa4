"""Resources that are claimed before a job is entered."""

import asyncio
import itertools
import time

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from guard_bank import bearer
from one_run import record, run, scheduled

from apscheduler_fence import Fence, FencedExecutor, fenced
from apscheduler_fence.errors import ConfigError, StaleToken
from apscheduler_fence.guard import Guard
from apscheduler_fence.guard_redis import RedisGuard


@fenced
def job(*, fence: Fence) -> int:
    """Says under which token it was entered."""
    return fence.token


@pytest.mark.backends("sqlite", "postgresql", "mariadb")
def test_a_predecessor_is_fenced_off_before_the_job_is_entered(bank):
    """From then on nobody with an older token can write, although the job has written nothing yet."""
    ran = run(bank.url, job, resources=[bank.guard.resource(bank.engine, "account:42")])
    assert bank.rows("fence_resource") == [("account:42", "job", ran.event.retval, ran.record.id)]


@pytest.mark.backends("postgresql")
def test_a_job_that_is_stale_already_is_not_entered(bank):
    """The run fails with the refusal."""
    future = (time.time_ns() // 1000) + 3_600_000_000
    bank.guard.claim(bank.engine, "account:42", fence=bearer(future - bearer().token, "job/later", "job"))
    ran = run(bank.url, job, resources=[bank.guard.resource(bank.engine, "account:42")])
    assert (ran.event.code, type(ran.event.exception), ran.record.state) == (EVENT_JOB_ERROR, StaleToken, "failed")


@pytest.mark.backends("postgresql")
def test_a_process_pool_claims_in_the_child(bank):
    """A resource with a URL travels there."""
    ran = run(bank.url, job, inner="processpool", resources=[Guard().resource(bank.url, "account:42")])
    assert ran.event.code == EVENT_JOB_EXECUTED
    assert bank.rows("fence_resource")[0][2] == ran.event.retval


@pytest.mark.backends("redis")
def test_a_coroutine_job_claims_without_blocking_its_loop(store_url):
    """On the way into the coroutine, on another thread."""

    class Slow:
        def claim(self, fence: Fence) -> None:
            time.sleep(0.5)
            guard.claim("account:42", fence=fence)

    guard = RedisGuard(store_url)
    ticks = []

    @fenced(resources=[Slow()])
    async def export(*, fence: Fence) -> int:
        return fence.token

    async def main():
        with scheduled(store_url, (export, ()), scheduler=AsyncIOScheduler) as event:
            waiting = asyncio.ensure_future(asyncio.to_thread(event))
            while not waiting.done():
                ticks.append(time.monotonic())
                await asyncio.sleep(0.01)
            return await waiting

    event = asyncio.run(main())
    assert event.code == EVENT_JOB_EXECUTED
    assert max(later - earlier for earlier, later in itertools.pairwise(ticks)) < 0.4
    with pytest.raises(StaleToken) as refusal:
        guard.claim("account:42", fence=bearer(lease="export"))
    assert refusal.value.highest == event.retval == record(store_url, "export").token
    guard.close()


@pytest.mark.parametrize("resources", ["account:42", ["account:42"], {"claim"}, None])
def test_what_can_not_be_claimed_is_refused(resources):
    """A name alone does not say what guards it."""
    with pytest.raises(ConfigError, match="claim"):
        fenced(resources=resources)
    with pytest.raises(ConfigError, match="claim"):
        FencedExecutor("memory://resources", resources=resources)
