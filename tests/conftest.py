"""Real servers for the tests, started when the first test asks for them, and an empty store of each kind."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TypeVar

import pytest
from servers import MariaDB, PostgreSQL, Redis, RedisCluster, RedisSentinel
from servers.redis import DATABASES
from servers.required import require
from servers.server import Controls

_numbers = itertools.count(1)
_started: list[Controls] = []

S = TypeVar("S", bound=Controls)


def _shared(server: type[S]) -> Iterator[S]:
    require(server)
    with server() as started:
        _started.append(started)
        yield started
        _started.remove(started)


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """One PostgreSQL server for all tests."""
    yield from _shared(PostgreSQL)


@pytest.fixture(scope="session")
def mariadb() -> Iterator[MariaDB]:
    """One MariaDB server for all tests."""
    yield from _shared(MariaDB)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[Redis]:
    """One Redis server without persistence for all tests."""
    yield from _shared(Redis)


@pytest.fixture(scope="session")
def redis_sentinel() -> Iterator[RedisSentinel]:
    """One master with two replicas and three Sentinels for all tests."""
    yield from _shared(RedisSentinel)


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    """One Redis Cluster of three masters for all tests."""
    yield from _shared(RedisCluster)


@pytest.fixture(autouse=True)
def _mended() -> None:
    """A test finds the shared servers running, whatever the one before did to them."""
    for server in _started:
        server.mend()


@contextlib.contextmanager
def _memory(_: pytest.FixtureRequest) -> Iterator[str]:
    yield f"memory://test-{next(_numbers)}"


@contextlib.contextmanager
def _sqlite(request: pytest.FixtureRequest) -> Iterator[str]:
    yield f"sqlite:///{request.getfixturevalue('tmp_path') / 'fence.db'}"


def _database_of(fixture: str) -> Callable[[pytest.FixtureRequest], AbstractContextManager[str]]:
    @contextlib.contextmanager
    def fresh(request: pytest.FixtureRequest) -> Iterator[str]:
        server = request.getfixturevalue(fixture)
        name = f"test_{next(_numbers)}"
        yield server.create_database(name)
        server.mend()
        server.drop_database(name)

    return fresh


@contextlib.contextmanager
def _redis(request: pytest.FixtureRequest) -> Iterator[str]:
    server = request.getfixturevalue("redis_server")
    # A database of its own rather than FLUSHALL: what a thread of an earlier test still writes does not reach it.
    number = next(_numbers) % DATABASES
    with server.client(db=number) as client:
        client.flushdb()
    yield server.database_url(number)


BACKENDS: dict[str, Callable[[pytest.FixtureRequest], AbstractContextManager[str]]] = {
    "memory": _memory,
    "sqlite": _sqlite,
    "postgresql": _database_of("postgresql"),
    "mariadb": _database_of("mariadb"),
    "redis": _redis,
}


@pytest.fixture
def store_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty store of every kind in turn, or of those that `@pytest.mark.backends(...)` names."""
    with BACKENDS[request.param](request) as url:
        yield url


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marker."""
    config.addinivalue_line("markers", f"backends(*names): run only with these of {', '.join(BACKENDS)}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that asks for `store_url` once for each kind of store."""
    if "store_url" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("backends")
    names = marker.args if marker else tuple(BACKENDS)
    if unknown := set(names) - BACKENDS.keys():
        message = f"{metafunc.definition.nodeid}: unknown backends {sorted(unknown)}"
        raise pytest.UsageError(message)
    metafunc.parametrize("store_url", names, ids=names, indirect=True)
