"""A store for each test, nodes on it, and that nothing of them is left behind."""

import threading
import uuid
from datetime import timezone

import pytest
from apscheduler.schedulers.background import BackgroundScheduler
from waiting import eventually
from watched import Watched, own_threads

from apscheduler_fence import FencedExecutor
from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.base import Executions


@pytest.fixture(autouse=True)
def _no_thread_survives():
    """No thread of this package is left when a test's schedulers are shut down."""
    before = set(threading.enumerate())  # what an earlier test left is that test's failure alone
    yield
    eventually(lambda: not own_threads(besides=before), within=15)


@pytest.fixture
def url():
    """A memory store of this test's own."""
    return f"memory://{uuid.uuid4()}"


@pytest.fixture
def rows(url):
    """Reads what the store has recorded, oldest slot first."""

    def read():
        return list(open_store(url).executions(Executions(oldest_first=True)))

    return read


@pytest.fixture
def start(url):
    """Starts BackgroundSchedulers, each with an executor of its own on the test's store unless given another."""
    nodes = []

    def starter(store=None, *, scheduler=None, paused=False, **options):
        executor = FencedExecutor(store if store is not None else url, **options)
        node = Watched(scheduler or BackgroundScheduler(timezone=timezone.utc))
        node.scheduler.add_executor(executor)
        nodes.append(node)
        node.scheduler.start(paused=paused)
        return node

    yield starter
    for node in nodes:
        if node.scheduler.running:
            node.scheduler.shutdown()
