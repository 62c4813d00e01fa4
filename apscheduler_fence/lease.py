"""Who may work, decided by comparing what was read.

This module holds every rule of the protocol, as pure functions. A store holds none: it is a set of registers that are
read together with the store's clock and swapped by comparison. What a node wants is an `Ask`; what it read is a `Seen`;
a rule turns the two into a `Change` (try this swap) or a `Refusal` (an expected "no").

One lease row says who may work under a lease name now, and with which token. One execution row says what became of one
slot. They move together, and an execution is *running* if and only if its lease holds it under the token the row names:

                     claim (token grows, holder = a nonce of this claim)
        FREE ────────────────────────────────────────────────────────────────▶ HELD ──┐ renew: not over yet, still mine
         ▲                                                                       │ ◀──┘ retry: as renew, new token and nonce
         │   settle: still mine, whatever the clock says                         │
         ├───────────────────────────────────────────────────────────────────────┤
         │   abandon: over, as seen          release: as seen (an operator)      │ expires_at passes
         └───────────────────────────────────────────────────────────────────────┤
                                                                                 ▼
        HELD by the next ◀──── claim, take over: the displaced run becomes ──── OVER
                               lost, or waiting for its next attempt

        execution:  (absent) ─▶ running ─▶ succeeded | failed | cancelled | lost | superseded
                       └──────▶ waiting ─▶ running        running ─▶ waiting ─▶ running   (at least once: next attempt)

Three properties carry the rest:

* Every move but renewal changes the token or the holder, and renewal never revives a lease that is over. So an expiry
  that was judged when the row was read is still true when the swap arrives, however late that is.
* A rule refuses only on what was read. A swap that failed says nothing: the row is read again and decided again.
* A claim keeps one nonce through all its reads and swaps. If an answer got lost, finding the nonce in the row settles
  it; if the row still looks as it did, sending the same swap again is harmless, because only one of the two can match.

Tokens are `max(last + 1, the store's clock in µs)`: they grow even where the store has forgotten its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

Micros: TypeAlias = int
"""Microseconds: since the epoch on the store's clock for a time, plain for a duration."""

OpenState = Literal["waiting", "running"]
FinalState = Literal["succeeded", "failed", "cancelled", "lost", "superseded"]
State = Literal["waiting", "running", "succeeded", "failed", "cancelled", "lost", "superseded"]
Delivery = Literal["at_most_once", "at_least_once"]
Overlap = Literal["skip", "queue", "allow", "replace"]
Reason = Literal["done", "running", "held", "spacing", "lost", "pruned", "early", "queued", "full"]

UNSPACED: Micros = 10_000
"""A `hold_until` so close to `acquired_at` means no `lock_at_least`: a store may read its clock once for each of them."""

FINAL_STATES: tuple[FinalState, ...] = ("succeeded", "failed", "cancelled", "lost", "superseded")


@dataclass(frozen=True, slots=True)
class Lease:
    """Who may work under one name. `holder` is None, and `expires_at` with it, while nobody may."""

    name: str
    token: int
    holder: str | None = None
    job: str | None = None
    slot: str | None = None
    acquired_at: Micros = 0
    expires_at: Micros | None = None
    hold_until: Micros = 0
    pruned_through: Micros = 0
    func: str | None = None


@dataclass(frozen=True, slots=True)
class Execution:
    """One logical run of one slot, and its latest attempt. `slot_at` orders slots; `scheduled_at` is for people."""

    job: str
    slot: str
    lease: str
    slot_at: Micros
    scheduled_at: Micros
    state: State
    attempt: int
    token: int
    holder: str | None
    delivery: Delivery = "at_most_once"
    max_attempts: int = 1
    started_at: Micros | None = None
    finished_at: Micros | None = None
    error: str | None = None
    keep_until: Micros | None = None
    func: str | None = None
    jobstore: str | None = None
    job_id: str | None = None

    @property
    def id(self) -> str:
        """The execution ID: stable over retries, take-overs and restarts."""
        return f"{self.job}/{self.slot}"


@dataclass(frozen=True, slots=True)
class Key:
    """What one read looks at: a lease, and one slot of one job."""

    lease: str
    job: str
    slot: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What one read saw, at one instant of the store's clock.

    Attributes:
        now: the store's clock.
        lease: the lease row.
        execution: the row of the slot that was asked for.
        holding: the row that the lease holds.
        waiting: the oldest waiting row of the lease.
    """

    now: Micros
    lease: Lease | None = None
    execution: Execution | None = None
    holding: Execution | None = None
    waiting: Execution | None = None


# --- what a rule may ask of a store -----------------------------------------------------------------------------------

Condition = Literal["any", "live", "over", "open"]
"""Judged by the store's own clock at the swap.

`live`: held and not expired. `over`: not live. `open`: over, and past `hold_until`.
"""

LeaseWrite = Literal["grant", "regrant", "extend", "free", "bump", "none"]
"""What happens to the lease row.

`grant`: next token, new holder, `expires_at = now + lock_at_most`, `hold_until = now + lock_at_least`, the held slot.
`regrant`: next token, new holder, new `expires_at`; the rest stays. `extend`: new `expires_at`. `free`: nobody holds it.
`bump`: next token. `none`: the row is only compared.
"""


@dataclass(frozen=True, slots=True)
class LeaseMove:
    """One swap of a lease row: what must be found, and what is written. `token` None: there must be no row."""

    name: str
    token: int | None
    holder: str | None
    condition: Condition
    write: LeaseWrite
    new_holder: str | None = None
    job: str | None = None
    slot: str | None = None
    lock_at_most: Micros = 0
    lock_at_least: Micros = 0
    func: str | None = None


@dataclass(frozen=True, slots=True)
class Insert:
    """A new execution row; its key must be absent.

    A running row gets the token that this change grants and `started_at = now`; a waiting one has neither.
    """

    row: Execution


@dataclass(frozen=True, slots=True)
class Update:
    """A move of an execution row that must be in state `was` under token `token`.

    `granted` says that the row gets the token this change grants, and `started_at = now`. A final state gets
    `finished_at = now` and `keep_until = now + keep_for`; an open one clears both. `error` and `max_attempts` None leave
    what is there.
    """

    job: str
    slot: str
    was: State
    token: int
    state: State
    attempt: int
    holder: str | None
    granted: bool = False
    max_attempts: int | None = None
    keep_for: Micros = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """One lease move and up to two execution moves: applied together, or not at all."""

    lease: LeaseMove | None
    executions: tuple[Insert | Update, ...] = ()
    displaced: Execution | None = None
    """The run this change ends or sends back to waiting, as it will be; whoever wins the swap announces it."""

    @property
    def enqueues(self) -> bool:
        """Whether this change records a slot that waits for its lease."""
        return any(isinstance(move, Insert) and move.row.state == "waiting" for move in self.executions)

    @property
    def grants(self) -> bool:
        """Whether the claimer holds the lease once this change is applied."""
        return self.lease is not None and self.lease.write in ("grant", "regrant")


@dataclass(frozen=True, slots=True)
class Refusal:
    """An expected "no", with who is in the way and until when (store time)."""

    reason: Reason
    holder: str | None = None
    until: Micros | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """What a node wants: this slot, under this lease, on these terms. Durations in µs.

    `nonce` names this claim for ever: it is the holder that the rows will show.
    """

    lease: str
    job: str
    slot: str
    slot_at: Micros
    scheduled_at: Micros
    nonce: str
    lock_at_most: Micros
    lock_at_least: Micros = 0
    delivery: Delivery = "at_most_once"
    max_attempts: int = 1
    overlap: Overlap = "skip"
    max_early: Micros = 60_000_000
    keep_for: Micros = 30 * 86_400_000_000
    func: str | None = None
    jobstore: str | None = None
    job_id: str | None = None

    @property
    def key(self) -> Key:
        """What to read before deciding."""
        return Key(self.lease, self.job, self.slot)


@dataclass(frozen=True, slots=True)
class Grant:
    """A lease that is held: everything its holder must show to renew or settle it."""

    lease: str
    job: str
    slot: str
    token: int
    holder: str
    attempt: int
    delivery: Delivery = "at_most_once"
    max_attempts: int = 1
    keep_for: Micros = 30 * 86_400_000_000


def granted(ask: Ask, token: int, attempt: int) -> Grant:
    """What the winner of a claim holds."""
    return Grant(
        ask.lease, ask.job, ask.slot, token, ask.nonce, attempt, ask.delivery, ask.max_attempts, ask.keep_for
    )  # fmt: skip


# --- predicates -------------------------------------------------------------------------------------------------------


def is_live(lease: Lease | None, now: Micros) -> bool:
    """Somebody holds the lease, and it is not over."""
    return lease is not None and lease.expires_at is not None and lease.expires_at > now


def is_spaced(lease: Lease, now: Micros) -> bool:
    """It is too soon after the last grant."""
    return now < lease.hold_until and not _is_unspaced(lease)


def _is_unspaced(lease: Lease | None) -> bool:
    # Granted without `lock_at_least`: then a store's clock that is set back before the grant must not hold up anything.
    return lease is not None and abs(lease.hold_until - lease.acquired_at) < UNSPACED


def next_token(last: int, now: Micros) -> int:
    """The token of a new grant: larger than the last, and at least the store's clock, so that a loss cannot repeat one."""
    return max(last + 1, now)


def is_mine(seen: Seen, nonce: str) -> bool:
    """The claim with this nonce holds the lease: how an unknown outcome is settled."""
    return seen.lease is not None and seen.lease.holder == nonce


def after_failure(row: Execution, *, cancelled: bool = False) -> State:
    """Where a run goes that ended without an outcome of its own: back to waiting only if it may be tried again."""
    if row.delivery == "at_least_once" and row.attempt < row.max_attempts:
        return "waiting"
    return "cancelled" if cancelled else "lost"


# --- the rules --------------------------------------------------------------------------------------------------------


def claim(seen: Seen, ask: Ask) -> Change | Refusal:
    """The swap that lets `ask` run its slot, or why it must not.

    Covers a first claim, the claim of a waiting row, the take-over of one whose attempt was abandoned, and what the
    overlap policy makes of a lease that is held: refuse, enqueue or supersede.
    """
    refusal = _refuse_slot(seen, ask)
    if refusal is not None:
        return refusal
    lease = seen.lease
    if lease is None:
        return _grant(seen, ask, None)
    if is_live(lease, seen.now):
        return _meet_holder(seen, ask, lease)
    taking_over = seen.execution is not None and seen.execution.attempt > 0
    too_soon = is_spaced(lease, seen.now) and not taking_over
    if ask.overlap == "queue" and (too_soon or _is_behind(seen)):
        # A lease that is over is made free first; then this slot takes its place in the line.
        return (
            _enqueue(seen, ask, lease) if lease.holder is None else _break(seen, lease, ask.nonce, ask.keep_for, "over")
        )
    if too_soon:
        return Refusal("spacing", lease.holder, lease.hold_until)
    return _grant(seen, ask, lease)


def _refuse_slot(seen: Seen, ask: Ask) -> Refusal | None:
    row = seen.execution
    if row is None:
        if seen.lease is not None and ask.slot_at <= seen.lease.pruned_through:
            return Refusal("pruned")
        if ask.overlap == "allow" and ask.slot_at <= seen.now - ask.keep_for - ask.max_early:
            return Refusal("pruned")  # its lease has no other slot, so `pruned_through` may be gone with it
        if ask.slot_at > seen.now + ask.max_early:
            return Refusal("early", until=ask.slot_at)
        return None
    if row.state == "running":
        lease = seen.lease
        over = lease is not None and lease.token == row.token and not is_live(lease, seen.now)
        if over and after_failure(row) == "waiting":
            return None
        return Refusal("running", row.holder, lease.expires_at if lease is not None else None)
    if row.state == "waiting":
        return None
    return Refusal("lost" if row.state == "lost" else "done", row.holder)


def _meet_holder(seen: Seen, ask: Ask, lease: Lease) -> Change | Refusal:
    held = Refusal("held", lease.holder, lease.expires_at)
    if ask.overlap == "queue":
        return _enqueue(seen, ask, lease)
    if ask.overlap == "replace":
        older = _standing(seen)
        if older is not None and older.slot_at < ask.slot_at:
            return supersede(seen, ask, lease, older)
    return held


def _is_behind(seen: Seen) -> bool:
    if seen.waiting is None:
        return False
    row = seen.execution
    return row is None or (row.job, row.slot) != (seen.waiting.job, seen.waiting.slot)


def _grant(seen: Seen, ask: Ask, lease: Lease | None) -> Change:
    row, displaced = seen.execution, _standing(seen)
    moves: list[Insert | Update] = []
    if displaced is not None and row is not None and displaced.id == row.id:
        displaced = None  # the next attempt of the very run that stands there
    if displaced is not None:
        moves.append(_end(displaced, ask.nonce, ask.keep_for))
    moves.append(_begin(row, ask))
    return Change(
        _grant_move(ask, lease, "over" if (row is not None and row.attempt > 0) or _is_unspaced(lease) else "open"),
        tuple(moves),
        displaced=_ended(displaced, ask.nonce) if displaced is not None else None,
    )


def _standing(seen: Seen) -> Execution | None:
    """The run that is still recorded as running under the lease as it was read."""
    held, lease = seen.holding, seen.lease
    if lease is None or lease.holder is None or held is None:
        return None
    return held if held.state == "running" and held.token == lease.token else None


def _begin(row: Execution | None, ask: Ask) -> Insert | Update:
    if row is None:
        return Insert(_row(ask, "running", attempt=1))
    return Update(
        row.job, row.slot, was=row.state, token=row.token, state="running", attempt=row.attempt + 1,
        holder=ask.nonce, granted=True,
    )  # fmt: skip


def _grant_move(ask: Ask, lease: Lease | None, condition: Condition) -> LeaseMove:
    return LeaseMove(
        ask.lease,
        token=lease.token if lease is not None else None,
        holder=lease.holder if lease is not None else None,
        condition=condition,
        write="grant",
        new_holder=ask.nonce,
        job=ask.job,
        slot=ask.slot,
        lock_at_most=ask.lock_at_most,
        lock_at_least=ask.lock_at_least,
        func=ask.func,
    )


def _row(ask: Ask, state: OpenState, attempt: int) -> Execution:
    return Execution(
        job=ask.job,
        slot=ask.slot,
        lease=ask.lease,
        slot_at=ask.slot_at,
        scheduled_at=ask.scheduled_at,
        state=state,
        attempt=attempt,
        token=0,
        holder=ask.nonce,
        delivery=ask.delivery,
        max_attempts=ask.max_attempts,
        func=ask.func,
        jobstore=ask.jobstore,
        job_id=ask.job_id,
    )


def _end(row: Execution, by: str, keep_for: Micros, state: State | None = None) -> Update:
    return Update(
        row.job, row.slot, was="running", token=row.token, state=state or after_failure(row), attempt=row.attempt,
        holder=by, keep_for=keep_for,
    )  # fmt: skip


def _ended(row: Execution, by: str, state: State | None = None) -> Execution:
    return replace(row, state=state or after_failure(row), holder=by)


def _enqueue(seen: Seen, ask: Ask, lease: Lease) -> Change | Refusal:
    free = lease.holder is None
    if seen.execution is not None:
        ahead = seen.waiting.holder if free and _is_behind(seen) and seen.waiting is not None else lease.holder
        until = lease.hold_until if free and is_spaced(lease, seen.now) else lease.expires_at
        return Refusal("queued", ahead, until)
    move = LeaseMove(
        ask.lease, lease.token, lease.holder,
        condition="over" if free else "live",
        # Without a new token, a claim that saw no waiting row could still win after this row was added.
        write="bump" if free else "none",
    )  # fmt: skip
    return Change(move, (Insert(_row(ask, "waiting", attempt=0)),))


def supersede(seen: Seen, ask: Ask, lease: Lease, older: Execution) -> Change:
    """A newer slot takes the lease from a run that is still going. Expiry is not compared: renewals must not defeat it."""
    moves = (_end(older, ask.nonce, ask.keep_for, "superseded"), _begin(seen.execution, ask))
    return Change(_grant_move(ask, lease, "any"), moves, displaced=_ended(older, ask.nonce, "superseded"))


def renew(grant: Grant, lock_at_most: Micros) -> Change:
    """Hold on for another `lock_at_most`, if the lease is still mine and not over."""
    return Change(LeaseMove(grant.lease, grant.token, grant.holder, "live", "extend", lock_at_most=lock_at_most))


def settle(grant: Grant, outcome: FinalState, error: str | None = None) -> Change:
    """Record how the run ended and give the lease back. If nobody took over, a finished run is a finished run."""
    state: State = outcome
    if outcome == "cancelled" and grant.delivery == "at_least_once" and grant.attempt < grant.max_attempts:
        state = "waiting"
    move = Update(
        grant.job, grant.slot, was="running", token=grant.token, state=state, attempt=grant.attempt,
        holder=grant.holder, keep_for=grant.keep_for, error=error,
    )  # fmt: skip
    return Change(LeaseMove(grant.lease, grant.token, grant.holder, "any", "free"), (move,))


def settled(seen: Seen, grant: Grant, change: Change) -> bool:
    """A settle that matched nothing had in truth worked: the row shows the very state that was sent, under my token."""
    row, (move,) = seen.execution, change.executions
    return row is not None and row.token == grant.token and row.holder == grant.holder and row.state == move_state(move)


def move_state(move: Insert | Update) -> State:
    """The state that a move leaves its row in."""
    return move.row.state if isinstance(move, Insert) else move.state


def retry(grant: Grant, nonce: str, lock_at_most: Micros, error: str | None = None) -> Change:
    """The next attempt of a run that failed, under the same lease: new token, new nonce."""
    move = Update(
        grant.job, grant.slot, was="running", token=grant.token, state="running", attempt=grant.attempt + 1,
        holder=nonce, granted=True, error=error,
    )  # fmt: skip
    return Change(
        LeaseMove(
            grant.lease, grant.token, grant.holder, "live", "regrant",
            new_holder=nonce, job=grant.job, slot=grant.slot, lock_at_most=lock_at_most,
        ),
        (move,),
    )  # fmt: skip


def abandon(seen: Seen, nonce: str, *, keep_for: Micros) -> Change | None:
    """End a run whose lease is over and that nobody has taken over; None if there is nothing to end.

    `nonce` is the sweeper's: it goes into the row, so that a lost answer can be read back and the loss announced once.
    """
    lease = seen.lease
    if lease is None or lease.holder is None or is_live(lease, seen.now):
        return None
    return _break(seen, lease, nonce, keep_for, "over")


def release(seen: Seen, nonce: str, *, keep_for: Micros) -> Change | None:
    """An operator breaks a lease, live or not; None if nobody holds it."""
    lease = seen.lease
    if lease is None or lease.holder is None:
        return None
    return _break(seen, lease, nonce, keep_for, "any")


def _break(seen: Seen, lease: Lease, nonce: str, keep_for: Micros, condition: Condition) -> Change:
    row = _standing(seen)
    return Change(
        LeaseMove(lease.name, lease.token, lease.holder, condition, "free"),
        (_end(row, nonce, keep_for),) if row is not None else (),
        displaced=_ended(row, nonce) if row is not None else None,
    )


def orphan(seen: Seen, nonce: str, *, orphan_after: Micros, keep_for: Micros) -> Change | None:
    """Give up a waiting execution that nobody has taken for so long although its lease was free; None if it is not so."""
    row, lease = seen.execution, seen.lease
    if row is None or row.state != "waiting" or lease is None or is_live(lease, seen.now):
        return None
    if seen.now < max(lease.acquired_at, lease.hold_until, row.slot_at) + orphan_after:
        return None
    move = Update(
        row.job, row.slot, was="waiting", token=row.token, state="lost", attempt=row.attempt,
        holder=nonce, keep_for=keep_for,
    )  # fmt: skip
    return Change(
        LeaseMove(lease.name, lease.token, lease.holder, "over", "none"), (move,), displaced=_ended(row, nonce, "lost")
    )  # fmt: skip


def broken(seen: Seen, change: Change) -> bool:
    """An abandon whose answer was lost had worked: the row it ended carries the sweeper's nonce."""
    row, ended = seen.execution, change.displaced
    return row is not None and ended is not None and row.holder == ended.holder and row.state == ended.state


def revive(row: Execution) -> Change | None:
    """An operator lets an execution run once more; None unless it ended without success."""
    if row.state not in ("lost", "failed", "cancelled"):
        return None
    move = Update(
        row.job, row.slot, was=row.state, token=row.token, state="waiting", attempt=row.attempt,
        holder=row.holder, max_attempts=max(row.max_attempts, row.attempt) + 1,
    )  # fmt: skip
    return Change(None, (move,))
