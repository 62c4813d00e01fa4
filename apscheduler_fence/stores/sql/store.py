"""The store itself: which statements go together in a transaction, and what is sent again after an error."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from sqlalchemy import URL, Connection, CursorResult, Engine
from sqlalchemy.exc import DBAPIError, IntegrityError

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.stores.base import StoreDescription, masked
from apscheduler_fence.stores.sql.callers import connection_of, on_rollback
from apscheduler_fence.stores.sql.engines import (
    is_mismatch,
    is_transient,
    make_engine,
    map_errors,
    url_of,
)
from apscheduler_fence.stores.sql.setup import check_server, create_missing
from apscheduler_fence.stores.sql.statements import (
    Statements,
    execution_of,
    held_of,
    lease_parameters,
    never,
    row_parameters,
    seen_of,
)
from apscheduler_fence.stores.sql.tables import tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from sqlalchemy import Executable

    from apscheduler_fence.lease import Change, Execution, Key, LeaseMove, Seen
    from apscheduler_fence.stores.base import Executions, HeldLeases
    from apscheduler_fence.stores.sql.callers import Database
    from apscheduler_fence.stores.sql.statements import Parameters

logger = logging.getLogger("apscheduler_fence.stores")

T = TypeVar("T")

TRIES = 5
PAGE = 1000
_BEGIN = {"sqlite": "BEGIN IMMEDIATE", "mysql": "BEGIN", "mariadb": "BEGIN", "postgresql": "BEGIN"}


class _Mismatch(Exception):  # noqa: N818 - no error: it makes a transaction roll back
    """A row was not as a change expects."""


class SqlStore:
    """Rows in two tables of an SQL database.

    PostgreSQL, MySQL (8.0.17), MariaDB (10.2) and SQLite are known. Any other database that SQLAlchemy reaches works once
    it has a clock expression (see `StoreClock`), if a single-row UPDATE there judges the latest version of the row.

    One statement is one round trip. A read is one, on every database; a swap of one change is one on PostgreSQL, and
    a transaction of a few elsewhere. All renewals of a swap are one statement on PostgreSQL, one transaction elsewhere.

    Every wait has the limit `timeout`, in seconds: for a connection, for an answer, and for a lock that another session
    holds. psycopg and libpq wait two seconds for a connection at least, and MySQL one for a lock; psycopg2 has no limit
    for a server process that is frozen. On a live engine the limits for connecting are the engine's own.

    PgBouncer in transaction mode works. PostgreSQL is then not told of the limits, since a SET would reach other
    applications, and only this side stops waiting; `ALTER ROLE ... SET statement_timeout` adds the server's side.

    SQLite is for the processes of one machine, never for a network file system.

    Args:
        source: an SQLAlchemy URL, or a live engine, of which only the way to connect is used.
        namespace: which rows scans and pruning look at.
        prefix: what the names of the tables begin with.
        schema: the schema they are in, which must exist.
        create_tables: create what is missing on first use.
        timeout: the limit on every wait, in seconds.

    Raises:
        ConfigError: the URL cannot be read or never work, the driver is missing, or an option is out of range.
    """

    def __init__(
        self,
        source: str | URL | Engine,
        namespace: str = "",
        *,
        prefix: str = "fence_",
        schema: str | None = None,
        create_tables: bool = True,
        timeout: float = 2.0,
    ) -> None:
        if not 0 < timeout <= 3600:  # noqa: PLR2004 - an hour, as the message says
            raise ConfigError(f"timeout={timeout!r} is out of range: more than 0 and at most 3600 seconds are allowed")
        self.namespace = namespace
        self._tables = tables(prefix, schema)
        self._statements = Statements(self._tables)
        self._create_tables = create_tables
        self._timeout = timeout
        self._options = (
            ("create_tables", create_tables),
            ("schema", schema),
            ("prefix", prefix),
            ("timeout", timeout),
        )
        self._live = isinstance(source, Engine)
        given = source if isinstance(source, Engine) else _fixed(url_of(source))
        self._url = given.url if isinstance(given, Engine) else given
        self._engine = make_engine(given, timeout)
        self._dialect = self._engine.dialect.name
        self._in_one_statement = self._dialect == "postgresql"
        self._opening = threading.Lock()
        self._opened = False

    def __repr__(self) -> str:
        return f"SqlStore({masked(self._url.render_as_string())!r}, {self.namespace!r})"

    # --- open and close -----------------------------------------------------------------------------------------------

    def open(self) -> list[str]:
        """Connect, create the tables unless told not to, and say what is unusual about the database.

        Raises:
            StoreError: the database cannot be reached, or has no tables and is not to be given any.
            ConfigError: it is too old.
        """
        with self._opening, map_errors("opening the store", self._url):
            return self._retrying(self._open, resend=True)

    def _open(self) -> list[str]:
        with self._engine.connect() as connection:
            warnings = check_server(connection)
            warnings += create_missing(connection, self._tables, create=self._create_tables)
        self._opened = True
        return warnings

    def _ready(self) -> None:
        if not self._opened:
            for warning in self.open():
                logger.warning("%s", warning)

    def close(self) -> None:
        """Close every connection that is not in use; the next call opens the store again."""
        self._opened = False
        self._engine.dispose()

    def forget(self) -> None:
        """Drop the parent's connections in a forked child, without a word to the server."""
        self._opening = threading.Lock()
        self._engine.dispose(close=False)

    def describe(self) -> StoreDescription:
        """Say how to open this store in another process.

        Raises:
            ConfigError: it was made from a live engine.
        """
        if self._live:
            raise ConfigError(
                "a store made from a live engine cannot be opened in another process: give its URL instead"
            )
        return StoreDescription(self._url.render_as_string(hide_password=False), self.namespace, self._options)

    # --- reads --------------------------------------------------------------------------------------------------------

    def read(self, key: Key) -> Seen:
        """Read the lease, the slot's row, the row the lease holds and the oldest waiting row: one round trip."""
        parameters = {"lease": key.lease, "job": key.job, "slot": key.slot}
        [row] = self._rows("a read", self._statements.read(), parameters)
        return seen_of(row)

    def executions(self, query: Executions) -> Iterator[Execution]:
        """Scan execution rows, page by page, so that no single statement takes long."""
        left, last = query.limit, None
        while left is None or left > 0:
            size = PAGE if left is None else min(PAGE, left)
            statement, parameters = self._statements.page(query, self.namespace, size, last)
            page = [row for values in self._rows("a scan", statement, parameters) if (row := execution_of(values))]
            yield from page
            if len(page) < size:
                return
            last = page[-1]
            left = None if left is None else left - size

    def held_leases(self, query: HeldLeases) -> Iterator[Seen]:
        """Scan leases that are held, those first that end first, in one indexed query."""
        statement, parameters = self._statements.held(query, self.namespace)
        return iter([held_of(row) for row in self._rows("a scan", statement, parameters)])

    def _rows(self, doing: str, statement: Executable, parameters: Parameters) -> Sequence[Any]:
        def fetch() -> Sequence[Any]:
            with self._engine.connect() as connection:
                return connection.execute(statement, parameters).fetchall()

        self._ready()
        with map_errors(doing, self._url):
            return self._retrying(fetch, resend=True)

    # --- changes ------------------------------------------------------------------------------------------------------

    def swap(self, changes: Sequence[Change]) -> list[int | None]:
        """Apply each change that matches; renewals together, the others each in turn.

        A swap that broke is not sent again, since it may have been applied. One that the database itself undid, in
        a deadlock or because a lock was not free, is, within `timeout`.
        """
        self._ready()
        tokens: list[int | None] = [None] * len(changes)
        renewals = [number for number, change in enumerate(changes) if _is_renewal(change)]
        with map_errors("a swap", self._url):
            if len(renewals) > 1:  # first, since they are in a hurry
                moves = [move for number in renewals if (move := changes[number].lease)]
                for number, token in zip(renewals, self._retrying(partial(self._renew, moves)), strict=True):
                    tokens[number] = token
            else:
                renewals = []
            for number in sorted(set(range(len(changes))).difference(renewals)):
                tokens[number] = self._retrying(partial(self._swap, changes[number]))
        return tokens

    def _swap(self, change: Change) -> int | None:
        if change.lease is not None and never(change.lease):
            return None
        return self._swap_whole(change) if self._in_one_statement else self._swap_in_steps(change)

    def _swap_whole(self, change: Change) -> int | None:
        parameters = {"ns": self.namespace}
        if change.lease is not None:
            parameters |= lease_parameters(change.lease)
        for number, move in enumerate(change.executions):
            parameters |= row_parameters(number, move)
        with self._engine.connect() as connection:
            try:
                row = connection.execute(self._statements.whole(change), parameters).first()
            except DBAPIError as error:
                if is_mismatch(error):
                    return None
                raise
        return None if row is None else int(row[0])

    def _swap_in_steps(self, change: Change) -> int | None:
        move = change.lease
        if move is not None and move.token is None and self._dialect != "sqlite":
            # In a transaction of its own: together with the UPDATE below it deadlocks with others that do the same.
            with self._engine.connect() as connection:
                self._seed(connection, move.name)
        elif move is not None and move.write in ("extend", "free") and not change.executions:
            with self._engine.connect() as connection:
                matched = self._count(connection, self._statements.move_lease(move), lease_parameters(move))
            return move.token if matched else None
        try:
            with self._transaction() as connection:
                return self._apply(connection, change)
        except (IntegrityError, _Mismatch):
            return None

    def _apply(self, connection: Connection, change: Change) -> int:
        move = change.lease
        if move is not None and move.token is None and self._dialect == "sqlite":
            self._seed(connection, move.name)
        token = 0 if move is None else self._move_lease(connection, move)
        for number, row in enumerate(change.executions):
            parameters = {**row_parameters(number, row), "granted": token, "ns": self.namespace}
            if not self._count(connection, self._statements.move_row(number, row), parameters):
                raise _Mismatch
        return token

    def settle_in(self, db: Database, change: Change, undone: Callable[[], None]) -> bool:
        """Apply a change of rows that exist in a transaction of the caller's, and say whether it matched.

        If it did not, that transaction has been rolled back. `undone` is called when it is rolled back later.

        Raises:
            FenceError: there is no transaction here.
            ConfigError: the transaction is not one of this store's database.
        """
        connection = connection_of(db)
        on_rollback(connection, undone)
        try:
            self._apply(connection, change)
        except _Mismatch:
            db.rollback()
            return False
        except DBAPIError as error:
            if is_transient(error) or error.connection_invalidated:
                raise
            db.rollback()
            raise ConfigError(f"this transaction is not in the store's database: {error.orig}") from error
        return True

    def _seed(self, connection: Connection, name: str) -> None:
        with contextlib.suppress(IntegrityError):
            connection.execute(self._statements.seed(), {"m_name": name, "ns": self.namespace})

    def _move_lease(self, connection: Connection, move: LeaseMove) -> int:
        parameters = lease_parameters(move)
        if move.write == "none" and move.token is not None:
            # Not by an UPDATE: some drivers count only rows that changed.
            if connection.execute(self._statements.compare_lease(move), parameters).first() is None:
                raise _Mismatch
            return move.token
        if not self._count(connection, self._statements.move_lease(move), parameters):
            raise _Mismatch
        if move.token is not None and move.write in ("extend", "free"):
            return move.token
        return int(connection.execute(self._statements.token(), {"name": move.name}).scalar_one())

    def _renew(self, moves: Sequence[LeaseMove]) -> list[int | None]:
        if not self._in_one_statement:
            with self._transaction() as connection:
                return [
                    move.token
                    if self._count(connection, self._statements.move_lease(move), lease_parameters(move))
                    else None
                    for move in moves
                ]
        parameters = {
            "names": [move.name for move in moves],
            "tokens": [move.token for move in moves],
            "holders": [move.holder for move in moves],
            "most": [move.lock_at_most for move in moves],
        }
        with self._engine.connect() as connection:
            renewed = {tuple(row) for row in connection.execute(self._statements.extend_all(), parameters)}
        return [move.token if (move.name, move.token, move.holder) in renewed else None for move in moves]

    def prune(self, limit: int = 1000) -> int:
        """Delete at most `limit` final rows past their `keep_until`; return how many.

        How far that goes is noted in each lease first, and committed, so that a pruned slot cannot be claimed again.
        """
        rows = self._rows("pruning", self._statements.old(), {"ns": self.namespace, "limit": limit})
        if not rows:
            return 0
        leases: dict[str, Parameters] = {}
        for _, _, lease, slot_at, token in rows:
            noted = leases.setdefault(lease, {"m_name": lease, "m_through": slot_at, "m_token": token})
            noted["m_through"] = max(noted["m_through"], slot_at)
        doomed = [{"a_job": row.job, "a_slot": row.slot} for row in rows]
        with map_errors("pruning", self._url):
            # Lease by lease, so that none of them is locked for longer than that.
            for noted in leases.values():
                self._retrying(partial(self._note_pruned, noted))
            return self._retrying(partial(self._delete, doomed))

    def _note_pruned(self, noted: Parameters) -> None:
        with self._engine.connect() as connection:
            if not self._count(connection, self._statements.note_pruned(), noted):
                self._seed(connection, noted["m_name"])
                connection.execute(self._statements.note_pruned(), noted)

    def _delete(self, doomed: list[Parameters]) -> int:
        with self._transaction() as connection:
            return sum(self._count(connection, self._statements.delete_old(), row) for row in doomed)

    # --- statements, transactions, retries ----------------------------------------------------------------------------

    def _count(self, connection: Connection, statement: Executable, parameters: Parameters) -> int:
        result: CursorResult[Any] = connection.execute(statement, parameters)
        return result.rowcount

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Connection]:
        begin = _BEGIN.get(self._dialect)
        with self._engine.connect() as connection:
            if begin is None:
                with connection.execution_options(isolation_level="READ COMMITTED").begin():
                    yield connection
                return
            self._begin(connection, begin)
            try:
                yield connection
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                self._roll_back(connection)
                raise

    def _begin(self, connection: Connection, begin: str) -> None:
        try:
            connection.exec_driver_sql(begin)
        except DBAPIError as error:
            # A connection that the server closed while it was idle: nothing has been sent that could have worked.
            if not error.connection_invalidated:
                raise
            connection.rollback()
            connection.exec_driver_sql(begin)

    def _roll_back(self, connection: Connection) -> None:
        if connection.invalidated:
            return
        try:
            connection.exec_driver_sql("ROLLBACK")
        except BaseException:  # noqa: BLE001 - whatever it was, a connection in an unknown state must not be used again
            connection.invalidate()

    def _retrying(self, work: Callable[[], T], *, resend: bool = False) -> T:
        deadline = time.monotonic() + self._timeout
        for tried in itertools.count(1):
            try:
                return work()
            except DBAPIError as error:
                again = is_transient(error) or (resend and error.connection_invalidated)
                if not again or tried == TRIES or time.monotonic() >= deadline:
                    raise
            time.sleep(random.uniform(0, 0.005 * 2**tried))  # noqa: S311 - spreads out those that collided
        raise AssertionError


def _is_renewal(change: Change) -> bool:
    move = change.lease
    return (
        move is not None
        and not change.executions
        and (move.write, move.condition) == ("extend", "live")
        and move.token is not None
        and move.holder is not None
    )


def _fixed(url: URL) -> URL:
    # A relative path would mean another file after a change of directory, or in another process.
    if url.get_backend_name() == "sqlite" and url.database and not url.database.startswith(("file:", ":")):
        return url.set(database=os.path.abspath(url.database))  # noqa: PTH100 - resolving links would name another path
    return url
