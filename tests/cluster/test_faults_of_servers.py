"""What servers suffer: a kill in the middle of a run and between two, a failover, a move, deadlocks."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pymysql
import pytest
from claims import HOUR, ask, compete
from faults import PERIOD, Cluster
from redis.crc import key_slot
from servers import PostgreSQL, Proxy, Redis
from servers.postgresql import _program
from servers.required import require
from servers.server import run, user_below_root
from sqlalchemy import make_url

from apscheduler_fence.lease import Grant, Refusal, settle
from apscheduler_fence.stores import open_store

THREADS, SLOTS = 16, 12


def _killed_twice(cluster, server):
    """Kills and restarts a server in the middle of a run and between two, and waits until every node has recovered."""
    cluster.join()
    cluster.join()
    cluster.serve()
    for moment in ("entered", "left"):
        cluster.next(what=moment)
        server.kill()
        time.sleep(PERIOD / 1000)
        server.start()
        cluster.serve()


@pytest.mark.backends("postgresql")
def test_nodes_survive_the_crash_of_postgresql(store_url, postgresql):
    """What was running goes on and is recorded afterwards, no slot runs twice, and nobody has to be restarted."""
    with Cluster(store_url, lock_at_most="5s") as cluster:
        _killed_twice(cluster, postgresql)
        cluster.judge()
        assert set(cluster.states().values()) == {"succeeded"}


def test_nodes_survive_the_crash_of_redis_with_a_log():
    """With an append-only file a killed server has forgotten nothing: no slot runs twice."""
    require(Redis)
    with Redis(aof=True) as server, Cluster(server.url, lock_at_most="5s") as cluster:
        _killed_twice(cluster, server)
        cluster.judge()
        assert set(cluster.states().values()) == {"succeeded"}


def test_tokens_grow_across_the_crash_of_a_forgetful_redis():
    """Without persistence the slots of the moment may run again, once for each crash, but never under an old token."""
    require(Redis)
    with Redis() as server, Cluster(server.url) as cluster:
        _killed_twice(cluster, server)
        cluster.judge(repeated=2)


class _Standby(PostgreSQL):
    """A copy of a server that follows it asynchronously, until `promote`."""

    def __init__(self, primary_port):
        super().__init__()
        self._primary_port = primary_port

    def install(self):
        run(
            [
                *(_program("pg_basebackup"), "-D", self.folder / "data", "--write-recovery-conf", "--checkpoint=fast"),
                *("--no-sync", "-d", f"host=127.0.0.1 port={self._primary_port} user=postgres"),
            ],
            user_below_root(self.user),
        )

    def promote(self):
        assert self.execute("SELECT pg_promote()") == [(True,)]


def test_a_standby_that_missed_the_last_write_goes_on_with_larger_tokens():
    """PostgreSQL fails over and forgets a run that was under way: at most that slot runs again, and tokens grow."""
    require(PostgreSQL)
    with contextlib.ExitStack() as stack:
        primary = stack.enter_context(PostgreSQL())
        proxy = stack.enter_context(Proxy(primary.port))
        standby = stack.enter_context(_Standby(proxy.port))
        hosts = f"host=127.0.0.1:{primary.port}&host=127.0.0.1:{standby.port}"
        url = f"postgresql+psycopg://postgres@/postgres?{hosts}&target_session_attrs=read-write"
        cluster = stack.enter_context(Cluster(url))
        cluster.join()
        cluster.join()
        cluster.serve()
        cluster.next(what="left")
        proxy.stop()
        missed = cluster.next(what="entered")
        primary.kill()
        standby.promote()
        cluster.serve()
        cluster.judge(repeated=2)
        later = cluster.said(what="entered", after=missed["at"])
        assert min(message["token"] for message in later) > missed["token"]
        assert missed["run"] not in cluster.states() or len(cluster.said(what="entered", run=missed["run"])) == 2


def test_nodes_follow_a_sentinel_failover(redis_sentinel):
    """The master is killed in the middle of a run; what its replicas had not heard may run again, under larger tokens."""
    with Cluster(redis_sentinel.url) as cluster:
        cluster.join()
        cluster.join()
        cluster.serve()
        cluster.next(what="entered")
        redis_sentinel.master().kill()
        cluster.serve()
        cluster.judge(repeated=1)


def test_nodes_follow_a_hash_slot_to_another_node_of_a_cluster(redis_cluster):
    """While it moves nothing is granted, and afterwards all is there: no slot runs twice."""
    slot = key_slot(b"fence:{%}:")  # the namespace "", as the store writes it
    with Cluster(redis_cluster.url, lock_at_most="5s") as cluster:
        cluster.join()
        cluster.join()
        cluster.serve()
        owner = next(node for node in redis_cluster.nodes if node.execute("CLUSTER", "COUNTKEYSINSLOT", slot))
        other = next(node for node in redis_cluster.nodes if node is not owner)
        for source, target in ((owner, other), (other, owner)):  # and back, for the tests that follow
            cluster.next(what="entered")
            _move(slot, source, target, redis_cluster.nodes)
            cluster.serve()
        cluster.judge()
        assert set(cluster.states().values()) == {"succeeded"}


def _move(slot, source, target, nodes):
    ids = {node: node.execute("CLUSTER", "MYID") for node in nodes}
    target.execute("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
    source.execute("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
    for key in source.execute("CLUSTER", "GETKEYSINSLOT", slot, 1000):
        source.execute("MIGRATE", "127.0.0.1", target.port, key, 0, 1000)
    for node in (target, source, *nodes):
        node.execute("CLUSTER", "SETSLOT", slot, "NODE", ids[target])


@pytest.mark.backends("mariadb")
def test_a_storm_of_deadlocks_grants_each_slot_once(store_url, mariadb):
    """Sixteen threads claim one lease while a stranger locks its rows in the other order: each slot is won by one of them."""
    before = _deadlocks(mariadb)
    with contextlib.ExitStack() as stack:
        stores = [open_store(store_url, "storm") for _ in range(4)]
        for store in stores:
            stack.callback(store.close)
            store.open()
        stranger = stack.enter_context(contextlib.closing(mariadb.connect(make_url(store_url).database)))
        over, start = threading.Event(), threading.Barrier(THREADS + 1, timeout=30)
        with ThreadPoolExecutor(THREADS + 1) as pool:
            strange = pool.submit(_lock_backwards, stranger, over, start)
            storm = [pool.submit(_claim_all, stores[number % 4], start) for number in range(THREADS)]
            try:
                won = sorted(sum((each.result(60) for each in storm), []))  # noqa: RUF017 - a dozen
            finally:
                over.set()
            strange.result(30)
    assert [slot for slot, _ in won] == list(range(SLOTS))
    assert [token for _, token in won] == sorted({token for _, token in won})
    assert _deadlocks(mariadb) > before


def _claim_all(store, start):
    won = []
    start.wait()
    for slot in range(SLOTS):
        terms = {"slot_at": slot + 1, "scheduled_at": slot + 1, "lock_at_most": HOUR}
        while (
            isinstance(answer := compete(store, ask("storm", f"s{slot}", **terms)), Refusal) and answer.reason == "held"
        ):
            time.sleep(0.005)
        if isinstance(answer, Grant):
            won.append((slot, answer.token))
            time.sleep(0.005)
            assert store.swap([settle(answer, "succeeded")]) == [answer.token]
    return won


def _lock_backwards(connection, over, start):
    start.wait()
    while not over.is_set():
        with contextlib.suppress(pymysql.OperationalError), connection.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("SELECT * FROM fence_execution FOR UPDATE")
            time.sleep(0.002)
            cursor.execute("SELECT * FROM fence_lease FOR UPDATE")
        connection.rollback()


def _deadlocks(server):
    return int(server.execute("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")[0][1])
