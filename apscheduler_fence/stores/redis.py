"""Leases and executions in Redis: hashes, a few sorted sets, and Lua scripts that read or move them at one instant.

Every key begins with `fence:{namespace}:`. The braces make it one hash slot, so that a cluster keeps them on one node:

    lease:<name>      hash    a lease row; `run` names the row it holds
    run:<job> <slot>  hash    an execution row
    held              zset    names of held leases by `expires_at`
    waiting:<lease>   zset    waiting rows of a lease by `slot_at`
    open              zset    waiting and running rows by `slot_at`
    runs, job:<job>   zset    all rows, those of one job, by `slot_at`
    final             zset    final rows by `keep_until`

No key ever expires by itself: an expiry is a field that is compared with the server's TIME, and rows go only when
`prune` has noted in their lease that they are gone.
"""

from __future__ import annotations

import json
import time
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote

from apscheduler_fence.errors import ConfigError, StoreError
from apscheduler_fence.lease import (
    FINAL_STATES,
    Change,
    Execution,
    Insert,
    Key,
    Lease,
    LeaseMove,
    Micros,
    Seen,
    Update,
)
from apscheduler_fence.stores.base import Executions, HeldLeases, StoreDescription
from apscheduler_fence.stores.redis_primary import Command, Script, from_client, from_url, map_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from redis import Redis, RedisCluster

READ, SWAP, HELD, PAGE, PRUNE = (Script.load(name) for name in ("read", "swap", "held", "page", "prune"))

_OLDEST_REDIS = 5  # the first whose scripts may write after they asked for the time
_PAGE = 500
_PRUNED_AT_ONCE = 200
_CHANGES_AT_ONCE = 500
_BYTES_AT_ONCE = 1_000_000
_SKEW_WORTH_A_WARNING = 1_000_000


class RedisStore:
    """A store in one Redis server, a Sentinel-watched primary, or one hash slot of a Redis Cluster.

    Args:
        source: a URL (`redis://`, `rediss://`, `unix://`, `redis+sentinel://host:port,host:port/service/db`,
            `redis+cluster://host:port,host:port`), or a live redis-py client: plain, from `Sentinel.master_for`, or a
            `RedisCluster`. A client is used through a copy that never sends anything twice.
        namespace: keeps applications on one Redis apart.
        prefix: how all keys begin.
        timeout: seconds for connecting, and for each answer.
        min_replicas: how many replicas must have a change before it counts as made. A detector, not a cure: a change
            that reached fewer raises `StoreError`, but stays on the primary.

    Raises:
        ConfigError: the source cannot be understood, or an option is out of range.
    """

    def __init__(
        self,
        source: str | Redis | RedisCluster,
        namespace: str = "",
        *,
        prefix: str = "fence",
        timeout: float = 2.0,
        min_replicas: int = 0,
    ) -> None:
        if not prefix or set(prefix) & set("{}"):
            raise ConfigError("prefix of a Redis store: at least one character, and no braces")
        if timeout <= 0:
            raise ConfigError("timeout of a Redis store: more than 0 seconds")
        if min_replicas < 0:
            raise ConfigError("min_replicas of a Redis store: 0 or more")
        self.namespace = namespace
        # Only what is between the first braces is hashed, if anything is: "%" alone is no other namespace's encoding.
        self._base = _bytes(f"{prefix}:{{{quote(namespace, safe='') or '%'}}}:")
        self._url = source if isinstance(source, str) else None
        self._options = (("prefix", prefix), ("timeout", timeout), ("min_replicas", min_replicas))
        self._min_replicas = min_replicas
        # WAIT must be over before the socket's own timeout is.
        self._wait: tuple[Command, ...] = (("WAIT", min_replicas, max(1, int(timeout * 500))),) if min_replicas else ()
        self._unconfirmed: set[str] = set()
        make = from_url if isinstance(source, str) else from_client
        self._primary = make(cast("Any", source), timeout, self._base)

    def __repr__(self) -> str:
        return f"<RedisStore {self._base.decode(errors='replace')}>"

    # --- one instant --------------------------------------------------------------------------------------------------

    def read(self, key: Key) -> Seen:
        """Read the four rows at one instant; sent once more if the connection dropped.

        A change that too few replicas had when it was made is not seen before enough of them have it.

        Raises:
            StoreError: Redis could not be reached, or answered with an error.
        """
        doubted = key.lease in self._unconfirmed
        # WAIT waits for what its own connection has written (Valkey takes that at its word), so something has to be.
        confirm = (("SET", self._base + b"confirmed", 1, "PX", 60_000), *self._wait) if doubted else ()
        with map_errors():
            found, *acks = self._primary.run(
                READ, self._base, (_bytes(key.lease), _run(key.job, key.slot)), *confirm, repeatable=True
            )
        if doubted:
            self._check(acks[-1])
            self._unconfirmed.discard(key.lease)
        clock, lease, *rows = found
        return Seen(_micros(clock), _lease(key.lease, lease), *map(_execution, rows))

    def swap(self, changes: Sequence[Change]) -> list[int | None]:
        """Apply each change that matches: one round trip for up to 500 of them; never sent twice.

        Raises:
            StoreError: Redis could not be reached, answered with an error, or has too few replicas that kept up.
        """
        tokens: list[int | None] = []
        for chunk in _chunks(changes):
            tokens += self._swap(changes[len(tokens) :], chunk)
        return tokens

    def _swap(self, changes: Sequence[Change], chunk: list[bytes]) -> list[int | None]:
        try:
            with map_errors():
                replies, *acks = self._primary.run(SWAP, self._base, chunk, *self._wait)
            tokens = [None if reply is None else int(reply) for reply in replies]
            if acks and any(token is not None for token in tokens):
                self._check(acks[-1])
        except StoreError:
            if self._min_replicas:
                self._unconfirmed.update(each.lease.name for each in changes[: len(chunk)] if each.lease is not None)
            raise
        return tokens

    def _check(self, replicas: int) -> None:
        if replicas < self._min_replicas:
            raise StoreError(
                f"Redis: the change is on the primary and {replicas} replicas, and min_replicas is {self._min_replicas}"
            )

    # --- scans --------------------------------------------------------------------------------------------------------

    def executions(self, query: Executions) -> Iterator[Execution]:
        """Scan execution rows, page by page: each page is one instant, the whole is not.

        Raises:
            StoreError: Redis could not be reached, or answered with an error.
        """
        found = filter(partial(_answers, query), self._rows(query))
        return islice(found, query.limit)

    def _rows(self, query: Executions) -> Iterator[Execution]:
        if query.job is not None and query.slot is not None:
            row = self.read(Key(query.lease or "", query.job, query.slot)).execution
            return iter(() if row is None else (row,))
        return self._pages(query)

    def _pages(self, query: Executions) -> Iterator[Execution]:
        up, size = query.oldest_first, _PAGE
        if query.limit is not None and not (query.lease or query.slot or query.states):
            size = max(1, min(query.limit, size))
        direction, start = ("up", "-inf" if query.since is None else query.since) if up else ("down", "+inf")
        seen, last = b"", None
        while True:
            with map_errors():
                (page,) = self._primary.run(
                    PAGE, self._base, (_index(query), direction, start, seen, size), repeatable=True
                )
            for row in filter(None, (_execution(flat) for _, _, flat in page)):
                place = (row.slot_at, row.job, row.slot)
                if last is not None and (place <= last if up else place >= last):
                    continue
                if not up and query.since is not None and row.slot_at < query.since:
                    return
                last = place
                yield row
            if len(page) < size:
                return
            seen, start, _ = page[-1]

    def held_leases(self, query: HeldLeases) -> Iterator[Seen]:
        """Scan leases that are held, those first that end first, in one round trip.

        Raises:
            StoreError: Redis could not be reached, or answered with an error.
        """
        args = ("expired" if query.expired else "all", -1 if query.limit is None else query.limit)
        with map_errors():
            ((clock, *found),) = self._primary.run(HELD, self._base, args, repeatable=True)
        now = _micros(clock)
        for name, lease, row in found:
            held = _execution(row)
            yield Seen(now, _lease(_text(name), lease), held, held)

    def prune(self, limit: int = 1000) -> int:
        """Delete final rows past their `keep_until`, in short steps so that nobody waits long for the server.

        Raises:
            StoreError: Redis could not be reached, or answered with an error.
        """
        gone = 0
        while gone < limit:
            step = min(_PRUNED_AT_ONCE, limit - gone)
            with map_errors():
                (count,) = self._primary.run(PRUNE, self._base, (step,))
            gone += count
            if count < step:
                break
        return gone

    # --- the connection -----------------------------------------------------------------------------------------------

    def open(self) -> list[str]:
        """Connect, and say what about this server lets it forget or evict what it was told.

        Raises:
            StoreError: Redis could not be reached.
            ConfigError: the server is older than Redis 5, or part of a cluster that the URL does not speak of.
        """
        with map_errors():
            (info,) = self._primary.ask(("INFO",))
            before = time.time_ns()
            ((seconds, micros),) = self._primary.ask(("TIME",))
            here = (before + time.time_ns()) // 2000
        version = str(info.get("redis_version", _OLDEST_REDIS))
        if int(version.partition(".")[0]) < _OLDEST_REDIS:
            raise ConfigError(
                f"this server is Redis {version}; the store needs Redis {_OLDEST_REDIS} or newer, or Valkey"
            )
        if info.get("cluster_enabled") and not self._primary.can_move:
            raise ConfigError("this server is part of a Redis Cluster: use redis+cluster://, or a RedisCluster client")
        return [*_weaknesses(info, self._min_replicas), *_skew(here, seconds * 1_000_000 + micros)]

    def close(self) -> None:
        """Give back every connection; the next call opens new ones. A client that was handed in is left alone."""
        self._primary.close()

    def forget(self) -> None:
        """Drop every connection unused, in a forked child."""
        self._primary.forget()

    def describe(self) -> StoreDescription:
        """Say how to open this store in another process.

        Raises:
            ConfigError: it was made from a live client.
        """
        if self._url is None:
            raise ConfigError("a store made from a live Redis client cannot be opened in another process: give its URL")
        return StoreDescription(self._url, self.namespace, self._options)


def _weaknesses(info: dict[str, Any], min_replicas: int) -> Iterator[str]:
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield (
            f"Redis evicts keys when memory is short (maxmemory-policy {policy}): a slot that was evicted can run "
            "again; set noeviction"
        )
    if not info.get("aof_enabled", 1):
        yield (
            "Redis keeps no append-only file: after a crash it has forgotten its last writes, and slots that ran since "
            "can run again (tokens still grow); set appendonly yes"
        )
    if info.get("role") == "slave":
        yield "this Redis server is a replica: it refuses every claim; name the primary"
    replicas = int(info.get("connected_slaves", 0))
    if replicas < min_replicas:
        yield f"min_replicas is {min_replicas}, but Redis has {replicas} replicas connected: nothing will be granted"


def _skew(here: Micros, there: Micros) -> Iterator[str]:
    if abs(there - here) > _SKEW_WORTH_A_WARNING:
        clocks = " and ".join(
            f"{whose} {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(at // 1_000_000))}"
            for whose, at in (("this host's clock says", here), ("Redis's", there))
        )
        yield f"{clocks}: {abs(there - here) / 1e6:.1f} s apart; only Redis's counts for leases, but schedules use this host's"


# --- rows as hashes ---------------------------------------------------------------------------------------------------

_R = TypeVar("_R", Lease, Execution)

_FIELDS = {kind: {each.name: each.type for each in fields(kind)} for kind in (Lease, Execution)}
_NUMBERS = ("int", "Micros", "Micros | None")


def _row(kind: type[_R], flat: Sequence[bytes], **known: str | None) -> _R | None:
    if not flat:
        return None
    types, found = _FIELDS[kind], dict[str, Any](known)
    for name, value in zip(map(_text, flat[::2]), flat[1::2], strict=True):
        if name in types:  # a newer version may keep more
            found[name] = int(value) if types[name] in _NUMBERS else _text(value)
    return kind(**found)


def _lease(name: str, flat: Sequence[bytes]) -> Lease | None:
    return _row(Lease, flat, name=name)


def _execution(flat: Sequence[bytes]) -> Execution | None:
    return _row(Execution, flat, holder=None)


def _micros(clock: Sequence[bytes]) -> Micros:
    return int(clock[0]) * 1_000_000 + int(clock[1])


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")


def _bytes(text: str) -> bytes:
    # An error message may hold what is no valid text, such as a file name in another encoding.
    return text.encode("utf-8", "surrogatepass")


def _run(job: str, slot: str) -> bytes:
    """The name of a row: unambiguous, and in the order of (job, slot), because a tab sorts before all that names hold."""
    return _bytes(job.replace("%", "%25").replace("\t", "%09") + "\t" + slot)


# --- queries ----------------------------------------------------------------------------------------------------------


def _index(query: Executions) -> bytes:
    if query.states and set(query.states) <= {"waiting", "running"}:
        waiting_for = query.lease if set(query.states) == {"waiting"} else None
        return b"open" if waiting_for is None else _bytes(f"waiting:{waiting_for}")
    return b"runs" if query.job is None else _bytes(f"job:{query.job}")


def _answers(query: Executions, row: Execution) -> bool:
    return (
        query.job in (None, row.job)
        and query.lease in (None, row.lease)
        and query.slot in (None, row.slot)
        and (not query.states or row.state in query.states)
        and (query.since is None or row.slot_at >= query.since)
    )


# --- changes as JSON --------------------------------------------------------------------------------------------------


def _chunks(changes: Sequence[Change]) -> Iterator[list[bytes]]:
    chunk: list[bytes] = []
    size = 0
    for change in changes:
        encoded = _bytes(json.dumps(_change(change), ensure_ascii=False, separators=(",", ":")))
        if chunk and (len(chunk) == _CHANGES_AT_ONCE or size + len(encoded) > _BYTES_AT_ONCE):
            yield chunk
            chunk, size = [], 0
        chunk.append(encoded)
        size += len(encoded)
    if chunk:
        yield chunk


def _change(change: Change) -> dict[str, Any]:
    runs = [_insert(move.row) if isinstance(move, Insert) else _update(move) for move in change.executions]
    return {"runs": runs} if change.lease is None else {"lease": _lease_move(change.lease), "runs": runs}


def _lease_move(move: LeaseMove) -> dict[str, Any]:
    values: dict[str, str | None] = {}
    after: dict[str, Micros] = {}
    match move.write:
        case "grant":
            run = None if move.job is None or move.slot is None else _text(_run(move.job, move.slot))
            values = {"holder": move.new_holder, "job": move.job, "slot": move.slot, "func": move.func, "run": run}
            after = {"acquired_at": 0, "expires_at": move.lock_at_most, "hold_until": move.lock_at_least}
        case "regrant":
            values = {"holder": move.new_holder}
            after = {"expires_at": move.lock_at_most}
        case "extend":
            after = {"expires_at": move.lock_at_most}
        case "free":
            values = dict.fromkeys(("holder", "job", "slot", "run", "expires_at"))
        case "bump" | "none":
            pass
    expected = {} if move.token is None else {"token": str(move.token)}
    if move.holder is not None:
        expected["holder"] = move.holder
    grows = move.write in ("grant", "regrant", "bump")
    return {"name": move.name, **expected, "condition": move.condition, "grows": grows, **_writes(values, after)}


def _insert(row: Execution) -> dict[str, Any]:
    begins = row.state == "running"
    values = {each.name: getattr(row, each.name) for each in fields(row)}
    if begins:
        del values["token"], values["started_at"]
    return {
        "run": _text(_run(row.job, row.slot)), "granted": begins, **_writes(values, {"started_at": 0} if begins else {}),
    }  # fmt: skip


def _update(move: Update) -> dict[str, Any]:
    values = {"state": move.state, "attempt": move.attempt, "holder": move.holder}
    values |= {name: value for name in ("max_attempts", "error") if (value := getattr(move, name)) is not None}
    after: dict[str, Micros] = {"started_at": 0} if move.granted else {}
    if move.state in FINAL_STATES:
        after |= {"finished_at": 0, "keep_until": move.keep_for}
    else:
        values |= {"finished_at": None, "keep_until": None}
    return {
        "run": _text(_run(move.job, move.slot)), "was": move.was, "token": str(move.token), "granted": move.granted,
        **_writes(values, after),
    }  # fmt: skip


def _writes(values: Mapping[str, str | int | None], after: Mapping[str, Micros]) -> dict[str, Any]:
    """Fields to set, fields to set to the server's clock plus so much, and fields to drop, which is how None is kept."""
    return {
        "set": {name: str(value) for name, value in values.items() if value is not None},
        "after": {name: str(offset) for name, offset in after.items()},
        "drop": [name for name, value in values.items() if value is None],
    }
