"""Functions for jobs in persistent stores."""

from apscheduler.triggers.interval import IntervalTrigger


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
