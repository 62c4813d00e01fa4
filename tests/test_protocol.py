"""The protocol under every order of events that a small world allows, on the real rules.

Two nodes want the same two slots of one lease. Each reads, decides and sends as the runner does; a message may be
answered, or its sender may stop waiting and the message arrive whenever, or never; a node may crash; leases end; sweepers
pick up what was left; jobs fail and are retried. Every state that can be reached is visited, and in each of them the
properties of the design must hold. Then each rule is weakened in turn, and the exploration must find what it was for.

Time is relative: a lease lasts until the next tick, and so does the trust of whoever sent a message before that tick.
What bounds the exploration is what each world gives: how many crashes, sweeps, renewals and unanswered messages there
are, and how often a node asks for one slot (twice). Nothing is sampled and nothing is cut off.
"""

# ruff: noqa: PLR0917 - what is next for a run is a tuple, spread over the arguments of the method that it names

from collections import deque
from dataclasses import dataclass, replace

import pytest

from apscheduler_fence import lease as rules
from apscheduler_fence.lease import FINAL_STATES, Ask, Change, Insert, Key, Refusal, granted
from apscheduler_fence.stores.memory import MemoryStore

NOW = 100
"""The clock stands still; ticks bring the ends of leases nearer instead, so that equal situations are equal states."""

SLOTS = (0, 1)
NODES = (0, 1)


@dataclass(frozen=True)
class World:
    """How much may happen, and on which terms the nodes ask."""

    delivery: str = "at_most_once"
    max_attempts: int = 1
    overlap: str = "skip"
    spacing: int = 0
    slots: int = 2
    unanswered: int = 1
    renewals: int = 0
    sweeps: int = 0
    crashes: int = 0
    retries: bool = False
    turns: int = 1
    refuses_on_a_lost_swap: bool = False
    trusts_from_the_answer: bool = False
    floor: int = 0


class Violation(Exception):  # noqa: N818 - what an exploration is after
    """A property does not hold."""


class Interned(dict):
    """Numbers for values, so that states are small tuples of small numbers."""

    def __init__(self):
        super().__init__()
        self.values_ = []

    def number(self, value):
        """The number of a value, the same for equal ones."""
        found = self.get(value)
        if found is None:
            found = self[value] = len(self.values_)
            self.values_.append(value)
        return found

    def value(self, number):
        """The value with a number."""
        return self.values_[number]


def memoized(method):
    """Remembers what a method said about its (hashable) arguments: the rules are pure."""

    def remembering(self, *args):
        known = self.memo.setdefault(method.__name__, {})
        if args not in known:
            known[args] = method(self, *args)
        return known[args]

    return remembering


class Registers:
    """The store's rows as numbers, and what the rules and the memory store make of them."""

    def __init__(self, world):
        self.world = world
        self.memo = {}
        self.stores = Interned()
        self.changes = Interned()
        self.store = MemoryStore(clock=lambda: NOW)
        self.empty = self.stores.number((None, (None,) * world.slots))

    def load(self, number):
        lease, rows = self.stores.value(number)
        self.store._leases = {} if lease is None else {"pay": lease}
        self.store._executions = {("pay", row.slot): row for row in rows if row is not None}

    @memoized
    def seen(self, number, slot):
        """What a read of one slot shows."""
        self.load(number)
        return self.store.read(Key("pay", "pay", f"s{slot}"))

    def row(self, number, slot):
        """The execution of one slot."""
        return self.stores.value(number)[1][slot]

    @memoized
    def tick(self, number):
        """The same rows when all leases and spacings have ended."""
        lease, rows = self.stores.value(number)
        if lease is not None:
            lease = replace(lease, hold_until=0, expires_at=None if lease.expires_at is None else NOW)
        return self.stores.number((lease, rows))

    @memoized
    def apply(self, number, change):
        """The rows after a change arrived, and its answer."""
        self.load(number)
        before = self.stores.value(number)
        change = self.changes.value(change)
        (token,) = self.store.swap([change])
        if token is None:
            return number, None
        lease = self.store._leases.get("pay")
        if lease is not None:
            spaced = lease.hold_until > NOW
            lease = replace(lease, acquired_at=0, hold_until=lease.hold_until if spaced else 0)
        rows = tuple(self.plain(self.store._executions.get(("pay", f"s{slot}"))) for slot in range(self.world.slots))
        self.check(before, change, (lease, rows))
        return self.stores.number((lease, rows)), token

    @staticmethod
    def plain(row):
        """A row without the times that no rule reads."""
        return row and replace(row, started_at=None, finished_at=None, keep_until=None)

    def check(self, before, change, after):
        """What must hold of every single change of the rows."""
        (old_lease, old_rows), (lease, rows) = before, after
        for old, new in zip(old_rows, rows, strict=True):
            if old is not None and old.state in FINAL_STATES and new != old:
                raise Violation(f"{old.id} was {old.state} and became {new.state} (I3)")
            if new is not None and new != old and new.state == "lost" and new.delivery == "at_least_once":
                self.check_exhausted(new)
        self.check_running(lease, rows)
        last = -1 if old_lease is None else old_lease.token
        if lease is not None and lease.token < last + change.grants:
            raise Violation("a token did not grow (I2)")
        if change.grants and change.lease.write == "grant" and self.world.overlap == "queue":
            self.check_order(old_rows, lease.slot)

    @staticmethod
    def check_exhausted(row):
        """At least once, a run is given up only after its last attempt."""
        if row.attempt < row.max_attempts:
            raise Violation(f"{row.id} is lost with attempts left")

    @staticmethod
    def check_running(lease, rows):
        """An execution is running if and only if its lease holds it under that token."""
        for row in rows:
            if row is not None and row.state == "running" and (lease.slot, lease.token) != (row.slot, row.token):
                raise Violation(f"{row.id} is running, and its lease does not hold it")
        if lease is None:
            return
        if (lease.holder is None) != (lease.expires_at is None):
            raise Violation("a lease that nobody holds has an end")
        held = next((row for row in rows if row is not None and row.slot == lease.slot), None)
        if lease.holder is not None and (held is None or (held.state, held.token) != ("running", lease.token)):
            raise Violation("a lease is held for a run that is not running")

    @staticmethod
    def check_order(old_rows, slot):
        for old in old_rows:
            if old is not None and old.state == "waiting" and old.slot < slot:
                raise Violation(f"s{slot[1:]} went ahead of {old.id}, which was waiting")

    def ask(self, who, turn):
        """What a node asks for; `who` counts nodes and slots, `turn` its asks for this slot."""
        node, slot = divmod(who, self.world.slots)
        return Ask(
            "pay", "pay", f"s{slot}", slot_at=slot + 1, scheduled_at=slot + 1, nonce=f"node{node}-s{slot}-{turn}",
            lock_at_most=1, lock_at_least=self.world.spacing, delivery=self.world.delivery,
            max_attempts=self.world.max_attempts, overlap=self.world.overlap,
        )  # fmt: skip

    @memoized
    def decide(self, number, who, turn):
        """What the rules say to an ask: a refusal, or a change's number."""
        decision = rules.claim(self.seen(number, who % self.world.slots), self.ask(who, turn))
        return decision if isinstance(decision, Refusal) else self.changes.number(decision)

    @memoized
    def grant(self, who, turn, nonce, token, attempt):
        """What a holder shows."""
        return replace(granted(self.ask(who, turn), token, attempt), holder=nonce)

    @memoized
    def renewal(self, grant):
        """The number of a holder's renewal."""
        return self.changes.number(rules.renew(grant, 1))

    @memoized
    def settlement(self, grant, outcome):
        """The number of a holder's settle."""
        return self.changes.number(rules.settle(grant, outcome))

    @memoized
    def another_try(self, grant):
        """The number of a holder's retry, and its new nonce."""
        change = rules.retry(grant, f"{grant.holder}-retry{grant.attempt}", 1)
        return self.changes.number(change), change.lease.new_holder

    @memoized
    def abandoning(self, number, nonce):
        """The number of a sweeper's change, or None where nothing is over."""
        lease, _ = self.stores.value(number)
        if lease is None or lease.expires_at is None or lease.expires_at > NOW:
            return None
        held = self.seen(number, int(lease.slot[1:]))
        change = rules.abandon(held, nonce, keep_for=1)
        return None if change is None else self.changes.number(change)


FIRST = ("read", 1, None)


class Exploration:
    """All states of a world.

    One run of one slot on one node is a tuple: the name of the method that knows what comes next, then its arguments.

        read      turn, first                             read and decide
        sent      turn, change, fresh, first              wait for the answer to a claim
        run       turn, nonce, token, attempt, fresh, renewing, renewals    the job runs; perhaps a renewal is under way
        retrying  turn, nonce, token, attempt, change, new nonce, fresh, first    wait for the answer to a retry
        unsure    turn, nonce, token, attempt, change, new nonce, first     read back whether the retry worked
        settle    turn, grant, outcome                    wait for the answer to a settle
        check     turn, grant, outcome                    read back whether it had worked
        end       turn, how

    `fresh` says that no tick has come since the message was sent, which is as long as its answer can be trusted; `first`
    is the same for the first message that got no answer, and None where every one had an answer.
    """

    def __init__(self, world):
        self.world = world
        self.registers = Registers(world)
        runs = (FIRST,) * (len(NODES) * world.slots)
        sweepers = (("idle", world.sweeps),) * len(NODES)
        self.start = (self.registers.empty, runs, sweepers, (), frozenset(), (world.crashes, world.unanswered))

    def explore(self):
        """Visits every state once and returns how many there are.

        Raises:
            Violation: with the steps that lead to it.
        """
        came_from = {self.start: None}
        todo = deque([self.start])
        while todo:
            state = todo.popleft()
            steps = 0
            try:
                for _, following in self.steps(state):
                    steps += 1
                    if following not in came_from:
                        came_from[following] = state
                        todo.append(following)
                if not steps:
                    self.check_end(state)
            except Violation as violation:
                raise Violation(f"{violation}\n{self.story(came_from, state)}") from None
        return len(came_from)

    def story(self, came_from, state):
        """The steps to a state, for people."""
        lines = [f"  then {state[1:]}"]
        while (before := came_from[state]) is not None:
            label = next(label for label, following in self.steps(before) if following == state)
            lines.append(f"  {label}: {self.registers.stores.value(state[0])[0]}")
            state = before
        return "\n".join(reversed(lines))

    # --- steps --------------------------------------------------------------------------------------------------------

    def steps(self, state):
        """Every step that can come next."""
        store, runs, sweepers, late, told, (crashes, unanswered) = state
        if (ticked := self.ticked(state)) != state:
            yield "tick", ticked
        for place, change in enumerate(late):
            if place and late[place - 1] == change:
                continue
            after, token = self.registers.apply(store, change)
            if token is not None:  # one that does not match changes nothing by arriving
                yield "late", (after, runs, sweepers, late[:place] + late[place + 1 :], told, state[5])
        for who, run in enumerate(runs):
            for label, after, following, more, tales in getattr(self, run[0])(state, who, *run[1:]):
                yield (
                    f"run {who} {label}",
                    (
                        after,
                        (*runs[:who], following, *runs[who + 1 :]),
                        sweepers,
                        tuple(sorted((*late, *more))) if more else late,
                        self.tell(told, tales),
                        (crashes, max(0, unanswered - len(more))),
                    ),
                )
        for node, sweeper in enumerate(sweepers):
            for label, after, following, more, tales in self.sweep(state, node, *sweeper):
                yield (
                    f"sweeper {node} {label}",
                    (
                        after,
                        runs,
                        (*sweepers[:node], following, *sweepers[node + 1 :]),
                        tuple(sorted((*late, *more))) if more else late,
                        self.tell(told, tales),
                        (crashes, max(0, unanswered - len(more))),
                    ),
                )
        if crashes:
            yield from ((f"crash {node}", self.crashed(state, node)) for node in NODES if self.is_up(state, node))

    def ticked(self, state):
        store, runs, *rest = state
        return self.registers.tick(store), tuple(map(self.aged, runs)), *rest

    @staticmethod
    def aged(run):
        """A run in which nothing that was sent is fresh any more."""
        match run:
            case ("read", turn, first):
                return ("read", turn, first and False)
            case ("sent", turn, change, _, first):
                return ("sent", turn, change, False, first and False)
            case ("run", *grant, _, renewing, renewals):
                return ("run", *grant, False, renewing and (renewing[0], False), renewals)
            case ("retrying", *rest, _, first):
                return ("retrying", *rest, False, first and False)
            case ("unsure", *rest, first):
                return ("unsure", *rest, first and False)
        return run

    def is_up(self, state, node):
        return any(run[0] != "end" for run in self.of_node(state[1], node))

    def of_node(self, runs, node):
        return runs[node * self.world.slots : (node + 1) * self.world.slots]

    def crashed(self, state, node):
        """Everything a node was about to do ends; what it sent may still arrive."""
        store, runs, sweepers, late, told, (crashes, unanswered) = state
        gone = [run[2] for run in self.of_node(runs, node) if run[0] == "sent"]
        gone += [run[5] for run in self.of_node(runs, node) if run[0] == "retrying"]
        gone += [run[6][0] for run in self.of_node(runs, node) if run[0] == "run" and run[6]]
        gone += [self.registers.settlement(*run[2:4]) for run in self.of_node(runs, node) if run[0] == "settle"]
        gone += [sweepers[node][2]] if sweepers[node][0] == "sent" else []
        ended = tuple(
            ("end", run[1], "crashed") if who // self.world.slots == node and run[0] != "end" else run
            for who, run in enumerate(runs)
        )
        swept = tuple(("idle", 0) if at == node else sweeper for at, sweeper in enumerate(sweepers))
        return store, ended, swept, tuple(sorted((*late, *gone))), told, (crashes - 1, unanswered)

    def tell(self, told, tales):
        """What nodes have come to believe, all in all."""
        for tale in tales:
            what, slot, attempt = tale
            if what == "entered":
                if tale in told:
                    raise Violation(f"s{slot} was entered twice in attempt {attempt} (I1)")
                once = self.world.delivery == "at_most_once" and not self.world.retries
                if once and any(other[:2] == ("entered", slot) for other in told):
                    raise Violation(f"s{slot} was entered twice, at most once (I1)")
            elif what == "lost":
                if tale in told:
                    raise Violation(f"the loss of s{slot} was announced twice")
                if ("recorded", slot, attempt) in told:
                    raise Violation(f"s{slot} was recorded, and then announced as lost")
            elif ("lost", slot, attempt) in told:
                raise Violation(f"s{slot} was announced as lost, and then taken for recorded")
            told = told | {tale}
        return told

    # --- a run of the job on a node -----------------------------------------------------------------------------------

    def read(self, state, who, turn, first):
        """Reads, decides, and sends or ends: as the runner's claim."""
        store, slot = state[0], who % self.world.slots
        if who == self.world.slots and state[1][0] == FIRST:
            return  # the nodes are alike: of their runs of the first slot, the first to read may as well be node 0's
        ask, seen = self.registers.ask(who, turn), self.registers.seen(store, slot)
        if first is not None and rules.is_mine(seen, ask.nonce):
            trusted = first or self.world.trusts_from_the_answer
            yield from self.enter(state, who, turn, ask.nonce, seen.lease.token, seen.execution.attempt, trusted)
            return
        decision = self.registers.decide(store, who, turn)
        if isinstance(decision, Refusal):
            yield "is refused", store, self.refused(state, who, turn), (), ()
        else:
            yield "sends", store, ("sent", turn, decision, True, first), (), ()

    def refused(self, state, who, turn):
        """Ends without a run: the slot must be somebody's, or somebody must be in the way."""
        lease, rows = self.registers.stores.value(state[0])
        in_the_way = lease is not None and (rules.is_live(lease, NOW) or lease.hold_until > NOW)
        if rows[who % self.world.slots] is None and not in_the_way:
            raise Violation(f"run {who} gave up a slot that nobody has, under a lease that nobody holds")
        return ("end", turn, "over")

    def sent(self, state, who, turn, number, fresh, first):
        """The claim is answered, or its sender stops waiting."""
        store, change = state[0], self.registers.changes.value(number)
        after, token = self.registers.apply(store, number)
        if token is None:
            if self.world.refuses_on_a_lost_swap:
                yield "gives up", store, self.refused(state, who, turn), (), ()
            else:
                yield "reads again", store, ("read", turn, first), (), ()
        elif not change.grants:
            yield "moves", after, ("read", turn, first), (), self.losses(change)
        else:
            begun = change.executions[-1]
            attempt = begun.row.attempt if isinstance(begun, Insert) else begun.attempt
            trusted = fresh or self.world.trusts_from_the_answer
            moved = (after, *state[1:])
            for label, new, run, more, tales in self.enter(
                moved, who, turn, change.lease.new_holder, token, attempt, trusted
            ):
                yield label, new, run, more, (*self.losses(change), *tales)
        if state[5][1]:
            yield "waits no longer", store, ("read", turn, fresh if first is None else first), (number,), ()

    @staticmethod
    def losses(change):
        """What whoever won a swap announces."""
        ended = change.displaced
        return (("lost", int(ended.slot[1:]), ended.attempt),) if ended is not None and ended.state == "lost" else ()

    def enter(self, state, who, turn, nonce, token, attempt, fresh):
        """Calls the job, if there is still trust in the lease; otherwise gives it back."""
        store, slot = state[0], who % self.world.slots
        if not fresh:
            grant = self.registers.grant(who, turn, nonce, token, attempt)
            yield "comes too late", store, ("settle", turn, grant, "cancelled"), (), ()
            return
        row = self.registers.row(store, slot)
        if row is None or (row.state, row.token) != ("running", token):
            raise Violation(f"s{slot} was entered without being recorded as running (I4)")
        self.check_alone(state, who)
        yield (
            "enters",
            store,
            ("run", turn, nonce, token, attempt, True, None, self.world.renewals),
            (),
            (("entered", slot, attempt),),
        )

    def run(self, state, who, turn, nonce, token, attempt, fresh, renewing, renewals):
        """The job renews, ends, or fails and is tried again."""
        store = state[0]
        grant = self.registers.grant(who, turn, nonce, token, attempt)
        mine = ("run", turn, nonce, token, attempt)
        under_way = (renewing[0],) if renewing else ()
        yield "ends", store, ("settle", turn, grant, "succeeded"), under_way, ()
        if self.world.retries and attempt < self.world.max_attempts:
            change, name = self.registers.another_try(grant)
            yield "fails", store, ("retrying", turn, nonce, token, attempt, change, name, True, None), under_way, ()
        if renewing:
            after, answer = self.registers.apply(store, renewing[0])
            trusted = answer is not None and (renewing[1] or self.world.trusts_from_the_answer)
            if trusted:
                self.check_alone(state, who)
            yield "renewed", after, (*mine, trusted or (fresh and answer is not None), None, renewals), (), ()
            if state[5][1]:
                yield "renews again", store, (*mine, fresh, None, renewals), (renewing[0],), ()
        elif renewals:
            yield "renews", store, (*mine, fresh, (self.registers.renewal(grant), True), renewals - 1), (), ()

    def check_alone(self, state, who):
        """Nobody else believes to hold the lease; but a job that was replaced is only told by its next renewal."""
        if self.world.overlap == "replace":
            return
        for other, run in enumerate(state[1]):
            if other != who and run[0] == "run" and run[5]:
                raise Violation("two runs believe that they hold the lease (I1, I5)")

    def retrying(self, state, who, turn, nonce, token, attempt, number, name, fresh, first):
        """The retry is answered, or its sender stops waiting."""
        store = state[0]
        after, answer = self.registers.apply(store, number)
        if answer is None:
            yield "lost", store, ("end", turn, "over"), (), ()
        else:
            yield from self.enter((after, *state[1:]), who, turn, name, answer, attempt + 1, fresh)
        if state[5][1]:
            since = fresh if first is None else first
            yield "waits no longer", store, ("unsure", turn, nonce, token, attempt, number, name, since), (number,), ()

    def unsure(self, state, who, turn, nonce, token, attempt, number, name, first):
        """Reads back whether the retry worked; sends it again if nothing has moved."""
        store = state[0]
        seen = self.registers.seen(store, who % self.world.slots)
        if rules.is_mine(seen, name):
            yield from self.enter(state, who, turn, name, seen.lease.token, seen.execution.attempt, first)
        elif seen.lease is not None and (seen.lease.token, seen.lease.holder) == (token, nonce):
            yield "sends again", store, ("retrying", turn, nonce, token, attempt, number, name, True, first), (), ()
        else:
            yield "lost", store, ("end", turn, "over"), (), ()

    def settle(self, state, who, turn, grant, outcome):
        """The settle is answered; without an answer it is sent again."""
        store = state[0]
        number = self.registers.settlement(grant, outcome)
        after, token = self.registers.apply(store, number)
        if token is None:
            yield "checks", store, ("check", turn, grant, outcome), (), ()
        else:
            yield "settles", after, ("end", turn, "over"), (), (("recorded", who % self.world.slots, grant.attempt),)
        if state[5][1]:
            yield "settles again", store, ("settle", turn, grant, outcome), (number,), ()

    def check(self, state, who, turn, grant, outcome):
        """A settle that matched nothing is read back."""
        store, slot = state[0], who % self.world.slots
        change = self.registers.changes.value(self.registers.settlement(grant, outcome))
        if rules.settled(self.registers.seen(store, slot), grant, change):
            yield "had settled", store, ("end", turn, "over"), (), (("recorded", slot, grant.attempt),)
        else:
            yield "had lost", store, ("end", turn, "over"), (), ()

    def end(self, state, who, turn, how):
        """A node that has ended asks again if the slot is left waiting: as a keeper does for those left behind."""
        row = self.registers.row(state[0], who % self.world.slots)
        if how != "crashed" and turn < self.world.turns and row is not None and row.state == "waiting":
            yield "asks again", state[0], ("read", turn + 1, None), (), ()

    # --- a sweeper ----------------------------------------------------------------------------------------------------

    def sweep(self, state, node, doing, left, number=None):
        """Looks for a lease that is over, ends what it held, and reads back what got no answer."""
        store = state[0]
        if doing == "idle":
            found = self.registers.abandoning(store, f"sweeper{node}-{left}") if left else None
            if found is not None:
                yield "sends", store, ("sent", left - 1, found), (), ()
            return
        change = self.registers.changes.value(number)
        if doing == "sent":
            after, token = self.registers.apply(store, number)
            yield "swept", after, ("idle", left), (), () if token is None else self.losses(change)
            if state[5][1]:
                yield "waits no longer", store, ("unsure", left, number), (number,), ()
        else:
            slot = int(change.displaced.slot[1:]) if change.displaced is not None else 0
            worked = rules.broken(self.registers.seen(store, slot), change)
            yield "reads back", store, ("idle", left), (), self.losses(change) if worked else ()

    # --- the end ------------------------------------------------------------------------------------------------------

    def check_end(self, state):
        """Where nothing more can happen and nobody has crashed, every run has ended and every queued slot has run."""
        store, runs, _, _, _, (crashes, _) = state
        if any(run[0] != "end" for run in runs):
            raise Violation("a run is stuck")
        if crashes == self.world.crashes and self.world.overlap == "queue":
            for slot in range(self.world.slots):
                if self.registers.row(store, slot) is None:
                    raise Violation(f"s{slot} was neither run nor queued")


# --- worlds -----------------------------------------------------------------------------------------------------------

AT_LEAST_ONCE = {"delivery": "at_least_once", "max_attempts": 2}

WORLDS = {
    "two slots, a message without an answer": World(floor=140_000),
    "two slots, two sweepers": World(sweeps=1, unanswered=0, floor=250_000),
    "two slots, renewals": World(renewals=1, unanswered=0, floor=35_000),
    "two slots, spacing": World(spacing=1, unanswered=0, floor=13_000),
    "one slot, everything": World(
        slots=1, sweeps=1, renewals=1, crashes=1, unanswered=2, floor=38_000,
    ),
    "at least once, two slots": World(**AT_LEAST_ONCE, unanswered=0, floor=230_000),
    "at least once, one slot, taken over": World(**AT_LEAST_ONCE, slots=1, turns=2, sweeps=1, floor=150_000),
    "at least once, one slot, crash": World(
        **AT_LEAST_ONCE, slots=1, turns=2, sweeps=1, crashes=1, unanswered=0, floor=31_000,
    ),
    "at least once, one slot, everything": World(
        **AT_LEAST_ONCE, slots=1, sweeps=1, crashes=1, renewals=1, floor=180_000,
    ),
    "queue": World(overlap="queue", turns=2, unanswered=0, floor=57_000),
    "queue, a message without an answer": World(overlap="queue", floor=340_000),
    "queue, spacing": World(overlap="queue", spacing=1, unanswered=0, floor=31_000),
    "replace": World(overlap="replace", unanswered=0, floor=16_000),
    "retry": World(max_attempts=2, retries=True, slots=1, sweeps=1, renewals=1, unanswered=2, floor=58_000),
    "retry, at least once": World(**AT_LEAST_ONCE, retries=True, slots=1, sweeps=1, floor=50_000),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _time_in_steps_of_one(monkeypatch):
    """Here a clock is read once, and its unit is not the microsecond."""
    monkeypatch.setattr(rules, "UNSPACED", 1)


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_the_protocol_holds_in_every_order_of_events(world):
    """No slot is entered twice, no two nodes trust one lease, nothing is given up for nothing, or lost and recorded."""
    visited = Exploration(world).explore()
    assert visited >= world.floor, f"{visited} states: the world has become smaller than it was"


# --- weakened rules ---------------------------------------------------------------------------------------------------

_apply, _moved, _row_after = MemoryStore._apply, MemoryStore._moved, MemoryStore._row_after


def without_comparing_holders(patch):
    """Who holds the lease is neither compared in a swap nor when an outcome is read back.

    In the swap alone it would not be missed: tokens and the states of executions are compared there too.
    """
    patch.setattr(rules, "is_mine", lambda seen, _: seen.lease is not None and seen.lease.holder is not None)

    def moved(self, move, now):
        found = self._leases.get(move.name)
        return _moved(self, replace(move, holder=found.holder) if found is not None else move, now)

    patch.setattr(MemoryStore, "_moved", moved)


def without_comparing_tokens(patch):
    """A lease moves whatever its token, if only its holder is as seen."""

    def moved(self, move, now):
        found = self._leases.get(move.name)
        return _moved(self, replace(move, token=found.token) if found is not None else move, now)

    patch.setattr(MemoryStore, "_moved", moved)


def settle_without_state_check(patch):
    """A settle writes its outcome over whatever became of the run under its token, and frees the lease if it can.

    The lease's comparison alone would cover for that of the row, and the other way round: both are left out.
    """

    def row_after(self, move, token, now):
        if isinstance(move, rules.Update) and move.state == "succeeded":
            move = replace(move, was=self._executions[move.job, move.slot].state)
        return _row_after(self, move, token, now)

    def apply(self, change):
        token = _apply(self, change)
        if token is None and change.executions and rules.move_state(change.executions[0]) == "succeeded":
            token = _apply(self, replace(change, lease=None))
        return token

    patch.setattr(MemoryStore, "_row_after", row_after)
    patch.setattr(MemoryStore, "_apply", apply)


def settle_that_takes_any_final_state_for_its_own(patch):
    """A settle that matched nothing is believed to have worked if the row is final under its token."""
    patch.setattr(
        rules,
        "settled",
        lambda seen, grant, _: seen.execution.token == grant.token and seen.execution.state in FINAL_STATES,
    )


def abandon_without_lease_move(patch):
    """A sweeper ends the run and leaves its lease as it is."""
    abandon = rules.abandon

    def abandon_row(seen, nonce, *, keep_for):
        change = abandon(seen, nonce, keep_for=keep_for)
        return change and replace(change, lease=None)

    patch.setattr(rules, "abandon", abandon_row)


def abandon_that_is_read_back_without_its_nonce(patch):
    """A sweeper takes the loss that another has recorded for its own."""
    patch.setattr(rules, "broken", lambda seen, change: seen.execution.state == change.displaced.state)


def retry_that_keeps_its_nonce(patch):
    """The next attempt goes by the name of the last."""
    retry = rules.retry
    patch.setattr(rules, "retry", lambda grant, _, lock_at_most: retry(grant, grant.holder, lock_at_most))


def enqueue_without_expiry_test(patch):
    """A slot gets in line behind a holder who may be over by then."""
    claim = rules.claim

    def claim_or_queue(seen, ask):
        change = claim(seen, ask)
        if isinstance(change, Change) and change.lease.write == "none":
            return replace(change, lease=replace(change.lease, condition="any"))
        return change

    patch.setattr(rules, "claim", claim_or_queue)


def renewal_without_expiry_test(patch):
    """A renewal that arrives late makes a lease live again that was over."""
    renew = rules.renew

    def renew_anyway(grant, lock_at_most):
        change = renew(grant, lock_at_most)
        return replace(change, lease=replace(change.lease, condition="any"))

    patch.setattr(rules, "renew", renew_anyway)


def queueing_without_a_new_token(patch):
    """A slot gets in line before a free lease without a trace in the lease."""
    claim = rules.claim

    def claim_or_queue(seen, ask):
        change = claim(seen, ask)
        if isinstance(change, Change) and change.lease.write == "bump":
            return replace(change, lease=replace(change.lease, write="none"))
        return change

    patch.setattr(rules, "claim", claim_or_queue)


def lost_with_attempts_left(patch):
    """A run that did not end is given up, whatever was promised."""
    patch.setattr(rules, "after_failure", lambda *_, cancelled=False: "cancelled" if cancelled else "lost")


def claim_without_displacing(patch):
    """A claim leaves the run whose lease it takes as it was."""
    claim = rules.claim

    def claim_only(seen, ask):
        change = claim(seen, ask)
        return replace(change, executions=change.executions[-1:]) if isinstance(change, Change) else change

    patch.setattr(rules, "claim", claim_only)


def as_it_is(_):
    """The rules stay; the node that uses them is the weak one."""


ONE = World(slots=1, sweeps=1)
QUEUE_OF_THREE = World(overlap="queue", slots=3, spacing=1, unanswered=0)

WEAKENED = {
    "no holder comparison": (without_comparing_holders, ONE, "without being recorded|believe"),
    "no token comparison": (without_comparing_tokens, QUEUE_OF_THREE, "went ahead"),
    "refuse on a lost swap": (as_it_is, World(unanswered=0, refuses_on_a_lost_swap=True), "gave up"),
    "settle without state check": (settle_without_state_check, ONE, "was lost and became succeeded"),
    "settle reading back any final state": (settle_that_takes_any_final_state_for_its_own, ONE, "taken for recorded|then announced"),
    "abandon without lease move": (abandon_without_lease_move, ONE, "held for a run that is not running"),
    "abandon read back without its nonce": (abandon_that_is_read_back_without_its_nonce, ONE, "announced twice"),
    "retry keeping its nonce": (
        retry_that_keeps_its_nonce, World(max_attempts=2, retries=True, slots=1), "entered twice in attempt 1",
    ),
    "enqueue without the not-expired test": (
        enqueue_without_expiry_test, World(**AT_LEAST_ONCE, overlap="queue", unanswered=0), "went ahead",
    ),
    "renewal without the not-expired test": (
        renewal_without_expiry_test, World(**AT_LEAST_ONCE, overlap="queue", renewals=1, unanswered=0), "went ahead",
    ),
    "queueing before a free lease without a new token": (
        queueing_without_a_new_token, QUEUE_OF_THREE, "went ahead",
    ),
    "claim without displacing": (claim_without_displacing, World(unanswered=0), "does not hold it"),
    "lost with attempts left": (lost_with_attempts_left, World(**AT_LEAST_ONCE, unanswered=0), "attempts left"),
    "trust from the answer": (as_it_is, World(trusts_from_the_answer=True), "believe that they hold"),
}  # fmt: skip


@pytest.mark.parametrize(("weaken", "world", "violation"), WEAKENED.values(), ids=WEAKENED.keys())
def test_a_weakened_rule_is_caught(monkeypatch, weaken, world, violation):
    """Each comparison is there for an order of events in which its absence does harm."""
    weaken(monkeypatch)
    with pytest.raises(Violation, match=violation):
        Exploration(world).explore()
