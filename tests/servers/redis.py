"""Redis: one server, a master with replicas under Sentinels, and a cluster."""

import secrets
import signal
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from servers.ports import free_port
from servers.server import Controls, Server, program

DATABASES = 1024


def _program() -> str | None:
    return program("redis-server", "usr/bin/redis-server") or program("valkey-server", "usr/bin/valkey-server")


class Redis(Server):
    """A Redis (or Valkey) server without passwords, with 1024 logical databases.

    Args:
        aof: log every write before its reply, so that a restart keeps the data; otherwise a restart forgets everything.
        options: settings as in redis.conf.
        port: a given port instead of a free one.
    """

    stop_signal = signal.SIGTERM
    not_yet = (redis.ConnectionError, redis.TimeoutError, redis.exceptions.BusyLoadingError)

    def __init__(self, *, aof: bool = False, options: Mapping[str, str] | None = None, port: int | None = None) -> None:
        super().__init__(port)
        self._options = {
            "databases": str(DATABASES),
            "save": '""',
            "appendonly": "yes" if aof else "no",
            **(options or {}),
        }

    @classmethod
    def available(cls) -> bool:
        return bool(_program())

    @property
    def address(self) -> tuple[str, int]:
        """Its host and port."""
        return ("127.0.0.1", self.port)

    @property
    def url(self) -> str:
        """The URL of logical database 0."""
        return self.database_url(0)

    def database_url(self, number: int) -> str:
        """The URL of a logical database."""
        return f"redis://127.0.0.1:{self.port}/{number}"

    def client(self, **options: Any) -> redis.Redis:
        """A client that gives up after 5 seconds and sends nothing twice, unless the options say otherwise."""
        settings = {
            "socket_timeout": 5,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,  # what replies look like then does not depend on the version of the client
            "decode_responses": True,
            **options,
        }
        return redis.Redis(host="127.0.0.1", port=self.port, **settings)

    def execute(self, *command: str | int) -> Any:
        """Sends one command over a connection of its own and returns the reply."""
        with self.client() as client:
            return client.execute_command(*command)

    def install(self) -> None:
        options = {"port": str(self.port), "bind": "127.0.0.1", "dir": str(self.folder), **self._options}
        settings = "".join(f"{name} {value}\n" for name, value in options.items())
        (self.folder / "redis.conf").write_text(settings)

    def command(self) -> Sequence[str | Path]:
        return [_program(), self.folder / "redis.conf"]

    def ping(self) -> None:
        self.execute("PING")


class Sentinel(Redis):
    """One Redis Sentinel.

    Args:
        statements: what its configuration file says besides where it listens.
    """

    def __init__(self, statements: Sequence[str], port: int) -> None:
        super().__init__(port=port)
        self._statements = statements

    def install(self) -> None:
        where = [f"port {self.port}", "bind 127.0.0.1", f"dir {self.folder}"]
        (self.folder / "redis.conf").write_text("\n".join([*where, *self._statements, ""]))

    def command(self) -> Sequence[str | Path]:
        return [*super().command(), "--sentinel"]


class _Group(Controls):
    """Several servers that are controlled as one; `members` can be killed and frozen one by one."""

    members: Sequence[Redis]

    @classmethod
    def available(cls) -> bool:
        return Redis.available()

    @abstractmethod
    def start(self) -> None: ...

    def stop(self) -> None:
        for member in self.members:
            member.stop()

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def freeze(self) -> None:
        for member in self.members:
            member.freeze()

    def thaw(self) -> None:
        for member in self.members:
            member.thaw()

    def close(self) -> None:
        for member in self.members:
            member.close()


class RedisSentinel(_Group):
    """A master with two replicas (`nodes`) and three Sentinels (`sentinels`) that see its failure after half a second.

    Args:
        aof: as for `Redis`.
        options: settings of the three nodes, as in redis.conf.
    """

    service = "fence"
    down_after = 0.5

    def __init__(self, *, aof: bool = False, options: Mapping[str, str] | None = None) -> None:
        first = free_port()
        # Without the two, a replica's first copy of the data waits 5 seconds and a silent master is noticed after 10.
        quick = {"repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1", **(options or {})}
        follow = {"replicaof": f"127.0.0.1 {first}"}
        self.nodes = [Redis(aof=aof, options=quick, port=first)]
        self.nodes += [Redis(aof=aof, options={**quick, **follow}) for _ in range(2)]
        # Sentinels find each other by messages sent every 2 seconds; written down beforehand they need not search.
        ids = {free_port(): secrets.token_hex(20) for _ in range(3)}
        self.sentinels = [Sentinel(self._statements(port, first, ids), port) for port in ids]
        self.members = [*self.nodes, *self.sentinels]
        self._met = False

    def _statements(self, port: int, master: int, ids: Mapping[int, str]) -> list[str]:
        return [
            f"sentinel myid {ids[port]}",
            f"sentinel monitor {self.service} 127.0.0.1 {master} 2",
            f"sentinel down-after-milliseconds {self.service} {int(self.down_after * 1000)}",
            f"sentinel failover-timeout {self.service} 3000",
            *(
                f"sentinel known-sentinel {self.service} 127.0.0.1 {other} {run_id}"
                for other, run_id in ids.items()
                if other != port
            ),
        ]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where the Sentinels listen."""
        return [sentinel.address for sentinel in self.sentinels]

    @property
    def url(self) -> str:
        """All Sentinels, the service's name and logical database 0, as `redis+sentinel://host:port,…/service/0`."""
        return f"redis+sentinel://{_list(self.addresses)}/{self.service}/0"

    def master(self) -> Redis:
        """The node that the first Sentinel to answer believes to be the master."""
        for sentinel in self.sentinels:
            if sentinel.running:
                _, port = sentinel.execute("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.service)
                return next(node for node in self.nodes if node.port == int(port))
        message = "no Sentinel is running"
        raise RuntimeError(message)

    def replicas(self) -> list[Redis]:
        """The other nodes."""
        master = self.master()
        return [node for node in self.nodes if node is not master]

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        if not self._met:
            # A Sentinel asks for the replicas when it connects and then only every 10 seconds.
            _until(self._replicating, "no master with two replicas")
            self._met = True
        for sentinel in self.sentinels:
            sentinel.start()
        _until(self._settled, "the Sentinels do not see each other and one master with two replicas")

    def _settled(self) -> bool:
        if not self._watched():
            return False
        master = self.master()
        for node in self.nodes:
            # The Sentinels would wait 8 seconds before they tell a former master that came back.
            if node is not master and node.execute("ROLE")[0] == "master":
                node.execute("REPLICAOF", *master.address)
        return self._replicating()

    def _replicating(self) -> bool:
        roles = [node.execute("ROLE") for node in self.nodes]
        return any(role[0] == "master" and len(role[2]) == 2 for role in roles) and all(
            role[3] == "connected" for role in roles if role[0] == "slave"
        )

    def _watched(self) -> bool:
        replies = [sentinel.execute("SENTINEL", "MASTER", self.service) for sentinel in self.sentinels]
        views = [dict(zip(reply[::2], reply[1::2], strict=True)) for reply in replies]
        return len({view["port"] for view in views}) == 1 and all(
            (view["flags"], int(view["num-slaves"]), int(view["num-other-sentinels"])) == ("master", 2, 2)
            for view in views
        )


class RedisCluster(_Group):
    """A Redis Cluster of three masters without replicas; a node that does not answer for a second has failed.

    Args:
        aof: as for `Redis`.
        options: settings of the three nodes, as in redis.conf.
    """

    def __init__(self, *, aof: bool = False, options: Mapping[str, str] | None = None) -> None:
        # Only database 0 exists in a cluster.
        settings = {"cluster-enabled": "yes", "cluster-node-timeout": "1000", "databases": "1", **(options or {})}
        self.nodes = [Redis(aof=aof, options=settings, port=free_port(10_000)) for _ in range(3)]
        self.members = self.nodes
        self._formed = False

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where the nodes listen."""
        return [node.address for node in self.nodes]

    @property
    def url(self) -> str:
        """All nodes, as `redis+cluster://host:port,…`."""
        return f"redis+cluster://{_list(self.addresses)}"

    def client(self, **options: Any) -> redis.RedisCluster:
        """A cluster client."""
        return redis.RedisCluster.from_url(self.nodes[0].url, **{"decode_responses": True, **options})

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        if not self._formed:
            self._form()
            self._formed = True
        _until(self._agreed, "the nodes do not agree on a cluster of three masters")

    def _form(self) -> None:
        slots = 16_384
        for number, node in enumerate(self.nodes):
            mine = range(number * slots // 3, (number + 1) * slots // 3)
            node.execute("CLUSTER", "ADDSLOTS", *mine)
            node.execute("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
            for other in self.nodes[:number]:
                node.execute("CLUSTER", "MEET", "127.0.0.1", other.port)

    def _agreed(self) -> bool:
        return all(
            "cluster_state:ok" in node.execute("CLUSTER", "INFO") and len(node.execute("CLUSTER", "SLOTS")) == 3
            for node in self.nodes
        )


def _list(addresses: Sequence[tuple[str, int]]) -> str:
    return ",".join(f"{host}:{port}" for host, port in addresses)


def _until(reached: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise RuntimeError(what)
        time.sleep(0.02)
