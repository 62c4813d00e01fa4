"""The guard of a resource in Redis: commands are executed if the token is not stale, at one instant of the server."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any, cast

from redis import RedisCluster
from redis.crc import key_slot
from redis.exceptions import ResponseError

from apscheduler_fence.bearer import bearer_of, require_token
from apscheduler_fence.errors import AlreadyApplied, ConfigError, InvalidToken, StaleToken
from apscheduler_fence.policy import in_micros, parse_duration
from apscheduler_fence.slots import validate_name
from apscheduler_fence.stores.redis_primary import Script, from_client, from_url

if TYPE_CHECKING:
    from redis import Redis

    from apscheduler_fence.bearer import Bears
    from apscheduler_fence.policy import Duration
    from apscheduler_fence.stores.redis_primary import Primary

_SCRIPT = Script(resources.files(__package__).joinpath("guard_redis.lua").read_text("utf-8"))


class RedisGuard:
    """Commands that are executed if nobody with a newer token has written to the resource before.

    A resource is named by its key, or by the hash tag that its keys have in common: the fence of `account:42` or of
    `{account:42}` is kept on the same node of a cluster as `account:42` and `{account:42}:log`.

    Args:
        source: a URL, as for a Redis store, or a live redis-py client. It is used through a copy of its own that never
            sends anything twice, and that answers in bytes.
        prefix: how the guard's keys begin.
        keep_operations: for how long an operation is remembered. An execution that is repeated after that applies it
            again: keep it for longer than the scheduler's `retention`.
        timeout: for connecting, and for each answer.

    Raises:
        ConfigError: the source cannot be understood, or an option is not allowed.
    """

    def __init__(
        self,
        source: str | Redis | RedisCluster,
        *,
        prefix: str = "fence",
        keep_operations: Duration = "90d",
        timeout: Duration = "2s",
    ) -> None:
        if not prefix or set(prefix) & set("{}"):
            raise ConfigError("prefix of a Redis guard: at least one character, and no braces")
        self._options: dict[str, Any] = {"prefix": prefix, "keep_operations": keep_operations, "timeout": timeout}
        self._source = source
        self._prefix = prefix
        self._kept = max(1, in_micros(parse_duration(keep_operations, "keep_operations")) // 1000)
        self._timeout = parse_duration(timeout, "timeout").total_seconds()
        self._cluster = isinstance(source, RedisCluster) or (isinstance(source, str) and "+cluster://" in source)
        self._primaries: dict[int, Primary] = {}
        self._making = threading.Lock()
        self._primary(b"")

    def __reduce__(self) -> Any:
        return partial(RedisGuard, self._source, **self._options), ()

    def execute(
        self,
        resource: str,
        *commands: tuple[str | bytes | float, ...],
        operation: str | None = None,
        fence: Bears | None = None,
    ) -> list[Any]:
        """Execute commands, none of which anybody sees without the others, or refuse them all; return their replies.

        If the connection is lost meanwhile, they may or may not have been executed: redis-py's error says so, and with an
        operation it is safe to try again.

        Args:
            resource: what is written to (at most 191 characters).
            commands: such as `("HINCRBY", "account:42", "balance", 5)`. As in MULTI, one that fails does not undo those
                before it; an operation counts as applied then, unless it was the first command that failed.
            operation: names this write within its execution: it is applied once, on whichever attempt.
            fence: on whose behalf; by default, that of the job which this code is part of.

        Raises:
            StaleToken: the resource has accepted a newer token of the same lease.
            AlreadyApplied: an earlier attempt of the execution has done this operation.
            InvalidToken: the token is none that a lease can have been granted under.
            ConfigError: in a cluster, a command's key is not on the same node as the resource.
            redis.exceptions.RedisError: Redis could not be reached, or refused a command.
        """
        key = self._key(resource)
        bearer = bearer_of(fence)
        require_token(resource, bearer)
        token = bearer.token
        if operation is not None:
            validate_name(operation, "operation")
        words: list[Any] = [bearer.lease, token, bearer.execution_id, operation or "", self._kept]
        for command in commands:
            self._require_same_node(resource, command)
            words += [len(command), *command]
        ((outcome, *details),) = self._primary(key).run(_SCRIPT, key, words)
        match outcome:
            case b"done":
                return cast("list[Any]", details[0])
            case b"stale":
                raise StaleToken(resource, token, int(details[0]))
            case b"applied":
                raise AlreadyApplied(resource, bearer.execution_id, operation or "")
            case b"early":
                raise InvalidToken(resource, token, f"it is days ahead of this server's clock, {int(details[0])}")
            case _:
                done, error = details
                raise ResponseError(f"command {done + 1} of {len(commands)} at {resource!r} failed: {error.decode()}")

    def claim(self, resource: str, *, fence: Bears | None = None) -> None:
        """Fence predecessors off at once, before anything is read.

        Raises:
            StaleToken, InvalidToken: as `execute`.
        """
        self.execute(resource, fence=fence)

    def resource(self, name: str) -> RedisResource:
        """A resource to claim on entry: `@fenced(resources=[guard.resource("account:42")])`."""
        self._key(name)
        return RedisResource(self, name)

    def close(self) -> None:
        """Close the guard's own connections; the next call opens new ones."""
        with self._making:
            primaries, self._primaries = list(self._primaries.values()), {}
        for primary in primaries:
            primary.close()

    def _key(self, resource: str) -> bytes:
        validate_name(resource, "resource")
        key = f"{self._prefix}:{resource}" if "{" in resource else f"{self._prefix}:{{{resource}}}"
        if key_slot(key.encode()) != key_slot(resource.encode()):
            raise ConfigError(
                f"resource={resource!r}: braces are allowed only as a hash tag, as in '{{account:42}}:log'"
            )
        return key.encode()

    def _require_same_node(self, resource: str, command: tuple[Any, ...]) -> None:
        if not self._cluster or len(command) < 2:  # noqa: PLR2004 - a command's name and its key
            return
        key = command[1] if isinstance(command[1], bytes) else str(command[1]).encode()
        if key_slot(key) != key_slot(resource.encode()):
            raise ConfigError(
                f"{key.decode(errors='replace')!r} and the resource {resource!r} are on different nodes of the cluster: "
                f"give them a hash tag in common"
            )

    def _primary(self, key: bytes) -> Primary:
        slot = key_slot(key) if self._cluster else 0
        with self._making:
            if slot not in self._primaries:
                make = from_url if isinstance(self._source, str) else from_client
                self._primaries[slot] = make(cast("Any", self._source), self._timeout, key)
            return self._primaries[slot]


@dataclass(frozen=True, slots=True)
class RedisResource:
    """A guarded resource at its place: what `@fenced(resources=[...])` claims before a job is entered."""

    guard: RedisGuard
    name: str

    def claim(self, fence: Bears | None = None) -> None:
        """Fence predecessors off.

        Raises:
            StaleToken, InvalidToken: as `RedisGuard.execute`.
        """
        self.guard.claim(self.name, fence=fence)
