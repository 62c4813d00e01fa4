"""How a shared job store is configured."""

from __future__ import annotations

import builtins
import sys

import pytest
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.jobstores.redis import RedisJobStore
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.jobstore import SharedJobStore

SQLITE = "sqlite:///unused.db"


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"url": SQLITE}, SQLAlchemyJobStore),
        ({"inner": "sqlalchemy", "url": SQLITE, "tablename": "t"}, SQLAlchemyJobStore),
        ({"inner": "redis", "host": "nowhere", "socket_timeout": 1}, RedisJobStore),
        ({"inner": "memory"}, MemoryJobStore),
        ({"inner": MemoryJobStore}, MemoryJobStore),
        ({"inner": MemoryJobStore()}, MemoryJobStore),
        ({"inner": "apscheduler.jobstores.memory:MemoryJobStore"}, MemoryJobStore),
    ],
)
def test_the_inner_store_is_named_in_any_of_apschedulers_ways(options, kind):
    """An alias, a reference, a class and an instance all name the inner store, which gets what options are left."""
    assert isinstance(SharedJobStore(**options)._inner, kind)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner": "sqlalchemy"}, "url"),
        ({"inner": "sqlalchemy", "url": SQLITE, "tabelname": "t"}, "unknown options tabelname"),
        ({"inner": "redis", "hots": "nowhere"}, "hots"),
        ({"inner": "memory", "url": SQLITE}, "unknown options url"),
        ({"inner": MemoryJobStore(), "url": SQLITE}, "unknown options url"),
        ({"inner": "postgresql"}, r"no job store 'postgresql'; there are .*sqlalchemy"),
        ({"inner": "no_such_module:Store"}, "no_such_module"),
        ({"inner": "builtins:dict"}, "must be a job store"),
        ({"inner": 7}, "must be a job store"),
        ({"inner": SharedJobStore("memory")}, "another shared one"),
        ({"inner": "memory", "poll": 0}, "poll"),
        ({"inner": "memory", "poll": "often"}, "poll"),
        ({"inner": "memory", "poll": None}, "poll"),
        ({"inner": "memory", "poll": 1e300}, "poll"),
    ],
)
def test_a_wrong_setting_is_named(options, message):
    """A setting that is unknown or not allowed is a `ConfigError` that names it."""
    with pytest.raises(ConfigError, match=message):
        SharedJobStore(**options)


def test_without_redis_py_the_error_says_what_to_install(monkeypatch):
    """Asking for the Redis store without redis-py tells how to get it."""
    monkeypatch.delitem(sys.modules, "apscheduler.jobstores.redis", raising=False)
    real_import = builtins.__import__

    def import_(name, *args, **kwargs):
        if name == "redis":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", import_)
    with pytest.raises(ConfigError, match=r"pip install .*redis"):
        SharedJobStore("redis")


def test_ini_style_configuration_works():
    """A scheduler can be configured from flat text options."""
    scheduler = BackgroundScheduler(
        {
            "apscheduler.jobstores.default.class": "apscheduler_fence.jobstore:SharedJobStore",
            "apscheduler.jobstores.default.inner": "memory",
            "apscheduler.jobstores.default.poll": "2.5",
        }
    )
    assert repr(scheduler._jobstores["default"]) == "<SharedJobStore (inner=<MemoryJobStore>, poll=2.5)>"


def test_no_password_is_shown():
    """The representation of a store hides the password of its database."""
    store = SharedJobStore(url="postgresql+psycopg://user:secret@nowhere/app")
    assert "secret" not in repr(store)
