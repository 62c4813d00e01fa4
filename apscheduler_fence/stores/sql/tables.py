"""The two tables, their indexes, and the database's clock. All times are BIGINT microseconds since the epoch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Column, Dialect, Index, Integer, MetaData, String, Table, Text
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import CompileError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

from apscheduler_fence.errors import ConfigError

if TYPE_CHECKING:
    from sqlalchemy.sql.compiler import SQLCompiler
    from sqlalchemy.types import TypeEngine

NAME_LENGTH = 191
SLOT_LENGTH = 96
HOLDER_LENGTH = 255

_PREFIX = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")

# --- the clock --------------------------------------------------------------------------------------------------------


class StoreClock(FunctionElement[int]):
    """The database's clock in µs since the epoch, read when the row is judged and not when a transaction began.

    A database of another kind is supported as soon as it has an expression here:

        @compiles(StoreClock, "mssql")
        def _(element, compiler, **kw):
            return "DATEDIFF_BIG(MICROSECOND, '19700101', SYSUTCDATETIME())"
    """

    name = "store_clock"
    type = BigInteger()
    inherit_cache = True


@compiles(StoreClock)
def _unknown_clock(_element: StoreClock, compiler: SQLCompiler, **_: Any) -> str:
    raise CompileError(f"no clock expression for {compiler.dialect.name}")


@compiles(StoreClock, "postgresql")
def _postgresql_clock(_element: StoreClock, _compiler: SQLCompiler, **_: Any) -> str:
    # now() is the start of the transaction, and statement_timestamp() is older than a wait for a row's lock.
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS BIGINT)"


@compiles(StoreClock, "mysql", "mariadb")
def _mysql_clock(_element: StoreClock, _compiler: SQLCompiler, **_: Any) -> str:
    # UNIX_TIMESTAMP(NOW(6)) is an hour off in the hour that daylight saving time repeats.
    return "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"


@compiles(StoreClock, "sqlite")
def _sqlite_clock(_element: StoreClock, _compiler: SQLCompiler, **_: Any) -> str:
    # unixepoch('subsec') is silently NULL before SQLite 3.42.
    return (
        "(CAST(strftime('%s', 'now') AS INTEGER) * 1000000 + CAST(substr(strftime('%f', 'now'), 4) AS INTEGER) * 1000)"
    )


class Greatest(FunctionElement[int]):
    """The largest of its arguments, each evaluated once: a clock that is read twice may have been set back between."""

    name = "greatest"
    type = BigInteger()
    inherit_cache = True


@compiles(Greatest)
def _greatest(element: Greatest, compiler: SQLCompiler, **kw: Any) -> str:
    return f"greatest({compiler.process(element.clauses, **kw)})"


@compiles(Greatest, "sqlite")
def _sqlite_greatest(element: Greatest, compiler: SQLCompiler, **kw: Any) -> str:
    return f"max({compiler.process(element.clauses, **kw)})"


# --- types ------------------------------------------------------------------------------------------------------------


class Name(TypeDecorator[str]):
    """Text that is compared character by character: `job`, `JOB` and `job ` are three names on every database."""

    impl = String
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Choose the collation; the usual ones of MySQL ignore case or trailing spaces, even `utf8mb4_bin`."""
        length = getattr(self.impl_instance, "length", None)
        if dialect.name == "postgresql":
            return dialect.type_descriptor(String(length, collation="C"))
        if dialect.name in ("mysql", "mariadb"):
            exact = "utf8mb4_nopad_bin" if getattr(dialect, "is_mariadb", False) else "utf8mb4_0900_bin"
            return dialect.type_descriptor(mysql.VARCHAR(length, charset="utf8mb4", collation=exact))
        return dialect.type_descriptor(String(length))


class Prose(TypeDecorator[str]):
    """Text that is only shown. What a database cannot hold is escaped: a strange traceback must not block a settle."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Choose a type that holds more than 64 KB."""
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.MEDIUMTEXT(charset="utf8mb4"))
        return Text()

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002 - SQLAlchemy's signature
        """Escape lone surrogates, which are not UTF-8, and NUL, which PostgreSQL refuses."""
        if value is None:
            return None
        return value.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "\\x00")


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tables:
    """The tables of one store."""

    lease: Table
    execution: Table


def tables(prefix: str = "fence_", schema: str | None = None) -> Tables:
    """Lay out the tables. The columns of each come in the order of the dataclass's fields; `namespace` is the last.

    Raises:
        ConfigError: the prefix is not a plain identifier of at most 32 characters.
    """
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        raise ConfigError(
            f"table_prefix={prefix!r}: letters, digits and underscores are allowed, 32 at most, not a digit first"
        )
    options: dict[str, Any] = {
        f"{family}_{option}": value
        for family in ("mysql", "mariadb")
        for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"))
    }
    metadata = MetaData(schema=schema)
    lease = Table(
        f"{prefix}lease",
        metadata,
        Column("name", Name(NAME_LENGTH), primary_key=True),
        Column("token", BigInteger, nullable=False),
        Column("holder", Name(HOLDER_LENGTH)),
        Column("job", Name(NAME_LENGTH)),
        Column("slot", Name(SLOT_LENGTH)),
        Column("acquired_at", BigInteger, nullable=False),
        Column("expires_at", BigInteger),
        Column("hold_until", BigInteger, nullable=False),
        Column("pruned_through", BigInteger, nullable=False),
        Column("func", Prose),
        Column("namespace", Name(NAME_LENGTH), nullable=False),
        **options,
    )
    execution = Table(
        f"{prefix}execution",
        metadata,
        Column("job", Name(NAME_LENGTH), primary_key=True),
        Column("slot", Name(SLOT_LENGTH), primary_key=True),
        Column("lease", Name(NAME_LENGTH), nullable=False),
        Column("slot_at", BigInteger, nullable=False),
        Column("scheduled_at", BigInteger, nullable=False),
        Column("state", Name(16), nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("token", BigInteger, nullable=False),
        Column("holder", Name(HOLDER_LENGTH)),
        Column("delivery", Name(16), nullable=False),
        Column("max_attempts", Integer, nullable=False),
        Column("started_at", BigInteger),
        Column("finished_at", BigInteger),
        Column("error", Prose),
        Column("keep_until", BigInteger),
        Column("func", Prose),
        Column("jobstore", Prose),
        Column("job_id", Prose),
        Column("namespace", Name(NAME_LENGTH), nullable=False),
        **options,
    )
    _index(lease, "held", "namespace", "expires_at", where=lease.c.expires_at.is_not(None))
    # Behind the namespace, since a planner without statistics would use it, not the key, to find one slot of a job.
    _index(execution, "history", "namespace", "job", "slot_at")
    _index(execution, "prune", "namespace", "keep_until", where=execution.c.keep_until.is_not(None))
    _index(execution, "recent", "namespace", "slot_at")
    waiting = execution.c.state == "waiting"
    _index(execution, "waiting", "lease", "state", "slot_at", where=waiting)
    # A partial index of the waiting rows is small enough to be scanned for a namespace; a full one is not.
    _index(execution, "state", "namespace", "state", "slot_at", info={"in place of": "partial indexes"})
    return Tables(lease, execution)


def _index(table: Table, what: str, *columns: str, where: Any = None, info: dict[Any, Any] | None = None) -> None:
    partial = {} if where is None else {"postgresql_where": where, "sqlite_where": where}
    Index(f"{table.name}_{what}", *(table.c[name] for name in columns), info=info, **partial)


def indexes(table: Table, dialect: Dialect) -> list[Index]:
    """List the indexes that a table has on this database."""
    partial = dialect.name in ("postgresql", "sqlite")
    return sorted((i for i in table.indexes if not (partial and i.info)), key=lambda index: str(index.name))
