"""What becomes of a run whose node dies: lost and announced once, or run again by another node as the same execution."""

import asyncio
import contextlib
import threading
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import life_node
import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from claims import HOUR
from dead import leave
from loops import node_on, shut_down, until
from servers import Node
from trouble import TroubledStore
from waiting import eventually, never
from watched import moment

from apscheduler_fence import EVENT_JOB_LOST, EVENT_JOB_RECOVERED, EVENT_LEASE_LOST, fenced
from apscheduler_fence.keeper import Keeper, Settings
from apscheduler_fence.lease import abandon, revive
from apscheduler_fence.policy import Instant
from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.base import Executions, HeldLeases
from apscheduler_fence.stores.memory import MemoryStore

SCRIPT = Path(__file__).with_name("life_node.py")
SWEEP = {"sweep": "0.1s"}


def knows(node, function, job_id="job", **settings):
    """Has a node schedule a job that will not be due while the test runs."""
    return node.scheduler.add_job(function, "interval", hours=24 * 365, id=job_id, misfire_grace_time=None, **settings)


def recorded(url):
    """What a store has recorded."""
    with contextlib.closing(open_store(url)) as store:
        return list(store.executions(Executions(oldest_first=True)))


def of_all(nodes, code):
    return [event for node in nodes for event in node.heard.of(code)]


# --- a process is killed ----------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    """A store for processes."""
    return f"sqlite:///{tmp_path / 'fence.db'}"


def killed_in_the_middle(file, delivery, jobstore="memory"):
    """Returns what the job said that was under way when its process was killed."""
    with Node(SCRIPT, file, delivery, jobstore, "add-now") as node:
        entered = node.receive(timeout=30, attempt=1)
        node.kill()
    return entered


def test_at_most_once_a_killed_process_leaves_a_lost_run_which_one_survivor_announces(start, file, caplog):
    """State `lost`, one EVENT_JOB_LOST and one ERROR line among three survivors, and nobody runs it again."""
    survivors = [start(file, delivery="at_most_once", **SWEEP) for _ in range(3)]
    for node in survivors:
        knows(node, life_node.endless_at_first)
    entered = killed_in_the_middle(file, "at_most_once")
    eventually(lambda: of_all(survivors, EVENT_JOB_LOST))
    never(lambda: len(of_all(survivors, EVENT_JOB_LOST)) > 1 or of_all(survivors, EVENT_JOB_RECOVERED), during=0.5)
    [event] = of_all(survivors, EVENT_JOB_LOST)
    assert (event.execution_id, event.token, event.attempt) == (entered["entered"], entered["token"], 1)
    assert [(row.id, row.state, row.attempt) for row in recorded(file)] == [(entered["entered"], "lost", 1)]
    assert [each.levelname for each in caplog.records if "is lost" in each.getMessage()] == ["ERROR"]


def test_at_least_once_a_survivor_runs_the_same_execution_again(start, file):
    """One of three: same id, attempt 2, a larger token, one EVENT_JOB_RECOVERED, nothing lost."""
    survivors = [start(file, delivery="at_least_once", **SWEEP) for _ in range(3)]
    for node in survivors:
        knows(node, life_node.endless_at_first)
    entered = killed_in_the_middle(file, "at_least_once")
    eventually(lambda: of_all(survivors, EVENT_JOB_EXECUTED))
    [executed] = of_all(survivors, EVENT_JOB_EXECUTED)
    [event] = of_all(survivors, EVENT_JOB_RECOVERED)
    assert executed.retval == 2
    assert (event.execution_id, event.attempt) == (entered["entered"], 2)
    assert event.token > entered["token"]
    assert [(row.id, row.state, row.attempt) for row in recorded(file)] == [(entered["entered"], "succeeded", 2)]
    assert of_all(survivors, EVENT_JOB_LOST) == []


@pytest.mark.parametrize("jobstore", ["memory", "sqlalchemy"])
def test_at_least_once_holds_when_all_nodes_have_died_and_one_comes_back(file, tmp_path, jobstore):
    """With the job added again, or found in a persistent job store: the returning node runs what was left."""
    persistent = jobstore == "sqlalchemy"
    jobs = f"sqlite:///{tmp_path / 'jobs.db'}" if persistent else "memory"
    entered = killed_in_the_middle(file, "at_least_once", jobs)
    with Node(SCRIPT, file, "at_least_once", jobs, "-" if persistent else "add") as node:
        again = node.receive(timeout=30, attempt=2)
        node.receive(event=EVENT_JOB_EXECUTED)
    assert again["entered"] == entered["entered"]
    assert again["token"] > entered["token"]
    assert [(row.state, row.attempt) for row in recorded(file)] == [("succeeded", 2)]


# --- what a dead node has left ----------------------------------------------------------------------------------------


def attempts_of():
    """A job that notes its fences."""
    fences = []

    @fenced(delivery="at_least_once")
    def job(fence):
        fences.append(fence)

    return job, fences


def test_a_date_job_is_taken_over_by_a_node_that_had_seen_it(start, store):
    """Its job store forgot the job when the slot came and was refused; the node has not."""
    job, fences = attempts_of()
    node, at = start(**SWEEP), moment(0.1)
    grant = leave(store, at, lasts=600_000)
    node.run(job, at=at)
    eventually(lambda: not node.scheduler.get_jobs())
    recovered = node.heard.one(EVENT_JOB_RECOVERED)
    node.heard.one(EVENT_JOB_EXECUTED)
    [fence] = fences
    assert (fence.attempt, fence.execution_id) == (2, recovered.execution_id)
    assert fence.token > grant.token
    assert round(fence.scheduled_at.timestamp() * 1e6) == round(at.timestamp() * 1e6)


def test_a_slot_that_comes_up_after_its_holder_died_is_taken_over_without_a_sweep(start, store):
    """A late node meets an expired lease on the very slot it is due to run."""
    job, fences = attempts_of()
    node, at = start(sweep="60s"), moment()
    leave(store, at, lasts=1000)
    eventually(lambda: node.executor._node.keeper._swept)
    time.sleep(0.05)
    node.run(job, at=at)
    node.heard.one(EVENT_JOB_EXECUTED)
    assert [fence.attempt for fence in fences] == [2]


def test_after_its_last_attempt_an_execution_is_lost_and_announced_once(start, store, rows):
    """`max_attempts=1` leaves nothing to repeat, also at least once."""
    job, fences = attempts_of()
    nodes = [start(**SWEEP) for _ in range(2)]
    for node in nodes:
        knows(node, job)
    leave(store, moment(), max_attempts=1)
    eventually(lambda: of_all(nodes, EVENT_JOB_LOST))
    never(lambda: len(of_all(nodes, EVENT_JOB_LOST)) > 1 or fences, during=0.4)
    assert [row.state for row in rows()] == ["lost"]


def test_a_job_that_kills_its_node_every_time_is_lost_after_max_attempts(start, store, rows):
    """Each take-over counts: attempts 1 and 2 were claimed and left, and there is no third."""
    job, fences = attempts_of()
    at = moment()
    leave(store, at, lasts=1000, max_attempts=2)
    time.sleep(0.01)
    leave(store, at, lasts=1000, max_attempts=2)
    node = start(**SWEEP)
    knows(node, job)
    assert node.heard.one(EVENT_JOB_LOST).attempt == 2
    assert fences == []
    assert [(row.state, row.attempt) for row in rows()] == [("lost", 2)]


def test_a_take_over_respects_max_instances(start, store):
    """With `overlap="allow"` each slot has its own lease; the node waits until fewer of its own runs are under way."""
    order, go_on = [], threading.Event()

    @fenced(delivery="at_least_once", overlap="allow")
    def job(fence):
        order.append(fence.attempt)
        if fence.attempt == 1:
            go_on.wait(10)

    node, left, at = start(sweep="2s"), moment(-10), moment()
    node.run(job, at=at, max_instances=1)
    eventually(lambda: order)
    leave(store, left, lease=f"job/{left:%Y-%m-%dT%H:%M:%S}", lasts=1000)
    eventually(lambda: node.executor._put_off)
    never(lambda: len(order) > 1, during=0.2)
    go_on.set()
    eventually(lambda: order == [1, 2], within=1)  # with the end of that run, not with the next sweep


def test_a_take_over_runs_the_job_as_it_was_modified(start, store):
    """What the node remembers of a job is what it would run now, not what was added."""
    arguments = []

    @fenced(delivery="at_least_once")
    def job(argument, fence):
        arguments.append((argument, fence.attempt))

    node = start(**SWEEP)
    knows(node, job, args=["old"])
    node.scheduler.modify_job("job", args=["new"])
    leave(store, moment())
    eventually(lambda: arguments)
    assert arguments == [("new", 2)]


def test_an_unfenced_job_takes_nothing_over(start, store, rows):
    """`policies={"job": None}`: every node runs it for itself, and no record is its."""
    job, fences = attempts_of()
    node = start(policies={"job": None}, **SWEEP)
    knows(node, job)
    leave(store, moment())
    eventually(lambda: rows()[0].state == "waiting")
    never(lambda: fences, during=0.4)


# --- nobody knows the job ---------------------------------------------------------------------------------------------


def test_an_execution_whose_job_nobody_knows_is_lost_after_orphan_after(start, store, rows):
    """It waits for a node that knows it; then it is given up, and one node says so."""
    nodes = [start(orphan_after="1s", **SWEEP) for _ in range(2)]
    left = leave(store, moment(), job="gone", lasts=1000)
    eventually(lambda: rows()[0].state == "waiting")
    never(lambda: rows()[0].state != "waiting", during=0.6)
    eventually(lambda: of_all(nodes, EVENT_JOB_LOST))
    never(lambda: len(of_all(nodes, EVENT_JOB_LOST)) > 1, during=0.4)
    [event] = of_all(nodes, EVENT_JOB_LOST)
    assert (event.execution_id, event.token) == (f"gone/{left.slot}", left.token)
    assert rows()[0].state == "lost"


def test_a_node_that_comes_up_late_does_not_give_up_what_it_has_not_been_told_of_yet():
    """All nodes were down for longer than `orphan_after`: jobs may be added after the first sweep of the one that is back."""
    now = [1_800_000_000.0]
    shared = MemoryStore(clock=lambda: int(now[0] * 1e6))
    keeper = Keeper(
        shared, lambda _: None, lambda: "sweeper", lambda: None, Settings(orphan_after=timedelta(hours=1)),
        clock=lambda: Instant(now[0], now[0], now[0]), recover=lambda _: False,
    )  # fmt: skip
    leave(shared, datetime.fromtimestamp(now[0], timezone.utc))
    now[0] += 1
    shared.swap([abandon(*shared.held_leases(HeldLeases()), "another", keep_for=HOUR)])
    now[0] += 2 * 3600
    keeper.step()
    now[0] += 1800
    keeper.step()
    assert [row.state for row in shared.executions(Executions())] == ["waiting"]
    now[0] += 1800
    keeper.step()
    assert [row.state for row in shared.executions(Executions())] == ["lost"]


def test_giving_up_an_execution_is_announced_though_the_answer_was_lost(start, url, store, rows):
    """The next sweep reads back that it was this node's doing."""
    troubled = TroubledStore(open_store(url))
    leave(store, moment(), job="gone", lasts=1000)
    node = start(troubled, orphan_after="1s", lock_at_most="0.2s", **SWEEP)
    eventually(lambda: rows()[0].state == "waiting")
    time.sleep(0.3)
    troubled.losing["swap"] = 1
    node.heard.one(EVENT_JOB_LOST)
    assert rows()[0].state == "lost"


# --- an operator ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
def test_a_revived_execution_is_run_once_more(start, store, rows, delivery):
    """An operator's retry of a failed run: the same execution, its next attempt, on whichever node sweeps first."""
    fences = []

    @fenced(delivery=delivery, max_attempts=1)
    def job(fence):
        fences.append(fence)
        if fence.attempt == 1:
            raise ValueError

    node = start(**SWEEP)
    node.run(job)
    node.heard.one(EVENT_JOB_ERROR)
    eventually(lambda: rows()[0].state == "failed")
    assert store.swap([revive(rows()[0])]) != [None]
    node.heard.one(EVENT_JOB_EXECUTED)
    node.heard.one(EVENT_JOB_RECOVERED)
    assert [fence.attempt for fence in fences] == [1, 2]
    assert fences[0].token < fences[1].token
    assert (rows()[0].state, rows()[0].attempt) == ("succeeded", 2)


# --- a clean end ------------------------------------------------------------------------------------------------------


def test_a_coroutine_cancelled_by_shutdown_is_taken_over_at_once(url, rows):
    """It gives its lease back: nobody waits for 60 s of `lock_at_most`."""
    entered = []

    @fenced(delivery="at_least_once", lock_at_most="60s")
    async def job(fence):
        entered.append((fence.attempt, time.monotonic()))
        await asyncio.sleep(60 if fence.attempt == 1 else 0)

    async def application():
        first, second = node_on(url, **SWEEP), node_on(url, **SWEEP)
        knows(second, job)
        knows(first, job, next_run_time=moment())
        await until(lambda: entered)
        stopped = time.monotonic()
        await shut_down(first)
        await until(lambda: second.heard.of(EVENT_JOB_EXECUTED))
        await shut_down(second)
        return second, entered[-1][1] - stopped

    second, took = asyncio.run(application())
    second.heard.one(EVENT_JOB_RECOVERED)
    assert [attempt for attempt, _ in entered] == [1, 2]
    assert took < 3
    assert (rows()[0].state, rows()[0].attempt) == ("succeeded", 2)


@pytest.mark.parametrize("wait", [True, False])
def test_a_thread_that_runs_on_after_shutdown_is_not_taken_over(start, rows, wait):
    """Its lease of 0.4 s is renewed until the function has really ended, and then the run has succeeded."""
    entered = []

    @fenced(delivery="at_least_once", lock_at_most="0.4s")
    def job(fence):
        entered.append(fence.attempt)
        time.sleep(1.2)

    node, other = start(**SWEEP), start(**SWEEP)
    knows(other, job)
    node.run(job)
    eventually(lambda: entered)
    node.scheduler.shutdown(wait=wait)
    assert rows()[0].state == ("succeeded" if wait else "running")
    eventually(lambda: rows()[0].state == "succeeded")
    assert entered == [1]
    assert other.heard.of(EVENT_JOB_RECOVERED | EVENT_JOB_LOST | EVENT_LEASE_LOST) == []
