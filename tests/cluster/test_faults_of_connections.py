"""What happens on the way to the store: cut, slow, half-open, replies lost, a pooler in between."""

import contextlib
import time

import pytest
from faults import PERIOD, Cluster
from servers import PgBouncer, Proxy
from servers.required import require
from sqlalchemy import make_url


@pytest.mark.backends("postgresql", "mariadb", "redis")
def test_a_node_whose_connections_break_in_every_way_comes_back(store_url):
    """Cut, delayed, half-open, replies lost: the other node goes on, no slot runs twice, and no run is forgotten."""
    with Proxy(make_url(store_url).port) as proxy, Cluster(store_url) as cluster:
        direct, through = cluster.join(), cluster.join(proxy.through(store_url))
        cluster.serve()
        cluster.runs_on(through)
        for fault in (_cut, _delayed, _half_open, _replies_dropped, _one_reply_lost):
            with fault(proxy):
                cluster.serve(direct)
            cluster.serve(through)
        cluster.judge()
        assert set(cluster.states().values()) <= {"succeeded", "lost"}
        assert {run for run, state in cluster.states().items() if state == "lost"} <= cluster.lost()


@contextlib.contextmanager
def _cut(proxy):
    proxy.refuse = True
    proxy.cut()
    yield
    proxy.refuse = False


@contextlib.contextmanager
def _delayed(proxy):
    proxy.delay = 0.2
    yield
    proxy.delay = 0.0


@contextlib.contextmanager
def _half_open(proxy):
    proxy.blackhole = True
    yield
    proxy.blackhole = False


@contextlib.contextmanager
def _replies_dropped(proxy):
    proxy.drop_replies = True
    yield
    proxy.drop_replies = False
    proxy.cut()  # what was swallowed never comes


@contextlib.contextmanager
def _one_reply_lost(proxy):
    lost = proxy.lose_next_reply()
    yield
    assert lost.wait(10)


@pytest.mark.backends("postgresql")
def test_nodes_work_through_a_pooler_that_is_killed(store_url, postgresql):
    """PgBouncer in transaction mode carries a cluster, and its crash in the middle of a run is an outage like any other."""
    require(PgBouncer)
    with PgBouncer(postgresql.port) as pooler:
        url = pooler.database_url(make_url(store_url).database)
        with Cluster(url, lock_at_most="5s") as cluster:
            cluster.join()
            cluster.join()
            cluster.serve()
            cluster.next(what="entered")
            pooler.kill()
            time.sleep(PERIOD / 1000)
            pooler.start()
            cluster.serve()
            cluster.judge()
            assert set(cluster.states().values()) == {"succeeded"}
