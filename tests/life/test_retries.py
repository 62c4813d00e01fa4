"""A run that raised is tried again: the same execution, under the same lease, with a larger token."""

import asyncio
import threading
import time

import life_jobs
import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from loops import node_on, shut_down, until
from trouble import TroubledStore
from waiting import eventually, never
from watched import moment

from apscheduler_fence import (
    EVENT_JOB_RECOVERED,
    EVENT_JOB_REFUSED,
    EVENT_LEASE_LOST,
    Backoff,
    ConfigError,
    LeaseLost,
    Retry,
    fenced,
)
from apscheduler_fence.lease import Key, release
from apscheduler_fence.policy import parse_options
from apscheduler_fence.stores import open_store

# --- how long to wait -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delay", "chance", "waits"),
    [
        ("2s", 0.7, [2, 2, 2, 2]),
        (0, 0.7, [0, 0, 0, 0]),
        (Backoff("1s", 2, "10s", jitter=0), 0.7, [1, 2, 4, 8, 10, 10]),
        (Backoff("20s", 3, "10s", jitter=0), 0.7, [10, 10]),
        (Backoff("1s", 2, "10s", jitter=0.5), 0, [1, 2, 4, 8, 10, 10]),
        (Backoff("1s", 2, "10s", jitter=0.5), 1, [0.5, 1, 2, 4, 5, 5]),
        (Backoff("1s", 2, "10s", jitter=1), 0.25, [0.75, 1.5, 3, 6, 7.5, 7.5]),
        (Backoff("1s", 100, "1h", jitter=0), 0, [1, 100, 3600]),
    ],
)
def test_waits_are_constant_or_grow_up_to_a_cap_less_the_jitter(delay, chance, waits):
    """The n-th wait is `first * factor ** (n - 1)`, at most `cap`, and `jitter` of it is left to chance."""
    backoff = parse_options({"retry_delay": delay}, "test")["retry_delay"]
    assert [backoff.wait(retry, chance) for retry in range(1, len(waits) + 1)] == pytest.approx(waits)


def test_the_thousandth_wait_does_not_overflow():
    """Growth stops mattering long before floating point does."""
    assert Backoff("1s", 100, "1h", jitter=0).wait(1000, 0) == 3600


@pytest.mark.parametrize("wrong", [{"factor": 0.5}, {"factor": 101}, {"jitter": -0.1}, {"jitter": 1.1}, {"first": "x"}])
def test_a_backoff_out_of_range_is_refused(wrong):
    """When it is written down, not at the first failure."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Backoff(**wrong)


# --- on a thread ------------------------------------------------------------------------------------------------------


def failing(times, error=ValueError, **policy):
    """A job that raises so many times, and the fences it was handed."""
    fences = []

    @fenced(**{"retries": 3, "retry_delay": 0.02, **policy})
    def job(fence):
        fences.append(fence)
        if len(fences) <= times:
            raise error(f"attempt {fence.attempt}")
        return fence.attempt

    return job, fences


def test_a_retry_is_the_next_attempt_of_the_same_execution(start, rows):
    """One id, attempts 1, 2, 3, tokens that grow; the record counts the attempts and keeps the last error."""
    node, (job, fences) = start(), failing(2)
    node.run(job)
    node.heard.one(EVENT_JOB_EXECUTED)
    assert len({fence.execution_id for fence in fences}) == 1
    assert [fence.attempt for fence in fences] == [1, 2, 3]
    assert fences[0].token < fences[1].token < fences[2].token
    [row] = rows()
    assert (row.state, row.attempt, row.token) == ("succeeded", 3, fences[2].token)
    assert row.error.endswith("ValueError: attempt 2")


def test_only_the_final_attempt_is_an_event(start):
    """Two failures in between are log lines: one EVENT_JOB_EXECUTED, no EVENT_JOB_ERROR, and nothing was recovered."""
    node, (job, _) = start(), failing(2)
    node.run(job)
    assert node.heard.one(EVENT_JOB_EXECUTED).retval == 3
    assert node.heard.of(EVENT_JOB_ERROR | EVENT_JOB_RECOVERED | EVENT_LEASE_LOST) == []


def test_retries_end_with_the_last_error(start, rows):
    """`retries=2` are three attempts; the third one's error is the event's and the record's."""
    node, (job, fences) = start(), failing(9, retries=2)
    node.run(job)
    assert str(node.heard.one(EVENT_JOB_ERROR).exception) == "attempt 3"
    never(lambda: len(fences) > 3, during=0.2)
    [row] = rows()
    assert (row.state, row.attempt) == ("failed", 3)
    assert row.error.endswith("ValueError: attempt 3")


def test_only_the_named_exceptions_are_worth_a_retry(start, rows):
    """`retry_on=KeyError`: a LookupError is not one, and fails at once."""
    node, (job, fences) = start(), failing(9, LookupError, retry_on=KeyError)
    node.run(job)
    node.heard.one(EVENT_JOB_ERROR)
    assert len(fences) == 1
    assert (rows()[0].state, rows()[0].attempt) == ("failed", 1)


def test_a_subclass_of_a_named_exception_is_worth_a_retry(start):
    """As in an except clause."""
    node, (job, fences) = start(), failing(1, KeyError, retry_on=(OSError, LookupError))
    node.run(job)
    node.heard.one(EVENT_JOB_EXECUTED)
    assert len(fences) == 2


def asking(**retry):
    """A job that asks once to be run again."""
    times = []

    @fenced(retries=1, retry_delay=retry.pop("retry_delay", 60), retry_on=KeyError)
    def job():
        times.append(time.monotonic())
        if len(times) == 1:
            raise Retry(**retry)

    return job, times


@pytest.mark.parametrize(
    ("retry", "least"),
    [
        ({"after": "0.3s"}, 0.3),
        ({"after": 0}, 0),
        ({"after": -1}, 0),
        ({"retry_delay": 0.3}, 0.3),
        ({"after": "soon", "retry_delay": 0.3}, 0.3),
    ],
    ids=["after", "at once", "a moment past", "without after", "not a duration"],
)
def test_a_job_can_ask_for_a_retry_and_say_when(start, rows, retry, least):
    """`raise Retry(after=…)` counts whatever `retry_on` says; without a usable `after` it waits as `retry_delay` says."""
    node, (job, times) = start(), asking(**retry)
    node.run(job)
    node.heard.one(EVENT_JOB_EXECUTED)
    assert least <= times[1] - times[0] < least + 2
    assert (rows()[0].state, rows()[0].attempt) == ("succeeded", 2)


def test_asking_for_a_retry_does_not_add_to_their_number(start, rows):
    """With `retries=0` a raised Retry is a failure like others."""
    node, (job, fences) = start(), failing(9, Retry, retries=0)
    node.run(job)
    node.heard.one(EVENT_JOB_ERROR)
    assert len(fences) == 1
    assert rows()[0].state == "failed"


# --- the lease between attempts ---------------------------------------------------------------------------------------


def test_the_lease_is_held_and_renewed_between_attempts(start):
    """1.2 s of delay under a lease of 0.4 s: another node is refused meanwhile, and the second attempt can be trusted."""
    node, other, at = start(lock_at_most="0.4s"), start(lock_at_most="0.4s"), moment()
    job, fences = failing(1, retry_delay=1.2)
    node.run(job, at=at)
    eventually(lambda: fences)
    time.sleep(0.8)
    other.run(job, at=at)
    assert other.heard.one(EVENT_JOB_REFUSED).reason == "running"
    node.heard.one(EVENT_JOB_EXECUTED)
    assert node.heard.of(EVENT_LEASE_LOST) == []
    assert [fence.attempt for fence in fences] == [1, 2]


def test_no_attempt_begins_when_the_lease_was_lost_in_between(start, rows, store):
    """An operator breaks the lease during the delay: the run ends with its error, the record stays as the operator left it."""
    node, (job, fences) = start(), failing(9, retry_delay=0.5)
    node.run(job)
    [row] = eventually(rows)
    eventually(lambda: fences)
    broken = release(store.read(Key(row.lease, row.job, row.slot)), "operator", keep_for=10**12)
    assert store.swap([broken]) != [None]
    node.heard.one(EVENT_JOB_ERROR)
    node.heard.one(EVENT_LEASE_LOST)
    assert len(fences) == 1
    assert rows()[0].state == "lost"


class Gates(TroubledStore):
    """Holds up the answer to the next lease move of one kind, or the move itself, until told to go on."""

    def __init__(self, url, move, *, applied):
        super().__init__(open_store(url))
        self.move, self.applied = move, applied
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.refused = []

    def swap(self, changes):
        moves = [change.lease.write for change in changes if change.lease is not None]
        gated = self.move in moves and not self.reached.is_set()
        if gated and not self.applied:
            self._wait()
        tokens = super().swap(changes)
        self.refused += [move for move, token in zip(moves, tokens, strict=False) if token is None]
        if gated and self.applied:
            self._wait()
        return tokens

    def _wait(self):
        self.reached.set()
        assert self.go_on.wait(20)


def test_a_renewal_on_its_way_when_the_token_moves_is_no_loss(start, url):
    """The renewal of the first attempt's grant arrives after the retry and matches nothing."""
    store = Gates(url, "extend", applied=False)
    node, answers = start(store, lock_at_most="1.5s"), []

    @fenced(retries=1, retry_delay=0)
    def job(fence):
        if fence.attempt == 1:
            assert store.reached.wait(10)
            raise ValueError
        store.go_on.set()
        eventually(lambda: store.refused == ["extend"])
        time.sleep(0.1)
        answers.append(fence.lost)

    node.run(job)
    node.heard.one(EVENT_JOB_EXECUTED)
    assert answers == [False]
    assert node.heard.of(EVENT_LEASE_LOST) == []


def test_a_renewal_while_a_retry_waits_for_its_answer_is_no_loss(start, url):
    """The retry is applied and its answer late: a renewal in between, with the old token, matches nothing."""
    store = Gates(url, "regrant", applied=True)
    node, (job, fences) = start(store, lock_at_most="1.5s"), failing(1)
    node.run(job)
    eventually(lambda: store.refused == ["extend"])
    store.go_on.set()
    node.heard.one(EVENT_JOB_EXECUTED)
    assert [fence.attempt for fence in fences] == [1, 2]
    assert node.heard.of(EVENT_LEASE_LOST) == []


# --- a store in trouble -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["failing", "losing"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_retry_that_got_no_answer_is_sent_until_it_has_one(start, url, rows, trouble, times):
    """Not applied, or applied with the answer lost: one second attempt, recorded as the second."""
    store, tokens = TroubledStore(open_store(url)), []
    node = start(store)

    @fenced(retries=3, retry_delay=0)
    def job(fence):
        tokens.append((fence.attempt, fence.token))
        if fence.attempt == 1:
            getattr(store, trouble)["swap"] = times
            raise ValueError

    node.run(job)
    node.heard.one(EVENT_JOB_EXECUTED)
    [row] = rows()
    assert [attempt for attempt, _ in tokens] == [1, 2]
    assert (row.state, row.attempt, row.token) == ("succeeded", *tokens[-1])
    assert node.heard.of(EVENT_LEASE_LOST) == []


def test_a_retry_is_given_up_with_the_store_and_the_failure_recorded_later(start, url, rows):
    """No attempt begins on an unknown outcome; the keeper records the failure when the store is back."""
    store, attempts = TroubledStore(open_store(url)), []
    node = start(store, store_patience=0.5)

    @fenced(retries=3, retry_delay=0)
    def job(fence):
        attempts.append(fence.attempt)
        store.down = True
        raise ValueError

    node.run(job)
    node.heard.one(EVENT_JOB_ERROR)
    assert rows()[0].state == "running"
    store.down = False
    eventually(lambda: rows()[0].state == "failed")
    assert attempts == [1]
    assert node.executor._node.keeper.held == ()


# --- on an event loop -------------------------------------------------------------------------------------------------


def test_a_coroutine_is_tried_again(url, rows):
    """As on a thread; the loop runs on during the delay."""
    fences = []

    @fenced(retries=2, retry_delay=0.05)
    async def job(fence):
        fences.append(fence)
        await asyncio.sleep(0)
        if fence.attempt < 3:
            raise ValueError
        return "done"

    async def application():
        node = node_on(url)
        node.run(job)
        await until(lambda: node.heard.of(EVENT_JOB_EXECUTED | EVENT_JOB_ERROR))
        await shut_down(node)
        return node

    node = asyncio.run(application())
    assert node.heard.one(EVENT_JOB_EXECUTED).retval == "done"
    assert node.heard.of(EVENT_JOB_ERROR) == []
    assert fences[0].token < fences[1].token < fences[2].token
    assert (rows()[0].state, rows()[0].attempt) == ("succeeded", 3)


def cancelled_meanwhile(store, reached, go_on):
    """Cancels a coroutine that has failed once as soon as `reached` says so, then lets the store go on."""
    attempts = []

    @fenced(retries=2, retry_delay=0.05)
    async def job(fence):
        attempts.append(fence.attempt)
        await asyncio.sleep(0)
        raise ValueError

    async def application():
        node = node_on(store)
        node.run(job)
        await until(lambda: attempts and reached())
        await shut_down(node)
        go_on()
        return node

    return asyncio.run(application()), attempts


def settled_as_cancelled(node, rows):
    [row] = eventually(lambda: (found := rows()) and found[0].state != "running" and found)
    assert row.state == "cancelled"
    eventually(lambda: node.executor._node.keeper.held == ())
    assert node.heard.of(EVENT_LEASE_LOST) == []
    return row


def test_a_coroutine_cancelled_during_the_delay_is_recorded_as_cancelled(url, rows):
    """Nothing more is called, the lease is given back, and the record keeps the error of the attempt that failed."""
    attempts = []

    @fenced(retries=2, retry_delay=60)
    async def job(fence):
        attempts.append(fence.attempt)
        raise ValueError

    async def application():
        node = node_on(url)
        node.run(job)
        await until(lambda: attempts)
        await asyncio.sleep(0.1)
        await shut_down(node)
        return node

    node = asyncio.run(application())
    assert "ValueError" in settled_as_cancelled(node, rows).error
    assert attempts == [1]
    assert isinstance(node.heard.one(EVENT_JOB_ERROR).exception, ValueError)


@pytest.mark.parametrize("applied", [True, False])
def test_a_coroutine_cancelled_during_the_retry_swap_is_recorded_as_cancelled(url, rows, applied):
    """Whether the swap had reached the store or not: the attempt it grants never begins."""
    store = Gates(url, "regrant", applied=applied)
    node, attempts = cancelled_meanwhile(store, store.reached.is_set, store.go_on.set)
    assert settled_as_cancelled(node, rows).attempt == 2
    assert attempts == [1]


@pytest.mark.parametrize("trouble", ["failing", "losing"])
def test_a_coroutine_cancelled_while_its_retry_waits_for_the_store_is_recorded_as_cancelled(url, rows, trouble):
    """Nothing stays held and renewed for ever by a run that is over."""
    store, armed = TroubledStore(open_store(url)), []

    def reached():
        if not armed:
            getattr(store, trouble)["swap"] = 1
            armed.append(True)
        return getattr(store, trouble)["swap"] == 0

    node, attempts = cancelled_meanwhile(store, reached, lambda: None)
    settled_as_cancelled(node, rows)
    assert attempts == [1]


# --- in a pool's child ------------------------------------------------------------------------------------------------


def test_a_run_in_a_child_is_tried_again_there(start, tmp_path):
    """Same execution, larger tokens, one event."""
    url, log = f"sqlite:///{tmp_path / 'fence.db'}", tmp_path / "log"
    node = start(url, inner="processpool", max_workers=1)
    node.run(life_jobs.succeeds_at_third_attempt, str(log))
    assert node.heard.one(EVENT_JOB_EXECUTED, within=30).retval == 3
    assert node.heard.of(EVENT_JOB_ERROR) == []
    entered = [line.split() for line in log.read_text().splitlines()]
    assert [attempt for _, attempt, _ in entered] == ["1", "2", "3"]
    assert len({execution for execution, _, _ in entered}) == 1
    assert sorted({int(token) for *_, token in entered}) == [int(token) for *_, token in entered]


def test_a_run_whose_lease_is_lost_is_not_tried_again(start, store, rows):
    """`fence.check()` raised LeaseLost: that is no failure to repeat."""
    node, attempts = start(lock_at_most="0.4s"), []

    @fenced(retries=3, retry_delay=0)
    def job(fence):
        attempts.append(fence.attempt)
        [row] = rows()
        store.swap([release(store.read(Key(row.lease, row.job, row.slot)), "operator", keep_for=10**12)])
        eventually(lambda: fence.lost)
        fence.check()

    node.run(job)
    assert isinstance(node.heard.one(EVENT_JOB_ERROR).exception, LeaseLost)
    assert attempts == [1]
