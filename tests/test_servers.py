"""The servers, the proxy and the processes that other tests rely on do what they claim."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pymysql
import pytest
import redis
import sqlalchemy
from servers import Node, PgBouncer, PostgreSQL, Proxy, Redis, RedisSentinel
from servers import janitor as janitors
from servers.process import faketime_library
from servers.required import require
from sqlalchemy.pool import NullPool

COUNTER = "CREATE TABLE counter (n integer)"


@pytest.fixture(params=["postgresql", "mariadb"])
def sql(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def database(sql, request):
    name = f"servers_{request.node.name.partition('[')[0]}"
    sql.create_database(name)
    yield name
    sql.mend()
    sql.drop_database(name)


def answers(url):
    engine = sqlalchemy.create_engine(url, poolclass=NullPool)
    with engine.connect() as connection:
        return connection.scalar(sqlalchemy.text("SELECT 1")) == 1


def alive(pid):
    return pid in janitors.running()


def eventually(reached, seconds=10):
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


# --- SQL servers


def test_a_sql_server_answers_at_its_url(sql):
    """SQLAlchemy can use the URL as it is."""
    assert answers(sql.url)


def test_a_new_database_is_empty(sql, database):
    """Nothing is in a database that was just created."""
    schema = "public" if isinstance(sql, PostgreSQL) else database
    tables = f"SELECT count(*) FROM information_schema.tables WHERE table_schema = '{schema}'"
    assert sql.execute(tables, database) == [(0,)]


@pytest.mark.parametrize("stop", ["stop", "kill"])
def test_what_was_committed_outlives_the_server(sql, database, stop):
    """Neither a clean stop nor SIGKILL loses a committed row."""
    sql.execute(COUNTER, database)
    sql.execute("INSERT INTO counter VALUES (7)", database)
    getattr(sql, stop)()
    with pytest.raises((psycopg.OperationalError, pymysql.OperationalError)):
        sql.connect(database)
    sql.start()
    assert sql.execute("SELECT n FROM counter", database) == [(7,)]


def test_killing_postgresql_ends_all_its_processes(postgresql):
    """Its backends lead sessions of their own, and none of them survives SIGKILL."""
    with contextlib.closing(postgresql.connect()) as connection:
        backend = connection.info.backend_pid
        assert alive(backend)
        postgresql.kill()
        assert not alive(backend)


def test_a_frozen_postgresql_does_not_answer_until_it_is_thawed(postgresql):
    """A connection that was open before hangs, and goes on afterwards as if nothing had been."""
    with contextlib.closing(postgresql.connect()) as connection:
        waiting = connection.pgconn
        with postgresql.frozen():
            waiting.send_query(b"SELECT 1")
            waiting.flush()
            assert not _readable(waiting.socket, 0.3)
        assert _readable(waiting.socket, 5)


def test_a_frozen_mariadb_lets_a_query_time_out(mariadb):
    """A client with a read timeout sees the timeout, not a closed connection."""
    client = pymysql.connect(host="127.0.0.1", port=mariadb.port, user="root", ssl_disabled=True, read_timeout=1)
    with mariadb.frozen(), client.cursor() as cursor, pytest.raises(pymysql.OperationalError, match="timed out"):
        cursor.execute("SELECT 1")


def _readable(descriptor, seconds):
    with socket.socket(fileno=os.dup(descriptor)) as peer:
        peer.settimeout(seconds)
        try:
            return bool(peer.recv(1, socket.MSG_PEEK))
        except TimeoutError:
            return False


def test_postgresql_finds_a_folder_when_the_temporary_one_is_private(monkeypatch, tmp_path):
    """Under root the server runs as another user, who may not look into a 0700 folder."""
    require(PostgreSQL)
    tmp_path.chmod(0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with PostgreSQL() as server:
        assert server.execute("SELECT 1") == [(1,)]


def test_pgbouncer_shares_one_server_connection_between_transactions(postgresql):
    """Two clients, one after the other, are served by the same backend."""
    require(PgBouncer)
    with PgBouncer(postgresql.port, {"default_pool_size": "1"}) as bouncer:
        url = bouncer.url.replace("+psycopg", "")
        with psycopg.connect(url, autocommit=True) as one, psycopg.connect(url, autocommit=True) as two:
            backends = {each.execute("SELECT pg_backend_pid()").fetchone() for each in (one, two)}
    assert len(backends) == 1


# --- Redis


def test_redis_without_persistence_forgets_everything():
    """A restart of a server without AOF loses its keys."""
    require(Redis)
    with Redis() as server:
        server.execute("SET", "key", "value")
        server.kill()
        server.start()
        assert server.execute("GET", "key") is None


def test_redis_with_aof_keeps_what_it_acknowledged():
    """A server with AOF has its keys again after SIGKILL."""
    require(Redis)
    with Redis(aof=True) as server:
        server.execute("SET", "key", "value")
        server.kill()
        server.start()
        assert server.execute("GET", "key") == "value"


def test_redis_takes_options():
    """An option becomes a setting of the server."""
    require(Redis)
    with Redis(options={"maxmemory-policy": "allkeys-lru"}) as server:
        assert server.execute("CONFIG", "GET", "maxmemory-policy") == ["maxmemory-policy", "allkeys-lru"]


def test_a_frozen_redis_lets_a_command_time_out(redis_server):
    """A connected client sees a timeout, not a refusal."""
    with redis_server.client(socket_timeout=0.2) as client:
        client.ping()
        with redis_server.frozen(), pytest.raises(redis.TimeoutError):
            client.ping()
    assert redis_server.execute("PING") in {"PONG", True}


def test_the_sentinels_name_the_master(redis_sentinel):
    """The node they name takes writes, and the two others follow it."""
    master = redis_sentinel.master()
    master.execute("SET", "key", "value")
    assert master.execute("WAIT", 2, 5000) == 2
    assert [replica.execute("GET", "key") for replica in redis_sentinel.replicas()] == ["value", "value"]


def test_the_sentinels_replace_a_master_that_died():
    """Another node is named soon after the master was killed."""
    require(RedisSentinel)
    with RedisSentinel() as trio:
        old = trio.master()
        old.kill()
        eventually(lambda: trio.master() is not old)
        assert trio.master().execute("SET", "key", "value") in {"OK", True}


def test_a_cluster_has_three_masters_that_share_the_slots(redis_cluster):
    """All 16384 slots are served, each by one of three nodes."""
    ranges = redis_cluster.nodes[0].execute("CLUSTER", "SLOTS")
    assert len({port for _, _, (_, port, *_) in ranges}) == 3
    assert sum(last - first + 1 for first, last, *_ in ranges) == 16_384
    with contextlib.closing(redis_cluster.client()) as client:
        assert [client.set(key, key) for key in "abc"] == [True, True, True]


# --- missing servers and chosen backends


class Missing(Redis):
    """A server that is nowhere installed."""

    @classmethod
    def available(cls):
        return False


def test_a_missing_server_skips_the_test_on_a_laptop(monkeypatch):
    """Without CI in the environment, `require` skips."""
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="Missing is not installed"):
        require(Missing)


def test_a_missing_server_fails_the_test_on_ci(monkeypatch):
    """With CI in the environment, `require` fails: a test that is skipped there proves nothing."""
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="Missing is not installed"):
        require(Missing)


_urls_seen = set()


@pytest.mark.parametrize("again", [1, 2])
def test_every_test_has_a_store_of_its_own(store_url, again):
    """No two tests are given the same store."""
    assert store_url not in _urls_seen
    _urls_seen.add(store_url)


@pytest.mark.backends("sqlite", "redis")
def test_a_test_can_choose_its_backends(store_url):
    """The marker narrows the parametrisation."""
    assert store_url.startswith(("sqlite:", "redis:"))


@pytest.mark.parametrize("harm", ["kill", "freeze"])
def test_a_harmed_server_is_well_again_for_the_next_test(redis_server, harm):
    """Whatever was done to a shared server, `mend` brings it back."""
    getattr(redis_server, harm)()
    redis_server.mend()
    assert redis_server.execute("PING") in {"PONG", True}


# --- what must not be left behind

SESSION = """
import json, sys, time
from servers import Node, Redis
redis, node = Redis().__enter__(), Node("-c", "import time; time.sleep(600)")
print(json.dumps({"pids": [redis.pid, node.pid], "folders": [str(redis.folder), str(node._folder)]}), flush=True)
time.sleep(600)
"""


def test_nothing_outlives_a_session_that_was_killed():
    """SIGKILL of the process that started them ends its servers and nodes, and removes their folders."""
    require(Redis)
    session = subprocess.Popen(
        [sys.executable, "-c", SESSION],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with session:
        left = json.loads(session.stdout.readline())
        assert all(alive(pid) for pid in left["pids"])
        session.kill()
    eventually(lambda: not any(alive(pid) for pid in left["pids"]))
    eventually(lambda: not any(Path(folder).exists() for folder in left["folders"]))


# --- proxy


@pytest.fixture
def proxy(redis_server):
    redis_server.execute("DEL", "n")
    with Proxy(redis_server.port) as started:
        yield started


@pytest.fixture
def client(proxy):
    """A client with one open connection through the proxy."""
    retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
    with redis.Redis(port=proxy.port, socket_timeout=0.5, retry=retry) as connected:
        connected.ping()
        yield connected


def test_the_proxy_forwards(client, redis_server):
    """What is written through it is in the server."""
    assert client.incr("n") == 1
    assert redis_server.execute("GET", "n") == "1"


def test_the_proxy_leads_a_url_through_itself(proxy, redis_server):
    """The URL it gives differs from the server's in the port only."""
    assert proxy.through(redis_server.database_url(3)) == f"redis://127.0.0.1:{proxy.port}/3"


def test_a_lost_reply_leaves_the_write_done(proxy, client, redis_server):
    """The client sees its connection reset although the server did what it was asked."""
    lost = proxy.lose_next_reply()
    with pytest.raises(redis.ConnectionError):
        client.incr("n")
    assert lost.is_set()
    assert redis_server.execute("GET", "n") == "1"
    assert client.incr("n") == 2


def test_the_request_whose_reply_is_lost_can_be_chosen(proxy, client):
    """Requests without the given bytes pass as ever."""
    proxy.lose_next_reply(containing=b"INCR")
    assert client.ping()
    with pytest.raises(redis.ConnectionError):
        client.incr("n")


def test_dropped_replies_leave_the_write_done(proxy, client, redis_server):
    """The client waits in vain although the server did what it was asked."""
    proxy.drop_replies = True
    with pytest.raises(redis.TimeoutError):
        client.incr("n")
    assert redis_server.execute("GET", "n") == "1"


def test_a_black_hole_swallows_requests_and_gives_them_back_late(proxy, client, redis_server):
    """Nothing reaches the server while it lasts; what was sent arrives when it ends."""
    proxy.blackhole = True
    with pytest.raises(redis.TimeoutError):
        client.incr("n")
    assert redis_server.execute("GET", "n") is None
    proxy.blackhole = False
    eventually(lambda: redis_server.execute("GET", "n") == "1")


def test_a_black_hole_accepts_connections(proxy):
    """A new connection is made and then stays silent."""
    proxy.blackhole = True
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=0.2) as connection:
        connection.sendall(b"PING\r\n")
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_delay_is_added_each_way(proxy, client):
    """A round trip takes two delays more."""
    proxy.delay = 0.05
    before = time.monotonic()
    client.ping()
    assert time.monotonic() - before >= 0.1


def test_refuse_turns_new_connections_away_and_keeps_the_old(proxy, client):
    """Nobody listens, but who is connected goes on; afterwards new ones are welcome again."""
    proxy.refuse = True
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port))
    assert client.ping()
    proxy.refuse = False
    socket.create_connection(("127.0.0.1", proxy.port)).close()


def test_cut_resets_live_connections(proxy):
    """A connected peer sees a reset, not an orderly end."""
    with socket.create_connection(("127.0.0.1", proxy.port)) as connection:
        connection.sendall(b"PING\r\n")
        assert connection.recv(64) == b"+PONG\r\n"
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            connection.recv(64)


def test_a_lost_commit_of_postgresql_is_committed(postgresql):
    """The proxy loses the reply to an INSERT, and the row is there."""
    postgresql.execute("DROP TABLE IF EXISTS counter")
    postgresql.execute(COUNTER)
    with Proxy(postgresql.port) as proxy:
        url = proxy.through(postgresql.url).replace("+psycopg", "")
        connection = psycopg.connect(url, autocommit=True)
        proxy.lose_next_reply(containing=b"INSERT")
        with connection, pytest.raises(psycopg.OperationalError):
            connection.execute("INSERT INTO counter VALUES (1)")
    assert postgresql.execute("SELECT n FROM counter") == [(1,)]


# --- processes


def test_a_node_reports_in_json_lines():
    """Each line it prints is a message; other text is kept as text."""
    with Node("-c", 'print(\'{"event": "hello", "n": 1}\'); print("plain")') as node:
        assert node.receive(event="hello") == {"event": "hello", "n": 1}
        assert node.wait() == 0
        assert node.messages[1:] == [{"text": "plain"}]


def test_a_node_that_died_says_why():
    """Waiting for a message fails at once and shows the traceback."""
    with Node("-c", "raise SystemExit('because')") as node, pytest.raises(RuntimeError, match="because"):
        node.receive(event="never")


TICKER = "import itertools, time\nfor n in itertools.count(): print('{\"n\": %d}' % n); time.sleep(0.02)"


def test_a_frozen_node_is_silent_until_it_is_thawed():
    """Its counting stops and goes on where it stopped."""
    with Node("-c", TICKER) as node:
        node.receive(n=1)
        node.freeze()
        time.sleep(0.1)
        seen = len(node.messages)
        time.sleep(0.2)
        assert len(node.messages) == seen
        node.thaw()
        assert node.receive(n=seen + 1)


def test_killing_a_node_kills_what_it_started():
    """No grandchild is left, as none would be after the machine was switched off."""
    code = "import subprocess, sys\np = subprocess.Popen(['sleep', '600'], start_new_session=True)\nprint('{\"pid\": %d}' % p.pid)\np.wait()"
    with Node("-c", code) as node:
        child = node.receive()["pid"]
        assert alive(child)
        node.kill()
        assert not alive(child)
        assert not node.running


def require_faketime():
    if faketime_library() is None:
        missing = pytest.fail if os.environ.get("CI") else pytest.skip
        missing("libfaketime is not installed")


@pytest.mark.parametrize(("offset", "seconds"), [("+1h", 3600), ("-30m", -1800)])
def test_a_node_can_live_in_the_wrong_hour(offset, seconds):
    """Its wall clock is off by the offset, its monotonic clock is not, and it can sleep."""
    require_faketime()
    code = (
        "import json, time; time.sleep(0.01); print(json.dumps({'wall': time.time(), 'monotonic': time.monotonic()}))"
    )
    with Node("-c", code, faketime=offset) as node:
        told = node.receive()
        assert told["wall"] - time.time() == pytest.approx(seconds, abs=10)
        assert told["monotonic"] == pytest.approx(time.monotonic(), abs=10)


def test_a_node_in_the_wrong_hour_leaves_no_shared_memory():
    """What libfaketime shares between processes is removed even after SIGKILL."""
    require_faketime()
    with Node("-c", TICKER, faketime="-30m") as node:
        node.receive(n=1)
        assert list(Path("/dev/shm").glob(f"*faketime*{node.pid}"))
    assert not list(Path("/dev/shm").glob(f"*faketime*{node.pid}"))
