"""What is held is kept, what cannot be kept is said to be lost, and what others left behind is ended once."""

import logging
from datetime import timedelta

import pytest
from trouble import TroubledStore

from apscheduler_fence import EVENT_JOB_LOST, EVENT_LEASE_LOST, EVENT_LEASE_OVERDUE, ConfigError
from apscheduler_fence.fence import Hold
from apscheduler_fence.keeper import IDLE, Keeper, Settings, plan
from apscheduler_fence.lease import Ask, Grant, Key, claim, granted, settle
from apscheduler_fence.policy import Instant, Policy, trusted_for
from apscheduler_fence.slots import Slot
from apscheduler_fence.stores.base import Executions
from apscheduler_fence.stores.memory import MemoryStore

SECOND = 1_000_000
BEGIN = 1_800_000_000


class Clock:
    """The clock of a node, in seconds, and that of a store."""

    def __init__(self):
        self.now = 0.0
        self.ahead = 0.0

    def __call__(self):
        return Instant(self.now, self.now, BEGIN + self.now + self.ahead)

    def micros(self):
        return int((BEGIN + self.now) * SECOND)


@pytest.fixture
def clock():
    return Clock()


# --- the plan ---------------------------------------------------------------------------------------------------------


def held(clock, since=0.0, began=None, **policy):
    """A hold whose last renewal was sent at `since`."""
    grant = Grant("job", "job", "slot", token=1, holder="host:1:nonce", attempt=1)
    at = Instant(since, since, BEGIN + since)
    start = at if began is None else Instant(began, began, BEGIN + began)
    options = {
        name: timedelta(seconds=value) if not isinstance(value, bool) else value for name, value in policy.items()
    }
    return Hold(grant, Slot("job", "slot", 0, 0), Policy(**options), since=at, began=start, clock=clock)


# What is held, the time, whether the store fails; what follows, and the wait.
PLANS = {
    "nothing held": ([], 0, False, "", IDLE),
    "not due yet": ([{"lock_at_most": 30}], 4, False, "", 6),
    "a third has passed": ([{"lock_at_most": 30}], 10, False, "renew", 10),
    "the shortest lease sets the pace": ([{"lock_at_most": 30}, {"lock_at_most": 3}], 1, False, "renew renew", 1),
    "faster while the store fails": ([{"lock_at_most": 30}], 1, True, "renew", 1),
    "never slower than a fifth while it fails": ([{"lock_at_most": 0.3}], 0.02, True, "renew", 0.02),
    "not renewed": ([{"lock_at_most": 10, "renew": False}], 4, False, "", 4),
    "not renewed, 80 % used": ([{"lock_at_most": 10, "renew": False}], 8, False, "overdue", 1.95),
    "not renewed, over": ([{"lock_at_most": 10, "renew": False}], 10, False, "lost overdue", IDLE),
    "80 % of max_runtime used": (
        [{"lock_at_most": 30, "max_runtime": 100, "since": 75, "began": 0}], 80, False, "overdue", 5,
    ),
    "max_runtime used up": (
        [{"lock_at_most": 30, "max_runtime": 100, "since": 95, "began": 0}], 100, False, "overdue", 24.85,
    ),
    "past the deadline without a renewal": ([{"lock_at_most": 3}], 3, False, "lost", IDLE),
    "one lost, one kept": ([{"lock_at_most": 3}, {"lock_at_most": 3, "since": 2}], 3.5, False, "lost renew", 1),
    "ended": ([{"lock_at_most": 3, "ended": True}], 9, False, "", IDLE),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANS.values(), ids=PLANS)
def test_a_plan_follows_from_what_is_held_and_the_time(clock, case):
    """Renew every third of the shortest lease; lost past the deadline; overdue at 80 % of the limit; then wait."""
    holds, now, failing, expected, wait = case
    given = []
    for options in holds:
        given.append(held(clock, **{name: value for name, value in options.items() if name != "ended"}))
        given[-1].ended = options.get("ended", False)
    clock.now = now
    latest = max((hold.since.monotonic for hold in given), default=0.0)
    since_round = now - (latest if len(given) == 1 else 0.0)
    todo = plan(given, clock(), since_round, failing=failing)
    said = ["lost"] * len(todo.lost) + ["renew"] * len(todo.renew) + ["overdue"] * len(todo.overdue)
    assert " ".join(said) == expected
    assert todo.wait == pytest.approx(wait, abs=0.02)


# --- one step after another, under a clock that the test sets -----------------------------------------------------------


class Node:
    """A keeper that takes a step when it is told to, and a store that it shares."""

    def __init__(self, clock, store, **settings):
        self.store = TroubledStore(store)
        self.said = []
        self.nonces = iter(f"sweeper:{id(self)}:{number}" for number in range(1000))
        self.keeper = Keeper(
            self.store, self.said.append, lambda: next(self.nonces), lambda: None, Settings(**settings), clock
        )
        self.clock = clock

    def codes(self):
        return [event.code for event in self.said]

    def claim(self, slot="1", lock_at_most=3.0, **policy):
        ask = Ask(
            lease="job", job="job", slot=slot, slot_at=1, scheduled_at=1, nonce=f"host:1:{slot}",
            lock_at_most=int(lock_at_most * SECOND), job_id="job", jobstore="default",
        )  # fmt: skip
        change = claim(self.store.store.read(ask.key), ask)
        [token] = self.store.store.swap([change])
        at = self.clock()
        rules = Policy(lock_at_most=timedelta(seconds=lock_at_most), **policy)
        hold = Hold(granted(ask, token, 1), Slot("job", slot, 1, 1), rules, at, at, "job", clock=self.clock)
        self.keeper.hold(hold)
        return hold

    def states(self):
        return [row.state for row in self.store.store.executions(Executions(oldest_first=True))]

    def run_until(self, end):
        """Steps as the thread would, never waiting longer than the keeper said."""
        while self.clock.now < end:
            wait = self.keeper.step()
            assert wait >= 0
            self.clock.now = min(end, self.clock.now + max(wait, 0.001))


@pytest.fixture
def shared(clock):
    return MemoryStore(clock=clock.micros)


@pytest.fixture
def node(clock, shared):
    return Node(clock, shared)


def test_a_job_of_many_leases_is_kept(node, clock):
    """Renewal goes on every third of `lock_at_most` for as long as the run takes."""
    hold = node.claim()
    node.run_until(60)
    assert hold.remaining() > 1.9
    assert node.said == []
    assert 55 <= node.store.calls.count("swap") <= 65


def test_all_leases_are_renewed_in_one_swap(node, shared):
    """However many are held, a round costs one call."""
    node.claim()
    other = MemoryStore.read(shared, Key("other", "other", "1"))
    ask = Ask("other", "other", "1", 1, 1, "host:1:other", 3 * SECOND)
    [token] = shared.swap([claim(other, ask)])
    at = node.clock()
    node.keeper.hold(Hold(granted(ask, token, 1), Slot("other", "1", 1, 1), Policy(), at, at, clock=node.clock))
    node.clock.now = 2
    node.keeper.step()
    assert node.store.calls.count("swap") == 1


def test_errors_of_the_store_never_end_renewal(node):
    """An outage shorter than the lease leaves no trace but the log."""
    hold = node.claim(lock_at_most=9.0)
    node.run_until(5)
    node.store.down = True
    node.run_until(10)
    node.store.down = False
    node.run_until(60)
    assert hold.remaining() > 5
    assert node.said == []


def test_an_error_that_is_not_the_stores_never_ends_renewal(node, caplog):
    """Whatever goes wrong is logged, and the next round comes."""
    hold = node.claim()
    node.store.store.held_leases = lambda _: 1 / 0
    node.run_until(20)
    assert hold.remaining() > 1
    assert "The keeper goes on after an error of its own" in caplog.text


def test_past_the_deadline_a_lease_is_lost_and_that_is_said_once(node, caplog):
    """`fence.lost`, one EVENT_LEASE_LOST and one WARNING, at the holder's own deadline; a late answer revives nothing."""
    hold = node.claim()
    node.store.down = True
    node.run_until(trusted_for(timedelta(seconds=3)) - 0.01)
    assert node.said == []
    node.run_until(10)
    node.store.down = False
    node.run_until(12)
    [event] = [event for event in node.said if event.code == EVENT_LEASE_LOST]
    assert (event.execution_id, event.token, event.holder) == ("job/1", hold.grant.token, hold.grant.holder)
    assert hold.remaining() == 0
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "Lease of job/1 lost" in warnings[0].getMessage()


def test_an_outage_is_logged_once_and_its_end_once(node, caplog):
    """Not once for each try."""
    caplog.set_level(logging.INFO)
    node.claim(lock_at_most=60.0)
    node.store.down = True
    node.run_until(30)
    node.store.down = False
    node.run_until(40)
    assert caplog.text.count("The store does not answer") == 1
    assert caplog.text.count("The store answers again") == 1


def test_a_lease_taken_by_another_is_lost_at_the_next_renewal(node, shared):
    """Renewal compares token and holder."""
    hold = node.claim()
    shared.swap([settle(hold.grant, "lost")])
    node.run_until(1.5)
    assert node.codes() == [EVENT_LEASE_LOST]


def test_a_store_that_is_configured_wrongly_is_logged_once(clock, shared, caplog):
    """A ConfigError stays; the keeper goes on without spinning or filling the log."""
    node = Node(clock, shared)

    def prepare():
        raise ConfigError("can never work")

    node.keeper.prepare = prepare
    node.run_until(60)
    assert caplog.text.count("can never work") == 1


def test_a_run_near_its_limit_is_overdue(node, caplog):
    """At 80 % of `max_runtime`: one event and one WARNING; at 100 % renewal ends, and then the lease."""
    hold = node.claim(max_runtime=timedelta(seconds=10))
    node.run_until(7.9)
    assert node.said == []
    node.run_until(9)
    assert node.codes() == [EVENT_LEASE_OVERDUE]
    assert "has used 80 % of 0:00:10" in caplog.text
    node.run_until(14)
    assert node.codes() == [EVENT_LEASE_OVERDUE, EVENT_LEASE_LOST]
    assert hold.remaining() == 0


def test_without_renewal_the_lease_is_a_hard_limit(node):
    """`renew=False`: overdue at 80 % of `lock_at_most`, lost at its end, nothing renewed."""
    node.claim(lock_at_most=10.0, renew=False)
    node.run_until(8.5)
    assert node.codes() == [EVENT_LEASE_OVERDUE]
    node.run_until(11)
    assert node.codes() == [EVENT_LEASE_OVERDUE, EVENT_LEASE_LOST]
    assert "swap" not in node.store.calls


# --- settles without an answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "not applied"])
def test_a_settle_without_an_answer_is_repeated_until_there_is_one(node, clock, applied):
    """Whether or not the first one arrived, the record ends as the run did, and nobody is told of a lost lease."""
    hold = node.claim()
    hold.ended = True
    change = settle(hold.grant, "succeeded")
    if applied:
        node.store.store.swap([change])
    node.store.failing["swap"] = 4
    node.keeper.settle_later(hold, change)
    node.run_until(30)
    assert node.states() == ["succeeded"]
    assert node.said == []
    assert node.keeper._unsettled == []


def test_a_settle_that_comes_too_late_is_not_recorded_and_says_so(clock, shared, caplog):
    """The lease was abandoned meanwhile: lost stays lost, one EVENT_LEASE_LOST, one WARNING."""
    late, sweeper = Node(clock, shared), Node(clock, shared)
    hold = late.claim()
    hold.ended = True
    late.keeper.settle_later(hold, settle(hold.grant, "succeeded"))
    clock.now = 4
    sweeper.keeper.step()
    late.run_until(6)
    assert late.codes() == [EVENT_LEASE_LOST]
    assert sweeper.codes() == [EVENT_JOB_LOST]
    assert late.states() == ["lost"]
    assert "Outcome of job/1 (succeeded) not recorded" in caplog.text


def test_a_node_does_not_abandon_what_it_has_yet_to_record(node, clock):
    """Its own settle is under way: an expired lease of its own is no stranger's."""
    hold = node.claim()
    hold.ended = True
    node.store.failing["swap"] = 10
    node.keeper.settle_later(hold, settle(hold.grant, "succeeded"))
    node.keeper.settings = Settings(lock_at_most=timedelta(seconds=0.1), sweep=timedelta(seconds=0.2))
    node.run_until(30)
    assert node.states() == ["succeeded"]


# --- what others left behind ------------------------------------------------------------------------------------------


def abandoned(clock, shared):
    """A run whose node is gone, and whose lease is over."""
    gone = Node(clock, shared)
    hold = gone.claim()
    clock.now += 4
    return hold


def test_an_abandoned_run_is_lost_and_one_of_two_nodes_says_so(clock, shared):
    """The event names the run's own holder, token and run time."""
    nodes = [Node(clock, shared), Node(clock, shared)]
    hold = abandoned(clock, shared)
    for node in nodes * 3:
        node.keeper.step()
        clock.now += 2.5
    [event] = [event for node in nodes for event in node.said]
    assert (event.code, event.job_id, event.jobstore) == (EVENT_JOB_LOST, "job", "default")
    assert (event.execution_id, event.holder, event.token) == ("job/1", hold.grant.holder, hold.grant.token)
    assert nodes[0].states() == ["lost"]


def test_a_loss_whose_answer_was_lost_is_announced_once(clock, shared):
    """The sweeper reads back whether it was its own swap that ended the run."""
    node, other = Node(clock, shared, lock_at_most=timedelta(seconds=1)), Node(clock, shared)
    abandoned(clock, shared)
    node.store.losing["swap"] = 1
    node.run_until(clock.now + 1)
    other.keeper.step()
    assert node.said == []
    node.run_until(clock.now + 20)
    assert node.codes() == [EVENT_JOB_LOST]
    assert other.said == []


def test_a_loss_that_another_node_ended_is_not_announced_twice(clock, shared):
    """A swap that failed, and a run that the other node ended meanwhile."""
    node, other = Node(clock, shared, lock_at_most=timedelta(seconds=1)), Node(clock, shared)
    abandoned(clock, shared)
    node.store.failing["swap"] = 1
    node.run_until(clock.now + 0.5)
    other.keeper.step()
    node.run_until(clock.now + 20)
    assert node.said == []
    assert other.codes() == [EVENT_JOB_LOST]


def test_nothing_is_swept_within_a_lease_period_of_an_outage(clock, shared):
    """Those who held leases through it come back first."""
    node = Node(clock, shared, lock_at_most=timedelta(seconds=30))
    node.run_until(1)
    node.store.down = True
    node.run_until(10)
    node.store.down = False
    abandoned(clock, shared)
    node.run_until(35)
    assert node.states() == ["running"]
    node.run_until(50)
    assert node.states() == ["lost"]


def test_more_than_one_round_of_abandoned_leases_is_swept(clock, shared):
    """A sweep that finds its limit goes on at once."""
    node = Node(clock, shared, sweep=timedelta(hours=1))
    for number in range(450):
        ask = Ask(f"job{number}", f"job{number}", "1", 1, 1, f"host:1:{number}", SECOND)
        shared.swap([claim(shared.read(ask.key), ask)])
    clock.now += 2
    node.run_until(clock.now + 5)
    assert set(node.states()) == {"lost"}


# --- old records ------------------------------------------------------------------------------------------------------


def old_record(node, clock):
    hold = node.claim()
    node.store.store.swap([settle(hold.grant, "succeeded")])
    node.keeper.drop(hold)
    clock.now += 31 * 86400


def test_records_past_their_time_are_pruned(node, clock):
    """After `retention`; not in the first minutes of a node, and then regularly."""
    old_record(node, clock)
    node.keeper.step()
    assert node.states() == ["succeeded"]
    node.run_until(clock.now + 700)
    assert node.states() == []


def test_nothing_is_pruned_while_the_clocks_are_days_apart(node, clock, caplog):
    """A store whose clock has jumped would take every record for an old one."""
    old_record(node, clock)
    clock.ahead = -2 * 86400
    node.run_until(clock.now + 1300)
    assert "prune" not in node.store.calls
    assert "Nothing is pruned while the store's clock is +172800 s from this node's" in caplog.text


def test_a_full_round_of_pruning_is_followed_by_another(node, clock):
    """A backlog of old records shrinks with every sweep, not every ten minutes."""
    node.store.store.prune = lambda limit: limit if node.store.calls.count("prune") < 5 else 0
    node.run_until(clock.now + 660)
    assert node.store.calls.count("prune") == 5
