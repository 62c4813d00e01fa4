"""Which store a URL, an engine, a client or a store opens, and with which options."""

import pickle

import pytest
import redis
import sqlalchemy
from claims import ask, win

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.lease import Key
from apscheduler_fence.stores import open_described, open_store
from apscheduler_fence.stores.base import StoreDescription, masked
from apscheduler_fence.stores.memory import MemoryStore
from apscheduler_fence.stores.redis import RedisStore
from apscheduler_fence.stores.sql import SqlStore


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgres://host/db", "postgresql+psycopg"),
        ("postgresql://host/db", "postgresql+psycopg"),
        ("postgresql+psycopg://host/db", "postgresql+psycopg"),
        ("mysql://host/db", "mysql+pymysql"),
        ("mariadb://host/db", "mariadb+pymysql"),
        ("mariadb+pymysql://host/db", "mariadb+pymysql"),
        ("sqlite:////nowhere/x.db", "sqlite"),
    ],
)
def test_a_database_url_opens_an_sql_store_with_the_extras_driver(url, driver):
    """A URL without a driver gets the one that this package's extra installs."""
    store = open_store(url, "ns")
    assert isinstance(store, SqlStore)
    assert store.namespace == "ns"
    assert sqlalchemy.make_url(store.describe().url).drivername == driver


@pytest.mark.parametrize("url", ["redis://host/1", "rediss://host/1", "unix:///run/redis.sock?db=1"])
def test_a_redis_url_opens_a_redis_store(url):
    """All of Redis's schemes are known."""
    store = open_store(url, "ns", timeout="1.5s", min_replicas="1")
    assert isinstance(store, RedisStore)
    assert store.namespace == "ns"
    store.close()


def test_live_objects_are_recognised(tmp_path):
    """An engine and a client open the store of their family."""
    engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'x.db'}")
    assert isinstance(open_store(engine), SqlStore)
    assert isinstance(open_store(engine.url), SqlStore)
    with redis.Redis(port=1) as client:
        assert isinstance(open_store(client), RedisStore)


def test_a_store_is_returned_as_it_is():
    """Also with a namespace, which it already has; options come too late."""
    store = MemoryStore("own")
    assert open_store(store, "other") is store
    with pytest.raises(ConfigError, match="timeout is no option of a store already made"):
        open_store(store, timeout=1)


def test_a_memory_url_names_rows_of_this_process():
    """The same name gives the same rows, another name or namespace others."""
    first, same = open_store("memory://rows", "ns"), open_store("memory://rows", "ns")
    win(first, ask("pay"))
    assert same.read(Key("pay", "", "")).lease is not None
    assert open_store("memory://rows", "ns2").read(Key("pay", "", "")).lease is None
    assert open_store("memory://other", "ns").read(Key("pay", "", "")).lease is None


@pytest.mark.backends("sqlite", "postgresql", "mariadb", "redis")
def test_a_description_opens_the_same_store(store_url):
    """What was written through one store is read through the one that its pickled description makes."""
    store = open_store(store_url, "ns", timeout="3s")
    described = open_described(pickle.loads(pickle.dumps(store.describe())))
    grant = win(store, ask("pay"))
    assert described.namespace == "ns"
    assert described.read(Key("pay", "", "")).lease.token == grant.token
    assert described.describe() == store.describe()
    store.close()
    described.close()


def test_options_may_be_text_as_in_an_ini_file(tmp_path):
    """Flags, durations and names are read as people write them."""
    url = f"sqlite:///{tmp_path / 'x.db'}"
    store = open_store(url, create_tables="false", table_prefix="jobs_", schema="", timeout="2.5")
    options = {"create_tables": False, "prefix": "jobs_", "schema": None, "timeout": 2.5}
    assert dict(store.describe().options) == options
    assert dict(open_store(url, timeout="500ms").describe().options)["timeout"] == 0.5


@pytest.mark.parametrize(
    ("source", "options", "named"),
    [
        (
            "sqlite:///x.db",
            {"min_replicas": 1},
            "min_replicas is no option of an SQL store; its options are: create_tables",
        ),
        (
            "redis://host",
            {"schema": "x"},
            "schema is no option of a Redis store; its options are: timeout, min_replicas",
        ),
        ("memory://", {"timeout": 1}, "timeout is no option of the memory store; its options are: none"),
        ("sqlite:///x.db", {"create_tables": "perhaps"}, "create_tables='perhaps' is neither true nor false"),
        ("sqlite:///x.db", {"timeout": "soon"}, "timeout='soon' is not a duration"),
        ("sqlite:///x.db", {"table_prefix": "a-b"}, "table_prefix='a-b'"),
        ("redis://host", {"min_replicas": "-1"}, "min_replicas='-1'"),
        ("fence.db", {}, "store='fence.db' is not a URL"),
        ("gopher://host", {}, "'gopher' is not a database"),
        (42, {}, "int is neither a URL"),
    ],
)
def test_what_cannot_be_opened_is_named(source, options, named):
    """The message names the option or the source, and what is allowed."""
    with pytest.raises(ConfigError, match=named):
        open_store(source, **options)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://app:pw@host/db", "postgresql://app:***@host/db"),
        ("redis://:pw@host:6379/0", "redis://:***@host:6379/0"),
        ("redis+sentinel://u:p@w@host:1,host:2/x", "redis+sentinel://u:***@host:1,host:2/x"),
        ("postgresql://host/db?password=pw&sslmode=x", "postgresql://host/db?password=***&sslmode=x"),
        ("sqlite:////srv/x.db", "sqlite:////srv/x.db"),
        ("redis://host:6379/0", "redis://host:6379/0"),
    ],
)
def test_a_url_is_shown_without_its_password(url, shown):
    """Whatever the scheme, and in a description too."""
    assert masked(url) == shown
    assert repr(shown) in repr(StoreDescription(url))
