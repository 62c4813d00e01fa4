"""Jobs for persistent job stores: importable by their names."""

from apscheduler_fence import current_fence


def plain():
    """Does nothing."""


class Recorder:
    def __call__(self):
        """Never reached from a persistent store."""

    def record(self):
        return current_fence().execution_id


class CountedCalls(Recorder):
    pass
