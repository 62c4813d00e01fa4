"""A database that is not ours: the caller's transaction, in which something of ours happens together with his own write.

Guard, outbox and prepared payloads keep their tables beside the caller's, by what is here.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError, InvalidRequestError

from apscheduler_fence.errors import ConfigError, FenceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine, MetaData
    from sqlalchemy.orm import Session

Database: TypeAlias = Union[Connection, "Session"]
"""A connection or a session in a transaction. Asynchronous ones lend theirs: `await db.run_sync(...)`."""

CREATIONS = 5

# --- transactions -----------------------------------------------------------------------------------------------------


def connection_of(db: Database) -> Connection:
    """The connection of the caller's transaction.

    Raises:
        FenceError: there is no transaction that the caller could have written in.
    """
    if not db.in_transaction():
        raise FenceError(
            "there is no transaction here: the write went to another connection, or has been committed already; write "
            "first, and check on the same connection before the commit"
        )
    connection = db if isinstance(db, Connection) else db.connection()
    if _commits_by_itself(connection):
        raise FenceError(
            "this connection commits every statement by itself (AUTOCOMMIT), so nothing can be undone or belong together"
        )
    return connection


def on_rollback(connection: Connection, undone: Callable[[], None]) -> None:
    """Call `undone` if the present transaction is rolled back, or the savepoint that it is in."""
    over: list[object] = []

    def roll_back(*_: object) -> None:
        if not over:
            undone()

    event.listen(connection, "rollback", roll_back)
    if connection.in_nested_transaction():
        event.listen(connection, "rollback_savepoint", roll_back)
    event.listen(connection, "begin", over.append)  # the next one; a commit may still fail


def _commits_by_itself(connection: Connection) -> bool:
    lent = connection.connection
    try:
        autocommit = connection.dialect.detect_autocommit_setting(lent.dbapi_connection)  # type: ignore[arg-type]
    except (NotImplementedError, InvalidRequestError):
        return False
    # sqlite3 is often told to commit by itself so that the application can say BEGIN.
    return autocommit and not getattr(lent.driver_connection, "in_transaction", False)


# --- tables -----------------------------------------------------------------------------------------------------------

ON_MYSQL: dict[str, Any] = {
    f"{family}_{option}": value
    for family in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"))
}
"""Options of a table that MySQL and MariaDB roll back, and whose text is Unicode."""


def create_tables(bind: Engine | Connection, metadata: MetaData) -> None:
    """Create what is missing, also while others do the same."""
    for tried in range(1, CREATIONS + 1):
        try:
            return metadata.create_all(bind)
        except DBAPIError:  # most likely somebody else was faster; the next look tells
            if tried == CREATIONS or isinstance(bind, Connection):
                raise
        time.sleep(random.uniform(0.01, 0.05 * tried))  # noqa: S311 - spreads out those that collided
    raise AssertionError


def checked_prefix(prefix: str) -> str:
    """See that tables' names may begin like this.

    Raises:
        ConfigError: it is not a plain identifier of at most 32 characters.
    """
    if not (prefix.isascii() and prefix.isidentifier() and len(prefix) <= 32):  # noqa: PLR2004 - as the message says
        raise ConfigError(
            f"table_prefix={prefix!r}: letters, digits and underscores are allowed, 32 at most, not a digit first"
        )
    return prefix
