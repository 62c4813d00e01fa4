"""What really happened, seen by nobody in the simulation, and what must be true of it at every step.

The invariants are those of the protocol: I1 one winner, I2 growing tokens, I3 final is final, I4 recorded before run,
I5 trust ends before the lease does, I6 no node's clock decides (nodes' clocks are wrong in most worlds), I7 no answer
means not granted, I8 pruned slots stay shut. Beyond them, what a user sees: a slot runs once, a guarded resource never
takes an older write after a newer one, and nothing gets lost without an event.
"""

from collections import Counter
from dataclasses import dataclass

from apscheduler_fence.errors import StaleToken
from apscheduler_fence.events import EVENT_JOB_LOST, EVENT_LEASE_LOST
from apscheduler_fence.lease import FINAL_STATES, Insert, is_live
from apscheduler_fence.policy import elapsed, trusted_for


class Violation(AssertionError):  # noqa: N818 - it is no mistake of the caller
    """Something happened that must never happen."""


def must(condition, name, *details):
    """Raise the violation called `name` unless the condition holds."""
    if not condition:
        raise Violation(" ".join([name + ":", *map(str, details)]))


@dataclass
class Granted:
    """One grant that the store made, and what came of it."""

    order: int
    lease: str
    execution: str
    key: tuple
    token: int
    holder: str
    attempt: int
    process: object
    entered: bool = False
    returned: str | None = None
    """The state in which its call ended."""
    replaced: bool = False
    """A newer slot took its lease, which its holder learns at its next renewal."""
    operations: int = 0
    """How many effects its call has had, or found there already."""


class Truth:
    """Stands before the memory store, applies what arrives, and watches."""

    def __init__(self, store, oldest):
        self.store = store
        self.oldest = oldest
        """How far back a slot lies at least that counts as pruned although no lease remembers it, in µs."""
        self.grants = {}
        self.by_holder = {}
        self.newest = {}
        self.attempts = set()
        self.largest = Counter()
        self.entries = Counter()
        self.states = {}
        self.announced = Counter()
        self.lost_by = {}
        self.leases_lost = set()
        self.highest = {}
        self.newest_written = Counter()
        self.effects = set()
        self.refused_writes = 0
        self.forgot = 0
        self.set_back = False
        self.disturbed = 0
        """The last grant made before the store forgot something or its clock was set ahead: its holder may be wrong."""
        self.refusals = Counter()

    # --- the store, step by step --------------------------------------------------------------------------------------

    def read(self, key):
        return self.store.read(key)

    def held_leases(self, query):
        return list(self.store.held_leases(query))

    def executions(self, query):
        return list(self.store.executions(query))

    def swap(self, change, process):
        leases, rows, now = self.store._leases, self.store._executions, self.store._clock()
        name = change.lease.name if change.lease else None
        lease = leases.get(name)
        was = {key: rows.get(key) for key in map(_key, change.executions)}
        held = rows.get((lease.job, lease.slot)) if lease and lease.holder else None
        [token] = self.store.swap([change])
        if token is None:
            must(all(rows.get(key) is row for key, row in was.items()), "a refused swap wrote", change)
            must(leases.get(name) is lease, "a refused swap wrote", change)
            return None
        move = change.lease
        if lease is not None:
            must((lease.token, lease.holder) == (move.token, move.holder), "I3: a stale holder changed", lease, change)
        for key, row in was.items():
            self._moved(key, row, rows[key], process)
        if move.write in ("extend", "regrant"):
            must(is_live(lease, now), "a lease that was over was renewed", lease)
        if change.grants:
            self._granted(lease, leases[name], change.executions[-1], now, process)
        self._running_iff_held(leases[name], held)
        return token

    def _moved(self, key, before, after, process):
        if before is not None:
            must(before.state not in FINAL_STATES, "I3: a final execution moved", before, after)
        self.states[key] = after.state
        if after.state == "lost":
            exhausted = after.delivery == "at_most_once" or after.attempt >= after.max_attempts
            must(exhausted, "lost with attempts left", after)
            self.lost_by[after.id, after.token] = process
        if after.state == "superseded":
            self.by_holder[before.holder, before.token].replaced = True

    def _granted(self, before, after, move, now, process):
        attempt = move.row.attempt if isinstance(move, Insert) else move.attempt
        key, row = _key(move), self.store._executions[_key(move)]
        if after.holder != row.holder or (before is not None and before.holder == after.holder):
            must(False, "granted to nobody new", before, after, row)
        regranted = before is not None and (before.job, before.slot) == key and is_live(before, now)
        replaces = before is not None and self.states.get((before.job, before.slot)) == "superseded"
        must(regranted or replaces or not is_live(before, now), "I1: granted over a live holder", before, after)
        if attempt == 1 and not replaces:
            too_soon = before is not None and before.acquired_at < before.hold_until and now < before.hold_until
            must(not too_soon, "granted within lock_at_least", before, after)
        must((*key, attempt) not in self.attempts, "I1: granted twice", key, "attempt", attempt)
        may_repeat = row.delivery == "at_least_once" or regranted
        must(attempt == 1 or may_repeat, "at most once: another attempt", key, attempt)
        must(attempt <= row.max_attempts, "more attempts than allowed", row)
        must(0 < after.token < 2**53, "I2: token out of range", after)
        if not (self.forgot and self.set_back):
            must(after.token > self.largest[after.name], "I2: tokens must grow", self.largest[after.name], after)
        self.largest[after.name] = max(after.token, self.largest[after.name])
        self.attempts.add((*key, attempt))
        grant = Granted(
            len(self.grants) + 1, after.name, row.id, key, after.token, after.holder, attempt, process
        )  # fmt: skip
        self.grants[grant.order] = self.by_holder[after.holder, after.token] = self.newest[key] = grant

    def _running_iff_held(self, lease, held_before):
        rows = self.store._executions
        if lease.holder is not None:
            row = rows.get((lease.job, lease.slot))
            must(row is not None and row.state == "running", "held, but not running", lease, row)
            must((row.token, row.holder) == (lease.token, lease.holder), "two holders of one run", lease, row)
        if held_before is not None and (lease.holder is None or lease.slot != held_before.slot):
            row = rows.get((held_before.job, held_before.slot))
            must(row is None or row.state != "running" or row.token == lease.token, "running, but not held", lease, row)

    def prune(self, limit):
        now, before = self.store._clock(), dict(self.store._executions)
        count = self.store.prune(limit)
        for key in before.keys() - self.store._executions.keys():
            row = before[key]
            must(row.state in FINAL_STATES and row.keep_until <= now, "I8: pruned too early", row)
            must(self.store._leases[row.lease].pruned_through >= row.slot_at, "I8: pruned, but not noted", row)
        return count

    # --- faults of the store ------------------------------------------------------------------------------------------

    def snapshot(self):
        return dict(self.store._leases), dict(self.store._executions), set(self.attempts)

    def restore(self, snapshot):
        """The store forgets what was written since: a restart without persistence, a failover to a lagging replica."""
        self.store._leases, self.store._executions = map(dict, snapshot[:2])
        self.attempts = set(snapshot[2])
        self.forgot += 1
        self.disturb()

    def disturb(self):
        self.disturbed = len(self.grants)

    # --- nodes --------------------------------------------------------------------------------------------------------

    def check_trust(self, processes):
        """I5: whoever still trusts a lease holds it in the store, unless the store forgot or jumped ahead meanwhile."""
        now = None
        for process in processes:
            if process.dead or process.machine.paused:
                continue
            for hold in process.node.keeper._holds:
                if hold.lost or hold.ended or hold.regranting:
                    continue
                left = trusted_for(hold.policy.lock_at_most) - elapsed(hold.since, hold.clock())
                left /= process.machine.rate
                grant = self.by_holder.get((hold.grant.holder, hold.grant.token))
                if left <= 0 or (grant is not None and (grant.replaced or grant.order <= self.disturbed)):
                    continue
                now = self.store._clock() if now is None else now
                lease = self.store._leases.get(hold.grant.lease)
                mine = lease is not None and (lease.token, lease.holder) == (hold.grant.token, hold.grant.holder)
                must(mine, "I5: trusted, and lost", hold.grant, lease)
                must(left <= (lease.expires_at - now) / 1e6, "I5: trusted for longer than held", left, lease, now)

    def entered(self, fence, hold):
        """The job function is entered."""
        grant = self.by_holder.get((hold.grant.holder, fence.token))
        must(grant is not None, "I4, I7: entered without a grant", fence)
        must(grant.execution == fence.execution_id, "entered under another's grant", fence, grant)
        must(not grant.entered, "one grant was entered twice", grant)
        must(hold.remaining() > 0, "I5: entered without trust", grant)
        grant.entered = True
        self.entries[grant.key, grant.attempt] += 1
        must(self.entries[grant.key, grant.attempt] <= 1 + self.forgot, "a slot was entered twice", grant)
        if grant.order > self.disturbed:
            row = self.store._executions.get(grant.key)
            mine = row is not None and (row.token == fence.token or grant.replaced)
            must(mine, "I4: entered without a record", fence, row)
        return grant

    def write(self, grant, fence, operation):
        """An effect at a guarded resource that keeps operation ids.

        Raises:
            StaleToken: the guard has seen a newer grant.
        """
        highest, execution = self.highest.get(fence.lease, (0, ""))
        if fence.token < highest or (fence.token == highest and execution != fence.execution_id):
            self.refused_writes += 1
            raise StaleToken(fence.lease, fence.token, highest)
        self.highest[fence.lease] = fence.token, fence.execution_id
        if not (self.forgot and self.set_back):
            must(grant.order >= self.newest_written[fence.lease], "the guard let an older grant write", grant)
        self.newest_written[fence.lease] = grant.order
        effect = fence.execution_id, operation
        must(effect not in self.effects or grant.attempt > 1 or self.forgot, "an effect was tried twice", effect)
        self.effects.add(effect)
        grant.operations += 1

    def heard(self, event):
        """A node told its listeners."""
        key = event.execution_id, getattr(event, "token", 0)
        if event.code == EVENT_JOB_LOST:
            self.announced[key] += 1
            must(self.announced[key] <= 1 + self.forgot, "a loss was announced twice", event)
            must(key in self.lost_by, "a loss was announced that is none", event)
        if event.code == EVENT_LEASE_LOST:
            self.leases_lost.add(key)

    def refused(self, reason, seen, key, slot_at):
        """A node refused a slot: what it had read must say the same."""
        self.refusals[reason] += 1
        row, lease, now = seen.execution, seen.lease, seen.now
        true = {
            "done": row is not None and row.state in FINAL_STATES,
            "lost": row is not None and row.state == "lost",
            "running": row is not None and row.state == "running",
            "held": is_live(lease, now),
            "spacing": lease is not None and lease.acquired_at < lease.hold_until and now < lease.hold_until,
            "pruned": row is None and slot_at <= max(now - self.oldest, lease.pruned_through if lease else 0),
            "early": slot_at > now,
            "queued": key in self.states,
            "full": seen.waiting is not None,
        }[reason]
        must(true, "refused on something that was not read", reason, seen)

    # --- the end ------------------------------------------------------------------------------------------------------

    def check_end(self):
        """All is quiet: nothing may be left half done, and nothing may have vanished silently."""
        for lease in self.store._leases.values():
            must(lease.holder is None, "a lease is held for ever", lease)
        for row in self.store._executions.values():
            must(row.state in FINAL_STATES, "an execution never ended", row)
        for (execution, token), process in self.lost_by.items():
            told = self.announced[execution, token]
            must(told or process.dead or process.gave_up, "lost without an event", execution, token, process)
        for grant in self.grants.values():
            self._check_fate(grant)

    def _check_fate(self, grant):
        told = (grant.execution, grant.token) in self.leases_lost
        state = self.states[grant.key]
        process = grant.process
        if grant.order > self.disturbed:
            must(state in FINAL_STATES, "an execution never ended", grant, state)
        if self.forgot and grant.order <= self.disturbed:
            return
        if state == "succeeded" and self.newest[grant.key] is grant:
            must(grant.operations == effects_of(grant.execution), "succeeded without all its effects", grant)
        retried = self.newest[grant.key] is not grant
        if grant.returned is None or process.dead or process.gave_up or told or retried:
            return
        must(state == grant.returned, "an outcome vanished", grant, "recorded as", state)


def effects_of(execution):
    """How many effects a complete run of an execution has: the same for each attempt."""
    return 1 + sum(execution.encode()) % 2


def _key(move):
    return (move.row.job, move.row.slot) if isinstance(move, Insert) else (move.job, move.slot)
