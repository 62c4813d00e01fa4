"""Applications that end, each in its own way, while a job runs. Prints what its test asks about.

Usage: exits.py CASE STORE_URL
"""

import asyncio
import json
import os
import sys
import threading
import time

from apscheduler.events import EVENT_JOB_EXECUTED
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_fence import FencedExecutor, current_fence, fenced

CASE, STORE = sys.argv[1], sys.argv[2]
executor = FencedExecutor(STORE)
entered = threading.Event()


def say(**message):
    print(json.dumps(message), flush=True)  # noqa: T201 - standard output is the channel


say(began=time.time())


def nap():
    entered.set()
    time.sleep(0.5)
    say(ended=True)


async def long_nap():
    entered.set()
    await asyncio.sleep(60)


def background(function):
    scheduler = BackgroundScheduler(executors={"default": executor})
    scheduler.start()
    scheduler.add_job(function, "date", id="job", misfire_grace_time=None)
    assert entered.wait(10)
    return scheduler


async def on_a_loop(*, shut_down):
    scheduler = AsyncIOScheduler(executors={"default": executor})
    scheduler.start()
    scheduler.add_job(long_nap, "date", id="job", misfire_grace_time=None)
    assert await asyncio.to_thread(entered.wait, 10)
    if shut_down:
        scheduler.shutdown()


@fenced(lock_at_most="2s")
def fork(fence):
    child = os.fork()
    if child == 0:
        keeper = executor._node.keeper
        say(
            held=len(keeper.held),
            lost=fence.lost,
            thread=keeper._thread is not None,
            submitted=len(executor._submitted),
        )
        threading.Timer(0.5, os._exit, [0]).start()
        return "child"  # on purpose: what comes after must leave the parent's lease alone
    os.waitpid(child, 0)
    time.sleep(0.2)
    say(parent_lost=current_fence().lost)
    entered.set()
    return "parent"


if CASE == "no shutdown":
    background(nap)
elif CASE == "shutdown":
    background(nap).shutdown()
elif CASE == "shutdown without waiting":
    background(nap).shutdown(wait=False)
elif CASE == "asyncio without shutdown":
    asyncio.run(on_a_loop(shut_down=False))
elif CASE == "asyncio with shutdown":
    asyncio.run(on_a_loop(shut_down=True))
elif CASE == "idle":
    scheduler = BackgroundScheduler(executors={"default": executor})
    scheduler.start()
elif CASE == "fork":
    scheduler = BackgroundScheduler(executors={"default": executor})
    heard = threading.Event()
    scheduler.add_listener(lambda event: (say(event=event.retval), heard.set()), EVENT_JOB_EXECUTED)
    scheduler.start()
    scheduler.add_job(fork, "date", id="job", misfire_grace_time=None)
    assert heard.wait(10)
    scheduler.shutdown()
say(main=True)
