"""Compare-and-swap registers with a clock: memory, SQL databases, Redis.

A store of each family is imported only when it is asked for: none needs the drivers of the others.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.policy import parse_duration, parse_flag
from apscheduler_fence.stores.base import masked
from apscheduler_fence.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from redis import Redis, RedisCluster
    from sqlalchemy import URL, Engine

    from apscheduler_fence.stores.base import Store, StoreDescription

_REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")
_VERBS = ("open", "close", "forget", "read", "swap", "executions", "held_leases", "prune", "describe")

_in_memory: dict[tuple[str, str], MemoryStore] = {}
_registering = threading.Lock()


def open_store(source: str | URL | Engine | Redis | RedisCluster | Store, namespace: str = "", **options: Any) -> Store:
    """Make a store. Nothing is connected before the store is used.

    Args:
        source: a URL: `sqlite:///path`, `postgresql://…`, `mysql://…`, `mariadb://…` or any other that SQLAlchemy knows,
            `redis://…`, `rediss://…`, `unix://path`, `redis+sentinel://…`, `redis+cluster://…`, or `memory://name`, which
            names the same rows within this process. Or a live SQLAlchemy engine or redis-py client. A store is returned
            as it is.
        namespace: keeps applications on one store apart.
        options: SQL databases know `create_tables`, `table_prefix`, `schema` and `timeout`, Redis knows `timeout` and
            `min_replicas`. Each may be text, as in an ini file.

    Raises:
        ConfigError: the source cannot be understood, or the store does not know an option.
    """
    family = _family(source)
    return _make(family, source, namespace, _parsed(_OPTIONS[family], options, family))


def open_described(description: StoreDescription) -> Store:
    """Make the store that another process has described."""
    return _make(_family(description.url), description.url, description.namespace, dict(description.options))


def _make(family: str, source: Any, namespace: str, options: dict[str, Any]) -> Store:
    if family == "store":
        return cast("Store", source)
    if family == "memory":
        with _registering:
            return _in_memory.setdefault((str(source), namespace), MemoryStore(namespace))
    if family == "redis":
        try:
            from apscheduler_fence.stores.redis import RedisStore  # noqa: PLC0415 - needs an extra
        except ModuleNotFoundError as missing:
            if missing.name != "redis":
                raise
            raise ConfigError('redis-py is not installed: pip install "apscheduler-fence[redis]"') from missing
        return RedisStore(source, namespace, **options)
    from apscheduler_fence.stores.sql import SqlStore  # noqa: PLC0415 - Redis users need not load SQLAlchemy

    return SqlStore(source, namespace, **options)


def _family(source: object) -> str:
    if isinstance(source, str):
        scheme, colon, _ = source.partition("://")
        if not colon or not scheme:
            raise ConfigError(f"store={masked(source)!r} is not a URL: write for example postgresql://host/database")
        if scheme == "memory":
            return "memory"
        return "redis" if scheme in _REDIS_SCHEMES else "sql"
    if all(callable(getattr(source, verb, None)) for verb in _VERBS):
        return "store"
    # By name, so that neither library is imported for users of the other.
    roots = {parent.__module__.partition(".")[0] for parent in type(source).__mro__}
    if "sqlalchemy" in roots:
        if hasattr(source, "sync_engine"):
            raise ConfigError("store: an asynchronous engine cannot be used; give the URL of a synchronous driver")
        if hasattr(source, "drivername") or hasattr(source, "dialect"):
            return "sql"
    if "redis" in roots:
        return "redis"
    raise ConfigError(
        f"store: {type(source).__name__} is neither a URL, nor an SQLAlchemy engine, nor a redis-py client, nor a store"
    )


# --- options ----------------------------------------------------------------------------------------------------------


def _seconds(value: object) -> float:
    return parse_duration(value, "timeout").total_seconds()


def _count(value: object) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not text.isdecimal():
        raise ConfigError(f"min_replicas={value!r}: a whole number, 0 or more, is allowed")
    return int(text)


def _name(value: object) -> str | None:
    text = "" if value is None else str(value).strip()
    return text if text and text.lower() != "none" else None


_Parsers = dict[str, "tuple[str, Callable[[object], Any]]"]

_SQL: _Parsers = {
    "create_tables": ("create_tables", lambda value: parse_flag(value, "create_tables")),
    "table_prefix": ("prefix", str),
    "schema": ("schema", _name),
    "timeout": ("timeout", _seconds),
}
_REDIS: _Parsers = {"timeout": ("timeout", _seconds), "min_replicas": ("min_replicas", _count)}
_OPTIONS: dict[str, _Parsers] = {"sql": _SQL, "redis": _REDIS, "memory": {}, "store": {}}
_CALLED = {
    "sql": "an SQL store",
    "redis": "a Redis store",
    "memory": "the memory store",
    "store": "a store already made",
}


def _parsed(known: _Parsers, options: Mapping[str, object], family: str) -> dict[str, Any]:
    for option in options:
        if option not in known:
            allowed = ", ".join(known) or "none"
            raise ConfigError(f"{option} is no option of {_CALLED[family]}; its options are: {allowed}")
    return {known[option][0]: known[option][1](value) for option, value in options.items()}
