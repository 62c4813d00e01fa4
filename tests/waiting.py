"""Waiting for what other threads and processes do, with a bound."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(condition: Callable[[], T], within: float = 10.0) -> T:
    """Asks until the answer is true, and returns it; fails with the last answer when the time is over."""
    deadline = time.monotonic() + within
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            message = f"not within {within} s; the last answer was {answer!r}"
            raise AssertionError(message)
        time.sleep(0.01)


def never(condition: Callable[[], object], during: float) -> None:
    """Asks for so many seconds and fails if the answer is true once."""
    deadline = time.monotonic() + during
    while time.monotonic() < deadline:
        answer = condition()
        assert not answer, answer
        time.sleep(0.01)
