"""`testing.simulate` shows a user's own job on several nodes, truthfully and without waiting."""

import asyncio
import time
from datetime import timedelta

import pytest

from apscheduler_fence import ConfigError, Fence, fenced, unfenced
from apscheduler_fence.errors import LeaseLost
from apscheduler_fence.events import EVENT_LEASE_LOST
from apscheduler_fence.testing import simulate


@fenced(lock_at_most="30s")
def job(*, fence: Fence) -> str:
    return fence.execution_id


def test_each_slot_runs_once_whatever_the_clocks_say() -> None:
    """Five nodes with clocks up to 45 s apart run each slot once and refuse it four times."""
    cluster = simulate(job, nodes=5, slots=20, skew="45s")
    assert [run.value for run in cluster.runs] == [run.execution_id for run in cluster.runs]
    assert cluster.entered == cluster.slots
    assert (len(cluster.runs), len(cluster.refusals), cluster.duplicates, cluster.missed) == (20, 80, (), ())


def test_nodes_with_equal_clocks_take_turns_by_chance() -> None:
    """With no skew either node can win, and the seed decides which."""
    winners = [tuple(run.node for run in simulate(job, seed=seed).runs) for seed in (1, 1, 2)]
    assert winners[0] == winners[1] != winners[2]
    assert set(winners[0]) == {0, 1}


@pytest.mark.parametrize("options", [{"once_per_slot": False}, {}])
def test_a_duplicate_is_shown_as_one(options: dict) -> None:
    """A job whose slots are not recorded, or that is not fenced at all, runs twice on two nodes."""
    cluster = simulate(job if options else unfenced(lambda: None), slots=5, skew=0.3, **options)
    assert len(cluster.duplicates) == len(cluster.runs) == 10


def test_a_long_run_keeps_its_lease() -> None:
    """A run three times as long as its lease is renewed, and later slots are refused meanwhile."""
    cluster = simulate(job, slots=4, takes="100s")
    assert (cluster.overlaps, cluster.events) == ((), ())
    assert cluster.missed == cluster.slots[1::2]
    assert {event.reason for event in cluster.refusals} == {"running", "held"}


def test_a_long_run_without_renewal_overlaps() -> None:
    """`renew=False` lets the lease run out under the job: the next slot starts beside it, and the loss is told."""
    cluster = simulate(job, slots=4, takes="100s", renew=False)
    assert len(cluster.overlaps) == 3
    assert all(run.lost for run in cluster.runs)
    assert sum(event.code == EVENT_LEASE_LOST for event in cluster.events) == 4


def test_a_paused_node_wakes_with_a_lost_lease_and_an_older_token() -> None:
    """The first node enters its job after another node ran a later slot, and sees by its fence that it is stale."""

    def careful(fence: Fence) -> None:
        fence.check()

    cluster = simulate(careful, slots=6, pause=90.0)
    stale = cluster.errors
    assert stale
    assert all(isinstance(run.error, LeaseLost) and run.lost and run.node == 0 for run in stale)
    assert any(run.began < stale[0].began and run.token > stale[0].token for run in cluster.runs)


def test_a_coroutine_sleeps_in_simulated_time() -> None:
    """An hour in a coroutine is over at once, and its lease was renewed for all of it."""

    async def long(fence: Fence) -> float:
        await asyncio.sleep(3600)
        return fence.remaining()

    began = time.monotonic()
    [run] = simulate(long, slots=1, lock_at_most="30s").runs
    assert time.monotonic() - began < 10
    assert run.ended - run.began == pytest.approx(3600)
    assert run.value > 15


def test_what_a_job_raises_is_kept() -> None:
    """An assertion that fails inside the job is seen outside."""

    def wrong() -> None:
        raise AssertionError("inside")

    assert [str(run.error) for run in simulate(wrong, slots=2).errors] == ["inside", "inside"]


def test_arguments_reach_the_job() -> None:
    """`args` and `kwargs` are the job's own."""
    [run] = simulate(lambda a, *, b: (a, b), slots=1, args=[1], kwargs={"b": timedelta(2)}).runs
    assert run.value == (1, timedelta(2))


def test_an_option_that_is_none_is_refused() -> None:
    """Options are checked as everywhere else."""
    with pytest.raises(ConfigError, match="lock_at_mots"):
        simulate(job, lock_at_mots="30s")
