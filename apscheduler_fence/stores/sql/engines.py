"""Connections of our own: one round trip per statement, a limit on every wait, and one seam where errors change their type."""

from __future__ import annotations

import contextlib
import math
import time
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy import URL, Dialect, Engine, create_engine, event, make_url, select
from sqlalchemy.exc import ArgumentError, CompileError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from apscheduler_fence.errors import ConfigError, StoreError
from apscheduler_fence.stores.base import masked
from apscheduler_fence.stores.sql.tables import StoreClock

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from sqlalchemy.engine import ExceptionContext

R = TypeVar("R")

_DRIVERS = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "mysql": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
}
_EXTRAS = {"postgresql": "postgresql", "mysql": "mysql", "mariadb": "mysql"}

# --- from a URL or an engine to an engine of our own ------------------------------------------------------------------


def url_of(source: str | URL) -> URL:
    """Read a URL; one without a driver gets the driver of this package's extra.

    Raises:
        ConfigError: it is not a URL.
    """
    try:
        url = make_url(source)
    except (ArgumentError, ValueError, TypeError):
        raise ConfigError(
            "the store's URL cannot be read: write dialect+driver://user:password@host/database"
        ) from None
    return url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))


def dialect_of(name: str) -> Dialect:
    """Make the dialect of a URL, or of a bare name such as `postgresql`, without its driver.

    Raises:
        ConfigError: SQLAlchemy does not know it.
    """
    url = url_of(name if "://" in name else f"{name}://")
    try:
        return url.get_dialect()()
    except NoSuchModuleError:
        raise ConfigError(f"{url.drivername!r} is not a database that SQLAlchemy knows") from None


def make_engine(source: URL | Engine, timeout: float) -> Engine:
    """Make the engine that a store uses, and nobody else.

    Every statement commits by itself, and nothing is sent when a connection goes back to the pool. The pool never makes
    anybody wait: it keeps five connections, and those above are closed when they come back.

    Of a live engine only the way to connect is used: its connect arguments and listeners, not its pool and never one of
    its transactions. What it leaves without a limit stays without one, except where a connection can be told later.

    Raises:
        ConfigError: the driver is not installed, or the store can never work with this database.
    """
    url = source if isinstance(source, URL) else source.url
    _refuse_unusable(url)
    arguments: dict[str, Any] = {"connect_args": _limits(url, timeout)}
    if isinstance(source, Engine):
        arguments = {"creator": _connector(source)}
    try:
        engine = create_engine(
            url,
            isolation_level="AUTOCOMMIT",
            pool_reset_on_return=None,
            skip_autocommit_rollback=True,
            pool_size=5,
            max_overflow=-1,
            pool_timeout=timeout,
            pool_use_lifo=True,
            enable_from_linting=False,  # joining one row with another on nothing is what reads and changes do
            **arguments,
        )
    except ModuleNotFoundError as missing:
        raise _driver_missing(url, missing) from missing
    except SQLAlchemyError as error:
        raise ConfigError(f"no engine can be made for {url.render_as_string()}: {error}") from error
    _require_clock(engine)
    event.listen(engine, "connect", _prepare(engine.dialect, timeout))
    event.listen(engine, "handle_error", _drop_read_only)
    if isinstance(source, URL) and "options" in arguments["connect_args"]:
        event.listen(engine, "do_connect", _without_startup_options(url))
    return engine


def _refuse_unusable(url: URL) -> None:
    try:
        dialect = url.get_dialect()
    except NoSuchModuleError:
        raise ConfigError(f"{url.drivername!r} is not a database that SQLAlchemy knows") from None
    except ModuleNotFoundError as missing:
        raise _driver_missing(url, missing) from missing
    if dialect.is_async:
        raise ConfigError(f"{url.drivername!r} is an asynchronous driver: give the URL of a synchronous one")
    if url.get_backend_name() != "sqlite":
        return
    database = url.database or ""
    if database in ("", ":memory:") or "file::memory:" in database or url.query.get("mode") == "memory":
        raise ConfigError("an SQLite database in memory is not shared by anybody: give sqlite:///path, or memory://")


def _driver_missing(url: URL, missing: ModuleNotFoundError) -> ConfigError:
    extra = _EXTRAS.get(url.get_backend_name())
    remedy = f'pip install "apscheduler-fence[{extra}]"' if extra and url.drivername in _DRIVERS.values() else None
    return ConfigError(
        f"the driver {missing.name!r} of {url.drivername!r} is not installed: {remedy or f'pip install {missing.name}'}"
    )


def _connector(engine: Engine) -> Callable[[], Any]:
    pool = engine.pool.recreate()

    def connect() -> Any:
        lent = pool.connect()
        connection = lent.dbapi_connection
        lent.detach()
        return connection

    return connect


def _require_clock(engine: Engine) -> None:
    try:
        select(StoreClock()).compile(dialect=engine.dialect)
    except CompileError:
        name = engine.dialect.name
        raise ConfigError(
            f"{name} has no clock expression yet: register one that gives µs since the epoch, with "
            f'@compiles(StoreClock, "{name}") from apscheduler_fence.stores.sql'
        ) from None


# --- limits -----------------------------------------------------------------------------------------------------------
# A server gives up a little before the client does, so that an ordinary wait ends in its own words and on a usable
# connection. The client's limit is for a server that is frozen or cut off.


def _server_limit(timeout: float) -> int:
    return max(1, round(timeout * 900))


def _limits(url: URL, timeout: float) -> dict[str, Any]:
    whole = max(1, math.ceil(timeout))
    server = _server_limit(timeout)
    given = url.query.get("options")
    own = f"-c statement_timeout={server} -c lock_timeout={server}"
    libpq = {
        "connect_timeout": max(2, whole),
        "tcp_user_timeout": round(timeout * 1000),
        "options": f"{own} {given}" if isinstance(given, str) else own,
    }
    limits: dict[str, dict[str, Any]] = {
        "psycopg": libpq,
        "psycopg2": libpq,
        "pg8000": {"timeout": timeout},
        "pymysql": {"connect_timeout": timeout, "read_timeout": timeout, "write_timeout": timeout},
        "mysqldb": {"connect_timeout": whole, "read_timeout": whole, "write_timeout": whole},
        "mysqlconnector": {"connection_timeout": whole},
        "pysqlite": {"timeout": timeout},
    }
    driver = url.get_driver_name()
    return {name: limit for name, limit in limits.get(driver, {}).items() if name == "options" or name not in url.query}


def _without_startup_options(url: URL) -> Callable[..., Any]:
    # PgBouncer in transaction mode refuses startup options, and a SET instead would leak to other clients. Statements
    # then have the client's limit only; ALTER ROLE … SET statement_timeout gives them the server's.
    given = url.query.get("options")

    def connect(dialect: Dialect, _record: object, arguments: Any, options: dict[str, Any]) -> Any:
        database_api: Any = dialect.dbapi
        try:
            return dialect.connect(*arguments, **options)
        except database_api.OperationalError as refusal:
            ours = options.get("options")
            if ours == given or not any(word in str(refusal) for word in ("startup parameter", "options")):
                raise
        # The dictionary is the engine's own, so that later connections do not ask again.
        if given is None:
            del options["options"]
        else:
            options["options"] = given
        return dialect.connect(*arguments, **options)

    return connect


def _prepare(dialect: Dialect, timeout: float) -> Callable[[Any, object], None]:
    def prepare(connection: Any, _record: object) -> None:
        if dialect.name == "sqlite":
            # WAL with NORMAL may lose the last commits in a power cut, and a slot would run twice.
            _execute(connection, "PRAGMA synchronous=FULL", f"PRAGMA busy_timeout={round(timeout * 1000)}")
        elif dialect.name in ("mysql", "mariadb"):
            _execute(connection, *_mysql_settings(timeout))
        elif dialect.driver == "psycopg":
            _limit_waits(connection, timeout)
            if _is_pooled(connection):
                connection.prepare_threshold = None

    return prepare


def _is_pooled(connection: Any) -> bool:
    # A pooler introduces itself by a process number of its own. It may run each statement on another server connection,
    # where what was prepared on the last one is not known.
    with contextlib.closing(connection.cursor()) as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        return bool(cursor.fetchone()[0] != connection.info.backend_pid)


def _execute(connection: Any, *statements: str) -> None:
    with contextlib.closing(connection.cursor()) as cursor:
        for statement in statements:
            cursor.execute(statement)


def _mysql_settings(timeout: float) -> tuple[str, ...]:
    whole = max(1, math.floor(timeout))
    server = _server_limit(timeout)
    return (
        # REPEATABLE READ locks gaps, in which inserts deadlock.
        "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
        # Each of the two families reads only its own kind of comment. A strict mode, or names too long are cut off.
        (
            f"SET SESSION innodb_lock_wait_timeout={whole}, lock_wait_timeout={whole},"
            " sql_mode=CONCAT_WS(',', NULLIF(@@sql_mode, ''), 'STRICT_ALL_TABLES')"
            f" /*M!100100 , max_statement_time={server / 1000} */ /*!50708 , max_execution_time={server} */"
        ),
    )


def _limit_waits(connection: Any, timeout: float) -> None:
    # psycopg wakes a waiting operation every 0.1 s (since 3.2); it has no limit of its own for a server that is silent.
    wait = connection.wait
    failure = _operational_error(connection)

    def limited(operation: Generator[Any, Any, R]) -> Generator[Any, Any, R]:
        deadline = time.monotonic() + timeout
        try:
            state = next(operation)
            while True:
                ready = yield state
                if not ready and time.monotonic() >= deadline:
                    connection.pgconn.finish()
                    raise failure(f"no answer within {timeout} s")
                state = operation.send(ready)
        except StopIteration as end:
            result: R = end.value
            return result

    connection.wait = lambda operation, *args, **options: wait(limited(operation), *args, **options)


def _operational_error(connection: Any) -> type[Exception]:
    error: type[Exception] = connection.OperationalError
    return error


# --- errors -----------------------------------------------------------------------------------------------------------

_TRANSIENT = frozenset({"40001", "40P01", 1213, 1205, 1020, "SQLITE_BUSY", "SQLITE_LOCKED"})
_READ_ONLY = frozenset({"25006", 1290, 1792, 1836})
_SQLITE = {5: "SQLITE_BUSY", 6: "SQLITE_LOCKED"}


def code_of(error: DBAPIError) -> str | int | None:
    """Find the database's own code: an SQLSTATE, MySQL's number, or the name of an SQLite result."""
    original: Any = error.orig
    if hasattr(original, "sqlite_errorcode"):  # since Python 3.11
        return _SQLITE.get(original.sqlite_errorcode & 0xFF)
    if "database is locked" in str(original) or "database table is locked" in str(original):
        return "SQLITE_BUSY"
    state = getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)
    if state is not None:
        return str(state)
    details = original.args[0] if original is not None and original.args else None
    if isinstance(details, dict):  # pg8000
        details = details.get("C")
    return details if isinstance(details, str | int) else None


def is_transient(error: DBAPIError) -> bool:
    """Whether nothing was applied, and the same may be sent again: a deadlock, a lock that was not free."""
    return code_of(error) in _TRANSIENT


def is_mismatch(error: DBAPIError) -> bool:
    """Whether a single statement undid itself on purpose: the key was taken, or a row was not as expected."""
    return code_of(error) in ("23505", "22012")


def is_read_only(error: DBAPIError) -> bool:
    """Whether the server takes no changes, as a standby does."""
    return code_of(error) in _READ_ONLY


def _drop_read_only(context: ExceptionContext) -> None:
    # After a failover the connections to the old primary go on living; while they do, nobody finds the new one.
    error = context.sqlalchemy_exception
    if isinstance(error, DBAPIError) and is_read_only(error):
        context.is_disconnect = True


@contextlib.contextmanager
def map_errors(doing: str, url: URL) -> Iterator[None]:
    """Turn whatever a database or its driver raises into `StoreError`, with the driver's error as its cause."""
    try:
        yield
    except DBAPIError as error:
        raise StoreError(_described(doing, url, error.orig or error)) from (error.orig or error)
    except (SQLAlchemyError, OSError, UnicodeError, OverflowError) as error:
        raise StoreError(_described(doing, url, error)) from error


def _described(doing: str, url: URL, error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if url.password:
        text = text.replace(str(url.password), "***")
    return f"{doing} failed at {masked(url.render_as_string())}: {text}"
