"""Functions for jobs in persistent stores."""

import json
import os

from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_fence.fence import current_fence


def nothing(*args, **kwargs):
    return args, kwargs


class Account:
    """Something to call methods of."""

    def __init__(self, number):
        self.number = number

    def settle(self):
        return self.number

    @classmethod
    def kind(cls):
        return cls.__name__

    @staticmethod
    def currency():
        return "EUR"


class Opaque:
    """An argument without equality."""


class Patient(IntervalTrigger):
    """A trigger of the user's own."""


def tell(**message):
    """Prints one message in one write, so that threads do not mix theirs."""
    os.write(1, (json.dumps(message) + "\n").encode())


def report():
    """Tells which execution this is."""
    fence = current_fence()
    tell(ran=fence.execution_id, attempt=fence.attempt)
