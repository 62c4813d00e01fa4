"""How reads and changes are written in SQL. Each shape of a change is one statement, built once and compiled once.

The names of a statement's parameters begin with `m_` for the lease move, and `a_` and `b_` for the execution moves.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from sqlalchemy import (
    ARRAY,
    BigInteger,
    ColumnElement,
    Integer,
    String,
    and_,
    bindparam,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects import postgresql

from apscheduler_fence.lease import FINAL_STATES, Execution, Insert, Lease, LeaseMove, Seen, Update
from apscheduler_fence.stores.sql.tables import Greatest, Name, StoreClock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import CTE, Executable, FromClause, Row, Select
    from sqlalchemy.sql import dml

    from apscheduler_fence.lease import Change
    from apscheduler_fence.stores.base import Executions, HeldLeases
    from apscheduler_fence.stores.sql.tables import Tables

S = TypeVar("S")
Parameters: TypeAlias = dict[str, Any]

ABSENT = -1
"""The token of a lease row that stands for none: something to lock where an INSERT cannot be part of the swap."""

_LEASE = tuple(column.name for column in fields(Lease))
_EXECUTION = tuple(column.name for column in fields(Execution))
_PREFIXES = ("a", "b")


@dataclass(frozen=True, slots=True)
class Statements:
    """The statements of one store."""

    tables: Tables
    _built: dict[Any, Any] = field(default_factory=dict)

    def _once(self, shape: Any, build: Callable[[], S]) -> S:
        built: S | None = self._built.get(shape)
        if built is None:
            built = self._built[shape] = build()
        return built

    # --- reads --------------------------------------------------------------------------------------------------------

    def read(self) -> Executable:
        """The clock and the four rows of a key (`lease`, `job`, `slot`), in one row of one statement."""
        return self._once("read", self._read)

    def _read(self) -> Select[Any]:
        lease, execution = self.tables.lease.alias("l"), self.tables.execution.alias("e")
        held = self.tables.execution.alias("h")
        oldest = self.tables.execution
        waiting = (
            select(*(oldest.c[name] for name in _EXECUTION))
            .where(oldest.c.lease == bindparam("lease"), oldest.c.state == literal_column("'waiting'"))
            .order_by(oldest.c.slot_at, oldest.c.job, oldest.c.slot)
            .limit(literal_column("1", Integer))
            .subquery("w")
        )
        one = select(literal_column("1").label("one")).subquery("one")
        source = (
            one.outerjoin(lease, lease.c.name == bindparam("lease"))
            .outerjoin(execution, and_(execution.c.job == bindparam("job"), execution.c.slot == bindparam("slot")))
            .outerjoin(held, and_(held.c.job == lease.c.job, held.c.slot == lease.c.slot))
            .outerjoin(waiting, true())
        )
        return select(
            StoreClock().label("now"),
            *_columns(lease, "l", _LEASE),
            *_columns(execution, "e", _EXECUTION),
            *_columns(held, "h", _EXECUTION),
            *_columns(waiting, "w", _EXECUTION),
        ).select_from(source)

    def held(self, query: HeldLeases, namespace: str) -> tuple[Executable, Parameters]:
        """The leases that are held, each with the run it holds, those first that end first."""
        shape = ("held", query.expired, query.limit is None)
        return self._once(shape, lambda: self._held(query)), {"ns": namespace, "limit": query.limit}

    def _held(self, query: HeldLeases) -> Select[Any]:
        lease, execution = self.tables.lease.alias("l"), self.tables.execution.alias("e")
        statement = (
            select(StoreClock().label("now"), *_columns(lease, "l", _LEASE), *_columns(execution, "e", _EXECUTION))
            .select_from(
                lease.outerjoin(execution, and_(execution.c.job == lease.c.job, execution.c.slot == lease.c.slot))
            )
            .where(lease.c.namespace == bindparam("ns"), lease.c.expires_at.is_not(None))
            .order_by(lease.c.expires_at, lease.c.name)
        )
        if query.expired:
            statement = statement.where(lease.c.expires_at <= _clock_once())
        return statement if query.limit is None else statement.limit(bindparam("limit", type_=Integer))

    def page(
        self, query: Executions, namespace: str, size: int, after: Execution | None
    ) -> tuple[Executable, Parameters]:
        """At most `size` execution rows that a query asks for, behind the row `after`."""
        wanted = {"job": query.job, "lease": query.lease, "slot": query.slot, "since": query.since}
        given = {name: value for name, value in wanted.items() if value is not None}
        shape = ("page", tuple(given), len(query.states), query.oldest_first, after is None)
        parameters = {**given, "ns": namespace, "size": size}
        parameters |= {f"state_{number}": state for number, state in enumerate(query.states)}
        if after is not None:
            parameters |= {"after_at": after.slot_at, "after_job": after.job, "after_slot": after.slot}
        return self._once(shape, lambda: self._page(query, set(given), after is None)), parameters

    def _page(self, query: Executions, given: set[str], first: bool) -> Select[Any]:
        row = self.tables.execution.c
        statement = select(*(row[name] for name in _EXECUTION)).where(row.namespace == bindparam("ns"))
        statement = statement.where(
            *(row[name] == bindparam(name) for name in ("job", "lease", "slot") if name in given)
        )
        if "since" in given:
            statement = statement.where(row.slot_at >= bindparam("since"))
        if query.states:
            states = [row.state == bindparam(f"state_{number}") for number in range(len(query.states))]
            statement = statement.where(or_(*states))
        order: list[ColumnElement[Any]] = [row.slot_at, row.job, row.slot]
        if not first:
            at = bindparam("after_at", type_=BigInteger)
            job, slot = bindparam("after_job", type_=Name()), bindparam("after_slot", type_=Name())
            beyond = _greater if query.oldest_first else _less
            statement = statement.where(
                row.slot_at >= at if query.oldest_first else row.slot_at <= at,
                or_(
                    beyond(row.slot_at, at),
                    and_(row.slot_at == at, or_(beyond(row.job, job), and_(row.job == job, beyond(row.slot, slot)))),
                ),
            )
        if not query.oldest_first:
            order = [column.desc() for column in order]
        return statement.order_by(*order).limit(bindparam("size", type_=Integer))

    # --- the lease's move ---------------------------------------------------------------------------------------------

    def move_lease(self, move: LeaseMove) -> Executable:
        """UPDATE the row if it is as expected, for dialects that count rows. An absent row was seeded before."""
        shape = ("move", _lease_shape(move))
        return self._once(shape, lambda: self._update_lease(move))

    def compare_lease(self, move: LeaseMove) -> Executable:
        """Lock the row if it is as expected: what a move that writes nothing comes to."""
        lease = self.tables.lease
        shape = ("compare", _lease_shape(move))
        return self._once(shape, lambda: select(lease.c.token).where(*self._found(move)).with_for_update())

    def token(self) -> Executable:
        """The token of the lease `name`."""
        lease = self.tables.lease
        return self._once("token", lambda: select(lease.c.token).where(lease.c.name == bindparam("name")))

    def seed(self) -> Executable:
        """A row that stands for none (`m_name`, `ns`); it fails on the key if there is a row of any kind."""
        return self._once("seed", lambda: insert(self.tables.lease).values(self._new_lease("m_name", ABSENT)))

    def _new_lease(self, name: str, token: int) -> dict[str, Any]:
        return {
            "name": bindparam(name, type_=Name()),
            "namespace": bindparam("ns", type_=Name()),
            "token": literal_column(str(token), BigInteger),
            "acquired_at": literal_column("0", BigInteger),
            "hold_until": literal_column("0", BigInteger),
            "pruned_through": literal_column("0", BigInteger),
        }

    def _found(self, move: LeaseMove) -> list[ColumnElement[bool]]:
        lease = self.tables.lease.c
        found = [lease.name == bindparam("m_name")]
        if move.token is None:
            found.append(lease.token == ABSENT)
        else:
            found.append(lease.token == bindparam("m_token"))
        found.append(lease.holder.is_(None) if move.holder is None else lease.holder == bindparam("m_holder"))
        over = or_(lease.expires_at.is_(None), lease.expires_at <= StoreClock())
        match move.condition:
            case "live":
                found.append(lease.expires_at > StoreClock())
            case "over":
                found.append(over)
            case "open":
                found += [over, lease.hold_until <= StoreClock()]
            case "any":
                pass
        return found

    def _written(self, move: LeaseMove) -> dict[str, Any]:
        last: ColumnElement[int] = (
            self.tables.lease.c.token if move.token is not None else literal_column("0", BigInteger)
        )
        following = Greatest(last + literal_column("1", BigInteger), StoreClock())
        expires = StoreClock() + bindparam("m_most", type_=BigInteger)
        match move.write:
            case "grant":
                return {
                    "token": following,
                    "holder": bindparam("m_new_holder"),
                    "job": bindparam("m_job"),
                    "slot": bindparam("m_slot"),
                    "acquired_at": StoreClock(),
                    "expires_at": expires,
                    "hold_until": StoreClock() + bindparam("m_least", type_=BigInteger),
                    "func": bindparam("m_func"),
                }
            case "regrant":
                return {"token": following, "holder": bindparam("m_new_holder"), "expires_at": expires}
            # The three below write the token that is there, except that a row which stood for none becomes one.
            case "extend":
                return {"token": last, "expires_at": expires}
            case "free":
                return {"token": last, "holder": null(), "job": null(), "slot": null(), "expires_at": null()}
            case "bump":
                return {"token": following}
            case "none":
                return {"token": last}

    def _update_lease(self, move: LeaseMove) -> dml.Update:
        return update(self.tables.lease).values(self._written(move)).where(*self._found(move))

    def _insert_lease(self, move: LeaseMove) -> dml.Insert:
        row = {**self._new_lease("m_name", 0), **self._written(move)}
        return postgresql.insert(self.tables.lease).values(row).on_conflict_do_nothing()

    # --- an execution's move ------------------------------------------------------------------------------------------

    def move_row(self, number: int, move: Insert | Update) -> Executable:
        """INSERT or UPDATE one execution row, with the token of this change as the parameter `granted`."""
        shape = ("row", number, _row_shape(move))
        token = bindparam("granted", type_=BigInteger)
        return self._once(shape, lambda: self._move_row(_PREFIXES[number], move, token, None))

    def _move_row(self, prefix: str, move: Insert | Update, token: Any, moved: CTE | None) -> dml.Insert | dml.Update:
        row = self.tables.execution
        if isinstance(move, Insert):
            return self._insert_row(prefix, move, token, moved)
        values: dict[str, Any] = {
            "state": bindparam(f"{prefix}_state"),
            "attempt": bindparam(f"{prefix}_attempt"),
            "holder": bindparam(f"{prefix}_holder"),
            "finished_at": null(),
            "keep_until": null(),
        }
        if move.granted:
            values |= {"token": token, "started_at": StoreClock()}
        if move.state in FINAL_STATES:
            kept = StoreClock() + bindparam(f"{prefix}_keep_for", type_=BigInteger)
            values |= {"finished_at": StoreClock(), "keep_until": kept}
        values |= {
            name: bindparam(f"{prefix}_{name}") for name in ("max_attempts", "error") if getattr(move, name) is not None
        }
        statement = update(row).values(values)
        if moved is not None:
            statement = statement.where(moved.c.token.is_not(None))
        return statement.where(
            row.c.job == bindparam(f"{prefix}_job"),
            row.c.slot == bindparam(f"{prefix}_slot"),
            row.c.state == bindparam(f"{prefix}_was"),
            row.c.token == bindparam(f"{prefix}_token"),
        )

    def _insert_row(self, prefix: str, move: Insert, token: Any, moved: CTE | None) -> dml.Insert:
        table = self.tables.execution
        values: dict[str, Any] = {name: bindparam(f"{prefix}_{name}", type_=table.c[name].type) for name in _EXECUTION}
        values["namespace"] = bindparam("ns", type_=Name())
        if move.row.state == "running":
            values |= {"token": token, "started_at": StoreClock()}
        if moved is None:
            return insert(table).values(values)
        # Plain on purpose, without ON CONFLICT: a taken key must undo the lease's move with it.
        return insert(table).from_select(list(values), select(*values.values()).select_from(moved))

    # --- a whole change in one statement, for PostgreSQL --------------------------------------------------------------

    def whole(self, change: Change) -> Executable:
        """Everything a change does; it gives the token if it matched, and no row or an error that undoes it if not."""
        move = change.lease
        shape = ("whole", move and _lease_shape(move), tuple(map(_row_shape, change.executions)))
        return self._once(shape, lambda: self._whole(change))

    def _whole(self, change: Change) -> Select[Any]:
        move, token = change.lease, self.tables.lease.c.token
        if move is None:
            moved = select(literal_column("0", BigInteger).label("token")).cte("moved")
        else:
            build = self._insert_lease if move.token is None else self._update_lease
            moved = build(move).returning(token).cte("moved")
        result = select(moved.c.token)
        for prefix, row in zip(_PREFIXES, change.executions, strict=False):
            statement = self._move_row(prefix, row, moved.c.token, moved)
            done = statement.returning(self.tables.execution.c.attempt).cte(f"row_{prefix}")
            if isinstance(row, Insert):
                result = result.add_cte(done)
            else:
                # The lease has moved, so a row that was not as expected must undo that: the division by zero does. It
                # is no constant, which would be worked out, and fail, in any case.
                count = select(func.count()).select_from(done).scalar_subquery()
                result = result.add_columns(literal_column("1").op("/")(count))
        return result

    def extend_all(self) -> Executable:
        """Extend each lease of four arrays (`names`, `tokens`, `holders`, `most`) that is live; gives the keys of those."""
        return self._once("extend all", self._extend_all)

    def _extend_all(self) -> Executable:
        lease = self.tables.lease
        mine = (
            func.unnest(
                bindparam("names", type_=ARRAY(String)),
                bindparam("tokens", type_=ARRAY(BigInteger)),
                bindparam("holders", type_=ARRAY(String)),
                bindparam("most", type_=ARRAY(BigInteger)),
            )
            .table_valued("name", "token", "holder", "most", name="mine")
            .render_derived()
        )
        return (
            update(lease)
            .values(expires_at=StoreClock() + mine.c.most)
            .where(
                lease.c.name == mine.c.name,
                lease.c.token == mine.c.token,
                lease.c.holder == mine.c.holder,
                lease.c.expires_at > StoreClock(),
            )
            .returning(lease.c.name, lease.c.token, lease.c.holder)
        )

    # --- pruning ------------------------------------------------------------------------------------------------------

    def old(self) -> Executable:
        """At most `limit` rows of the namespace `ns` that are past their `keep_until`."""
        row = self.tables.execution.c
        return self._once(
            "old",
            lambda: (
                select(row.job, row.slot, row.lease, row.slot_at, row.token)
                .where(row.namespace == bindparam("ns"), row.keep_until <= _clock_once())
                .order_by(row.keep_until)
                .limit(bindparam("limit", type_=Integer))
            ),
        )

    def note_pruned(self) -> Executable:
        """Write `pruned_through` of the lease `m_name`; a row that stood for none becomes one with token `m_token`."""
        lease = self.tables.lease
        return self._once(
            "note pruned",
            lambda: (
                update(lease)
                .values(
                    token=Greatest(lease.c.token, bindparam("m_token", type_=BigInteger)),
                    pruned_through=Greatest(lease.c.pruned_through, bindparam("m_through", type_=BigInteger)),
                )
                .where(lease.c.name == bindparam("m_name"))
            ),
        )

    def delete_old(self) -> Executable:
        """Delete the row `a_job`, `a_slot` if it is still past its `keep_until`: it may have been revived."""
        row = self.tables.execution
        return self._once(
            "delete old",
            lambda: row.delete().where(
                row.c.job == bindparam("a_job"), row.c.slot == bindparam("a_slot"), row.c.keep_until <= StoreClock()
            ),
        )


# --- shapes and parameters --------------------------------------------------------------------------------------------


def _lease_shape(move: LeaseMove) -> tuple[Any, ...]:
    return (move.token is None, move.holder is None, move.condition, move.write)


def _row_shape(move: Insert | Update) -> tuple[Any, ...]:
    if isinstance(move, Insert):
        return ("insert", move.row.state == "running")
    return ("update", move.granted, move.state in FINAL_STATES, move.max_attempts is None, move.error is None)


def lease_parameters(move: LeaseMove) -> Parameters:
    """The parameters of a lease move."""
    return {
        "m_name": move.name,
        "m_token": move.token,
        "m_holder": move.holder,
        "m_new_holder": move.new_holder,
        "m_job": move.job,
        "m_slot": move.slot,
        "m_most": move.lock_at_most,
        "m_least": move.lock_at_least,
        "m_func": move.func,
    }


def row_parameters(number: int, move: Insert | Update) -> Parameters:
    """The parameters of an execution move."""
    values = move.row if isinstance(move, Insert) else move
    prefix = _PREFIXES[number]
    return {f"{prefix}_{item.name}": getattr(values, item.name) for item in fields(values)}


def _columns(source: FromClause, prefix: str, names: Sequence[str]) -> list[ColumnElement[Any]]:
    return [source.c[name].label(f"{prefix}_{name}") for name in names]


def _clock_once() -> Any:
    # PostgreSQL uses an index only for a value that is worked out once.
    return select(StoreClock()).scalar_subquery()


def _greater(column: Any, value: Any) -> Any:
    return column > value


def _less(column: Any, value: Any) -> Any:
    return column < value


# --- rows -------------------------------------------------------------------------------------------------------------


def execution_of(values: Sequence[Any]) -> Execution | None:
    """The execution in a row's columns; None where an outer join found nothing."""
    return None if values[0] is None else Execution(*values)


def seen_of(row: Row[Any]) -> Seen:
    """What `read` saw."""
    now, values = row[0], row[1:]
    lease = _lease_of(values[: len(_LEASE)])
    rest = values[len(_LEASE) :]
    size = len(_EXECUTION)
    execution, holding, waiting = (execution_of(rest[at : at + size]) for at in (0, size, 2 * size))
    return Seen(now, lease, execution, holding, waiting)


def held_of(row: Row[Any]) -> Seen:
    """One lease of `held`."""
    now, values = row[0], row[1:]
    execution = execution_of(values[len(_LEASE) :])
    return Seen(now, _lease_of(values[: len(_LEASE)]), execution, execution)


def _lease_of(values: Sequence[Any]) -> Lease | None:
    lease = None if values[0] is None else Lease(*values)
    return None if lease is not None and lease.token == ABSENT else lease


def never(move: LeaseMove) -> bool:
    """Whether a move cannot match: a row that is not there is not live."""
    return move.token is None and (move.condition == "live" or move.holder is not None)
