"""A transaction that is not ours: the caller's, in which something of ours is to happen together with his own write."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, Union

from sqlalchemy import Connection
from sqlalchemy.exc import InvalidRequestError

from apscheduler_fence.errors import FenceError

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

Database: TypeAlias = Union[Connection, "Session"]
"""A connection or a session in a transaction. Asynchronous ones lend theirs: `await db.run_sync(...)`."""


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


def _commits_by_itself(connection: Connection) -> bool:
    lent = connection.connection
    try:
        autocommit = connection.dialect.detect_autocommit_setting(lent.dbapi_connection)  # type: ignore[arg-type]
    except (NotImplementedError, InvalidRequestError):
        return False
    # sqlite3 is often told to commit by itself so that the application can say BEGIN.
    return autocommit and not getattr(lent.driver_connection, "in_transaction", False)
