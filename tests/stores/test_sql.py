"""What is particular to SQL databases: round trips, locks, clocks, collations, creation, limits, and foreign engines."""

import contextlib
import os
import pickle
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import freezegun
import pytest
import sqlalchemy
from claims import HOUR, ask, compete, run, win
from servers import PgBouncer, Proxy
from sqlalchemy.dialects import registry
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.ext.compiler import compiles

from apscheduler_fence.errors import ConfigError, StoreError
from apscheduler_fence.lease import Key, Refusal, Seen, claim, granted, renew, revive, settle
from apscheduler_fence.stores.base import Executions, HeldLeases
from apscheduler_fence.stores.sql import SqlStore, StoreClock, ddl
from apscheduler_fence.stores.sql.setup import file_system

every_database = pytest.mark.backends("sqlite", "postgresql", "mariadb")
SLACK = 1.5  # seconds that a busy machine may add to a limit


@pytest.fixture
def make():
    """Makes stores that are closed at the end."""
    with contextlib.ExitStack() as made:

        def make(source, namespace="", **options):
            store = SqlStore(source, namespace, **options)
            made.callback(store.close)
            return store

        yield make


@pytest.fixture
def database(request):
    """The URL of an empty PostgreSQL database."""
    server = request.getfixturevalue("postgresql")
    name = f"sql_{request.node.name[:40].replace('[', '_').replace(']', '')}".lower()
    yield server.create_database(name)
    server.mend()
    server.drop_database(name)


def _name(url):
    return sqlalchemy.make_url(url).database


# --- round trips ------------------------------------------------------------------------------------------------------


class Turns:
    """A TCP proxy that counts how often a client speaks after the server has spoken: round trips, whatever the driver."""

    def __init__(self, target_port):
        self.count = 0
        self._target = target_port
        self._server_spoke = True
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                for pair in ((client, server), (server, client)):
                    pump = threading.Thread(target=self._pump, args=(*pair, pair[0] is client), daemon=True)
                    self._threads.append(pump)
                    pump.start()

    def _pump(self, source, sink, from_client):
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                if from_client and self._server_spoke:
                    self.count += 1
                self._server_spoke = not from_client
                sink.sendall(piece)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for each in self._sockets:
            each.close()

    def of(self, action):
        """Do something, and say how many round trips that took."""
        before = self.count
        action()
        return self.count - before


@pytest.fixture
def counted(request, store_url, make):
    """A store whose round trips are counted, and the counter."""
    server = request.getfixturevalue(request.node.callspec.params["store_url"])
    with Turns(server.port) as turns:
        store = make(store_url.replace(f":{server.port}", f":{turns.port}"))
        store.open()
        store.read(Key("", "", ""))
        yield store, turns
        store.close()


@pytest.mark.backends("postgresql")
def test_a_claim_costs_two_round_trips_and_its_settle_one(counted):
    """On PostgreSQL a winner pays a read and a swap, and one more to settle; a loser pays the read."""
    store, turns = counted
    wanted = ask()
    seen = []
    assert turns.of(lambda: seen.append(store.read(wanted.key))) == 1
    tokens = []
    assert turns.of(lambda: tokens.extend(store.swap([claim(seen[0], wanted)]))) == 1
    assert turns.of(lambda: claim(store.read(wanted.key), wanted)) == 1
    assert turns.of(lambda: store.swap([settle(granted(wanted, tokens[0], 1), "succeeded")])) == 1


@pytest.mark.backends("postgresql")
def test_a_swap_that_does_not_match_costs_one_round_trip(counted):
    """On PostgreSQL a claim that came too late pays one round trip, also where the server undoes it by an error."""
    store, turns = counted
    wanted = ask()
    late = claim(store.read(wanted.key), wanted)
    grant = win(store, wanted)
    assert turns.of(lambda: store.swap([late])) == 1
    stale = settle(grant, "succeeded")
    store._engine.connect().execute(sqlalchemy.text("UPDATE fence_execution SET state = 'lost'")).connection.close()
    assert turns.of(lambda: store.swap([stale])) == 1


@pytest.mark.backends("postgresql")
def test_all_renewals_cost_one_round_trip(counted):
    """On PostgreSQL a thousand leases are renewed in one statement, and each is answered for by itself."""
    store, turns = counted
    grants = [win(store, ask(f"lease {number}")) for number in range(5)]
    store.swap([settle(grants[2], "succeeded")])
    tokens = []
    renewals = [renew(grant, HOUR) for grant in grants] * 200
    assert turns.of(lambda: tokens.extend(store.swap(renewals))) == 1
    assert tokens == [None if number == 2 else grant.token for number, grant in enumerate(grants)] * 200


@pytest.mark.backends("mariadb")
def test_a_transaction_is_only_paid_for_where_two_rows_move(counted):
    """On MariaDB a read and a renewal cost one round trip; a claim and a settle cost those of their transaction."""
    store, turns = counted
    run(store, ask("pay"))
    wanted = ask("pay")
    seen = []
    assert turns.of(lambda: seen.append(store.read(wanted.key))) == 1
    tokens = []
    assert turns.of(lambda: tokens.extend(store.swap([claim(seen[0], wanted)]))) == 5
    grant = granted(wanted, tokens[0], 1)
    assert turns.of(lambda: store.swap([renew(grant, HOUR)])) == 1
    assert turns.of(lambda: store.swap([settle(grant, "succeeded")])) == 4


@pytest.mark.backends("postgresql")
def test_a_server_without_a_pooler_plans_each_statement_once(store):
    """What is executed again and again is prepared."""
    for _ in range(8):
        store.read(Key("", "", ""))
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM pg_prepared_statements").scalar() > 0


@every_database
def test_statements_are_built_once_for_each_shape(store):
    """A second run of the same kind builds no statement that the first has not built."""
    run(store, ask("pay"))
    run(store, ask("pay"))
    built = set(store._statements._built)
    run(store, ask("pay"))
    assert set(store._statements._built) == built


# --- names and texts --------------------------------------------------------------------------------------------------


@every_database
def test_names_differ_by_case_accents_and_trailing_spaces(store):
    """Each of these names is a lease of its own."""
    names = ["job", "JOB", "job ", "jöb", "jo\u0308b", "job\u00a0", "j\U0001f600b"]
    for name in names:
        win(store, ask(name, slot="s"))
    assert {row.job for row in store.executions(Executions())} == set(names)


@every_database
def test_an_error_that_no_database_can_hold_is_still_recorded(store):
    """NUL, lone surrogates and more than 64 KB of text do not keep a run from being settled."""
    wanted = ask()
    run(store, wanted, "failed", "x\x00y\udc80z" + "long " * 20_000)
    recorded = store.read(wanted.key).execution
    assert recorded.error.startswith("x\\x00y\\udc80z")
    assert len(recorded.error) > 100_000


@pytest.mark.backends("mariadb")
def test_a_text_too_long_is_refused_although_the_server_is_lenient(request, store_url, make):
    """A server without strict mode does not cut a holder's nonce off: two of them could become the same."""
    server = request.getfixturevalue("mariadb")
    before = server.execute("SELECT @@global.sql_mode")[0][0]
    server.execute("SET GLOBAL sql_mode = ''")
    try:
        store = make(store_url)
        with pytest.raises(StoreError, match="too long"):
            win(store, ask("pay" * 100))
    finally:
        server.execute(f"SET GLOBAL sql_mode = '{before}'")


# --- clocks -----------------------------------------------------------------------------------------------------------


@every_database
def test_the_clock_is_utc_whatever_the_zone(store):
    """The store's clock is the machine's, in microseconds since the epoch."""
    assert abs(store.read(Key("", "", "")).now / 1e6 - time.time()) < 1


@pytest.mark.backends("postgresql", "mariadb")
def test_the_clock_does_not_depend_on_the_sessions_zone(store_url, make, monkeypatch):
    """A session in a zone with daylight saving time reads the same clock."""
    setting = {"postgresql": "SET TIME ZONE 'America/New_York'", "mysql": "SET time_zone = '-04:00'"}
    store = make(store_url)
    with store._engine.connect() as connection:
        connection.exec_driver_sql(
            setting[sqlalchemy.make_url(store_url).get_backend_name().replace("mariadb", "mysql")]
        )
        now = connection.execute(sqlalchemy.select(StoreClock())).scalar_one()
    assert abs(now / 1e6 - time.time()) < 1


def test_a_claim_that_waited_for_a_lock_has_the_time_after_the_wait(postgresql, database, make):
    """On PostgreSQL a change that waited for another change of its lease is judged, and timed, after that."""
    store = make(database)
    run(store, ask("pay"))
    wanted = ask("pay")
    change = claim(store.read(wanted.key), wanted)
    with ThreadPoolExecutor(1) as pool, postgresql.connect(_name(database)) as other:
        with other.transaction():
            other.execute("UPDATE fence_lease SET func = func")
            waiting = pool.submit(store.swap, [change])
            time.sleep(0.4)
            released = other.execute("SELECT extract(epoch FROM clock_timestamp()) * 1000000").fetchone()[0]
        assert waiting.result()[0] >= released


def test_a_clock_that_differs_is_reported_with_both_times(tmp_path, make):
    """The warning names this host's time and the database's."""
    with freezegun.freeze_time("2020-02-03T04:05:06Z"):
        [warning] = make(f"sqlite:///{tmp_path / 'fence.db'}").open()
    assert "2020-02-03T04:05:06" in warning
    assert time.strftime("%Y-%m-%dT", time.gmtime()) in warning


# --- all or nothing ---------------------------------------------------------------------------------------------------


@every_database
def test_a_taken_slot_undoes_the_lease(store):
    """A claim whose slot was recorded meanwhile, under another lease, leaves its own lease as it was."""
    wanted = ask("one", job="job", slot="s")
    run(store, ask("one"))
    change = claim(store.read(wanted.key), wanted)
    run(store, ask("two", job="job", slot="s"))
    before = store.read(wanted.key).lease
    assert store.swap([change]) == [None]
    assert store.read(wanted.key).lease == before


@every_database
def test_a_row_that_is_not_as_expected_undoes_the_lease(store):
    """A settle whose execution has another state leaves the lease held."""
    wanted = ask()
    grant = win(store, wanted)
    with store._engine.connect() as connection:
        connection.exec_driver_sql("UPDATE fence_execution SET state = 'lost'")
    before = store.read(wanted.key).lease
    assert store.swap([settle(grant, "succeeded")]) == [None]
    assert store.read(wanted.key).lease == before


@every_database
def test_the_second_move_undoes_the_first(store):
    """A take-over whose slot is taken leaves the run that it displaces as it was."""
    displaced = ask("lease", job="a", lock_at_most=1)
    win(store, displaced)
    wanted = ask("lease", job="b", slot="s")
    change = claim(store.read(wanted.key), wanted)
    assert len(change.executions) == 2
    run(store, ask("other", job="b", slot="s"))
    before = store.read(displaced.key)
    assert store.swap([change]) == [None]
    after = store.read(displaced.key)
    assert (after.lease, after.execution) == (before.lease, before.execution)


@every_database
def test_a_claim_that_lost_leaves_no_lease_behind(store):
    """A lease that nobody was ever granted does not appear, whatever was written to lock it."""
    wanted = ask("new", job="job", slot="s")
    change = claim(store.read(wanted.key), wanted)
    run(store, ask("two", job="job", slot="s"))
    assert store.swap([change]) == [None]
    assert store.read(wanted.key).lease is None
    assert win(store, ask("new")).token > 0


def test_a_claim_that_a_serializable_server_refuses_is_sent_again(postgresql, database, make):
    """40001 says that nothing was applied: the claim is sent again, and matches."""
    postgresql.execute(f"ALTER DATABASE {_name(database)} SET default_transaction_isolation = 'serializable'")
    store = make(database)
    run(store, ask("pay"))
    wanted = ask("pay")
    change = claim(store.read(wanted.key), wanted)
    with ThreadPoolExecutor(1) as pool, postgresql.connect(_name(database)) as other:
        with other.transaction():
            other.execute("UPDATE fence_lease SET func = func")
            waiting = pool.submit(store.swap, [change])
            time.sleep(0.4)
        assert waiting.result() != [None]


def test_sqlite_locks_before_it_reads(tmp_path, make):
    """Nobody can write between what a transaction compares and what it writes; a later lock could be refused."""
    store = make(f"sqlite:///{tmp_path / 'fence.db'}")
    held = win(store, ask("pay"))
    wanted = ask("pay", overlap="queue")
    change = claim(store.read(wanted.key), wanted)
    assert change.lease.write == "none"
    refused = []

    def try_to_write(_connection, _cursor, statement, *_):
        if statement.startswith("SELECT"):
            with contextlib.closing(sqlite3.connect(tmp_path / "fence.db", timeout=0)) as other:
                with pytest.raises(sqlite3.OperationalError, match="locked"):
                    other.execute("BEGIN IMMEDIATE")
                refused.append(statement)

    sqlalchemy.event.listen(store._engine, "before_cursor_execute", try_to_write)
    assert store.swap([change]) == [held.token]
    assert len(refused) == 1


def test_a_serializable_database_gives_one_winner_and_no_error(postgresql, database, make):
    """Claims that PostgreSQL refuses by 40001 are sent again."""
    postgresql.execute(f"ALTER DATABASE {_name(database)} SET default_transaction_isolation = 'serializable'")
    stores = [make(database) for _ in range(4)]
    warnings = [store.open() for store in stores]
    assert all("serializable" in warning for [warning] in warnings)
    with ThreadPoolExecutor(4) as pool:
        for number in range(10):
            shared = ask("pay", slot=f"s{number}")
            wanted = [ask("pay", slot=f"s{number}", slot_at=shared.slot_at) for _ in stores]
            results = list(pool.map(compete, stores, wanted))
            grants = [result for result in results if not isinstance(result, Refusal)]
            assert len(grants) == 1
            stores[0].swap([settle(grants[0], "succeeded")])


# --- creation ---------------------------------------------------------------------------------------------------------


@every_database
def test_twelve_nodes_create_the_tables_at_the_same_instant(store_url, make):
    """All of them find tables and indexes, and none fails."""
    stores = [make(store_url, timeout=10) for _ in range(12)]
    at_once = threading.Barrier(len(stores))

    def start(store):
        at_once.wait()
        return store.open()

    with ThreadPoolExecutor(len(stores)) as pool:
        assert list(pool.map(start, stores)) == [[]] * len(stores)
    with stores[0]._engine.connect() as connection:
        inspector = sqlalchemy.inspect(connection)
        assert {"fence_lease", "fence_execution"} <= set(inspector.get_table_names())
        assert len(inspector.get_indexes("fence_lease")) == 1
        assert len(inspector.get_indexes("fence_execution")) >= 4


@every_database
def test_tables_are_not_created_where_that_is_off_and_the_error_says_what_to_do(store_url, make):
    """Without tables the store refuses, names the command, and works as soon as its statements were executed."""
    store = make(store_url, create_tables=False, prefix="dba_")
    with pytest.raises(StoreError, match=r"dba_lease and dba_execution.*apscheduler-fence init --sql"):
        store.read(Key("", "", ""))
    with store._engine.connect() as connection:
        for statement in ddl(store_url, "dba_").split(";"):
            if statement.strip():
                connection.exec_driver_sql(statement)
    run(store, ask())
    assert make(store_url, prefix="dba_").open() == []


def test_tables_live_in_the_schema_that_was_given(postgresql, database, make):
    """Prefix and schema name the tables."""
    postgresql.execute("CREATE SCHEMA jobs", _name(database))
    run(make(database, schema="jobs", prefix="x_"), ask())
    assert postgresql.execute("SELECT count(*) FROM jobs.x_execution", _name(database)) == [(1,)]


def test_an_index_that_cannot_be_created_is_a_warning(postgresql, database, make):
    """A user who may not create indexes can still use tables that lack one."""
    make(database).open()
    postgresql.execute("DROP INDEX fence_execution_history", _name(database))
    postgresql.execute("DROP ROLE IF EXISTS humble; CREATE ROLE humble LOGIN")
    postgresql.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO humble", _name(database))
    store = make(database.replace("postgres@", "humble@"))
    [warning] = store.open()
    assert "fence_execution_history" in warning
    run(store, ask())


# --- limits -----------------------------------------------------------------------------------------------------------


def _refused_in_time(action, limit):
    began = time.monotonic()
    with pytest.raises(StoreError):
        action()
    assert time.monotonic() - began < limit + SLACK


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_a_frozen_server_is_given_up_in_time(request, make, server):
    """Neither a read nor a swap waits for a server that is silent, and both work when it is back."""
    server = request.getfixturevalue(server)
    url = server.create_database(f"frozen_{os.getpid()}")
    try:
        store = make(url, timeout=1.0)
        grant = win(store, ask())
        server.freeze()
        _refused_in_time(lambda: store.read(Key("", "", "")), 1.0)
        _refused_in_time(lambda: store.swap([renew(grant, HOUR)]), 2.0)  # 2: the least that libpq waits to connect
        server.thaw()
        assert store.swap([renew(grant, HOUR)]) == [grant.token]
        store.close()
    finally:
        server.mend()
        server.drop_database(_name(url))


def test_a_statement_in_flight_is_given_up_when_the_server_falls_silent(database, postgresql, make):
    """A server that has taken the statement and says nothing more is given up within the limit."""
    with Proxy(postgresql.port) as proxy:
        store = make(proxy.through(database), timeout=0.6)
        store.read(Key("", "", ""))
        proxy.drop_replies = True
        began = time.monotonic()
        with pytest.raises(StoreError, match=r"no answer within 0\.6 s"):
            store.swap([claim(Seen(int(time.time() * 1e6)), ask())])
        assert 0.5 < time.monotonic() - began < 0.6 + SLACK
        proxy.drop_replies = False
        store.close()


@every_database
def test_a_lock_that_another_session_holds_is_given_up_in_time(request, store_url, make):
    """A swap that meets a locked row raises, and is not waiting in the server any more; a read is not even slowed."""
    store = make(store_url, timeout=1.0)
    wanted = ask()
    grant = win(store, wanted)
    with _locking(request, store_url):
        _refused_in_time(lambda: store.swap([settle(grant, "succeeded")]), 1.0)
        began = time.monotonic()
        store.read(wanted.key)
        assert time.monotonic() - began < 0.9
    assert store.swap([settle(grant, "succeeded")]) == [grant.token]


@contextlib.contextmanager
def _locking(request, url):
    if url.startswith("sqlite"):
        with contextlib.closing(sqlite3.connect(_name(url), isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            yield
            other.execute("ROLLBACK")
        return
    server = request.getfixturevalue(request.node.callspec.params["store_url"])
    with contextlib.closing(server.connect(_name(url))) as other, contextlib.closing(other.cursor()) as cursor:
        cursor.execute("BEGIN")
        cursor.execute("SELECT * FROM fence_lease FOR UPDATE")
        yield
        cursor.execute("ROLLBACK")


@pytest.mark.parametrize("server", ["postgresql", "mariadb"])
def test_the_server_knows_the_limits_too(request, make, server):
    """A session of ours ends its statements and lock waits by itself, within the limit."""
    server = request.getfixturevalue(server)
    with make(server.url, timeout=3.0)._engine.connect() as connection:
        if connection.dialect.name == "postgresql":
            limits = [
                connection.exec_driver_sql(f"SHOW {name}").scalar() for name in ("statement_timeout", "lock_timeout")
            ]
            assert limits == ["2700ms", "2700ms"]
        else:
            limits = connection.exec_driver_sql("SELECT @@innodb_lock_wait_timeout, @@max_statement_time").one()
            assert tuple(map(float, limits)) == (3, 2.7)
            assert connection.exec_driver_sql("SELECT @@tx_isolation").scalar() == "READ-COMMITTED"


def test_sqlite_never_loses_a_commit_to_a_power_cut(tmp_path, make):
    """Every connection writes with synchronous=FULL, in WAL."""
    store = make(f"sqlite:///{tmp_path / 'fence.db'}")
    assert store.open() == []
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"


@pytest.fixture(params=[{}, {"ignore_startup_parameters": "options"}], ids=["strict", "lenient"])
def pooler(request):
    """A PgBouncer in transaction mode, with few server connections; one that refuses startup options, and one that drops them."""
    if not PgBouncer.available():
        assert not os.environ.get("CI"), "PgBouncer is not installed"
        pytest.skip("PgBouncer is not installed")
    with PgBouncer(request.getfixturevalue("postgresql").port, {"default_pool_size": "3", **request.param}) as pooler:
        yield pooler


def test_a_transaction_pooler_works_and_nothing_leaks_through_it(pooler, database, make):
    """Every operation works again and again from several threads, and other clients keep their own settings."""
    stores = [make(pooler.database_url(_name(database))) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        grants = list(pool.map(lambda number: run(stores[number % 2], ask(f"lease {number}")), range(80)))
    assert len(grants) == 80
    held = [win(stores[0], ask(f"held {number}")) for number in range(3)]
    assert None not in stores[1].swap([renew(grant, HOUR) for grant in held])
    with sqlalchemy.create_engine(pooler.database_url(_name(database))).connect() as other:
        assert other.exec_driver_sql("SHOW statement_timeout").scalar() == "0"
        other.connection.dbapi_connection.close()
        other.invalidate()


# --- lost connections -------------------------------------------------------------------------------------------------


def test_a_read_survives_a_lost_connection(database, postgresql, make):
    """A read on connections that the server has ended is sent again on a new one."""
    store = make(database)
    store.read(Key("", "", ""))
    _end_sessions(postgresql, database)
    assert store.read(Key("", "", "")).now > 0


def test_a_swap_on_a_lost_connection_is_not_sent_again(database, postgresql, make):
    """It raises, since it may have been applied; the next one works."""
    store = make(database)
    grant = win(store, ask())
    _end_sessions(postgresql, database)
    with pytest.raises(StoreError):
        store.swap([renew(grant, HOUR)])
    assert store.swap([renew(grant, HOUR)]) == [grant.token]


def _end_sessions(server, url):
    name = _name(url)
    server.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")
    deadline = time.monotonic() + 5
    while server.execute(f"SELECT 1 FROM pg_stat_activity WHERE datname = '{name}'") and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.backends("postgresql", "mariadb")
def test_a_lost_answer_raises_and_the_nonce_is_found(request, store_url, make):
    """After a swap whose answer got lost, the row shows whether it was applied."""
    server = request.getfixturevalue(request.node.callspec.params["store_url"])
    with Proxy(server.port) as proxy:
        store = make(proxy.through(store_url))
        run(store, ask("pay"))
        wanted = ask("pay")
        change = claim(store.read(wanted.key), wanted)
        lost = proxy.lose_next_reply(b"COMMIT" if server.__class__.__name__ == "MariaDB" else b"fence_execution")
        with pytest.raises(StoreError):
            store.swap([change])
        assert lost.wait(5)
        assert store.read(wanted.key).lease.holder == wanted.nonce
        store.close()


def test_mariadb_may_close_idle_connections(mariadb, make):
    """A swap that needs a transaction notices at BEGIN, before anything was sent, and takes a new connection."""
    url = mariadb.create_database(f"idle_{os.getpid()}")
    try:
        store = make(url)
        grant = win(store, ask())
        for (connection,) in mariadb.execute(
            f"SELECT id FROM information_schema.processlist WHERE db = '{_name(url)}'"
        ):
            mariadb.execute(f"KILL {connection}")
        assert store.swap([settle(grant, "succeeded")]) == [grant.token]
        store.close()
    finally:
        mariadb.drop_database(_name(url))


def test_connections_to_a_demoted_primary_are_dropped(database, postgresql, make):
    """A server that has become read-only is left, so that the new primary is found when it is there."""
    make(database).open()
    postgresql.execute(f"ALTER DATABASE {_name(database)} SET default_transaction_read_only = on")
    store = make(database)
    assert any("read_only" in warning for warning in store.open())
    with pytest.raises(StoreError, match="read-only"):
        win(store, ask())
    postgresql.execute(f"ALTER DATABASE {_name(database)} RESET default_transaction_read_only")
    win(store, ask())


def test_a_forked_child_opens_its_own_connections(database):
    """A child that forgets its parent's connections uses the store, and so does the parent afterwards."""
    script = f"""
import os, sys
from apscheduler_fence.lease import Key
from apscheduler_fence.stores.sql import SqlStore
store = SqlStore({database!r})
def backend():
    with store._engine.connect() as connection:
        return connection.exec_driver_sql("SELECT pg_backend_pid()").scalar()
store.read(Key("", "", ""))
ours = backend()
child = os.fork()
if child == 0:
    store.forget()
    store.read(Key("", "", ""))
    os._exit(0 if backend() != ours else 1)
_, status = os.waitpid(child, 0)
store.read(Key("", "", ""))
assert backend() == ours
store.close()
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


# --- a live engine ----------------------------------------------------------------------------------------------------


@every_database
def test_a_live_engine_lends_its_way_to_connect_and_nothing_else(store_url, make):
    """A claim made while the engine's user has a transaction open is no part of it."""
    engine = sqlalchemy.create_engine(store_url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    store = make(engine)
    store.open()
    wanted = ask()
    with engine.connect() as theirs:
        with theirs.begin() as transaction:
            theirs.exec_driver_sql("SELECT count(*) FROM fence_lease")
            grant = win(store, wanted)
            transaction.rollback()
        assert store.read(wanted.key).lease.token == grant.token
        assert engine.pool.checkedout() == 1
    engine.dispose()


def test_a_live_engine_keeps_its_connect_arguments_and_listeners(database, make):
    """What the engine's user does to each connection is done to ours."""
    engine = sqlalchemy.create_engine(
        database, connect_args={"application_name": "theirs"}, isolation_level="SERIALIZABLE"
    )
    seen = []
    sqlalchemy.event.listen(engine, "connect", lambda connection, _: seen.append(connection))
    store = make(engine)
    run(store, ask())
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("SHOW application_name").scalar() == "theirs"
        assert connection.connection.dbapi_connection in seen
        assert connection.connection.dbapi_connection.autocommit
    engine.dispose()


# --- namespaces, scans, pruning ---------------------------------------------------------------------------------------


@every_database
def test_namespaces_are_scanned_and_pruned_apart(store_url, make):
    """Neither sees, counts or prunes what is the other's."""
    ours, theirs = make(store_url, "ours"), make(store_url, "theirs")
    run(ours, ask("a", keep_for=0))
    run(theirs, ask("b", keep_for=0))
    win(theirs, ask("c"))
    assert [row.job for row in ours.executions(Executions())] == ["a"]
    assert list(ours.held_leases(HeldLeases())) == []
    assert [seen.lease.name for seen in theirs.held_leases(HeldLeases())] == ["c"]
    assert ours.prune() == 1
    assert [row.job for row in theirs.executions(Executions(oldest_first=True))] == ["b", "c"]


@every_database
def test_a_long_scan_is_read_in_pages(store, monkeypatch):
    """The rows come complete and in order, however the pages fall."""
    monkeypatch.setattr("apscheduler_fence.stores.sql.store.PAGE", 3)
    for number in range(10):
        run(store, ask("pay", slot=f"s{number}", slot_at=1 + number // 4, job=f"job{number % 2}"))
    oldest = list(store.executions(Executions(oldest_first=True)))
    assert [(row.slot_at, row.job, row.slot) for row in oldest] == sorted(
        (row.slot_at, row.job, row.slot) for row in oldest
    )
    assert len(oldest) == 10
    assert list(store.executions(Executions())) == oldest[::-1]
    assert list(store.executions(Executions(limit=7))) == oldest[::-1][:7]


@every_database
def test_a_row_that_was_revived_is_not_pruned(store):
    """Only what is past its `keep_until` when it is deleted goes; a revived row has none."""
    wanted = ask("a", keep_for=0)
    run(store, wanted, "failed", "x")
    rows = store._rows("", store._statements.old(), {"ns": store.namespace, "limit": 9})
    store.swap([revive(store.read(wanted.key).execution)])
    assert store._delete([{"a_job": row.job, "a_slot": row.slot} for row in rows]) == 0


PLANS = {
    "read": ("fence_lease_pkey", "fence_execution_pkey", "fence_execution_waiting"),
    "held": ("fence_lease_held", "AND (expires_at <= $0)"),
    "old": ("fence_execution_prune", "AND (keep_until <= $0)"),
    "history": ("fence_execution_history",),
    "recent": ("fence_execution_recent",),
    "waiting": ("fence_execution_waiting",),
    "next": ("fence_execution_waiting", "Index Cond"),
}


def test_every_read_of_postgresql_uses_an_index(database, make):
    """None of the kinds of read scans a table of many rows."""
    store = make(database, "ns")
    store.open()
    with store._engine.connect() as connection:
        connection.exec_driver_sql(
            "INSERT INTO fence_execution (job, slot, lease, slot_at, scheduled_at, state, attempt, token, delivery,"
            " max_attempts, keep_until, namespace) SELECT 'j' || n %% 50, n, 'j' || n %% 50, n, n, 'succeeded', 1, n, 'x', 1,"
            " 9e15 + n, 'ns' FROM generate_series(1, 20000) n"
        )
        connection.exec_driver_sql(
            "INSERT INTO fence_lease (name, token, acquired_at, expires_at, hold_until, pruned_through, namespace) SELECT"
            " 'j' || n, n, 0, CASE WHEN n %% 100 = 0 THEN 9e15 + n END, 0, 0, 'ns' FROM generate_series(1, 5000) n"
        )
        connection.exec_driver_sql("ANALYZE")
        made = store._statements
        page = {"size": 20, "after": None}
        statements = {
            "read": (made.read(), {"lease": "j1", "job": "j1", "slot": "1"}),
            "held": made.held(HeldLeases(expired=True, limit=10), "ns"),
            "old": (made.old(), {"ns": "ns", "limit": 1000}),
            "history": made.page(Executions(job="j7"), "ns", **page),
            "recent": made.page(Executions(), "ns", **page),
            "waiting": made.page(Executions(states=("waiting",), oldest_first=True), "ns", **page),
            "next": made.page(Executions(lease="j7", states=("waiting",), oldest_first=True), "ns", **page),
        }
        for name, (statement, parameters) in statements.items():
            compiled = statement.compile(connection.engine)
            plan = connection.exec_driver_sql(
                f"EXPLAIN {compiled}", {key: parameters.get(key, value) for key, value in compiled.params.items()}
            )
            text = "\n".join(plan.scalars())
            assert "Seq Scan" not in text, text
            assert all(part in text for part in PLANS[name]), text


# --- what is refused and what is shown --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("sqlite://", "in memory"),
        ("sqlite:///:memory:", "in memory"),
        ("sqlite:///file::memory:?uri=true", "in memory"),
        ("sqlite:///file:x?mode=memory&uri=true", "in memory"),
        ("sqlite+aiosqlite:///x.db", "asynchronous"),
        ("postgresql+asyncpg://host/db", "asynchronous"),
        ("dbase://host/db", "'dbase' is not a database"),
        ("nonsense", "cannot be read"),
    ],
)
def test_a_url_that_can_never_work_is_refused_with_the_reason(url, reason):
    """A ConfigError says what is wrong with the URL."""
    with pytest.raises(ConfigError, match=reason):
        SqlStore(url)


@pytest.mark.parametrize(
    ("url", "module", "package"),
    [
        ("postgresql://host/db", "psycopg", r'"apscheduler-fence\[postgresql\]"'),
        ("mysql://host/db", "pymysql", r'"apscheduler-fence\[mysql\]"'),
        ("postgresql+psycopg2://host/db", "psycopg2", "psycopg2"),
    ],
)
def test_a_missing_driver_is_named_with_what_brings_it(monkeypatch, url, module, package):
    """The message is the command that mends it: this package's extra where it has one."""
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=f"{module}.*not installed: pip install {package}$"):
        SqlStore(url)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"prefix": "a b"}, "table_prefix"), ({"prefix": "x" * 40}, "table_prefix"), ({"timeout": 0}, "timeout")],
)
def test_an_option_out_of_range_is_named(tmp_path, options, named):
    """The message names the option and what is allowed."""
    with pytest.raises(ConfigError, match=named):
        SqlStore(f"sqlite:///{tmp_path / 'fence.db'}", **options)


def test_a_password_is_carried_but_never_shown():
    """It is in the description, and in no text that is printed."""
    store = SqlStore("postgresql://app:s3cret@127.0.0.1:1/db", timeout=0.5)
    description = store.describe()
    assert "s3cret" in description.url
    assert pickle.loads(pickle.dumps(description)) == description
    with pytest.raises(StoreError) as failure:
        store.read(Key("", "", ""))
    for text in (repr(description), repr(store), str(failure.value)):
        assert "s3cret" not in text
        assert "app:***@127.0.0.1" in text
    assert type(failure.value.__cause__).__module__.startswith("psycopg")


def test_a_described_file_is_the_same_file_elsewhere(tmp_path, monkeypatch):
    """A relative path is described as an absolute one."""
    monkeypatch.chdir(tmp_path)
    store = SqlStore("sqlite:///fence.db")
    monkeypatch.chdir("/")
    assert store.describe().url == f"sqlite:///{tmp_path / 'fence.db'}"
    with pytest.raises(ConfigError, match="live engine"):
        SqlStore(sqlalchemy.create_engine("sqlite:///x.db")).describe()


def test_a_network_file_system_is_recognised(tmp_path):
    """The deepest mount that holds the file counts."""
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/sda1 / ext4 rw 0 0\nserver:/srv /srv nfs4 rw 0 0\ntmpfs /srv/fast\\040one tmpfs rw 0 0\n")
    assert file_system(Path("/srv/app/x.db"), mounts) == "nfs4"
    assert file_system(Path("/srv/fast one/x.db"), mounts) == "tmpfs"
    assert file_system(Path("/home/x.db"), mounts) == "ext4"
    assert file_system(Path("/home/x.db"), tmp_path / "none") is None


# --- databases of other kinds -----------------------------------------------------------------------------------------


class OddDialect(PGDialect_psycopg):
    """A database that this package does not know: PostgreSQL under another name."""

    name = "odd"
    supports_statement_cache = True


registry.register("odd.psycopg", __name__, "OddDialect")


@pytest.fixture
def odd_clock():
    """The clock expression that a user registers."""

    @compiles(StoreClock, "odd")
    def _clock(*_, **__):
        return "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)"

    yield
    del StoreClock._compiler_dispatcher.specs["odd"]


def test_a_database_without_a_clock_expression_is_refused_and_told_how(database):
    """The message says what to register."""
    with pytest.raises(ConfigError, match=r'odd has no clock.*@compiles\(StoreClock, "odd"\)'):
        SqlStore(database.replace("postgresql+", "odd+"))


def test_any_database_with_a_clock_expression_works(odd_clock, database, make):
    """The general path, in transactions of plain statements, gives one winner per slot."""
    url = database.replace("postgresql+", "odd+")
    stores = [make(url) for _ in range(4)]
    for store in stores:
        store.open()
    with ThreadPoolExecutor(4) as pool:
        for number in range(10):
            wanted = [ask("pay", slot=f"s{number}", slot_at=number) for _ in stores]
            results = list(pool.map(compete, stores, wanted))
            [grant] = [result for result in results if not isinstance(result, Refusal)]
            assert stores[1].swap([renew(grant, HOUR)] * 2) == [grant.token] * 2
            assert stores[2].swap([settle(grant, "succeeded")]) == [grant.token]
    assert len(list(stores[3].executions(Executions(states=("succeeded",))))) == 10
