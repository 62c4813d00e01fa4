"""The check at the resource: a token older than one already accepted is refused in the transaction of the write itself.

The check is the *last* statement before the commit. A guard that locks its row first lets a paused holder block its
successor, and is then passed by it; one that locks it last lets the successor commit, and refuses whoever wakes up:

    A: BEGIN, write ............ paused ............ check: token 41 < 42, StaleToken, ROLLBACK
    B:            BEGIN, write, check: 42, COMMIT

For each resource and lease there is one row with the highest token accepted: tokens of different leases have no order
among themselves, and two jobs may rightly write to one resource. Operations are a second, separate uniqueness: a retry
has a larger token and is rightly accepted, so only the name of the operation can keep it from being applied twice.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, overload

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Index,
    MetaData,
    Table,
    and_,
    bindparam,
    create_engine,
    delete,
    event,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from apscheduler_fence.bearer import EXECUTION_LIMIT, bearer_of, require_token
from apscheduler_fence.errors import AlreadyApplied, FenceError, InvalidToken, StaleToken
from apscheduler_fence.policy import in_micros, parse_duration
from apscheduler_fence.slots import validate_name
from apscheduler_fence.stores.sql.callers import ON_MYSQL, checked_prefix, connection_of, create_tables
from apscheduler_fence.stores.sql.engines import is_transient, url_of
from apscheduler_fence.stores.sql.tables import NAME_LENGTH, Name, StoreClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence
    from types import TracebackType

    from sqlalchemy import URL, BindParameter, Connection, CursorResult, Executable, Select
    from sqlalchemy.sql.elements import ColumnElement

    from apscheduler_fence.bearer import Bears
    from apscheduler_fence.policy import Duration
    from apscheduler_fence.stores.sql.callers import Database

D = TypeVar("D", bound="Connection | Session")
A = TypeVar("A", bound=AsyncConnection | AsyncSession)
S = TypeVar("S", bound=Session)
T = TypeVar("T", bound=AsyncSession)

DAY = 86_400_000_000
CLAIMS = 5
"""How often a claim is sent that the database undoes because of what others did at the same time."""

_COUNTS = ("postgresql", "sqlite")
_OPERATION_KEY = ("resource", "execution_id", "operation")
_RESOURCE_ROW = ("resource", "lease", "token", "execution_id")


@dataclass(frozen=True, slots=True)
class _Write:
    """What is checked: this write to this resource, on behalf of this run."""

    resource: str
    bearer: Bears
    operation: str | None = None

    @property
    def parameters(self) -> dict[str, Any]:
        bearer = self.bearer
        return {
            "resource": self.resource,
            "lease": bearer.lease,
            "token": bearer.token,
            "execution_id": bearer.execution_id,
            "operation": self.operation,
        }

    def stale(self, highest: int) -> StaleToken:
        return StaleToken(self.resource, self.bearer.token, highest)

    def repeated(self) -> AlreadyApplied:
        return AlreadyApplied(self.resource, self.bearer.execution_id, self.operation or "")

    def judge(self, seen: Any) -> None:
        """Refuse on what was read: the resource's clock, the highest token, and whose that is."""
        token = self.bearer.token
        if token > seen.now + DAY:
            ahead = (token - seen.now) / DAY
            raise InvalidToken(self.resource, token, f"it is {ahead:.1f} days ahead of this database's clock")
        if seen.token is None or seen.token < token:
            return
        if seen.token > token or seen.execution_id != self.bearer.execution_id:
            raise self.stale(seen.token)


class Guard:
    """Two tables beside the caller's own, and the statements that check a token against them.

    Args:
        table_prefix: how the names of the tables begin: `fence_resource`, `fence_operation`.
        schema: where they are, if not in the connection's default schema.

    Raises:
        ConfigError: the prefix is not a plain identifier of at most 32 characters.
    """

    def __init__(self, *, table_prefix: str = "fence_", schema: str | None = None) -> None:
        self._options = {"table_prefix": table_prefix, "schema": schema}
        self.metadata, self._resource, self._operation = _tables(table_prefix, schema)
        self._upserts: dict[str, Executable] = {}
        row = self._resource.c
        mine = (row.resource == bindparam("resource"), row.lease == bindparam("lease"))
        found = (StoreClock().label("now"), row.token, row.execution_id)
        one = select(literal_column("1").label("one")).subquery("one")
        self._read = select(*found).select_from(one.outerjoin(self._resource, and_(*mine)))
        self._locked = select(*found).where(*mine).with_for_update()
        self._first = insert(self._resource).values(**_given(self._resource, _RESOURCE_ROW), accepted_at=StoreClock())
        self._apply = insert(self._operation).values(
            **_given(self._operation, (*_OPERATION_KEY, "token")), applied_at=StoreClock()
        )

    def __reduce__(self) -> Any:
        return _guard, (self._options,)

    def create(self, bind: Engine | Connection) -> None:
        """Create the two tables where they are missing; with an asynchronous engine `await connection.run_sync(guard.create)`."""
        create_tables(bind, self.metadata)

    # --- checking -----------------------------------------------------------------------------------------------------

    def check(self, db: Database, resource: str, operation: str | None = None, *, fence: Bears | None = None) -> None:
        """Refuse, or accept, what was written in the transaction of `db`; call it last, just before the commit.

        A refusal has rolled the transaction back already, so that nobody can commit it by mistake.

        Args:
            db: the connection or session that has written. A session is flushed first.
            resource: what was written to (at most 191 characters). Check several in the same order everywhere, or two
                callers may wait for each other until the database ends one of them.
            operation: names the write within its execution (at most 191 characters): it is applied once, on whichever
                attempt.
            fence: on whose behalf; by default, that of the job which this code is part of.

        Raises:
            StaleToken: the resource has accepted a newer token of the same lease.
            AlreadyApplied: an earlier attempt of the execution has committed this operation.
            InvalidToken: the token is none that a lease can have been granted under.
            FenceError: there is no transaction here to check, or no fence.
        """
        write = self._write(resource, operation, fence)
        connection = connection_of(db)
        try:
            _flush(db)
            self._decide(connection, write)
        except FenceError:
            db.rollback()
            raise
        except DBAPIError as error:
            db.rollback()
            self._explain_elsewhere(connection.engine, write, error)
            raise

    @overload
    def claim(self, source: Engine, resource: str, *, fence: Bears | None = None) -> None: ...
    @overload
    def claim(self, source: AsyncEngine, resource: str, *, fence: Bears | None = None) -> Awaitable[None]: ...
    def claim(
        self, source: Engine | AsyncEngine, resource: str, *, fence: Bears | None = None
    ) -> Awaitable[None] | None:
        """Fence predecessors off at once, in a transaction of its own, before anything is read.

        Raises:
            StaleToken, InvalidToken, FenceError: as `check`.
        """
        write = self._write(resource, None, fence)
        if isinstance(source, AsyncEngine):
            return self._claim_async(source, write)
        with source.connect() as connection:
            self._claim(connection, write)
        return None

    async def _claim_async(self, engine: AsyncEngine, write: _Write) -> None:
        async with engine.connect() as connection:
            await connection.run_sync(self._claim, write)

    def _claim(self, connection: Connection, write: _Write) -> None:
        for tried in range(1, CLAIMS + 1):
            try:
                with connection.begin():
                    return self._decide(connection_of(connection), write)
            except DBAPIError as error:
                if tried == CLAIMS or not is_transient(error):
                    raise
            time.sleep(random.uniform(0, 0.01 * tried))  # noqa: S311 - spreads out those that collided
        raise AssertionError

    # --- as a block ---------------------------------------------------------------------------------------------------

    @overload
    def writing(
        self, source: Engine, resource: str, operation: str | None = ..., *, fence: Bears | None = ...
    ) -> Writing[Connection]: ...
    @overload
    def writing(
        self, source: sessionmaker[S], resource: str, operation: str | None = ..., *, fence: Bears | None = ...
    ) -> Writing[S]: ...
    @overload
    def writing(
        self, source: AsyncEngine, resource: str, operation: str | None = ..., *, fence: Bears | None = ...
    ) -> AsyncWriting[AsyncConnection]: ...
    @overload
    def writing(
        self, source: async_sessionmaker[T], resource: str, operation: str | None = ..., *, fence: Bears | None = ...
    ) -> AsyncWriting[T]: ...
    def writing(
        self, source: Any, resource: str, operation: str | None = None, *, fence: Bears | None = None
    ) -> Writing[Any] | AsyncWriting[Any]:
        """A transaction that is checked and committed on leaving the block, or rolled back.

        The block gets a new connection of an engine, or a new session of a sessionmaker; with an asynchronous engine or
        sessionmaker it is an `async with`. The other arguments are those of `check`. A repeated operation is undone and
        not an error: the block's own `already_applied` tells.

            with guard.writing(engine, "account:42", "settle") as db:
                db.execute(...)

        Raises:
            StaleToken: on entering, by a cheap read without a lock, or on leaving.
            InvalidToken, FenceError: as `check`; also if nothing was executed on the block's own connection, since what
                was written elsewhere is not guarded.
        """
        write = self._write(resource, operation, fence)
        if isinstance(source, AsyncEngine | async_sessionmaker):
            return AsyncWriting(self, write, source.connect if isinstance(source, AsyncEngine) else source)
        return Writing(self, write, source.connect if isinstance(source, Engine) else source)

    def resource(self, source: Engine | URL | str, name: str) -> Resource:
        """A resource to claim on entry: `@fenced(resources=[guard.resource(engine, "account:42")])`."""
        return Resource(self, source, validate_name(name, "resource"))

    # --- old operations -----------------------------------------------------------------------------------------------

    def prune(self, engine: Engine, older_than: Duration) -> int:
        """Forget operations applied longer ago than this, and return how many.

        An execution that is repeated after that applies its operations again: keep them for longer than the scheduler's
        `retention`.
        """
        age = in_micros(parse_duration(older_than, "older_than"))
        with engine.begin() as connection:
            old = self._operation.c.applied_at < StoreClock() - age
            return _count(connection, delete(self._operation).where(old))

    # --- statements ---------------------------------------------------------------------------------------------------

    def _write(self, resource: str, operation: str | None, fence: Bears | None) -> _Write:
        validate_name(resource, "resource")
        if operation is not None:
            validate_name(operation, "operation")
        bearer = bearer_of(fence)
        require_token(resource, bearer)
        return _Write(resource, bearer, operation)

    def _look(self, connection: Connection, write: _Write) -> None:
        write.judge(connection.execute(self._read, write.parameters).one())

    def _decide(self, connection: Connection, write: _Write) -> None:
        self._accept(connection, write)
        if write.operation is None:
            return
        try:
            connection.execute(self._apply, write.parameters)
        except IntegrityError as error:
            raise write.repeated() from error

    def _accept(self, connection: Connection, write: _Write) -> None:
        dialect = connection.dialect.name
        if dialect in _COUNTS:
            if _count(connection, self._upsert(dialect), write.parameters):
                return
            self._look(connection, write)
            raise write.stale(write.bearer.token)  # the row has just gone, which only people can do
        if dialect in ("mysql", "mariadb"):
            connection.execute(self._upsert("mysql"), write.parameters)
            # What drivers count here differs. The row is locked now, so reading it tells.
            seen = connection.execute(self._locked, write.parameters).first()
            if seen is None:
                self._look(connection, write)
            else:
                write.judge(seen)
            return
        self._accept_portably(connection, write)

    def _accept_portably(self, connection: Connection, write: _Write) -> None:
        """On a database whose upsert is not known here."""
        row, bearer = self._resource.c, write.bearer
        raised = (
            update(self._resource)
            .values(token=bearer.token, execution_id=bearer.execution_id, accepted_at=StoreClock())
            .where(row.resource == write.resource, row.lease == bearer.lease)
            .where(_not_older(row, bearer.token, bearer.execution_id))
        )
        self._look(connection, write)
        if _count(connection, raised):
            return
        try:
            with connection.begin_nested():
                connection.execute(self._first, write.parameters)
        except IntegrityError:
            if not _count(connection, raised):
                self._look(connection, write)
                raise write.stale(write.bearer.token) from None

    def _upsert(self, dialect: str) -> Executable:
        if dialect not in self._upserts:
            self._upserts[dialect] = self._build_upsert(dialect)
        return self._upserts[dialect]

    def _build_upsert(self, dialect: str) -> Executable:
        table = self._resource
        given = _given(table, _RESOURCE_ROW)
        # The condition is the SELECT's, so that a wild token is refused by the resource's clock in the same statement.
        latest = StoreClock() + literal_column(str(DAY), BigInteger)
        row = select(*given.values(), StoreClock()).where(given["token"] <= latest)
        columns = [column.name for column in table.columns]
        if dialect == "mysql":
            return self._build_mysql_upsert(columns, row)
        family = postgresql if dialect == "postgresql" else sqlite
        statement = family.insert(table).from_select(columns, row)
        new = statement.excluded
        newer = statement.on_conflict_do_update(
            index_elements=[table.c.resource, table.c.lease],
            set_={name: new[name] for name in ("token", "execution_id", "accepted_at")},
            where=_not_older(table.c, new.token, new.execution_id),
        )
        counting: Executable = newer.execution_options(preserve_rowcount=True)
        return counting

    def _build_mysql_upsert(self, columns: list[str], row: Select[Any]) -> Executable:
        old, statement = self._resource.c, mysql.insert(self._resource).from_select(columns, row)
        new = statement.inserted
        # From left to right, each seeing what those before it have set: the token is the last.
        return statement.on_duplicate_key_update(
            [
                ("accepted_at", func.if_(new.token >= old.token, new.accepted_at, old.accepted_at)),
                ("execution_id", func.if_(new.token > old.token, new.execution_id, old.execution_id)),
                ("token", func.greatest(old.token, new.token)),
            ]
        )

    # --- what a broken transaction meant ------------------------------------------------------------------------------

    def _explain(self, connection: Connection, write: _Write, error: DBAPIError) -> None:
        """Raise `StaleToken` or `AlreadyApplied` if that is why the database would not serialize this transaction."""
        try:
            self._look(connection, write)
        except StaleToken as stale:
            raise stale from error
        if write.operation is None:
            return
        row = self._operation.c
        found = select(row.token).where(*(row[name] == bindparam(name) for name in _OPERATION_KEY))
        if connection.execute(found, write.parameters).first() is not None:
            raise write.repeated() from error

    def _explain_elsewhere(self, engine: Engine, write: _Write, error: DBAPIError) -> None:
        if not is_transient(error):
            return
        try:
            with engine.connect() as connection:
                self._explain(connection, write, error)
        except SQLAlchemyError:  # no other connection to be had: the first error says enough
            return


class _Block:
    """What both kinds of block do with their connection or session, once there is one."""

    def __init__(self, guard: Guard, write: _Write, source: Any) -> None:
        self._guard = guard
        self._write = write
        self._source = source
        self._executed = 0
        self._open: Any = None
        self.applied = False
        """Whether the write was committed."""
        self.already_applied = False
        """Whether the operation had been applied by an earlier attempt, so that this write was undone."""

    def _begin(self, db: Database) -> None:
        db.begin()
        connection = connection_of(db)
        try:
            self._guard._look(connection, self._write)  # noqa: SLF001 - a guard and its blocks are one thing
            if connection.dialect.name != "postgresql":
                # Having read in it, a transaction of SQLite would be refused its first write as soon as another had
                # committed, and one of MySQL would hold a lock under SERIALIZABLE.
                db.rollback()
                db.begin()
                connection = connection_of(db)
        except BaseException:
            db.rollback()
            raise
        event.listen(connection, "before_cursor_execute", self._notice)

    def _notice(self, *_: object) -> None:
        self._executed += 1

    def _end(self, db: Database, error: BaseException | None) -> bool:
        """Commit or roll back; say whether the error is dealt with."""
        try:
            if error is not None:
                db.rollback()
                return isinstance(error, DBAPIError) and self._understood(db, error)
            try:
                self._commit(db)
            except DBAPIError as failure:
                db.rollback()
                if self._understood(db, failure):
                    return True
                raise
            except BaseException:
                db.rollback()
                raise
        except AlreadyApplied:
            self.already_applied = True
            return True
        return False

    def _commit(self, db: Database) -> None:
        _flush(db)
        connection = connection_of(db)
        if not self._executed:
            raise FenceError(
                f"nothing was executed on the connection that guards {self._write.resource!r}: a write on another "
                "connection, or to something that is no database, is not guarded by it"
            )
        self._guard._decide(connection, self._write)  # noqa: SLF001 - as above
        db.commit()
        self.applied = True

    def _understood(self, db: Database, error: DBAPIError) -> bool:
        if is_transient(error):
            with db.begin():
                connection = db if not isinstance(db, Session) else db.connection()
                self._guard._explain(connection, self._write, error)  # noqa: SLF001 - as above
        return False


class Writing(_Block, Generic[D]):
    """The block of `Guard.writing`."""

    def __enter__(self) -> D:
        db: D = self._source()
        try:
            self._begin(db)
        except BaseException:
            db.close()
            raise
        self._open = db
        return db

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        db, self._open = self._open, None
        try:
            return self._end(db, error)
        finally:
            db.close()


class AsyncWriting(_Block, Generic[A]):
    """The block of `Guard.writing` with an asynchronous engine or sessionmaker."""

    async def __aenter__(self) -> A:
        db: Any = self._source()
        try:
            if isinstance(db, AsyncConnection):
                await db.start()
            await db.run_sync(self._begin)
        except BaseException:
            await db.close()
            raise
        self._open = db
        return cast("A", db)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        db, self._open = self._open, None
        try:
            return bool(await db.run_sync(self._end, error))
        finally:
            await db.close()


@dataclass(frozen=True, slots=True)
class Resource:
    """A guarded resource at its place: what `@fenced(resources=[...])` claims before a job is entered.

    With a URL in place of an engine it can be pickled, as a process pool requires.
    """

    guard: Guard
    source: Engine | URL | str
    name: str

    def claim(self, fence: Bears | None = None) -> None:
        """Fence predecessors off.

        Raises:
            StaleToken, InvalidToken, FenceError: as `Guard.claim`.
        """
        if isinstance(self.source, Engine):
            return self.guard.claim(self.source, self.name, fence=fence)
        engine = create_engine(url_of(self.source), poolclass=NullPool)
        return self.guard.claim(engine, self.name, fence=fence)


def _tables(prefix: str, schema: str | None) -> tuple[MetaData, Table, Table]:
    metadata = MetaData(schema=schema)
    begin = checked_prefix(prefix)
    resource = Table(
        f"{begin}resource",
        metadata,
        Column("resource", Name(NAME_LENGTH), primary_key=True),
        Column("lease", Name(NAME_LENGTH), primary_key=True),
        Column("token", BigInteger, nullable=False),
        Column("execution_id", Name(EXECUTION_LIMIT), nullable=False),
        Column("accepted_at", BigInteger, nullable=False),
        **ON_MYSQL,
    )
    operation = Table(
        f"{begin}operation",
        metadata,
        Column("resource", Name(NAME_LENGTH), primary_key=True),
        Column("execution_id", Name(EXECUTION_LIMIT), primary_key=True),
        Column("operation", Name(NAME_LENGTH), primary_key=True),
        Column("token", BigInteger, nullable=False),
        Column("applied_at", BigInteger, nullable=False),
        **ON_MYSQL,
    )
    Index(f"{operation.name}_applied_at", operation.c.applied_at)
    return metadata, resource, operation


def _given(table: Table, names: Sequence[str]) -> dict[str, BindParameter[Any]]:
    return {name: bindparam(name, type_=table.c[name].type) for name in names}


def _flush(db: Database) -> None:
    if isinstance(db, Session):
        db.flush()


def _not_older(row: Any, token: Any, execution_id: Any) -> ColumnElement[bool]:
    # A store that lost its data could grant a token a second time; only the run that had it first may use it.
    return or_(row.token < token, and_(row.token == token, row.execution_id == execution_id))


def _count(connection: Connection, statement: Executable, parameters: dict[str, Any] | None = None) -> int:
    return cast("CursorResult[Any]", connection.execute(statement, parameters)).rowcount


def _guard(options: dict[str, Any]) -> Guard:
    return Guard(**options)
