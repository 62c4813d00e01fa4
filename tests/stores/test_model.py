"""Every store does what the memory store does, whatever the order in which changes are decided and arrive.

A state machine drives both side by side. What it sends was decided by the real rules, on what each of the two showed;
it may arrive late, twice, or together with others. Two clocks and two series of tokens cannot be equal, so offsets are
chosen to be over at once or far away, and tokens are compared by the swap that granted them.
"""

import itertools
from dataclasses import fields, is_dataclass, replace

import hypothesis.strategies as st
from claims import HOUR, nonce
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from apscheduler_fence.lease import (
    FINAL_STATES,
    Ask,
    Change,
    Insert,
    Key,
    LeaseMove,
    Seen,
    Update,
    abandon,
    broken,
    claim,
    granted,
    release,
    renew,
    retry,
    revive,
    settle,
    settled,
)
from apscheduler_fence.stores.base import Executions, HeldLeases
from apscheduler_fence.stores.memory import MemoryStore

JOBS = {"pay": "pay", "Pay": "shared", "p%y {}": "shared"}
"""Jobs and the leases they run under."""
SLOTS = {"s1": 1, "s2": 2, "s3": 3, "S3": 3, "far": 2**52}
TIMES = {"acquired_at", "expires_at", "hold_until", "started_at", "finished_at", "keep_until", "until", "now"}

_examples = itertools.count(1)

jobs, slots = st.sampled_from(sorted(JOBS)), st.sampled_from(["s1", "s2", "s3", "S3"] * 4 + ["far"])
offsets = st.sampled_from([-HOUR, HOUR])
terms = st.fixed_dictionaries(
    {
        "overlap": st.sampled_from(["skip", "queue", "replace", "allow"]),
        "max_attempts": st.sampled_from([1, 3]),
        "delivery": st.sampled_from(["at_most_once", "at_least_once"]),
        "lock_at_most": offsets,
        "lock_at_least": st.sampled_from([0] * 7 + [3 * HOUR]),
        "keep_for": offsets,
    }
)
outcomes = st.sampled_from(["succeeded", "failed", "cancelled"])
whens = st.sampled_from(["now", "now", "now", "later", "now and later"])
picks = st.sampled_from([0, 0, 0, 1, 2, 5])
queries = st.builds(
    dict,
    job=st.none() | jobs,
    lease=st.none() | st.sampled_from(sorted(set(JOBS.values()))),
    states=st.lists(st.sampled_from(["waiting", "running", *FINAL_STATES]), unique=True, max_size=3).map(tuple),
    since=st.none() | st.sampled_from([1, 2, 3]),
    limit=st.none() | st.integers(1, 4),
    oldest_first=st.booleans(),
)


class Side:
    """One of the two stores, and what tokens mean there."""

    def __init__(self, store):
        self.store = store
        self.tokens = {0: "none"}

    def plain(self, value, now):
        """A value without what only this store can know: tokens by their number, times in hours from now."""
        if is_dataclass(value):
            return type(value).__name__, *(self._plain_field(value, each.name, now) for each in fields(value))
        if isinstance(value, (tuple, list)):
            return tuple(self.plain(each, now) for each in value)
        return value

    def _plain_field(self, row, name, now):
        value = getattr(row, name)
        if name == "token" and value is not None:
            return self.tokens[value]
        if name in TIMES and value is not None:
            return "never" if value == 0 else round((value - now) / HOUR)
        return self.plain(value, now)


class BesideMemory(RuleBasedStateMachine):
    """The store under test and the reference, given the same work."""

    store = None

    def __init__(self):
        super().__init__()
        self.prefix = f"{next(_examples)}:"
        self.sides = Side(self.store), Side(MemoryStore())
        self.late = []
        self.grants = []
        self.last_token = {}
        self.seen = self.look("pay", "s1")

    def teardown(self):
        """Leaves no row behind that the next example would have to read past."""
        changes = [
            Change(None, (Update(row.job, row.slot, row.state, row.token, "lost", 1, None, keep_for=-HOUR),))
            for row in self.mine(self.store.executions(Executions()))
        ]
        for seen in self.mine(self.store.held_leases(HeldLeases())):
            lease = seen.lease
            changes.append(Change(LeaseMove(lease.name, lease.token, lease.holder, "any", "free")))
        assert None not in self.store.swap(changes)
        assert self.store.prune() == len(changes) - sum(change.lease is not None for change in changes)

    # --- comparing ----------------------------------------------------------------------------------------------------

    def both(self, act):
        """Does the same on both sides and returns the two results."""
        return tuple(act(side.store) for side in self.sides)

    def same(self, results):
        """Asserts that two results mean the same, and returns them."""
        here, reference = (
            side.plain(result, seen.now) for side, result, seen in zip(self.sides, results, self.seen, strict=True)
        )
        assert here == reference
        return results

    def look(self, job, slot):
        """Reads on both sides, which must show the same."""
        key = Key(self.prefix + JOBS[job], self.prefix + job, slot)
        self.seen = self.both(lambda store: store.read(key))
        return self.same(self.seen)

    def mine(self, found):
        """Those that belong to this example."""
        return [one for one in found if (one.lease.name if isinstance(one, Seen) else one.job).startswith(self.prefix)]

    # --- the rules decide, each on what its side showed ---------------------------------------------------------------

    @rule(job=jobs, slot=slots, terms=terms, when=whens)
    def claim(self, job, slot, terms, when):
        """A node wants a slot."""
        ask = Ask(
            self.prefix + JOBS[job],
            self.prefix + job,
            slot,
            SLOTS[slot],
            SLOTS[slot],
            nonce(),
            func=f"m:{job}",
            **terms,
        )
        decisions = self.same(tuple(claim(seen, ask) for seen in self.look(job, slot)))
        if isinstance(decisions[0], Change):
            self.send((ask, decisions), when)

    @rule(job=jobs, slot=slots, terms=terms, outcome=outcomes)
    def claim_and_settle(self, job, slot, terms, outcome):
        """A node gets a slot and runs it, undisturbed."""
        before = len(self.grants)
        self.claim(job, slot, terms, "now")
        if len(self.grants) > before:
            self.settle(0, outcome, None, "now")

    @rule(job=jobs, slot=slots, terms=terms)
    def claim_as_others_do(self, job, slot, terms):
        """Two nodes read the same, and both of their swaps arrive."""
        self.claim(job, slot, terms, "later")
        self.claim(job, slot, terms, "now")

    @precondition(lambda self: self.grants)
    @rule(pick=picks, most=offsets, when=whens)
    def renew(self, pick, most, when):
        """A holder, present or past, renews."""
        self.send((None, tuple(renew(grant, most) for grant in self.picked(pick))), when)

    @precondition(lambda self: self.grants)
    @rule(pick=picks, outcome=outcomes, error=st.none() | st.just("boom\n"), when=whens)
    def settle(self, pick, outcome, error, when):
        """A holder, present or past, settles, and reads back."""
        grants = self.picked(pick)
        changes = tuple(settle(grant, outcome, error) for grant in grants)
        self.send((None, changes), when)
        key = Key(grants[0].lease, grants[0].job, grants[0].slot)
        self.seen = self.both(lambda store: store.read(key))
        self.same(tuple(map(settled, self.seen, grants, changes)))

    @precondition(lambda self: self.grants)
    @rule(pick=picks, most=offsets, when=whens)
    def retry(self, pick, most, when):
        """A holder starts the next attempt under the same lease."""
        grants, name = self.picked(pick), nonce()
        following = tuple(replace(grant, holder=name, attempt=grant.attempt + 1) for grant in grants)
        self.send((following, tuple(retry(grant, name, most, "again") for grant in grants)), when)

    @rule(job=jobs, keep_for=offsets, end=st.sampled_from([abandon, abandon, release]), when=whens)
    def end_from_outside(self, job, keep_for, end, when):
        """A sweeper or an operator ends what stands there, and reads back."""
        name = nonce()
        changes = self.same(tuple(end(seen, name, keep_for=keep_for) for seen in self.look(job, "s1")))
        if changes[0] is None:
            return
        self.send((None, changes), when)
        if changes[0].displaced is not None:
            key = Key(changes[0].displaced.lease, changes[0].displaced.job, changes[0].displaced.slot)
            self.seen = self.both(lambda store: store.read(key))
            self.same(tuple(map(broken, self.seen, changes)))

    @rule(job=jobs, slot=slots, when=whens)
    def revive(self, job, slot, when):
        """An operator lets an execution run again."""
        changes = self.same(tuple(seen.execution and revive(seen.execution) for seen in self.look(job, slot)))
        if changes[0] is not None:
            self.send((None, changes), when)

    def picked(self, pick):
        """One of the grants, the newest most often."""
        return self.grants[-1 - min(pick, len(self.grants) - 1)]

    # --- changes arrive -----------------------------------------------------------------------------------------------

    def send(self, decided, when):
        """Sends what was decided at once, later, or at once and later again."""
        if when != "now":
            self.late.append(decided)
        if when != "later":
            self.arrive([decided])

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def arrive_late(self, data):
        """Some of what was sent earlier arrives, in one call and any order."""
        places = st.lists(st.sampled_from(range(len(self.late))), min_size=1, max_size=4, unique=True)
        chosen = data.draw(places)
        together = [self.late[place] for place in chosen]
        self.late = [each for place, each in enumerate(self.late) if place not in chosen]
        self.arrive(together)

    def arrive(self, together):
        """Swaps on both sides: the same changes match, and what was granted is granted on both."""
        answers = [
            side.store.swap([changes[place] for _, changes in together]) for place, side in enumerate(self.sides)
        ]
        assert [answer is not None for answer in answers[0]] == [answer is not None for answer in answers[1]]
        for number, (who, changes) in enumerate(together):
            tokens = [answer[number] for answer in answers]
            if tokens[0] is None:
                continue
            for side, change, token in zip(self.sides, changes, tokens, strict=True):
                self.note(side, change, token)
            if changes[0].grants:
                self.grants.append(tuple(grants_of(who, changes, tokens)))

    def note(self, side, change, token):
        """Learns what a token means; a new one is larger than all of its lease."""
        if change.lease is None:
            assert token == 0
            return
        last = self.last_token.get((side, change.lease.name), 0)
        if change.lease.write in ("grant", "regrant", "bump"):
            assert token > last
            side.tokens[token] = f"{change.lease.name} {len(side.tokens)}"
            self.last_token[side, change.lease.name] = token
        else:
            assert token == last

    # --- looking ------------------------------------------------------------------------------------------------------

    @rule(query=queries, first=st.sampled_from(["prune", "sweep", "neither"]))
    def look_around(self, query, first):
        """As many rows are pruned, those leases are over that are over there, and a query gives the same rows."""
        if first == "prune":
            self.same(self.both(lambda store: store.prune()))
        elif first == "sweep":
            found = self.both(lambda store: self.mine(store.held_leases(HeldLeases(expired=True))))
            self.same(tuple(sorted(held, key=lambda seen: seen.lease.name) for held in found))
        query = {
            name: self.prefix + value if name in ("job", "lease") and value else value for name, value in query.items()
        }
        if query["job"] is None and query["lease"] is None:
            query["lease"] = self.prefix + "shared"
        self.same(self.both(lambda store: list(store.executions(Executions(**query)))))

    @invariant()
    def all_rows_are_the_same(self):
        """Every execution, in the same order, and every lease with what it holds and who waits."""
        for job in ("pay", "Pay"):
            self.look(job, "s1")
        self.same(self.both(lambda store: self.mine(store.executions(Executions()))))

    @invariant()
    def what_runs_is_what_is_held(self):
        """An execution is running if and only if its lease holds it under the token that its row names."""
        leases = self.mine(self.store.held_leases(HeldLeases()))
        ends = [seen.lease.expires_at for seen in leases]
        assert ends == sorted(ends)
        held = {(seen.lease.job, seen.lease.slot, seen.lease.token) for seen in leases}
        running = self.mine(self.store.executions(Executions(states=("running",))))
        assert held == {(row.job, row.slot, row.token) for row in running}


def grants_of(who, changes, tokens):
    """What the winner holds on either side."""
    for place, (change, token) in enumerate(zip(changes, tokens, strict=True)):
        if isinstance(who, Ask):
            begun = change.executions[-1]
            yield granted(who, token, begun.row.attempt if isinstance(begun, Insert) else begun.attempt)
        else:
            yield replace(who[place], token=token)


def test_a_store_does_what_the_memory_store_does(store):
    """Whatever is decided, by whom, and in which order it arrives, both stores look the same after each step."""
    machine = type("Machine", (BesideMemory,), {"store": store})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,  # the same examples everywhere: a failure is a change's, not a day's
            suppress_health_check=list(HealthCheck),
        ),
    )
