"""Members of a cluster on one job store, and a way to break it."""

from __future__ import annotations

import contextlib

import pytest
import sqlalchemy
from jobstore_nodes import Node, inner_options
from redis import Redis

from apscheduler_fence.jobstore import SharedJobStore


@pytest.fixture
def make_node(store_url):
    """Makes a scheduler with a shared store at `store_url`; options are the store's, or the scheduler's."""
    with contextlib.ExitStack() as stack:

        def make(poll=1.0, **options):
            node = Node(SharedJobStore(poll=poll, **inner_options(store_url)), **options)
            stack.callback(node.scheduler.shutdown)
            return node

        yield make


@pytest.fixture
def node(make_node):
    return make_node()


@pytest.fixture
def other(make_node):
    return make_node()


@pytest.fixture
def broken(store_url):
    """Makes every statement about the jobs fail inside the `with` block."""
    misplaced = _misplaced_keys if store_url.startswith("redis:") else _misplaced_table

    @contextlib.contextmanager
    def breaking():
        with misplaced(store_url):
            yield

    return breaking


@contextlib.contextmanager
def _misplaced_table(url):
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    rename = "ALTER TABLE {} RENAME TO {}"
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text(rename.format("apscheduler_jobs", "misplaced")))
    try:
        yield
    finally:
        with engine.begin() as connection:
            connection.execute(sqlalchemy.text(rename.format("misplaced", "apscheduler_jobs")))


@contextlib.contextmanager
def _misplaced_keys(url):
    keys = ("apscheduler.jobs", "apscheduler.run_times")
    with Redis.from_url(url) as client:
        for key in keys:
            client.rename(key, f"misplaced.{key}")
            client.set(key, "not what is expected here")
        try:
            yield
        finally:
            for key in keys:
                client.rename(f"misplaced.{key}", key)
