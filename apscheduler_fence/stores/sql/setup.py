"""What is done once when a store is opened: look at the server, and create what is missing."""

from __future__ import annotations

import random
import sqlite3
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Dialect, inspect, select
from sqlalchemy.exc import DBAPIError, NoSuchTableError
from sqlalchemy.schema import CreateIndex, CreateTable

from apscheduler_fence.errors import ConfigError, StoreError
from apscheduler_fence.stores.sql.engines import dialect_of, is_read_only, is_transient
from apscheduler_fence.stores.sql.tables import StoreClock, Tables, indexes, tables

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Table

CREATIONS = 12
CLOCK_TOLERANCE = 1.0
_NETWORK_FILE_SYSTEMS = frozenset((
    "9p", "afs", "ceph", "cifs", "fakeowner", "fuse.glusterfs", "fuse.s3fs", "fuse.sshfs", "gfs2", "glusterfs", "grpcfuse",
    "lustre", "ncpfs", "nfs", "nfs4", "smb3", "smbfs", "vboxsf", "virtiofs",
))  # fmt: skip

# --- the server -------------------------------------------------------------------------------------------------------


def check_server(connection: Connection) -> list[str]:
    """Say what is unusual about a database.

    Raises:
        ConfigError: it is too old to keep names apart.
    """
    warnings = list(_clock(connection))
    match connection.dialect.name:
        case "sqlite":
            warnings += _sqlite(connection)
        case "postgresql":
            warnings += _postgresql(connection)
        case "mysql" | "mariadb":
            warnings += _mysql(connection)
    return warnings


def _clock(connection: Connection) -> Iterator[str]:
    before = time.time()
    store = int(connection.execute(select(StoreClock())).scalar_one()) / 1e6
    after = time.time()
    behind = max(before - store, store - after)
    if behind > CLOCK_TOLERANCE:
        yield (
            f"this host's clock says {_utc(after)} and the database's {_utc(store)}, {behind:.1f} s apart: leases are "
            "judged by the database's alone, but slots are computed, and misfires judged, by this host's"
        )


def _utc(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def _sqlite(connection: Connection) -> Iterator[str]:
    if sqlite3.sqlite_version_info < (3, 31):
        yield f"SQLite {sqlite3.sqlite_version} is older than 3.31, the oldest version this store is made for"
    journal = "unknown"
    try:
        # One file keeps it for all who open it; readers then never wait for a writer, nor a writer for readers.
        journal = str(connection.exec_driver_sql("PRAGMA journal_mode=WAL").scalar_one())
    except DBAPIError as error:
        if not is_transient(error):
            raise
        journal = str(connection.exec_driver_sql("PRAGMA journal_mode").scalar_one())
    if journal.lower() != "wal":
        yield f"SQLite keeps its journal in mode {journal!r}, not in WAL: nodes will wait for each other more"
    file = next((row[2] for row in connection.exec_driver_sql("PRAGMA database_list") if row[1] == "main"), "")
    kind = file_system(Path(file)) if file else None
    if kind in _NETWORK_FILE_SYSTEMS:
        yield (
            f"{file} is on a file system of type {kind}: SQLite's locks do not work across machines, and several nodes "
            "may run the same slot; use PostgreSQL, MySQL or Redis there"
        )


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """Name the type of the file system that a path is on, where the system says so."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    whole = path.resolve()
    found: dict[int, str] = {}
    for line in lines:
        _, point, kind, *_ = line.split()
        mounted = Path(point.replace("\\040", " "))
        if mounted == whole or mounted in whole.parents:
            found[len(mounted.parts)] = kind  # of several mounts on one point the last counts
    return found[max(found)] if found else None


def _postgresql(connection: Connection) -> Iterator[str]:
    standby, read_only, isolation, commits = connection.exec_driver_sql(
        "SELECT pg_is_in_recovery(), current_setting('default_transaction_read_only'),"
        " current_setting('default_transaction_isolation'), current_setting('synchronous_commit')"
    ).one()
    if standby:
        yield "this PostgreSQL server is a standby: nothing can be claimed there; connect to the primary"
    if read_only == "on":
        yield "default_transaction_read_only is on: nothing can be claimed here"
    if isolation != "read committed":
        yield (
            f"default_transaction_isolation is {isolation!r}: claims work, but those that meet are refused by the server "
            "and sent again; ALTER ROLE … SET default_transaction_isolation = 'read committed' is better for this user"
        )
    if commits == "off":
        yield "synchronous_commit is off: a crash of the server may forget the last claims, and their slots may run twice"


def _mysql(connection: Connection) -> Iterator[str]:
    version, read_only, binary_log = connection.exec_driver_sql(
        "SELECT VERSION(), @@global.read_only, @@binlog_format"
    ).one()
    mariadb = bool(getattr(connection.dialect, "is_mariadb", False))
    name, least = ("MariaDB", (10, 2)) if mariadb else ("MySQL", (8, 0, 17))
    found = tuple(getattr(connection.dialect, "server_version_info", None) or least)
    if found[: len(least)] < least:
        raise ConfigError(
            f"{name} {version} has no collation that tells 'job' from 'job ': "
            f"{name} {'.'.join(map(str, least))} is the oldest that works"
        )
    if read_only:
        yield f"this {name} server is read-only: nothing can be claimed there; connect to the primary"
    if str(binary_log).upper() == "STATEMENT":
        yield "binlog_format is STATEMENT, with which READ COMMITTED transactions are refused: use ROW or MIXED"


# --- the tables -------------------------------------------------------------------------------------------------------


def create_missing(connection: Connection, layout: Tables, *, create: bool) -> list[str]:
    """Create the tables and indexes that are missing, also while others do the same; return warnings.

    Raises:
        StoreError: a table is missing and is not to be created, or could not be.
    """
    if not create:
        missing = [table.fullname for table in _tables(layout) if not _exists(connection, table)]
        if missing:
            raise StoreError(
                f"{' and '.join(missing)} not found, and create_tables is off: run `apscheduler-fence init --sql` and "
                "have the statements it prints executed, or let the store create its tables"
            )
        return []
    failure: DBAPIError | None = None
    for tried in range(CREATIONS):
        missing_parts = list(_missing(connection, layout))
        try:
            for part in missing_parts:
                connection.execute(part)
        except DBAPIError as error:
            if error.connection_invalidated or is_read_only(error):
                raise
            failure = error  # most likely somebody else was faster; what is there by now tells
            time.sleep(random.uniform(0.01, 0.02 * (tried + 1)))  # noqa: S311 - spreads out those that collided
        else:
            return []
    return _left(list(_missing(connection, layout)), failure)


def _left(missing: list[CreateTable | CreateIndex], failure: DBAPIError | None) -> list[str]:
    why = failure.orig if failure is not None else None
    for part in missing:
        if isinstance(part, CreateTable):
            raise StoreError(
                f"{part.element.fullname} could not be created: {why}. If another user creates tables here, run "
                "`apscheduler-fence init --sql` and set create_tables=False"
            ) from why
    return [f"the index {part.element.name} is missing and could not be created: {why}" for part in missing]


def _tables(layout: Tables) -> tuple[Table, Table]:
    return layout.lease, layout.execution


def _exists(connection: Connection, table: Table) -> bool:
    return inspect(connection).has_table(table.name, schema=table.schema)


def _missing(connection: Connection, layout: Tables) -> Iterator[CreateTable | CreateIndex]:
    for table in _tables(layout):
        found = _found_indexes(connection, table)
        if found is None:
            yield CreateTable(table)
        for index in indexes(table, connection.dialect):
            if index.name not in (found or ()):
                yield CreateIndex(index)


def _found_indexes(connection: Connection, table: Table) -> set[Any] | None:
    try:
        return {index["name"] for index in inspect(connection).get_indexes(table.name, schema=table.schema)}
    except NoSuchTableError:
        return None


def ddl(source: str | Dialect, prefix: str = "fence_", schema: str | None = None) -> str:
    """Write the SQL that creates the tables, for those whose administrator runs it.

    Args:
        source: a URL, a dialect, or the name of one (`postgresql`, `mysql`, `mariadb`, `sqlite`). MySQL and MariaDB
            differ.
        prefix: what the tables' names begin with.
        schema: the schema to create them in, which must exist.

    Raises:
        ConfigError: the dialect is not known, or the prefix is not an identifier.
    """
    dialect = source if isinstance(source, Dialect) else dialect_of(source)
    statements: list[CreateTable | CreateIndex] = []
    for table in _tables(tables(prefix, schema)):
        statements.append(CreateTable(table))
        statements += [CreateIndex(index) for index in indexes(table, dialect)]
    return "".join(f"{str(statement.compile(dialect=dialect)).strip()};\n" for statement in statements)
