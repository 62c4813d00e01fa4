"""What is sent twice must be the same bytes: a payload is kept before it is sent, and handed to every attempt again.

Building a second request is not safe where sending the first again is: a transaction that is signed anew is another
transaction, an invoice rendered anew has another number.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast, overload

from sqlalchemy import BigInteger, Column, Engine, LargeBinary, MetaData, Table, bindparam, delete, insert, select
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine

from apscheduler_fence.bearer import EXECUTION_LIMIT, bearer_of
from apscheduler_fence.policy import in_micros, parse_duration
from apscheduler_fence.slots import validate_name
from apscheduler_fence.stores.sql.callers import ON_MYSQL, checked_prefix, create_tables
from apscheduler_fence.stores.sql.engines import is_transient
from apscheduler_fence.stores.sql.tables import NAME_LENGTH, Name, StoreClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from sqlalchemy import Connection, CursorResult

    from apscheduler_fence.bearer import Bears
    from apscheduler_fence.policy import Duration

TRIES = 5
"""How often a payload is stored that the database undoes because of what others did at the same time."""


class Prepared:
    """Payloads by execution and key; `prepared` is one with the usual table.

    Args:
        table_prefix: how the name of the table begins: `fence_prepared`.
        schema: where it is, if not in the connection's default schema.

    Raises:
        ConfigError: the prefix is not a plain identifier of at most 32 characters.
    """

    def __init__(self, *, table_prefix: str = "fence_", schema: str | None = None) -> None:
        self.metadata = MetaData(schema=schema)
        self._table = Table(
            f"{checked_prefix(table_prefix)}prepared",
            self.metadata,
            Column("execution_id", Name(EXECUTION_LIMIT), primary_key=True),
            Column("key", Name(NAME_LENGTH), primary_key=True),
            Column("payload", LargeBinary().with_variant(mysql.LONGBLOB(), "mysql", "mariadb"), nullable=False),
            Column("made_at", BigInteger, nullable=False),
            **ON_MYSQL,
        )
        row = self._table.c
        mine = (row.execution_id == bindparam("execution_id"), row.key == bindparam("key"))
        self._find = select(row.payload).where(*mine)

    def create(self, bind: Engine | Connection) -> None:
        """Create the table if it is missing; with an asynchronous engine `await connection.run_sync(prepared.create)`."""
        create_tables(bind, self.metadata)

    @overload
    def __call__(self, engine: Engine, key: str, make: Callable[[], bytes], *, fence: Bears | None = None) -> bytes: ...
    @overload
    def __call__(
        self, engine: AsyncEngine, key: str, make: Callable[[], bytes | Awaitable[bytes]], *, fence: Bears | None = None
    ) -> Awaitable[bytes]: ...
    def __call__(
        self, engine: Engine | AsyncEngine, key: str, make: Callable[[], Any], *, fence: Bears | None = None
    ) -> bytes | Awaitable[bytes]:
        """Hand out the payload of this execution under this key, made and committed before anybody gets it.

        Every attempt gets the same bytes. Of those that make it at the same time one wins, and all get the winner's;
        `make` may therefore be called in vain, but nothing it returned is handed out twice in two forms.

        Args:
            engine: where it is kept, in a transaction of its own. With an asynchronous engine the result is to be
                awaited, and `make` may be a coroutine function.
            key: names the payload within its execution (at most 191 characters).
            make: makes the bytes; if it raises, nothing is kept.
            fence: for which run; by default, for the job which this code is part of.

        Raises:
            FenceError: there is no fence.
            TypeError: `make` returned something else than bytes.
        """
        validate_name(key, "key")
        given = {"execution_id": bearer_of(fence).execution_id, "key": key}
        if isinstance(engine, AsyncEngine):
            return self._prepare_async(engine, given, make)
        with engine.connect() as connection:
            found = self._found(connection, given)
        if found is not None:
            return found
        row = {**given, "payload": _checked(make())}
        with engine.connect() as connection:
            return self._keep(connection, row)

    async def _prepare_async(self, engine: AsyncEngine, given: dict[str, Any], make: Callable[[], Any]) -> bytes:
        async with engine.connect() as connection:
            found = await connection.run_sync(self._found, given)
        if found is not None:
            return found
        made = make()
        row = {**given, "payload": _checked(await made if inspect.isawaitable(made) else made)}
        async with engine.connect() as connection:
            return await connection.run_sync(self._keep, row)

    def _found(self, connection: Connection, given: dict[str, Any]) -> bytes | None:
        with connection.begin():
            payload = connection.execute(self._find, given).scalar_one_or_none()
        return None if payload is None else bytes(payload)

    def _keep(self, connection: Connection, row: dict[str, Any]) -> bytes:
        for tried in range(1, TRIES + 1):
            try:
                with connection.begin():
                    connection.execute(insert(self._table).values(**row, made_at=StoreClock()))
                return cast("bytes", row["payload"])
            except IntegrityError:
                pass
            except DBAPIError as error:
                if tried == TRIES or not is_transient(error):
                    raise
            found = self._found(connection, row)
            if found is not None:
                return found
        raise AssertionError

    def prune(self, engine: Engine, older_than: Duration) -> int:
        """Forget payloads made longer ago than this, and return how many.

        An execution that is repeated after that makes new ones: keep them for longer than the scheduler's `retention`.
        """
        age = in_micros(parse_duration(older_than, "older_than"))
        with engine.begin() as connection:
            done = connection.execute(delete(self._table).where(self._table.c.made_at < StoreClock() - age))
            return cast("CursorResult[Any]", done).rowcount


def _checked(payload: object) -> bytes:
    if not isinstance(payload, bytes):
        raise TypeError(
            f"a prepared payload is bytes, not {type(payload).__name__}: encode it, so that it stays the same"
        )
    return payload


prepared = Prepared()
"""`prepared(engine, "signed-tx", make)`: the bytes of this execution, the same on every attempt."""
