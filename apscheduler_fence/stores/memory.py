"""The store of one process: the reference that every other store is held against, and the default of unit tests."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from apscheduler_fence.errors import ConfigError
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
    is_live,
    next_token,
)
from apscheduler_fence.stores.base import Clock, Executions, HeldLeases, StoreDescription

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def wall_clock() -> Micros:
    """This host's clock, in µs since the epoch."""
    return time.time_ns() // 1000


class MemoryStore:
    """Rows in this process: nothing survives it, and no other process sees them."""

    def __init__(self, namespace: str = "", *, clock: Clock = wall_clock) -> None:
        self.namespace = namespace
        self._clock = clock
        self._lock = threading.RLock()
        self._leases: dict[str, Lease] = {}
        self._executions: dict[tuple[str, str], Execution] = {}

    def open(self) -> list[str]:
        """There is nothing to connect to."""
        return []

    def close(self) -> None:
        """There is nothing to give back; the rows stay."""

    def forget(self) -> None:
        """A forked child has a copy of the rows, which is no store: it starts empty."""
        self._lock = threading.RLock()
        self._leases = {}
        self._executions = {}

    def describe(self) -> StoreDescription:
        """Refuse: no other process can see these rows.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("the memory store lives in one process: with a process pool, give a database or Redis URL")

    def read(self, key: Key) -> Seen:
        """Read the four rows at one instant."""
        with self._lock:
            lease = self._leases.get(key.lease)
            return Seen(
                self._clock(),
                lease,
                self._executions.get((key.job, key.slot)),
                self._held_by(lease),
                next(self._select(Executions(lease=key.lease, states=("waiting",), oldest_first=True)), None),
            )

    def _held_by(self, lease: Lease | None) -> Execution | None:
        if lease is None or lease.job is None or lease.slot is None:
            return None
        return self._executions.get((lease.job, lease.slot))

    def swap(self, changes: Sequence[Change]) -> list[int | None]:
        """Apply each change that matches."""
        with self._lock:
            return [self._apply(change) for change in changes]

    def _apply(self, change: Change) -> int | None:
        now = self._clock()
        lease: Lease | None = None
        if change.lease is not None:
            lease = self._moved(change.lease, now)
            if lease is None:
                return None
        token = lease.token if lease is not None else 0
        rows = [self._row_after(move, token, now) for move in change.executions]
        if None in rows:
            return None
        if lease is not None:
            self._leases[lease.name] = lease
        for row in cast("list[Execution]", rows):
            self._executions[row.job, row.slot] = row
        return token

    def _moved(self, move: LeaseMove, now: Micros) -> Lease | None:
        found = self._leases.get(move.name)
        if move.token is None:
            found = Lease(move.name, token=0) if found is None else None
        elif found is not None and (found.token, found.holder) != (move.token, move.holder):
            found = None
        if found is None:
            return None
        live = is_live(found, now)
        if move.condition == "live" and not live:
            return None
        if move.condition in ("over", "open") and live:
            return None
        if move.condition == "open" and now < found.hold_until:
            return None
        return self._written(found, move, now)

    def _written(self, found: Lease, move: LeaseMove, now: Micros) -> Lease:
        match move.write:
            case "grant":
                return replace(
                    found,
                    token=next_token(found.token, now),
                    holder=move.new_holder,
                    job=move.job,
                    slot=move.slot,
                    acquired_at=now,
                    expires_at=now + move.lock_at_most,
                    hold_until=now + move.lock_at_least,
                    func=move.func,
                )
            case "regrant":
                return replace(
                    found,
                    token=next_token(found.token, now),
                    holder=move.new_holder,
                    expires_at=now + move.lock_at_most,
                )
            case "extend":
                return replace(found, expires_at=now + move.lock_at_most)
            case "free":
                return replace(found, holder=None, job=None, slot=None, expires_at=None)
            case "bump":
                return replace(found, token=next_token(found.token, now))
            case "none":
                return found

    def _row_after(self, move: Insert | Update, token: int, now: Micros) -> Execution | None:
        if isinstance(move, Insert):
            row = move.row
            if (row.job, row.slot) in self._executions:
                return None
            return replace(row, token=token, started_at=now) if row.state == "running" else row
        found = self._executions.get((move.job, move.slot))
        if found is None or (found.state, found.token) != (move.was, move.token):
            return None
        final = move.state in FINAL_STATES
        return replace(
            found,
            state=move.state,
            attempt=move.attempt,
            holder=move.holder,
            token=token if move.granted else found.token,
            started_at=now if move.granted else found.started_at,
            max_attempts=found.max_attempts if move.max_attempts is None else move.max_attempts,
            finished_at=now if final else None,
            keep_until=now + move.keep_for if final else None,
            error=found.error if move.error is None else move.error,
        )

    def executions(self, query: Executions) -> Iterator[Execution]:
        """Scan execution rows as they stand now."""
        with self._lock:
            return iter(list(self._select(query)))

    def _select(self, query: Executions) -> Iterator[Execution]:
        rows = [
            row
            for row in self._executions.values()
            if (query.job is None or row.job == query.job)
            and (query.lease is None or row.lease == query.lease)
            and (query.slot is None or row.slot == query.slot)
            and (not query.states or row.state in query.states)
            and (query.since is None or row.slot_at >= query.since)
        ]
        rows.sort(key=lambda row: (row.slot_at, row.job, row.slot), reverse=not query.oldest_first)
        return iter(rows[: query.limit])

    def held_leases(self, query: HeldLeases) -> Iterator[Seen]:
        """Scan leases that are held, those first that end first."""
        with self._lock:
            now = self._clock()
            held = [
                lease
                for lease in self._leases.values()
                if lease.expires_at is not None and (not query.expired or lease.expires_at <= now)
            ]
            held.sort(key=lambda lease: (lease.expires_at or 0, lease.name))
            return iter([Seen(now, lease, row := self._held_by(lease), row) for lease in held[: query.limit]])

    def prune(self, limit: int = 1000) -> int:
        """Delete final rows past their `keep_until`, after noting in their leases how far that went."""
        with self._lock:
            now = self._clock()
            old = [row for row in self._executions.values() if row.keep_until is not None and row.keep_until <= now]
            old.sort(key=lambda row: row.keep_until or 0)
            for row in old[:limit]:
                lease = self._leases.get(row.lease, Lease(row.lease, token=row.token))
                through = max(lease.pruned_through, row.slot_at)
                self._leases[row.lease] = replace(lease, pruned_through=through)
                del self._executions[row.job, row.slot]
            return len(old[:limit])
