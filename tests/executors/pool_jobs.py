"""Jobs for process pools: importable in a child by their name."""

import os
import signal
import time

from apscheduler_fence import current_fence, fenced


def identity(fence):
    return fence.execution_id, fence.token, os.getpid()


identity = fenced(identity)


@fenced(lock_at_most="0.5s")
def longer_than_its_lease(seconds):
    time.sleep(seconds)
    current_fence().check()
    return "kept"


@fenced(lock_at_most="0.3s", renew=False)
def outlives_its_lease():
    time.sleep(0.6)
    return current_fence().lost


def sleep(seconds):
    time.sleep(seconds)


def die():
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)


class NotPortableError(Exception):
    """Its pickle cannot be read back: `__init__` wants two arguments, and gets `args`."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class LeavingError(BaseException):
    pass


def raise_not_portable():
    raise NotPortableError("one", "two")


def raise_portable():
    raise KeyError("portable")


def leave():
    raise LeavingError("out")


def return_not_portable():
    return lambda: None


async def coroutine_job():
    raise AssertionError("nobody awaits this")
