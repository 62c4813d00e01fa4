"""Deliberate bugs, each of which the simulation or the table of the rules must notice.

Run as a program, `python -m tests.simulation.mutations`, it plants one after the other and says what noticed it.
"""

# ruff: noqa: T201 - a program that prints

import __future__

import contextlib
import functools
import inspect
import sys
import textwrap
import time
from dataclasses import dataclass

from apscheduler_fence import fence, keeper, lease, policy, runner
from apscheduler_fence.stores import memory

from .truth import Violation
from .world import World

WORLDS = 600
"""A bug that survives so many worlds is not noticed."""


@dataclass(frozen=True)
class Mutation:
    """In the source of one function, `right` becomes `wrong`. `why` is what would come of it."""

    why: str
    where: object
    right: str
    wrong: str
    faults: tuple | None = None
    """The faults that bring it out fastest; any, if not given."""


_MemoryStore, _Keeper, _Hold = memory.MemoryStore, keeper.Keeper, fence.Hold

MUTATIONS = (
    # The store: comparison and clock.
    Mutation("swaps do not compare the token", _MemoryStore._moved,
             "(found.token, found.holder) != (move.token, move.holder)", "found.holder != move.holder"),
    Mutation("pruning does not note how far it went", _MemoryStore.prune,
             "max(lease.pruned_through, row.slot_at)", "lease.pruned_through"),
    Mutation("pruning deletes what is not past its time", _MemoryStore.prune,
             "row.keep_until is not None and row.keep_until <= now", "row.keep_until is not None"),
    # Tokens.
    Mutation("tokens come from a counter", memory.next_token, "max(last + 1, now)", "last + 1"),
    Mutation("tokens come from the clock alone", memory.next_token, "max(last + 1, now)", "now"),
    # The rules.
    Mutation("a pruned slot is opened again", lease._refuse_slot,
             "seen.lease is not None and ask.slot_at <= seen.lease.pruned_through", "False"),
    Mutation("a finished slot runs again", lease._refuse_slot,
             'return Refusal("lost" if row.state == "lost" else "done", row.holder)', "return None"),
    Mutation("a run that may not be repeated is taken over", lease._refuse_slot,
             'if over and after_failure(row) == "waiting":', "if over:"),
    Mutation("a displaced run is left as running", lease._grant, "if displaced is not None:", "if False:"),
    Mutation("lock_at_least is ignored", lease.claim, "is_spaced(lease, seen.now) and not taking_over", "False"),
    Mutation("a store clock that was set back holds up jobs without lock_at_least", lease._is_unspaced,
             "lease is not None and abs(lease.hold_until - lease.acquired_at) < UNSPACED", "False"),
    Mutation("a lease that is over is renewed", lease.renew, '"live"', '"any"'),
    Mutation("an abandoned run is ended without a move of its lease", lease._break, '"free"', '"none"'),
    Mutation("any final state passes for the one that was sent", lease.settled,
             "row.holder == grant.holder and row.state == move_state(move)", "row.state in FINAL_STATES", ("network", "pause")),
    Mutation("a run is given up with attempts left", lease.after_failure, "row.attempt < row.max_attempts:", "False:"),
    # The runner.
    Mutation("a node decides by its own clock", runner._try_claim,
             "claim(seen, ask)", "claim(replace(seen, now=int(node.clock().wall * 1e6)), ask)"),
    Mutation("a lost swap is taken for a refusal", runner._try_claim,
             "if token is None:\n        return None", "if token is None:\n        return Refusal('held')"),
    Mutation("a job starts on an unknown outcome", runner._try_claim, "is_mine(seen, ask.nonce) and ", ""),
    Mutation("trust is counted from the reply", runner._try_claim,
             "begun.attempt, attempt.sent)", "begun.attempt, node.clock())"),
    Mutation("trust is counted from the read-back", runner._try_claim,
             "seen.execution.attempt, attempt.first_sent)", "seen.execution.attempt, node.clock())"),
    Mutation("a run that was displaced without an answer is not announced", runner._read_back_ending,
             "if broken(seen, ending):", "if False:"),
    Mutation("a job is entered although its lease ran out on the way", runner._run_held, "if hold.remaining() <= 0:", "if False:", ("network", "pause")),
    Mutation("a store that does not answer is waited for without end", runner._claim,
             "if elapsed(started, node.clock()) >= node.terms.store_patience:", "if False:", ("outage",)),
    Mutation("a settle without an answer is not repeated", runner._settle,
             "node.keeper.settle_later(hold, change)", "node.keeper.drop(hold)"),
    Mutation("a retry keeps its nonce", runner._regrant, "node.nonce(), hold.grant", "hold.grant.holder, hold.grant"),
    # Trust and the keeper.
    Mutation("trust has no margin", policy.trusted_for, "seconds - max(0.002, 0.005 * seconds)", "seconds"),
    Mutation("a suspended machine trusts on", policy.elapsed,
             "until.boottime - since.boottime,\n        until.wall - since.wall,", "0.0,"),
    Mutation("a renewal counts from its reply", _Keeper._renew, "hold.since = sent", "hold.since = self.clock()"),
    Mutation("leases are not renewed", keeper._renewable, "policy = hold.policy", "return False"),
    Mutation("a lease that came while the keeper was at work waits for the next round", _Keeper._run,
             "if not self._nudged and", "if", ()),
    Mutation("every sweeper announces the loss", _Keeper._end,
             "if token is not None and change.displaced is not None:", "if change.displaced is not None:", ("crash", "pause")),
    Mutation("nobody takes what waits", _Keeper._sweep, "self._next_in_line()", "[]"),
    Mutation("nobody sweeps", _Keeper._sweep, "list(self.store.held_leases(HeldLeases(expired=True, limit=SWEEP_LIMIT + len(mine))))",
             "[]", ("crash",)),
)  # fmt: skip


@contextlib.contextmanager
def planted(mutation):
    """Have the bug everywhere inside the block."""
    function = mutation.where
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutation.right) != 1:
        raise ValueError(f"{mutation.why}: {mutation.right!r} is there {source.count(mutation.right)} times, not once")
    code = compile(
        source.replace(mutation.right, mutation.wrong), inspect.getfile(function), "exec",
        flags=__future__.annotations.compiler_flag, dont_inherit=True,
    )  # fmt: skip
    found = {}
    exec(code, function.__globals__, found)
    wrong = functools.wraps(function)(found[function.__name__])
    places = _places(function)
    for place in places:
        setattr(place, function.__name__, wrong)
    try:
        yield
    finally:
        for place in places:
            setattr(place, function.__name__, function)


def _places(function):
    """Where the function is known by its name: its class, or each module that has imported it."""
    owner, _, _ = function.__qualname__.rpartition(".")
    if owner:
        return [getattr(sys.modules[function.__module__], owner)]
    return [module for module in [*sys.modules.values()] if vars(module).get(function.__name__) is function]


def violation(world):
    """Play a world; return what broke, or None."""
    try:
        world.run()
    except Violation as broken:
        return str(broken)
    return None


def noticed(mutation):
    """Play worlds with the bug until one breaks a promise; return its seed and what broke, or None."""
    with planted(mutation):
        for seed in range(WORLDS):
            found = violation(World(seed, faults=mutation.faults))
            if found is not None:
                return seed, found
    return None


if __name__ == "__main__":
    survived = 0
    for mutation in MUTATIONS:
        began = time.monotonic()
        found = noticed(mutation)
        survived += found is None
        how = f"seed {found[0]}: {found[1][:90]}" if found else "SURVIVED"
        print(f"{time.monotonic() - began:5.1f} s  {mutation.why}: {how}", flush=True)
    sys.exit(survived > 0)
