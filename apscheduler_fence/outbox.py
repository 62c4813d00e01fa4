"""Messages written in the caller's transaction and dispatched later: what is to be sent commits together with why.

A relay claims messages that are due for a while, sends them outside of any transaction, and records what came of it. If
it dies between sending and recording, the message is sent again *under the same idempotency key*: no outbox can close
that window, only an endpoint that deduplicates.

    add (in the caller's transaction) ─▶ waiting ─▶ claimed ─▶ sent ─▶ (pruned)
                                            ▲          ├─▶ failed: due again later ─▶ dead, after max_attempts
                                            └──────────┘ the claim is over: the relay has died

Nothing is selected by position: numbers are given out before their transactions commit, and a relay that remembered the
last one would miss those that commit late. Within an order key only the oldest message that is not sent is ever due.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast, get_args

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    UniqueConstraint,
    and_,
    create_engine,
    delete,
    exists,
    insert,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError

from apscheduler_fence.bearer import EXECUTION_LIMIT, bearer_of
from apscheduler_fence.errors import ConfigError, FenceError
from apscheduler_fence.fence import KEY_LIMIT, current_fence, idempotency_key
from apscheduler_fence.policy import elapsed, in_micros, instant, parse_duration, trusted_for
from apscheduler_fence.slots import validate_name
from apscheduler_fence.stores.sql.callers import ON_MYSQL, checked_prefix, connection_of, create_tables
from apscheduler_fence.stores.sql.engines import is_transient, url_of
from apscheduler_fence.stores.sql.tables import NAME_LENGTH, Name, Prose, StoreClock

if TYPE_CHECKING:
    from sqlalchemy import URL, ColumnElement, Connection, CursorResult, Executable, Row

    from apscheduler_fence.bearer import Bears
    from apscheduler_fence.policy import Duration, Instant
    from apscheduler_fence.stores.sql.callers import Database

logger = logging.getLogger(__name__)

T = TypeVar("T")

MessageState = Literal["waiting", "sent", "dead"]
TRIES = 8
"""How often a step is made that the database undoes because of what others did at the same time."""
ERROR_LIMIT = 2000
PRUNED_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Message:
    """What a handler sends.

    Attributes:
        id: a UUID of this message.
        topic: what `add` was told.
        payload: what `add` was given, after a journey through JSON.
        idempotency_key: the same however often the message is sent: at most 255 ASCII characters, to be handed to the
            endpoint. As a header: `Idempotency-Key: "<key>"`.
        attempt: 1 for the first. From 2 on the message may have arrived before.
    """

    id: str
    topic: str
    payload: Any
    idempotency_key: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Entry:
    """A message as it stands in the outbox, for people. Times are in UTC."""

    message: Message
    state: MessageState
    execution_id: str
    order_key: str | None
    created_at: datetime
    due_at: datetime
    sent_at: datetime | None
    failures: int
    error: str | None


Handler: TypeAlias = Callable[[Message], object] | Callable[[Message], Awaitable[object]]
Flow: TypeAlias = Generator[Message, BaseException | None, int]


class Outbox:
    """A table of messages beside the caller's own tables.

    Args:
        source: the engine of the database that the table is in, or its URL. Relays use it; `add` uses the caller's
            connection.
        table_prefix: how the table's name begins: `fence_outbox`.
        schema: where it is, if not in the connection's default schema.
        batch: how many messages a relay claims at once.
        claim_for: for how long they are its own. A message that takes longer to send is sent again by another relay.
        max_attempts: failures after which a message is parked as dead. The later ones of its order key wait until
            somebody retries or purges it.
        backoff: how long the second attempt waits; each further one waits twice as long, less up to a half at random.
        max_backoff: the longest wait.
        retention: how long sent messages are kept. An execution that is repeated after that adds its messages again:
            keep them for as long as the scheduler keeps executions.

    Raises:
        ConfigError: an option is not allowed.
    """

    def __init__(
        self,
        source: Engine | URL | str,
        *,
        table_prefix: str = "fence_",
        schema: str | None = None,
        batch: int = 50,
        claim_for: Duration = "1m",
        max_attempts: int = 10,
        backoff: Duration = "1s",
        max_backoff: Duration = "10m",
        retention: Duration = "30d",
    ) -> None:
        if batch < 1 or max_attempts < 1:
            raise ConfigError("batch and max_attempts of an outbox: 1 or more")
        self._engine = source if isinstance(source, Engine) else create_engine(url_of(source))
        self.metadata, self._table = _table(table_prefix, schema)
        self._batch = batch
        self._claim_for = parse_duration(claim_for, "claim_for")
        self._max_attempts = max_attempts
        self._backoff = parse_duration(backoff, "backoff")
        self._max_backoff = parse_duration(max_backoff, "max_backoff")
        self._retention = parse_duration(retention, "retention")

    def create(self, bind: Engine | Connection | None = None) -> None:
        """Create the table if it is missing."""
        create_tables(self._engine if bind is None else bind, self.metadata)

    def close(self) -> None:
        """Close every connection that is not in use; the next call opens new ones."""
        self._engine.dispose()

    # --- writing ------------------------------------------------------------------------------------------------------

    def add(
        self,
        db: Database,
        topic: str,
        payload: Any,
        *,
        key: str,
        order_key: str | None = None,
        fence: Bears | None = None,
    ) -> bool:
        """Write a message in the caller's transaction: it is sent if, and only if, that commits.

        Args:
            db: a connection or session in a transaction; of an asynchronous one, `await db.run_sync(...)` lends it.
            topic: what the handler tells messages apart by (at most 191 characters).
            payload: anything that JSON can hold.
            key: names the message within its execution (at most 191 characters). A later attempt that adds it again adds
                nothing: the first one stands.
            order_key: messages with the same one are sent in the order in which they were added (at most 191 characters).
            fence: by which run; by default, by the job which this code is part of.

        Returns:
            Whether it is new.

        Raises:
            FenceError: there is no transaction here, or no fence.
            ConfigError: a name is not allowed.
            TypeError, ValueError: JSON cannot hold the payload.
        """
        execution_id = bearer_of(fence).execution_id
        number = str(uuid.uuid4())
        values = {
            "id": number,
            "aggregatetype": validate_name(topic, "topic"),
            "aggregateid": number if order_key is None else validate_name(order_key, "order_key"),
            "type": topic,
            "payload": json.dumps(payload, allow_nan=False),
            "execution_id": execution_id,
            "key": validate_name(key, "key"),
            "idempotency_key": idempotency_key(execution_id, key),
            "attempt": 0,
            "failures": 0,
            "created_at": StoreClock(),
            "due_at": StoreClock(),
        }
        return self._insert(connection_of(db), values)

    def _insert(self, connection: Connection, values: dict[str, Any]) -> bool:
        dialect = connection.dialect.name
        families: dict[str, Any] = {"postgresql": postgresql, "sqlite": sqlite}
        if dialect in families:
            statement = families[dialect].insert(self._table).inline().values(values).on_conflict_do_nothing()
            return _count(connection, statement.execution_options(preserve_rowcount=True)) == 1
        # MySQL undoes only the statement; of others that is not known.
        undo = contextlib.nullcontext() if dialect in ("mysql", "mariadb") else connection.begin_nested()
        try:
            with undo:
                connection.execute(insert(self._table).inline().values(values))
        except IntegrityError:
            return False
        return True

    # --- sending ------------------------------------------------------------------------------------------------------

    def relay(self, handler: Handler) -> int:
        """Send what is due, until nothing is, and return how many messages were sent: a job function to schedule.

        An exception of the handler is a failed attempt of that message, and the others go on. Any number of relays may
        run at the same time. In a fenced job it ends when the job's lease is lost.

        Args:
            handler: called with one `Message` after the other; a coroutine function is awaited.
        """
        if _is_async(handler):
            return asyncio.run(self.relay_async(handler))
        with contextlib.closing(self._flow()) as flow:
            step = _next(flow, None)
            while isinstance(step, Message):
                step = _next(flow, _attempt(handler, step))
            return step

    async def relay_async(self, handler: Handler) -> int:
        """`relay` as a coroutine: the handler runs on this event loop, and waits for the database do not block it."""
        flow, error = self._flow(), None
        step: asyncio.Future[Message | int] | None = None
        try:
            while True:
                step = asyncio.ensure_future(asyncio.to_thread(_next, flow, error))
                message = await asyncio.shield(step)
                if not isinstance(message, Message):
                    return message
                error = await _attempt_async(handler, message)
        finally:
            if step is not None and not step.done():
                await asyncio.wait([step])
            await asyncio.to_thread(flow.close)

    def _flow(self) -> Flow:
        """Claim, hand out one by one, record what it is told; how sending waits is the driver's business."""
        sent = 0
        while not _lease_lost():
            since, relay = instant(), uuid.uuid4().hex
            rows = self._transact(partial(self._claim, relay))
            if not rows:
                break
            in_flight: Row[Any] | None = None
            try:
                while rows and self._still_mine(since) and not _lease_lost():
                    in_flight = rows.pop(0)
                    error = yield _message(in_flight)
                    self._record(in_flight, relay, error)
                    in_flight = None
                    sent += error is None
            finally:
                if rows or in_flight is not None:
                    self._transact(partial(self._give_back, relay, [row.seq for row in rows]))
        self.prune()
        return sent

    def _still_mine(self, since: Instant) -> bool:
        return elapsed(since, instant()) < trusted_for(self._claim_for)

    def _claim(self, relay: str, connection: Connection) -> list[Row[Any]]:
        table = self._table
        earlier = table.alias("earlier")
        first_of_its_order = ~exists().where(
            earlier.c.aggregateid == table.c.aggregateid, earlier.c.seq < table.c.seq, earlier.c.sent_at.is_(None)
        )
        due = (
            select(table.c.seq)
            .where(self._claimable(), table.c.due_at <= StoreClock(), first_of_its_order)
            .order_by(table.c.seq)
            .limit(self._batch)
        )
        if _skips_locked(connection):
            due = due.with_for_update(skip_locked=True)
        found = list(connection.execute(due).scalars())
        if not found:
            return []
        claimed = update(table).values(
            claimed_by=relay,
            claimed_until=StoreClock() + in_micros(self._claim_for),
            attempt=table.c.attempt + 1,
        )
        # Where rows cannot be locked by reading them, this comparison decides who gets them.
        _count(connection, claimed.where(table.c.seq.in_(found), self._claimable()))
        mine = select(table).where(table.c.seq.in_(found), table.c.claimed_by == relay).order_by(table.c.seq)
        return list(connection.execute(mine))

    def _claimable(self) -> ColumnElement[bool]:
        row = self._table.c
        return and_(
            row.sent_at.is_(None),
            row.dead_at.is_(None),
            or_(row.claimed_until.is_(None), row.claimed_until <= StoreClock()),
        )

    def _record(self, row: Row[Any], relay: str, error: BaseException | None) -> None:
        changes: dict[str, Any] = {"claimed_by": null(), "claimed_until": null()}
        if error is None:
            changes |= {"sent_at": StoreClock(), "error": null()}
        else:
            changes |= self._after_failure(row, error)
        table = self._table
        mine = (table.c.seq == row.seq, table.c.claimed_by == relay)
        recorded = self._transact(lambda db: _count(db, update(table).values(changes).where(*mine)))
        if not recorded:
            logger.warning(
                "Message %s (%s) took longer than its claim, and another relay may have sent it again", row.id, row.type
            )

    def _after_failure(self, row: Row[Any], error: BaseException) -> dict[str, Any]:
        failures = row.failures + 1
        text = f"{type(error).__name__}: {error}"[:ERROR_LIMIT]
        if failures >= self._max_attempts:
            logger.error(
                "Message %s (%s) is dead after %s failures, and holds up what comes after it in its order: %s",
                row.id, row.type, failures, text,
            )  # fmt: skip
            return {"failures": failures, "error": text, "dead_at": StoreClock()}
        longest = min(self._max_backoff, self._backoff * 2 ** min(failures - 1, 32))
        wait = longest * random.uniform(0.5, 1)  # noqa: S311 - spreads retries out
        logger.warning("Message %s (%s) failed, again in %s: %s", row.id, row.type, wait, text)
        return {"failures": failures, "error": text, "due_at": StoreClock() + in_micros(wait)}

    def _give_back(self, relay: str, unsent: Sequence[int], connection: Connection) -> None:
        table = self._table
        free = update(table).values(claimed_by=null(), claimed_until=null()).where(table.c.claimed_by == relay)
        _count(connection, free.values(attempt=table.c.attempt - 1).where(table.c.seq.in_(unsent)))
        _count(connection, free)

    # --- looking after it ---------------------------------------------------------------------------------------------

    def entries(self, state: MessageState | None = None, *, limit: int = 100) -> list[Entry]:
        """List messages, oldest first.

        Raises:
            ConfigError: there is no such state.
        """
        wanted = select(self._table).order_by(self._table.c.seq).limit(limit)
        if state is not None:
            wanted = wanted.where(self._in_state(state))
        return self._transact(lambda db: [_entry(row) for row in db.execute(wanted)])

    def retry(self, *ids: str) -> int:
        """Send dead messages again: these, or all of them; return how many."""
        table = self._table
        again = update(table).values(dead_at=null(), failures=0, due_at=StoreClock()).where(self._in_state("dead"))
        if ids:
            again = again.where(table.c.id.in_(ids))
        return self._transact(lambda db: _count(db, again))

    def purge(self, state: Literal["sent", "dead"], older_than: Duration = 0) -> int:
        """Delete all messages that were sent, or parked, longer ago than this, and return how many.

        Raises:
            ConfigError: messages in this state are not there to be purged.
        """
        if state not in ("sent", "dead"):
            raise ConfigError(f"state={state!r}: messages are purged when they are 'sent' or 'dead'")
        age, gone = parse_duration(older_than, "older_than"), 0
        while deleted := self._transact(partial(self._delete, state, age)):
            gone += deleted
        return gone

    def prune(self) -> int:
        """Delete messages that were sent before `retention`, 1,000 at most, and return how many. Relays do it, too."""
        return self._transact(partial(self._delete, "sent", self._retention))

    def _delete(self, state: Literal["sent", "dead"], age: timedelta, connection: Connection) -> int:
        table = self._table
        since = table.c.sent_at if state == "sent" else table.c.dead_at
        old = select(table.c.seq).where(since <= StoreClock() - in_micros(age)).limit(PRUNED_AT_ONCE)
        found = list(connection.execute(old).scalars())
        return _count(connection, delete(table).where(table.c.seq.in_(found), since.is_not(None))) if found else 0

    def _in_state(self, state: MessageState) -> ColumnElement[bool]:
        if state not in get_args(MessageState):
            raise ConfigError(f"state={state!r}: there are {', '.join(get_args(MessageState))}")
        row = self._table.c
        if state == "sent":
            return row.sent_at.is_not(None)
        return and_(row.sent_at.is_(None), row.dead_at.is_not(None) if state == "dead" else row.dead_at.is_(None))

    def _transact(self, work: Callable[[Connection], T]) -> T:
        for tried in range(1, TRIES + 1):
            try:
                with self._engine.connect() as connection:
                    if connection.dialect.name != "sqlite":
                        connection.execution_options(isolation_level="READ COMMITTED")
                    with connection.begin():
                        return work(connection)
            except DBAPIError as error:
                if tried == TRIES or not is_transient(error):
                    raise
            time.sleep(random.uniform(0, 0.01 * 2**tried))  # noqa: S311 - spreads out those that collided
        raise AssertionError


# --- handlers ---------------------------------------------------------------------------------------------------------


def _is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


def _next(flow: Flow, error: BaseException | None) -> Message | int:
    # A StopIteration could not be handed from a thread to an event loop.
    try:
        return flow.send(error) if inspect.getgeneratorstate(flow) != inspect.GEN_CREATED else next(flow)
    except StopIteration as end:
        return cast("int", end.value)


def _attempt(handler: Handler, message: Message) -> Exception | None:
    try:
        handler(message)
    except Exception as error:  # noqa: BLE001 - whatever it is, this message was not sent and others can be
        return error
    return None


async def _attempt_async(handler: Handler, message: Message) -> Exception | None:
    try:
        sending = handler(message)
        if inspect.isawaitable(sending):
            await sending
    except Exception as error:  # noqa: BLE001 - as above
        return error
    return None


def _lease_lost() -> bool:
    try:
        return current_fence().lost
    except FenceError:  # a relay needs no fence: the claims are enough
        return False


# --- rows -------------------------------------------------------------------------------------------------------------


def _table(prefix: str, schema: str | None) -> tuple[MetaData, Table]:
    """Lay out the table. `id` to `payload` are named as Debezium's outbox event router expects them."""
    metadata = MetaData(schema=schema)
    table = Table(
        f"{checked_prefix(prefix)}outbox",
        metadata,
        Column("seq", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True, autoincrement=True),
        Column("id", String(36), nullable=False, unique=True),
        Column("aggregatetype", Name(NAME_LENGTH), nullable=False),
        Column("aggregateid", Name(NAME_LENGTH), nullable=False),
        Column("type", Name(NAME_LENGTH), nullable=False),
        Column("payload", Prose, nullable=False),
        Column("execution_id", Name(EXECUTION_LIMIT), nullable=False),
        Column("key", Name(NAME_LENGTH), nullable=False),
        Column("idempotency_key", Name(KEY_LIMIT), nullable=False),
        Column("attempt", Integer, nullable=False),
        Column("failures", Integer, nullable=False),
        Column("error", Prose),
        Column("created_at", BigInteger, nullable=False),
        Column("due_at", BigInteger, nullable=False),
        Column("claimed_by", Name(NAME_LENGTH)),
        Column("claimed_until", BigInteger),
        Column("sent_at", BigInteger),
        Column("dead_at", BigInteger),
        UniqueConstraint("execution_id", "key", name=f"{prefix}outbox_once"),
        **ON_MYSQL,
    )
    unsent: dict[str, Any] = {f"{family}_where": table.c.sent_at.is_(None) for family in ("postgresql", "sqlite")}
    Index(f"{table.name}_due", table.c.sent_at, table.c.dead_at, table.c.due_at, **unsent)
    Index(f"{table.name}_order", table.c.aggregateid, table.c.seq, **unsent)
    Index(f"{table.name}_sent", table.c.sent_at)
    return metadata, table


def _message(row: Row[Any]) -> Message:
    return Message(row.id, row.aggregatetype, json.loads(row.payload), row.idempotency_key, row.attempt)


def _entry(row: Row[Any]) -> Entry:
    state: MessageState = "sent" if row.sent_at is not None else "dead" if row.dead_at is not None else "waiting"
    order_key = None if row.aggregateid == row.id else row.aggregateid
    return Entry(
        _message(row), state, row.execution_id, order_key, _at(row.created_at), _at(row.due_at),
        None if row.sent_at is None else _at(row.sent_at), row.failures, row.error,
    )  # fmt: skip


def _at(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=micros)


def _skips_locked(connection: Connection) -> bool:
    dialect = connection.dialect
    if dialect.name not in ("mysql", "mariadb"):
        return dialect.name == "postgresql"
    since = (10, 6) if getattr(dialect, "is_mariadb", False) else (8, 0, 1)
    return tuple(getattr(dialect, "server_version_info", None) or ()) >= since


def _count(connection: Connection, statement: Executable) -> int:
    return cast("CursorResult[Any]", connection.execute(statement)).rowcount
