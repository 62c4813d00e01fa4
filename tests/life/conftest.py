"""The fixtures of the executors' tests, and the store behind a node."""

import pytest
from executors.conftest import _no_thread_survives, rows, start, url

from apscheduler_fence.stores import open_store

__all__ = ["_no_thread_survives", "rows", "start", "url"]


@pytest.fixture
def store(url):
    """The test's store, for claims that no node makes."""
    return open_store(url)
