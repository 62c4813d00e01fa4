"""The one Redis server that may be written to: finding it, and asking it without ever asking twice unnoticed."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import re
import threading
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from apscheduler_fence.errors import ConfigError, StoreError

try:
    from redis import Redis, RedisCluster, exceptions
    from redis.backoff import NoBackoff
    from redis.connection import ConnectionPool, SSLConnection, UnixDomainSocketConnection, parse_url
    from redis.crc import key_slot
    from redis.retry import Retry
    from redis.sentinel import Sentinel, SentinelConnectionPool
except ImportError as error:
    raise ConfigError('Redis stores need redis-py: pip install "apscheduler-fence[redis]"') from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

Address: TypeAlias = tuple[str, int]
Command: TypeAlias = tuple[Any, ...]

_FORMS = "redis://, rediss://, unix://, redis+sentinel://host:port,host:port/service/db or redis+cluster://host:port"
_REDIRECTS = 3
_UNBOUNDED = 2**31  # threads are what bounds the connections; redis-py 8 would refuse the 101st

_HINTS = {
    "MOVED": " (a Redis Cluster needs redis+cluster://, or a RedisCluster client)",
    "ASK": " (the hash slot is being moved to another node; nothing is granted until that is done)",
    "READONLY": " (the server is a replica; claims need the primary)",
}


def _code(error: Exception) -> str:
    """What the server's error reply began with: redis-py 5 has few classes for it, Redis 6 wraps it if a script met it."""
    classes = {"MovedError": "MOVED", "AskError": "ASK", "ReadOnlyError": "READONLY", "ClusterDownError": "CLUSTERDOWN"}
    wrapped = re.search(r"^(?:Error running script.*? -)?([A-Z]+) ", str(error))
    return classes.get(type(error).__name__) or (wrapped[1] if wrapped else "")


@contextlib.contextmanager
def map_errors() -> Iterator[None]:
    """Turn whatever redis-py or the socket raises into a `StoreError` that names it."""
    try:
        yield
    except (exceptions.RedisError, OSError) as error:
        raise StoreError(f"Redis: {type(error).__name__}: {error}{_HINTS.get(_code(error), '')}") from error


@dataclass(frozen=True, slots=True)
class Script:
    """One of the Lua files beside this module."""

    source: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        # SHA-1 is the name that Redis itself gives to a script.
        object.__setattr__(self, "sha", hashlib.sha1(self.source.encode(), usedforsecurity=False).hexdigest())

    @classmethod
    def load(cls, name: str) -> Script:
        """Read `name`.lua."""
        return cls(resources.files(__package__).joinpath(f"{name}.lua").read_text("utf-8"))


class Primary:
    """A client of the server that owns the store's keys; found anew after an error that may mean it has changed.

    Args:
        find: makes the client, and after it those whose connections are to be closed with it.
        can_move: another server may become the primary, so a lost connection is a reason to search again.
    """

    def __init__(self, find: Callable[[], Sequence[Redis]], *, can_move: bool = False) -> None:
        self.can_move = can_move
        self._find = find
        self._found: Sequence[Redis] = ()
        self._lock = threading.Lock()

    def client(self) -> Redis:
        """The primary's client, which retries nothing."""
        found = self._found
        if not found:
            # Not under the lock: the search may wait for nodes that do not answer, and each caller for its own only.
            found = self._find()
            with self._lock:
                if self._found:
                    _disconnect(found, in_use=True)
                    found = self._found
                self._found = found
        return found[0]

    def run(
        self, script: Script, key: bytes, args: Sequence[bytes | str | int], *then: Command, repeatable: bool = False
    ) -> list[Any]:
        """Run a script, and the commands `then` after it on the same connection, in one round trip.

        Args:
            script: what to run.
            key: the one key it is given; it decides which node of a cluster runs it.
            args: the script's arguments.
            then: commands to send along.
            repeatable: the script only reads, so after a dropped connection it is sent once more.

        Returns:
            The script's reply, then those of `then`.
        """
        call = (script.sha, 1, key, *args)
        for attempt in range(_REDIRECTS):
            client = self.client()
            try:
                try:
                    return _send(client, ("EVALSHA", *call), *then)
                except exceptions.NoScriptError:
                    # New to this server, or it has restarted: nothing was executed.
                    return _send(client, ("EVAL", script.source, *call[1:]), *then)
            except exceptions.RedisError as error:
                self._failed(client, error)
                not_executed = _code(error) == "MOVED" and self.can_move
                dropped = isinstance(error, exceptions.ConnectionError) and repeatable and attempt == 0
                if not (not_executed or dropped):
                    raise
        raise exceptions.ClusterDownError("CLUSTERDOWN the nodes do not agree on who owns the hash slot")

    def ask(self, *commands: Command) -> list[Any]:
        """Send commands to the primary in one round trip."""
        return _send(self.client(), *commands)

    def _failed(self, client: Redis, error: exceptions.RedisError) -> None:
        # A plain client reconnects by itself; only a demoted primary keeps old connections alive but useless.
        code, unreachable = _code(error), isinstance(error, (exceptions.ConnectionError, exceptions.TimeoutError))
        if code == "READONLY" or (self.can_move and (unreachable or code in ("MOVED", "CLUSTERDOWN"))):
            with self._lock:
                if self._found and self._found[0] is client:
                    found, self._found = self._found, ()
                    _disconnect(found, in_use=False)

    def close(self) -> None:
        """Close every connection; the next call opens new ones."""
        with self._lock:
            found, self._found = self._found, ()
        _disconnect(found, in_use=True)

    def forget(self) -> None:
        """Drop every connection unused: redis-py closes inherited sockets without telling the server."""
        self._lock = threading.Lock()
        self._found = ()


def _send(client: Any, *commands: Command) -> list[Any]:
    if len(commands) == 1:
        return [client.execute_command(*commands[0])]
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        replies = pipeline.execute(raise_on_error=False)
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return list(replies)


def _disconnect(clients: Sequence[Redis], *, in_use: bool) -> None:
    for client in clients:
        client.connection_pool.disconnect(inuse_connections=in_use)


# --- from a URL -------------------------------------------------------------------------------------------------------


def from_url(url: str, timeout: float, key: bytes) -> Primary:
    """The primary that a URL names; nothing is connected yet.

    Raises:
        ConfigError: the URL cannot be understood. The message does not repeat it, because it may hold a password.
    """
    # The netloc may be a list, which urlsplit would take for a broken port.
    parts = re.fullmatch(
        r"(?P<scheme>rediss?)\+(?P<kind>sentinel|cluster)://(?:(?P<user>[^/?]*)@)?(?P<hosts>[^/?@]+)"
        r"(?:/(?P<path>[^?]*))?(?:\?(?P<query>.*))?",
        url,
    )
    if parts is None:
        settings = _settings(_options(url), timeout)
        return Primary(lambda: [Redis(connection_pool=ConnectionPool(**settings))])
    hosts = [_address(host, 26379 if parts["kind"] == "sentinel" else 6379) for host in parts["hosts"].split(",")]
    service, _, db = (parts["path"] or "").partition("/")
    if parts["kind"] == "cluster":
        service, db = "-", service or "0"
        if db != "0":
            raise ConfigError("a Redis Cluster has only database 0: leave the path of the URL away")
    if not service or not re.fullmatch(r"\d*", db):
        raise ConfigError(f"the Redis URL cannot be understood; the forms are {_FORMS}")
    user = f"{parts['user']}@" if parts["user"] else ""
    options = _options(f"{parts['scheme']}://{user}localhost/{db or 0}?{parts['query'] or ''}")
    del options["host"]
    if parts["kind"] == "cluster":
        del options["db"]
        settings = _settings(options, timeout)
        return _cluster(hosts, lambda at: ConnectionPool(**{**settings, "host": at[0], "port": at[1]}), key)
    return _sentinel(hosts, service, options, timeout)


# How replies look and what is repeated is decided here; the others are a pool's own parts.
_NOT_TAKEN = re.compile(
    "retry.*|protocol|encoding.*|decode_responses|cache.*|maint_notifications.*|orig_.*|connection_pool|himport_registry"
)


def _options(url: str) -> dict[str, Any]:
    try:
        options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
        return {name: value for name, value in options.items() if not _NOT_TAKEN.fullmatch(name)}
    except ValueError:
        # Not `from error`: redis-py's message may quote a piece of the password.
        raise ConfigError(f"the Redis URL cannot be understood; the forms are {_FORMS}") from None


def _address(text: str, default_port: int) -> Address:
    parts = re.fullmatch(r"(\[[^\]]+\]|[^:]+)(?::(\d+))?", text)
    if parts is None:
        raise ConfigError(f"the Redis URL cannot be understood; the forms are {_FORMS}")
    return parts[1].strip("[]"), int(parts[2] or default_port)


def _once(timeout: float) -> dict[str, Any]:
    # A lost reply must surface: redis-py would send the command again, and a swap that has worked would seem refused.
    return {"retry": Retry(NoBackoff(), 0), "protocol": 2, "socket_timeout": timeout, "socket_connect_timeout": timeout}


def _settings(options: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    """What a pool is made with, after a look at whether its connections could be."""
    settings = {"max_connections": _UNBOUNDED, **_once(timeout), **options}
    if options.get("connection_class") is not UnixDomainSocketConnection:
        settings.setdefault("socket_keepalive", True)
    pool = ConnectionPool(**settings)
    try:
        pool.connection_class(**pool.connection_kwargs)
    except TypeError as error:
        raise ConfigError(f"the Redis URL has an option that redis-py does not know: {error}") from None
    return settings


def _sentinel(hosts: Sequence[Address], service: str, options: dict[str, Any], timeout: float) -> Primary:
    own = {
        name.removeprefix("sentinel_"): options.pop(name)
        for name in ("sentinel_username", "sentinel_password")
        if name in options
    }
    settings = _settings(options, timeout)
    tls = {name: value for name, value in settings.items() if name.startswith("ssl_")}
    if settings.pop("connection_class", None) is SSLConnection:
        tls["ssl"] = True

    def find() -> list[Redis]:
        manager = Sentinel(hosts, sentinel_kwargs={**_once(timeout), **tls, **own})  # type: ignore[no-untyped-call]
        return _watched(service, manager, {**settings, **tls})

    return Primary(find)


def _watched(service: str, manager: Sentinel, settings: Mapping[str, Any]) -> list[Redis]:
    pool = SentinelConnectionPool(service, manager, **settings)  # type: ignore[no-untyped-call]
    return [Redis(connection_pool=pool), *manager.sentinels]


# --- from a live client -----------------------------------------------------------------------------------------------


def from_client(client: Redis | RedisCluster, timeout: float, key: bytes) -> Primary:
    """The primary that a live client talks to, through a copy of it that retries nothing.

    The copy has connections of its own, the client's timeouts where it has any shorter ones, and its credentials.

    Raises:
        ConfigError: it is not a synchronous redis-py client, or one that reads from replicas.
    """
    if isinstance(client, RedisCluster):
        return _copied_cluster(client, timeout, key)
    if not isinstance(client, Redis):
        raise ConfigError(
            f"a Redis store is made from a URL or a synchronous redis-py client, not from {type(client).__name__}"
        )
    pool = client.connection_pool
    if not isinstance(pool, SentinelConnectionPool):
        return Primary(lambda: [Redis(connection_pool=_copy(pool, timeout))])
    if not pool.is_master:
        raise ConfigError("this client was made with Sentinel.slave_for, and claims need the primary: use master_for")

    def find() -> list[Redis]:
        manager = copy.copy(pool.sentinel_manager)
        manager.sentinels = [Redis(connection_pool=_copy(each.connection_pool, timeout)) for each in manager.sentinels]
        settings = {**_copied_settings(pool, timeout), "connection_class": pool.connection_class}
        return _watched(pool.service_name, manager, settings)

    return Primary(find)


def _copied_cluster(client: RedisCluster, timeout: float, key: bytes) -> Primary:
    nodes = client.get_nodes()  # type: ignore[no-untyped-call]
    if not nodes:
        raise ConfigError("this RedisCluster client knows no nodes: it has been closed")
    sample = client.get_redis_connection(nodes[0]).connection_pool

    def connect(at: Address) -> ConnectionPool:
        # The client's own connect function sends READONLY where it reads from replicas.
        return _copy(sample, timeout, host=at[0], port=at[1], redis_connect_func=None)

    return _cluster([(node.host, node.port) for node in nodes], connect, key, client.nodes_manager.remap_host_port)


def _copied_settings(pool: ConnectionPool, timeout: float) -> dict[str, Any]:
    own = {name: value for name, value in pool.connection_kwargs.items() if not _NOT_TAKEN.fullmatch(name)}
    for name in ("socket_timeout", "socket_connect_timeout"):
        own[name] = min(own.get(name) or timeout, timeout)
    return {"max_connections": _UNBOUNDED, **_once(timeout), **own}


def _copy(pool: ConnectionPool, timeout: float, **changed: Any) -> ConnectionPool:
    settings = {**_copied_settings(pool, timeout), "connection_class": pool.connection_class, **changed}
    return ConnectionPool(**settings)


# --- the node of a cluster --------------------------------------------------------------------------------------------


def _cluster(
    nodes: list[Address],
    connect: Callable[[Address], ConnectionPool],
    key: bytes,
    remap: Callable[[str, int], Address] = lambda host, port: (host, port),
) -> Primary:
    """The node that owns the hash slot of `key`.

    All keys of a store share one slot, so all it needs of a cluster is one plain client. `RedisCluster` itself would
    send commands again after a lost reply, and would follow ASK: while a slot is moved, the script would run on a node
    that has only some of the rows, and find a lease free that is held. Without following, calls fail until the slot has
    moved: the key that routes them never exists, so it is never served by the node that the slot is leaving.
    """
    known, slot = list(nodes), key_slot(key)

    def find() -> list[Redis]:
        problem: exceptions.RedisError = exceptions.ClusterDownError("CLUSTERDOWN no node serves the hash slot")
        for at in tuple(known):
            client = Redis(connection_pool=connect(at))
            try:
                ranges = _send(client, ("CLUSTER", "SLOTS"))[0]
            except exceptions.RedisError as error:
                problem = error
                known[:] = [*(other for other in known if other != at), at]  # the next search begins elsewhere
                continue
            finally:
                _disconnect([client], in_use=True)
            owners = [(low <= slot <= high, remap(_host(node, at), node[1])) for low, high, node, *_ in ranges]
            known.extend({owner for _, owner in owners} - set(known))
            for owns_it, owner in owners:
                if owns_it:
                    return [Redis(connection_pool=connect(owner))]
        raise problem

    return Primary(find, can_move=True)


def _host(node: Sequence[Any], asked: Address) -> str:
    # A node that does not know its own name leaves it empty, meaning the one it was asked under.
    host = cast("bytes | None", node[0]) or b""
    return asked[0] if host in (b"", b"?") else host.decode()
