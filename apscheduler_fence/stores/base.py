"""What a store is: rows that are read together with a clock, and swapped by comparison. No rule lives in a store."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from apscheduler_fence.lease import Change, Execution, Key, Micros, Seen, State


@dataclass(frozen=True, slots=True)
class Executions:
    """A query for execution rows, newest slot first unless `oldest_first`.

    Attributes:
        job: only this job.
        lease: only this lease.
        slot: only this slot (with `job`).
        states: only these states.
        since: only slots at or after this time.
        limit: at most so many rows.
    """

    job: str | None = None
    lease: str | None = None
    slot: str | None = None
    states: tuple[State, ...] = ()
    since: Micros | None = None
    limit: int | None = None
    oldest_first: bool = False


@dataclass(frozen=True, slots=True)
class HeldLeases:
    """A query for leases that somebody holds, each as a `Seen` with the run it holds in both `execution` and `holding`.

    Attributes:
        expired: only those that are over by the store's clock.
        limit: at most so many rows.
    """

    expired: bool = False
    limit: int | None = None


_PASSWORD = re.compile(r"(?<=://)([^/?#]*?):[^/?#]*(?=@)|(?<=[?&])((?:ssl)?passw(?:or)?d)=[^&#]*", re.IGNORECASE)


def masked(url: str) -> str:
    """Return a URL as it may be shown: without its passwords."""
    return _PASSWORD.sub(lambda found: f"{found[1]}:***" if found[1] is not None else f"{found[2]}=***", url)


@dataclass(frozen=True, slots=True)
class StoreDescription:
    """Enough to open the same store in another process. It can be pickled, and its repr shows no password.

    Attributes:
        url: the store's URL, with its password.
        namespace: the store's namespace.
        options: the other arguments of the store's class, by name.
    """

    url: str
    namespace: str = ""
    options: tuple[tuple[str, object], ...] = ()

    def __repr__(self) -> str:
        return f"StoreDescription({masked(self.url)!r}, {self.namespace!r}, {self.options!r})"


class Store(Protocol):
    """Registers shared by all nodes, and the one clock that all times are compared with.

    Every method may raise `StoreError`; after one from `swap`, the change may or may not have been applied. A store is
    used by several threads at once, and again after a connection was lost.
    """

    namespace: str

    def open(self) -> list[str]:
        """Connect, create what is missing unless told not to, and return warnings about this store's set-up.

        Raises:
            StoreError: the store could not be reached; calling again is the remedy.
            ConfigError: the store can never work as it is set up.
        """
        ...

    def close(self) -> None:
        """Give back every connection. Calling any method afterwards opens the store again."""
        ...

    def forget(self) -> None:
        """Drop every connection unused, in a child process after a fork: they belong to the parent."""
        ...

    def read(self, key: Key) -> Seen:
        """Read the lease, the slot's row, the row the lease holds and the oldest waiting row at one instant: one round trip."""
        ...

    def swap(self, changes: Sequence[Change]) -> list[int | None]:
        """Apply each change that matches, each atomically and independently of the others.

        Returns:
            For each change None if it did not match, else the lease's token afterwards (0 where no lease is moved).
        """
        ...

    def executions(self, query: Executions) -> Iterator[Execution]:
        """Scan execution rows."""
        ...

    def held_leases(self, query: HeldLeases) -> Iterator[Seen]:
        """Scan leases that are held, in one indexed query."""
        ...

    def prune(self, limit: int = 1000) -> int:
        """Delete at most `limit` final rows past their `keep_until`; return how many.

        `pruned_through` of their leases is written first, so that a pruned slot cannot be claimed again.
        """
        ...

    def describe(self) -> StoreDescription:
        """Say how to open this store in another process.

        Raises:
            ConfigError: it cannot be opened elsewhere (memory, or made from a live engine or client).
        """
        ...


Clock = Callable[[], Micros]
"""A settable stand-in for a store's clock; only the memory store takes one."""
