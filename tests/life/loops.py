"""Nodes on an event loop."""

import asyncio
import time
from datetime import timezone

from apscheduler.schedulers.asyncio import AsyncIOScheduler
from watched import Watched

from apscheduler_fence import FencedExecutor


def node_on(store, **options):
    """Starts an AsyncIOScheduler on the running loop."""
    node = Watched(AsyncIOScheduler(timezone=timezone.utc))
    node.scheduler.add_executor(FencedExecutor(store, **options))
    node.scheduler.start()
    return node


async def until(condition, within=10.0):
    """As `eventually`, without blocking the loop."""
    deadline = time.monotonic() + within
    while not (answer := condition()):
        assert time.monotonic() < deadline, answer
        await asyncio.sleep(0.005)
    return answer


async def shut_down(*nodes):
    """Shuts schedulers down and gives their coroutines the turn in which they are cancelled."""
    for node in nodes:
        node.scheduler.shutdown()
    await until(lambda: not any(node.scheduler.running for node in nodes))
    await asyncio.sleep(0.02)
