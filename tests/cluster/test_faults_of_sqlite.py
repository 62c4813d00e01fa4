"""What an SQLite file suffers: a stranger's lock, and a full disk."""

import contextlib
import resource
import sqlite3
import time

import pytest
from faults import PERIOD, Cluster
from sqlalchemy import make_url
from waiting import eventually

pytestmark = pytest.mark.backends("sqlite")
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def test_nodes_wait_for_a_stranger_who_locks_the_file_for_longer_than_they_wait(store_url):
    """Another program writes for three timeouts, in the middle of a run: nothing runs twice, and the run is recorded."""
    with Cluster(store_url, lock_at_most="5s") as cluster:
        cluster.join()
        cluster.join()
        cluster.serve()
        cluster.next(what="entered")
        stranger = sqlite3.connect(make_url(store_url).database, isolation_level=None, timeout=10)
        with contextlib.closing(stranger):
            stranger.execute("BEGIN IMMEDIATE")
            time.sleep(3 * PERIOD / 1000)
            stranger.execute("ROLLBACK")
        cluster.serve()
        cluster.judge()
        assert set(cluster.states().values()) == {"succeeded"}


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits another process")
def test_nodes_outlive_a_disk_that_takes_no_more(store_url):
    """Files may not grow: slots end in errors and not in runs, and what could not be recorded is announced as lost."""
    with Cluster(store_url, store_patience="0.5s") as cluster:
        cluster.join()
        cluster.join()
        cluster.serve()
        cluster.next(what="entered")
        full = time.monotonic()
        for node in cluster.nodes:
            resource.prlimit(node.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
        for node in cluster.nodes:
            eventually(lambda node=node: [each for each in cluster.said(node, after=full) if _disk(each)])
        assert len(cluster.said(after=full, what="entered")) <= 1  # one that was granted before
        for node in cluster.nodes:
            resource.prlimit(node.pid, resource.RLIMIT_FSIZE, UNLIMITED)
        cluster.serve()
        cluster.judge()
        assert {run for run, state in cluster.states().items() if state != "succeeded"} == cluster.lost()
    with contextlib.closing(sqlite3.connect(make_url(store_url).database)) as file:
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def _disk(message):
    return "disk" in message.get("error", "")
