"""Simulated clusters keep every promise, whatever the network, the clocks, the processes and the store do."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from simulation import World, simulate_many
from simulation.mutations import violation

from apscheduler_fence.keeper import Keeper, Settings
from apscheduler_fence.lease import Ask, Change, Lease, Seen, claim
from apscheduler_fence.stores.memory import MemoryStore

SLOTS = int(os.environ.get("SIMULATED_SLOTS", "20000"))


@pytest.mark.timeout(600)
def test_every_promise_holds_in_every_world() -> None:
    """No seed leads to a violation, and the worlds were hostile enough for that to mean something."""
    seen: Counter[str] = Counter()
    for world in simulate_many(SLOTS):
        truth = world.truth
        seen.update(truth.refusals)
        seen.update(truth.states.values())
        seen.update(world.faults)
        seen["stale write refused"] += truth.refused_writes
        seen["lease lost"] += len(truth.leases_lost)
        seen["error event"] += world.errors
    missing = {
        "done", "running", "held", "spacing", "lost", "pruned", "succeeded", "failed", "cancelled", "network", "pause",
        "suspend", "crash", "shutdown", "clock", "outage", "loss", "rollback", "store_ahead", "store_back",
        "stale write refused", "lease lost", "error event",
    } - {what for what, count in seen.items() if count > 0}  # fmt: skip
    assert not missing


def test_a_seed_decides_everything() -> None:
    """Two worlds of one seed take the very same steps."""
    first, second = World(17, trace=True), World(17, trace=True)
    first.run()
    second.run()
    assert first.steps
    assert list(first.steps) == list(second.steps)


def test_a_trace_does_not_change_what_happens() -> None:
    """A world that was run without its trace is replayed with it."""
    bare, traced = World(23), World(23, trace=True)
    bare.run()
    traced.run()
    assert bare.truth.states == traced.truth.states
    assert bare.now == traced.now


def test_a_violation_is_replayed_by_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What broke once breaks again in the same way."""
    monkeypatch.setattr("apscheduler_fence.stores.memory.next_token", lambda last, _: last)
    seed = next(seed for seed in range(100) if violation(World(seed)))
    assert violation(World(seed)) == violation(World(seed))


def test_the_program_replays_a_seed() -> None:
    """`python -m tests.simulation --seed N` prints every step of that world and how it ended."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation", "--seed", "3"],
        cwd=Path(__file__).parent.parent, check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "swap arrives" in done.stdout
    assert "seed 3: no violation" in done.stdout.splitlines()[-1]


def test_a_keeper_that_may_not_sweep_yet_sleeps_until_it_may() -> None:
    """After trouble with the store a keeper waits out one lease period, and does not wake twenty times a second."""
    world = World(0, faults=())
    keeper = Keeper(MemoryStore(), print, str, str, Settings(), world.machines[0].clock)
    keeper._swept = keeper._trouble = keeper.clock()
    world.now += 20.0
    assert keeper.step() == pytest.approx(10.0, abs=0.1)


def test_a_store_clock_that_was_set_back_holds_up_no_job_without_lock_at_least() -> None:
    """A lease granted in the store's future is claimed at once if its last run asked for no spacing."""
    ask = Ask("pay", "pay", "b", slot_at=1, scheduled_at=1, nonce="me", lock_at_most=10)
    granted_ahead = Lease("pay", token=500, acquired_at=500, hold_until=500)
    assert isinstance(claim(Seen(100, granted_ahead), ask), Change)
    [token] = (store := _store_at(100, granted_ahead)).swap([claim(store.read(ask.key), ask)])
    assert token == 501


def _store_at(now: int, lease: Lease) -> MemoryStore:
    store = MemoryStore(clock=lambda: now)
    store._leases[lease.name] = lease
    return store
