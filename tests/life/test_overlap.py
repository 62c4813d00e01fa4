"""A slot that comes while an earlier one still runs, on this node or another: skip, queue, allow or replace."""

import asyncio
import threading
import time

import life_jobs
import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MAX_INSTANCES
from claims import HOUR, ask
from dead import leave
from loops import node_on, shut_down, until
from trouble import TroubledStore
from waiting import eventually
from watched import moment, own_threads

from apscheduler_fence import (
    EVENT_JOB_LOST,
    EVENT_JOB_REFUSED,
    EVENT_LEASE_LOST,
    ConfigError,
    LeaseLost,
    fenced,
)
from apscheduler_fence.lease import claim, settle
from apscheduler_fence.slots import format_time
from apscheduler_fence.stores import open_store

SWEEP = {"sweep": "0.1s"}


class Gated:
    """A job whose runs begin and end as the test says."""

    def __init__(self, **policy):
        self.fences, self.ended = [], []
        self.gates = {}
        self.lock = threading.Lock()

        @fenced(**policy)
        def job(fence):
            with self.lock:
                gate = self.gates.setdefault(fence.slot, threading.Event())
                self.fences.append(fence)
            assert gate.wait(20)
            self.ended.append(fence)
            return fence.slot

        self.job = job

    def begun(self, number):
        """The fences of so many runs, once they have begun."""
        eventually(lambda: len(self.fences) >= number)
        assert len(self.fences) == number
        return self.fences

    def let_go(self, *slots):
        """Lets these slots end, also if they have not begun."""
        for slot in slots:
            with self.lock:
                self.gates.setdefault(slot, threading.Event()).set()


def slot(at):
    return format_time(round(at.timestamp() * 1e6))


def times(number):
    """So many slots, a millisecond apart and all of them due."""
    return [moment(-1 + each / 1000) for each in range(number)]


@pytest.fixture(params=["one node", "two nodes"])
def pair(request, start):
    """Two nodes that share a store, or one node twice."""

    def starter(**options):
        node = start(**{**SWEEP, **options})
        return node, node if request.param == "one node" else start(**{**SWEEP, **options})

    return starter


def submit(node, job, at, args=(), **settings):
    """Has a node run a slot of the job "job", whatever else of it runs there."""
    node.run(job, *args, at=at, replace_existing=True, **settings)
    eventually(lambda: node.scheduler.get_job("job") is None)


# --- skip -------------------------------------------------------------------------------------------------------------


def test_skip_refuses_a_slot_while_another_node_runs_an_earlier_one(start, rows):
    """The default: refused as `held`, with the holder, and not recorded."""
    gated, (first, second) = Gated(), times(2)
    node, other = start(), start()
    submit(node, gated.job, first)
    [fence] = gated.begun(1)
    submit(other, gated.job, second)
    refused = other.heard.one(EVENT_JOB_REFUSED)
    assert (refused.reason, refused.holder) == ("held", rows()[0].holder)
    assert [row.id for row in rows()] == [fence.execution_id]
    gated.let_go(slot(first))


def test_skip_leaves_a_second_run_on_one_node_to_max_instances(start):
    """As in APScheduler without this executor, where nothing of the policy is lost by it."""
    gated, node = Gated(), start()
    node.scheduler.add_job(gated.job, "interval", seconds=0.2, id="job", max_instances=1)
    gated.begun(1)
    eventually(lambda: node.heard.of(EVENT_JOB_MAX_INSTANCES))
    node.scheduler.remove_job("job")
    gated.let_go(gated.fences[0].slot)


# --- queue ------------------------------------------------------------------------------------------------------------


def test_queue_runs_every_slot_in_order_one_at_a_time(pair, rows):
    """A backlog of eight, on one node and over two: each recorded at once, none lost, none beside another."""
    gated, slots = Gated(overlap="queue"), times(9)
    nodes = pair()
    submit(nodes[0], gated.job, slots[0])
    gated.begun(1)
    for number, at in enumerate(slots[1:], 1):
        submit(nodes[number % 2], gated.job, at)
        eventually(lambda number=number: len(rows()) == number + 1)
    assert [row.state for row in rows()] == ["running"] + ["waiting"] * 8
    for number, at in enumerate(slots, 1):
        assert [fence.slot for fence in gated.begun(number)] == [slot(each) for each in slots[:number]]
        gated.let_go(slot(at))
    eventually(lambda: [row.state for row in rows()] == ["succeeded"] * 9)
    tokens = [fence.token for fence in gated.fences]
    assert tokens == sorted(set(tokens))
    assert [row.attempt for row in rows()] == [1] * 9


def test_a_queue_is_in_the_order_of_its_slots_not_of_their_arrival(start, rows):
    """Of those that wait, the oldest slot is next."""
    gated, slots = Gated(overlap="queue"), times(4)
    node = start(**SWEEP)
    submit(node, gated.job, slots[0])
    gated.begun(1)
    for at in (slots[3], slots[1], slots[2]):
        submit(node, gated.job, at)
    eventually(lambda: len(rows()) == 4)
    gated.let_go(*map(slot, slots))
    eventually(lambda: len(gated.ended) == 4)
    assert [fence.slot for fence in gated.ended] == [slot(at) for at in slots]


def test_a_queued_slot_is_said_to_be_queued_and_then_runs(start, rows):
    """EVENT_JOB_REFUSED with reason `queued`, later EVENT_JOB_EXECUTED; no worker waits in between."""
    gated, slots = Gated(overlap="queue"), times(4)
    node = start(inner="threadpool", max_workers=2, sweep="60s")
    submit(node, gated.job, slots[0])
    gated.begun(1)
    for at in slots[1:]:
        submit(node, gated.job, at)
    eventually(lambda: [event.reason for event in node.heard.of(EVENT_JOB_REFUSED)] == ["queued"] * 3)
    ran = threading.Event()
    node.run(ran.set, job_id="another")  # with two workers, of which the first is busy
    assert ran.wait(5)
    gated.let_go(*map(slot, slots))
    eventually(lambda: len(node.heard.of(EVENT_JOB_EXECUTED)) == 5)


@pytest.mark.parametrize("max_instances", [1, 3])
def test_a_queue_is_drained_without_waiting_for_sweeps(start, rows, max_instances):
    """Ten slots with a sweep every minute: each end calls up the next."""
    slots, ran = times(10), []

    @fenced(overlap="queue")
    def job(fence):
        ran.append(fence.slot)
        time.sleep(0.05)

    node = start(sweep="60s")
    eventually(lambda: node.executor._node.keeper._swept)
    for at in slots:
        submit(node, job, at, max_instances=max_instances)
    began = time.monotonic()
    eventually(lambda: len(ran) == 10)
    assert time.monotonic() - began < 8
    eventually(lambda: [row.state for row in rows()] == ["succeeded"] * 10)


def test_a_queue_is_drained_promptly_in_a_process_pool(start, tmp_path):
    """The run ends in a child, and the next is called up by the parent."""
    url, log = f"sqlite:///{tmp_path / 'fence.db'}", tmp_path / "log"
    node = start(url, inner="processpool", max_workers=2, sweep="60s")
    slots = times(4)
    for at in slots:
        submit(node, life_jobs.takes_a_moment, at, args=[str(log)])
    # In which order two children claim the first two is their affair.
    eventually(lambda: log.exists() and sorted(log.read_text().split()) == [slot(at) for at in slots], within=40)


def test_a_slot_beyond_the_queue_limit_is_refused_and_not_recorded(pair, rows):
    """`queue_limit=2`: two wait, the third is refused as `full`, on whichever node."""
    gated, slots = Gated(overlap="queue", queue_limit=2), times(4)
    nodes = pair()
    submit(nodes[0], gated.job, slots[0])
    gated.begun(1)
    for number, at in enumerate(slots[1:3], 2):
        submit(nodes[1], gated.job, at)
        eventually(lambda number=number: len(rows()) == number)
    submit(nodes[1], gated.job, slots[3])
    eventually(lambda: "full" in [event.reason for event in nodes[1].heard.of(EVENT_JOB_REFUSED)])
    assert len(rows()) == 3
    gated.let_go(*map(slot, slots))
    eventually(lambda: [row.state for row in rows()] == ["succeeded"] * 3)


def test_what_a_dead_node_had_queued_is_run_by_another(start, store, rows):
    """Its running slot is lost or repeated as delivery says, and those that waited run in order."""
    gated, slots = Gated(overlap="queue"), times(3)
    leave(store, slots[0], lasts=500_000, delivery="at_most_once")
    for at in slots[1:]:
        _queue_up(store, at)
    node = start(**SWEEP)
    node.scheduler.add_job(gated.job, "interval", hours=9999, id="job")
    gated.let_go(*map(slot, slots))
    eventually(lambda: [row.state for row in rows()] == ["lost", "succeeded", "succeeded"])
    assert [fence.slot for fence in gated.ended] == [slot(at) for at in slots[1:]]
    assert [fence.attempt for fence in gated.ended] == [1, 1]
    node.heard.one(EVENT_JOB_LOST)


def _queue_up(store, at):
    micros = round(at.timestamp() * 1e6)
    wanted = ask(
        "job", slot(at), job="job", slot_at=micros, scheduled_at=micros, overlap="queue", jobstore="default",
        job_id="job", keep_for=24 * HOUR,
    )  # fmt: skip
    change = claim(store.read(wanted.key), wanted)
    assert change.enqueues
    assert store.swap([change]) != [None]


def test_a_new_slot_does_not_overtake_those_that_wait(start, store, rows):
    """The lease is free and an older slot waits, whose node has died: the new slot queues behind it."""
    gated, slots = Gated(overlap="queue"), times(3)
    grant = leave(store, slots[0], lasts=HOUR)
    _queue_up(store, slots[1])
    assert store.swap([settle(grant, "succeeded")]) != [None]
    node = start(sweep="1s", paused=True)
    node.executor._node.keeper._swept = node.executor._node.keeper.clock()
    node.run(gated.job, at=slots[2])
    node.scheduler.resume()
    gated.let_go(*map(slot, slots))
    eventually(lambda: len(gated.ended) == 2)
    assert [fence.slot for fence in gated.ended] == [slot(at) for at in slots[1:]]


@pytest.mark.parametrize("wait", [True, False])
def test_what_waits_is_left_to_others_at_shutdown(start, rows, caplog, wait):
    """The run under way ends; nothing is begun after it, and nobody complains."""
    gated, slots = Gated(overlap="queue"), times(3)
    node = start(**SWEEP)
    submit(node, gated.job, slots[0])
    gated.begun(1)
    for at in slots[1:]:
        submit(node, gated.job, at)
    eventually(lambda: len(rows()) == 3)
    threading.Timer(0.3, gated.let_go, map(slot, slots)).start()
    node.scheduler.shutdown(wait=wait)
    eventually(lambda: [row.state for row in rows()] == ["succeeded", "waiting", "waiting"])
    eventually(lambda: not own_threads())
    assert len(gated.fences) == 1
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


def test_a_loss_found_by_a_slot_that_then_queues_is_announced_though_the_answer_was_lost(start, url, store, rows):
    """The claim ends an expired run in a swap of its own before it takes its place in the line."""
    troubled = TroubledStore(open_store(url))
    gated, slots = Gated(overlap="queue"), times(3)
    leave(store, slots[0], lasts=300_000, delivery="at_most_once")
    _queue_up(store, slots[1])
    node = start(troubled, sweep="60s", paused=True)  # whose first sweep finds nothing that is over
    eventually(lambda: node.executor._node.keeper._swept)
    time.sleep(0.4)
    troubled.losing["swap"] = 1
    node.run(gated.job, at=slots[2])
    node.scheduler.resume()
    gated.let_go(*map(slot, slots))
    assert node.heard.one(EVENT_JOB_LOST).execution_id == f"job/{slot(slots[0])}"
    eventually(lambda: rows()[2].state in ("waiting", "succeeded"))


# --- allow ------------------------------------------------------------------------------------------------------------


def test_allow_runs_slots_beside_each_other_under_leases_of_their_own(pair, rows):
    """Two slots at once; each lease is named after its slot, and each slot still runs once."""
    gated, (first, second) = Gated(overlap="allow"), times(2)
    nodes = pair()
    submit(nodes[0], gated.job, first)
    submit(nodes[1], gated.job, second)
    fences = gated.begun(2)
    assert {fence.lease for fence in fences} == {f"job/{slot(first)}", f"job/{slot(second)}"}
    submit(nodes[1], gated.job, first)
    assert nodes[1].heard.one(EVENT_JOB_REFUSED).reason == "running"
    gated.let_go(slot(first), slot(second))
    eventually(lambda: [row.state for row in rows()] == ["succeeded"] * 2)


def test_allow_leaves_room_in_a_lease_name_for_its_slot(start):
    """A job name that is too long for that is refused when the job is added."""
    node, gated = start(), Gated(overlap="allow")
    node.scheduler.add_job(gated.job, "interval", hours=1, id="j" * 170)
    assert isinstance(node.heard.one(EVENT_JOB_ERROR).exception, ConfigError)


def test_allow_does_not_run_a_slot_again_whose_record_may_be_pruned(start, rows):
    """With its lease gone too, only its age tells: older than `retention`, refused as `pruned`."""
    node, gated = start(retention="1m"), Gated(overlap="allow")
    submit(node, gated.job, moment(-3600))
    assert node.heard.one(EVENT_JOB_REFUSED).reason == "pruned"
    assert rows() == []


# --- replace ----------------------------------------------------------------------------------------------------------


def test_replace_lets_the_newer_slot_run_and_records_nothing_more_of_the_older(pair, rows):
    """A thread that never checks: superseded at once, its token stale, its end not recorded, its lease said to be lost."""
    gated, (first, second) = Gated(overlap="replace"), times(2)
    nodes = pair(lock_at_most="0.6s")
    submit(nodes[0], gated.job, first)
    gated.begun(1)
    submit(nodes[1], gated.job, second)
    older, newer = gated.begun(2)
    assert newer.token > older.token
    assert [row.state for row in rows()] == ["superseded", "running"]
    eventually(lambda: older.lost)
    assert not newer.lost
    gated.let_go(slot(first))
    eventually(lambda: len(gated.ended) == 1)
    time.sleep(0.3)
    assert [row.state for row in rows()] == ["superseded", "running"]
    assert nodes[0].heard.one(EVENT_LEASE_LOST).execution_id == older.execution_id
    gated.let_go(slot(second))
    eventually(lambda: [row.state for row in rows()] == ["superseded", "succeeded"])


def test_a_replaced_function_gets_lease_lost_at_its_next_check(start, rows):
    """It learns of it from its node's renewal."""
    (first, second), checked = times(2), []
    node, other = (start(lock_at_most="0.6s", **SWEEP) for _ in range(2))

    @fenced(overlap="replace")
    def job(fence):
        if fence.slot == slot(first):
            checked.append(True)
            while True:
                fence.check()
                time.sleep(0.01)

    submit(node, job, first)
    eventually(lambda: checked)
    submit(other, job, second)
    assert isinstance(node.heard.one(EVENT_JOB_ERROR).exception, LeaseLost)
    other.heard.one(EVENT_JOB_EXECUTED)
    assert [row.state for row in rows()] == ["superseded", "succeeded"]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_replaced_coroutine_is_cancelled(url, rows, nodes):
    """At once on the same node, at the next renewal on another; its task ends with LeaseLost."""
    (first, second), entered, ended = times(2), [], []

    @fenced(overlap="replace")
    async def job(fence):
        entered.append(fence.slot)
        if fence.slot == slot(first):
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(time.monotonic())

    async def application():
        running = [node_on(url, lock_at_most="1s") for _ in range(nodes)]
        running[0].run(job, at=first)
        await until(lambda: entered)
        running[-1].run(job, at=second)
        await until(lambda: ended and running[-1].heard.of(EVENT_JOB_EXECUTED))
        await until(lambda: running[0].heard.of(EVENT_JOB_ERROR))
        await shut_down(*running)
        return running[0]

    node = asyncio.run(application())
    assert isinstance(node.heard.one(EVENT_JOB_ERROR).exception, LeaseLost)
    assert [row.state for row in rows()] == ["superseded", "succeeded"]


def test_an_older_slot_never_replaces_a_newer_one(pair, rows):
    """A late node's older slot is refused as `held`."""
    gated, (older, newer) = Gated(overlap="replace"), times(2)
    nodes = pair()
    submit(nodes[0], gated.job, newer)
    gated.begun(1)
    submit(nodes[1], gated.job, older)
    assert nodes[1].heard.one(EVENT_JOB_REFUSED).reason == "held"
    assert len(rows()) == 1
    gated.let_go(slot(newer))
    eventually(lambda: rows()[0].state == "succeeded")


@pytest.mark.parametrize("overlap", ["queue", "allow", "replace"])
def test_max_instances_does_not_get_in_the_way_of_the_policy(start, rows, overlap):
    """APScheduler's default of one instance: three slots that come while the first runs are queued, run or replace it."""
    gated = Gated(overlap=overlap, lock_at_most="0.6s")
    node = start(**SWEEP)
    node.scheduler.add_job(gated.job, "interval", seconds=0.2, id="job", max_instances=1)
    eventually(lambda: len(rows()) >= 3)
    node.scheduler.remove_job("job")
    assert node.heard.of(EVENT_JOB_MAX_INSTANCES) == []
    gated.let_go(*[row.slot for row in rows()])
    time.sleep(0.3)
    gated.let_go(*[row.slot for row in rows()])
    eventually(lambda: not {"running", "waiting"} & {row.state for row in rows()})
