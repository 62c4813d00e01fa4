"""What every store promises, held over every store; where a table would be long, the memory store is the table."""

import itertools
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from claims import HOUR, SECOND, ask, compete, nonce, rows, run, win

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.lease import (
    FINAL_STATES,
    Change,
    Execution,
    Insert,
    Key,
    LeaseMove,
    Refusal,
    Seen,
    Update,
    abandon,
    claim,
    granted,
    renew,
    retry,
    revive,
    settle,
    supersede,
)
from apscheduler_fence.slots import job_name
from apscheduler_fence.stores import open_described
from apscheduler_fence.stores.base import Executions, HeldLeases
from apscheduler_fence.stores.memory import MemoryStore

NOBODY = Key("nobody's", "nobody's", "never")
NOBODY_OF_PAY = Key("pay", "pay", "never")


def lease_of(store, name="pay"):
    """One lease row."""
    return store.read(Key(name, "", "")).lease


def move_of(lease, condition, write, name="pay", **terms):
    """A move that expects just what is there."""
    token, holder = (None, None) if lease is None else (lease.token, lease.holder)
    return LeaseMove(name, token, holder, condition, write, **terms)


def close(one, other):
    """Two looks at the clock in one swap: a store may read it once for each value that it writes."""
    return abs(one - other) < SECOND


def about(moment, now):
    """A time as whole hours from now: what two clocks agree on."""
    return None if moment is None else "never" if moment == 0 else round((moment - now) / HOUR)


# --- reading ----------------------------------------------------------------------------------------------------------


def test_an_empty_store_shows_nothing_but_its_clock(store):
    """What was never written is None, and the clock is there all the same."""
    seen = store.read(NOBODY)
    assert seen == Seen(seen.now)
    assert abs(seen.now / 1e6 - time.time()) < 60
    assert list(store.executions(Executions())) == list(store.held_leases(HeldLeases())) == []
    assert store.swap([]) == []
    assert store.prune() == 0


def test_the_clock_goes_forward(store):
    """Of two reads the later shows a later time."""
    first = store.read(NOBODY).now
    time.sleep(0.01)
    assert store.read(NOBODY).now > first


def test_a_read_shows_the_four_rows(store):
    """The lease, the slot that is asked for, the run that the lease holds and the oldest that waits."""
    run(store, ask(slot="done", slot_at=1))
    held = ask(slot="held", slot_at=2)
    win(store, held)
    for slot, slot_at in (("later", 5), ("next", 4), ("last", 6)):
        wanted = ask(slot=slot, slot_at=slot_at, overlap="queue")
        assert store.swap([claim(store.read(wanted.key), wanted)]) != [None]
    seen = store.read(Key("pay", "pay", "done"))
    assert (seen.lease.holder, seen.lease.slot) == (held.nonce, "held")
    assert (seen.execution.slot, seen.execution.state) == ("done", "succeeded")
    assert (seen.holding.slot, seen.holding.state) == ("held", "running")
    assert (seen.waiting.slot, seen.waiting.state) == ("next", "waiting")


def test_every_value_comes_back_as_it_went_in(store):
    """Nothing is rounded, cut, or turned from nothing into something."""
    big = 2**53 - 1
    wanted = ask(
        slot_at=1_800_000_000_123_457, scheduled_at=1_800_000_000_123_459, lock_at_most=1_234_567_891, lock_at_least=987_654_321,
        delivery="at_least_once", max_attempts=7, keep_for=12_345_678_901, func="mod:Class.f", jobstore="shared",
        job_id="id with spaces", max_early=big,
    )  # fmt: skip
    grant = win(store, wanted)
    seen = store.read(wanted.key)
    lease, row = seen.lease, seen.execution
    assert row == Execution(
        "pay", wanted.slot, "pay", wanted.slot_at, wanted.scheduled_at, "running", 1, grant.token, wanted.nonce,
        "at_least_once", 7, started_at=row.started_at, func="mod:Class.f", jobstore="shared",
        job_id="id with spaces",
    )  # fmt: skip
    assert (lease.token, lease.holder, lease.job, lease.slot) == (grant.token, wanted.nonce, "pay", wanted.slot)
    assert (lease.pruned_through, lease.func) == (0, "mod:Class.f")
    assert close(lease.acquired_at, row.started_at)
    assert close(lease.expires_at, lease.acquired_at + wanted.lock_at_most)
    assert close(lease.hold_until, lease.acquired_at + wanted.lock_at_least)
    store.swap([settle(grant, "failed", "boom")])
    row = store.read(wanted.key).execution
    assert row.error == "boom"
    assert close(row.keep_until, row.finished_at + wanted.keep_for)
    assert row.started_at <= row.finished_at


def test_a_read_is_of_one_instant(store):
    """While runs come and go, every read shows a lease that is held by a running row or free: never half of a swap."""
    done = threading.Event()
    torn = []

    def look():
        while not done.is_set():
            seen = store.read(NOBODY_OF_PAY)
            held, holding = seen.lease.holder, seen.holding
            if held is not None and (
                holding is None or (holding.state, holding.token) != ("running", seen.lease.token)
            ):
                torn.append(seen)

    run(store, ask())
    with ThreadPoolExecutor(2) as pool:
        readers = [pool.submit(look) for _ in range(2)]
        for _ in range(60):
            run(store, ask())
        done.set()
        for reader in readers:
            reader.result()
    assert torn == []


# --- comparing and writing a lease ------------------------------------------------------------------------------------

STATES = {
    "absent": None,
    "free": (HOUR, 0, "free"),
    "free, within its spacing": (HOUR, 3 * HOUR, "free"),
    "live": (HOUR, 0, None),
    "live, within its spacing": (HOUR, 3 * HOUR, None),
    "over": (-HOUR, 0, None),
    "over, within its spacing": (-HOUR, 3 * HOUR, None),
}
CONDITIONS = {
    "any": set(STATES),
    "live": {"live", "live, within its spacing"},
    "over": set(STATES) - {"live", "live, within its spacing"},
    "open": {"absent", "free", "over"},
}
WRITES = ("grant", "regrant", "extend", "free", "bump", "none")


def set_up(store, state, name="pay"):
    """Brings a lease into one of the states."""
    if STATES[state] is None:
        return
    most, least, freed = STATES[state]
    grant = win(store, ask(name, "old", lock_at_most=most, lock_at_least=least, func="m:f"))
    if freed:
        store.swap([settle(grant, "succeeded")])


def moved(store, name, condition, write):
    """What one move does to a lease, as far as two clocks agree on it."""
    before = lease_of(store, name)
    move = move_of(
        before, condition, write, name, new_holder="new", job=name, slot="new", lock_at_most=7 * HOUR,
        lock_at_least=9 * HOUR, func="m:g",
    )  # fmt: skip
    (token,) = store.swap([Change(move)])
    seen = store.read(Key(name, "", ""))
    after, now = seen.lease, seen.now
    if after is None:
        return token is not None, None
    grown = before is None or after.token > before.token
    assert token in (None, after.token)
    assert not grown or after.token >= now - HOUR
    holder = "old" if after.holder not in ("new", None) else after.holder
    times = [about(moment, now) for moment in (after.acquired_at, after.expires_at, after.hold_until)]
    return token is not None, grown, holder, after.job, after.slot, after.func, times


@pytest.mark.parametrize("state", STATES)
def test_a_lease_moves_as_the_reference_says(store, state):
    """Each condition lets each write through or not, and the row afterwards is the one that the memory store has."""
    writes = WRITES
    if state == "absent":
        writes = ("grant",)
    elif state.startswith("free"):
        writes = ("grant", "free", "bump", "none")  # what nobody holds is not extended
    here, reference = {}, {}
    for outcomes, which in ((here, store), (reference, MemoryStore())):
        for condition, write in itertools.product(CONDITIONS, writes):
            name = f"{condition} {write}"
            set_up(which, state, name)
            outcomes[name] = moved(which, name, condition, write)
            assert outcomes[name][0] is (state in CONDITIONS[condition]), name
    assert here == reference


@pytest.mark.parametrize(
    ("state", "token", "holder"),
    [
        ("live", 1, "same"),
        ("live", "same", "somebody else"),
        ("live", "same", None),
        ("live", None, None),
        ("live", "same", "SAME"),
        ("live", "same", "same "),
        ("free", "same", "somebody"),
        ("free", 1, None),
        ("free", None, None),
        ("absent", 1, None),
        ("absent", 0, None),
        ("absent", 1, "somebody"),
    ],
)
def test_a_lease_that_is_not_as_seen_does_not_move(store, state, token, holder):
    """Token and holder are compared, "nobody" and "no row" too, and every letter counts (I1, I3)."""
    set_up(store, state)
    before = lease_of(store)
    if token == "same":
        token = before.token
    if holder and holder.strip().lower() == "same":
        holder = before.holder + holder.strip("sameSAME") if holder.islower() else before.holder.upper()
    for write in ("grant", "extend", "free", "bump", "none"):
        change = Change(LeaseMove("pay", token, holder, "any", write, "new", "pay", "new", HOUR))
        assert store.swap([change]) == [None]
    assert lease_of(store) == before


def test_tokens_grow_and_are_never_behind_the_clock(store):
    """Every grant, retry and queueing has a larger token than all before, and at least the store's time (I2)."""
    tokens = []
    for _ in range(10):
        before = store.read(NOBODY).now
        grant = win(store, ask())
        other = nonce()
        (again,) = store.swap([retry(grant, other, HOUR)])
        store.swap([settle(replace(grant, token=again, holder=other, attempt=2), "succeeded")])
        (bumped,) = store.swap([Change(move_of(lease_of(store), "over", "bump"))])
        assert grant.token >= before
        tokens += [grant.token, again, bumped]
    assert tokens == sorted(set(tokens))


# --- executions -------------------------------------------------------------------------------------------------------

WAITING = Execution("pay", "new", "pay", 50, 51, "waiting", 0, 0, "h", max_attempts=2, func="m:f", job_id="id")
RUNNING = replace(WAITING, state="running", attempt=1)


def test_a_new_row_that_runs_gets_the_token_and_the_time_of_its_grant(store):
    """A running row is inserted under the token that the same change grants; a waiting one has neither."""
    grant = Change(LeaseMove("pay", None, None, "open", "grant", "h", "pay", "new", HOUR), (Insert(RUNNING),))
    (token,) = store.swap([grant])
    seen = store.read(Key("pay", "pay", "new"))
    assert seen.execution == replace(RUNNING, token=token, started_at=seen.execution.started_at)
    assert close(seen.execution.started_at, seen.lease.acquired_at)
    waiting = Change(move_of(seen.lease, "live", "none"), (Insert(replace(WAITING, slot="next")),))
    assert store.swap([waiting]) == [token]
    assert store.read(Key("pay", "pay", "next")).execution == replace(WAITING, slot="next")


@pytest.mark.parametrize("state", ["waiting", "running", *FINAL_STATES])
def test_an_update_writes_just_what_it_says(store, state):
    """A final state has an end and a keep-until, an open one neither; what is None in the move stays as it is."""
    grant = win(store, ask(max_attempts=3, func="m:f", job_id="id"))
    before = store.read(Key("pay", "pay", grant.slot)).execution
    move = Update("pay", grant.slot, "running", grant.token, state, 4, "by", keep_for=HOUR, error="first")
    assert store.swap([Change(None, (move,))]) == [0]
    row = store.read(Key("pay", "pay", grant.slot)).execution
    assert row == replace(
        before, state=state, attempt=4, holder="by", error="first",
        finished_at=row.finished_at, keep_until=row.keep_until,
    )  # fmt: skip
    if state in FINAL_STATES:
        assert close(row.keep_until, row.finished_at + HOUR)
    else:
        assert row.finished_at is row.keep_until is None
    again = Update("pay", grant.slot, state, grant.token, "waiting", 4, None, max_attempts=9)
    assert store.swap([Change(None, (again,))]) == [0]
    after = store.read(Key("pay", "pay", grant.slot)).execution
    assert after == replace(row, state="waiting", holder=None, max_attempts=9, finished_at=None, keep_until=None)
    granting = Update("pay", grant.slot, "waiting", grant.token, "running", 5, "me", granted=True)
    lease = lease_of(store)
    (token,) = store.swap([Change(move_of(lease, "any", "regrant", new_holder="me", lock_at_most=HOUR), (granting,))])
    last = store.read(Key("pay", "pay", grant.slot)).execution
    assert last == replace(after, state="running", attempt=5, holder="me", token=token, started_at=last.started_at)
    assert last.started_at >= before.started_at


@pytest.mark.parametrize("wrong", [{"was": "waiting"}, {"was": "lost"}, {"token": 1}, {"slot": "never"}])
def test_a_row_that_is_not_as_expected_undoes_the_whole_change(store, wrong):
    """State and token of an execution are compared, and its lease moves only with it."""
    grant = win(store, ask())
    before, rows_before = lease_of(store), rows(store)
    good = Update("pay", grant.slot, "running", grant.token, "succeeded", 1, grant.holder)
    change = Change(move_of(before, "any", "free"), (replace(good, **wrong),))
    assert store.swap([change]) == [None]
    assert (lease_of(store), rows(store)) == (before, rows_before)


@pytest.mark.parametrize("write", ["grant", "bump", "none"])
@pytest.mark.parametrize("there", ["running", "waiting", "succeeded"])
def test_a_row_that_is_there_already_undoes_the_whole_change(store, there, write):
    """An insert never overwrites, and its conflict takes the lease's move back with it (I1)."""
    if there == "waiting":
        win(store, ask())
        wanted = ask(slot="new", overlap="queue")
        store.swap([claim(store.read(wanted.key), wanted)])
    else:
        grant = win(store, ask(slot="new"))
        if there == "succeeded":
            store.swap([settle(grant, "succeeded")])
    before, rows_before = lease_of(store), rows(store)
    move = move_of(before, "any", write, new_holder="h", job="pay", slot="new", lock_at_most=HOUR)
    for row in (RUNNING, WAITING):
        assert store.swap([Change(move, (Insert(row),))]) == [None]
    assert (lease_of(store), rows(store)) == (before, rows_before)


def test_a_first_claim_whose_slot_is_there_leaves_no_lease_row_behind(store):
    """The row of a lease that was new to the store goes away with the insert that conflicted."""
    run(store, ask(slot="new"))
    change = Change(LeaseMove("other", None, None, "open", "grant", "h", "pay", "new", HOUR), (Insert(RUNNING),))
    assert store.swap([change]) == [None]
    lease = lease_of(store, "other")
    assert lease is None or (lease.token, lease.holder, lease.expires_at) == (0, None, None)
    assert compete(store, ask("other")).token > 0


def displacing(store):
    """A change of a lease and two rows that matches: the later slot takes the lease from the earlier."""
    older = ask(slot="old", slot_at=10)
    win(store, older)
    wanted = ask(slot="new", slot_at=50)
    seen = store.read(wanted.key)
    return supersede(seen, wanted, seen.lease, seen.holding)


def test_a_change_of_three_rows_is_applied_whole(store):
    """The lease, the run that is ended and the one that begins move in one step."""
    change = displacing(store)
    (token,) = store.swap([change])
    found = rows(store)
    assert (found["pay/old"].state, found["pay/new"].state) == ("superseded", "running")
    assert found["pay/new"].token == token == lease_of(store).token


@pytest.mark.parametrize("failing", ["lease", "first row", "second row: insert", "second row: update"])
def test_a_change_of_three_rows_is_applied_not_at_all(store, failing):
    """Whichever of the three does not match, none of them moves."""
    change = displacing(store)
    end, begin = change.executions
    match failing:
        case "lease":
            change = replace(change, lease=replace(change.lease, token=1))
        case "first row":
            change = replace(change, executions=(replace(end, token=1), begin))
        case "second row: insert":
            taken = Change(None, (Insert(replace(begin.row, state="waiting")),))
            assert store.swap([taken]) == [0]
        case _:
            begin = Update("pay", "new", "waiting", 0, "running", 1, "h", granted=True)
            change = replace(change, executions=(end, begin))
    before, rows_before = lease_of(store), rows(store)
    assert store.swap([change]) == [None]
    assert (lease_of(store), rows(store)) == (before, rows_before)


def test_a_change_without_a_lease_answers_zero(store):
    """Reviving moves one row, compares its state, and touches no lease."""
    run(store, ask(slot="failed"), "failed")
    before = lease_of(store)
    change = revive(rows(store)["pay/failed"])
    assert store.swap([change, change]) == [0, None]
    row = rows(store)["pay/failed"]
    assert (row.state, row.attempt, row.max_attempts, row.keep_until, row.finished_at) == ("waiting", 1, 2, None, None)
    assert lease_of(store) == before
    grant = win(store, ask(slot="failed"))
    assert (grant.attempt, rows(store)["pay/failed"].state) == (2, "running")


# --- several changes --------------------------------------------------------------------------------------------------


def test_changes_of_one_call_are_independent(store):
    """One that does not match takes nothing from the others, whatever its place, and answers keep their order."""
    grants = [win(store, ask(f"lease-{number}")) for number in range(5)]
    stale = replace(grants[0], holder="somebody else")
    new, taken = ask("new"), grants[4]
    changes = [
        renew(stale, HOUR),
        settle(grants[0], "succeeded"),
        settle(stale, "failed"),
        renew(grants[1], HOUR),
        Change(LeaseMove("lease-4", None, None, "open", "grant", "h", "lease-4", taken.slot, HOUR)),
        claim(store.read(new.key), new),
        settle(grants[2], "failed", "boom"),
        settle(replace(grants[3], token=1), "failed"),
    ]
    answers = store.swap(changes)
    assert [answer is not None for answer in answers] == [False, True, False, True, False, True, True, False]
    assert (answers[1], answers[3], answers[6]) == (grants[0].token, grants[1].token, grants[2].token)
    states = sorted((row.lease, row.state) for row in rows(store).values())
    assert states == [
        ("lease-0", "succeeded"), ("lease-1", "running"), ("lease-2", "failed"), ("lease-3", "running"),
        ("lease-4", "running"), ("new", "running"),
    ]  # fmt: skip


@pytest.mark.parametrize("known", [False, True])
def test_of_two_claims_in_one_call_one_wins(store, known):
    """Two changes that expect the same lease row cannot both match."""
    if known:
        run(store, ask())
    first, second = ask(slot_at=1), ask(slot_at=2)
    changes = [claim(store.read(wanted.key), wanted) for wanted in (first, second)]
    answers = store.swap(changes)
    assert sum(answer is not None for answer in answers) == 1
    winner = (first, second)[answers.index(next(filter(None, answers)))]
    assert lease_of(store).holder == winner.nonce
    assert [row.slot for row in rows(store).values() if row.state == "running"] == [winner.slot]


def test_a_thousand_leases_are_renewed_in_one_call(store):
    """Renewals of all that a node holds go together, each with an answer of its own, in order."""
    wanted = [ask(f"lease-{number:04}", lock_at_most=HOUR) for number in range(1000)]
    seen = Seen(store.read(NOBODY).now)
    tokens = store.swap([claim(seen, each) for each in wanted])
    assert None not in tokens
    grants = [granted(each, token, 1) for each, token in zip(wanted, tokens, strict=True)]
    grants[7] = replace(grants[7], holder="somebody else")
    grants[500] = replace(grants[500], token=1)
    renewed = store.swap([renew(grant, 5 * HOUR) for grant in grants])
    assert [place for place, token in enumerate(renewed) if token is None] == [7, 500]
    assert [token for token in renewed if token] == [t for place, t in enumerate(tokens) if place not in (7, 500)]
    held = list(store.held_leases(HeldLeases()))
    assert len(held) == 1000
    assert {one.lease.name for one in held[:2]} == {"lease-0007", "lease-0500"}
    assert about(held[-1].lease.expires_at, held[-1].now) == 5


# --- names and texts --------------------------------------------------------------------------------------------------

NAMES = [
    "job", "Job", "JOB", "job ", "job\N{NO-BREAK SPACE}", "job%", "job%25", "job%20", "job_", "job?", "job*", "{job}",
    "{}", "}{", "job:", "job/", "job\\", "job'", 'job"', "job;--", "job-", "j\N{LATIN SMALL LETTER O WITH ACUTE}b",
    "jo\N{COMBINING ACUTE ACCENT}b", "stra\N{LATIN SMALL LETTER SHARP S}e", "strasse", "\N{SNOWMAN}", "\N{PILE OF POO}",
    "\N{KELVIN SIGN}", "K", "k", "j" * 191, "j" * 190 + "J", "\N{PILE OF POO}" * 191,
]  # fmt: skip


def test_names_that_differ_at_all_are_different_rows(store):
    """Case, trailing spaces, accents, wildcards, braces: a lease, job and slot of each name stand beside all others."""
    assert len(set(NAMES)) == len(NAMES)
    wanted = [ask(name, name if len(name) <= 63 else f"{name[-1]}{len(name)}") for name in NAMES]
    grants = [win(store, each) for each in wanted]
    for each in wanted:
        seen = store.read(each.key)
        assert (seen.lease.name, seen.lease.holder) == (each.lease, each.nonce)
        assert (seen.execution.job, seen.execution.slot, seen.execution.lease) == (each.job, each.slot, each.lease)
        assert seen.holding == seen.execution
        assert [row.holder for row in store.executions(Executions(job=each.job))] == [each.nonce]
        assert [row.holder for row in store.executions(Executions(lease=each.lease))] == [each.nonce]
        assert [row.holder for row in store.executions(Executions(job=each.job, slot=each.slot))] == [each.nonce]
    assert sorted(one.lease.name for one in store.held_leases(HeldLeases())) == sorted(NAMES)
    assert store.swap([settle(grant, "succeeded") for grant in grants]) == [grant.token for grant in grants]
    assert list(store.held_leases(HeldLeases())) == []


def test_job_and_slot_are_not_run_together(store):
    """Two names that read the same when joined are two rows."""
    pairs = [("a", "b/c"), ("a/b", "c"), ("a", "b c"), ("a b", "c"), ("a", "b:c"), ("a:b", "c"), ("a", "b%09c")]
    for job, slot in pairs:
        win(store, ask(f"{job}|{slot}", slot, job=job))
    assert sorted((row.job, row.slot) for row in store.executions(Executions())) == sorted(pairs)


@pytest.mark.parametrize("error", ["x" * 10_000, "\N{PILE OF POO}" * 10_000, "a\nb\r\n\tc 'd' \"e\" %s {f} :g \\ \x1b"])
def test_an_error_text_is_kept_whole(store, error):
    """Long texts, and texts full of what means something elsewhere, come back as they were."""
    wanted = ask()
    run(store, wanted, "failed", error)
    assert store.read(wanted.key).execution.error == error


@pytest.mark.parametrize("error", ["disk \x00 full", "no such file: caf\udce9"])
def test_an_error_text_that_is_no_proper_text_does_not_stop_a_settle(store, error):
    """A message with a NUL or an undecodable file name is recorded, if need be with another sign in that place."""
    wanted = ask()
    run(store, wanted, "failed", error)
    row = store.read(wanted.key).execution
    assert (row.state, row.error[:4]) == ("failed", error[:4])


# --- scans ------------------------------------------------------------------------------------------------------------


def history(store):
    """Six executions of two jobs on two leases, in an order of insertion that is no order of time."""
    plan = [
        ("b", "s3", 30, "failed"), ("a", "s1", 10, "succeeded"), ("b", "s1", 11, "succeeded"),
        ("a", "s2", 20, "failed"), ("b", "s4", 40, None), ("a", "s4", 41, None),
    ]  # fmt: skip
    for job, slot, slot_at, outcome in plan:
        wanted = ask(f"lease {job}", slot, job=job, slot_at=slot_at)
        if outcome:
            run(store, wanted, outcome)
        else:
            win(store, wanted)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, "a/s4 b/s4 b/s3 a/s2 b/s1 a/s1"),
        ({"oldest_first": True}, "a/s1 b/s1 a/s2 b/s3 b/s4 a/s4"),
        ({"job": "a"}, "a/s4 a/s2 a/s1"),
        ({"job": "a", "oldest_first": True}, "a/s1 a/s2 a/s4"),
        ({"lease": "lease b"}, "b/s4 b/s3 b/s1"),
        ({"lease": "lease b", "job": "a"}, ""),
        ({"job": "a", "slot": "s2"}, "a/s2"),
        ({"job": "a", "slot": "s3"}, ""),
        ({"states": ("failed",)}, "b/s3 a/s2"),
        ({"states": ("failed", "running")}, "a/s4 b/s4 b/s3 a/s2"),
        ({"states": ("waiting", "running"), "oldest_first": True}, "b/s4 a/s4"),
        ({"states": ("lost",)}, ""),
        ({"since": 20}, "a/s4 b/s4 b/s3 a/s2"),
        ({"since": 21, "job": "b"}, "b/s4 b/s3"),
        ({"since": 20, "oldest_first": True, "limit": 2}, "a/s2 b/s3"),
        ({"limit": 2}, "a/s4 b/s4"),
        ({"limit": 100}, "a/s4 b/s4 b/s3 a/s2 b/s1 a/s1"),
        ({"limit": 1, "states": ("failed",), "job": "b"}, "b/s3"),
        ({"limit": 1, "lease": "lease a", "states": ("succeeded",)}, "a/s1"),
        ({"job": "c"}, ""),
    ],
)
def test_executions_are_filtered_ordered_and_limited(store, query, expected):
    """All filters hold together; the newest slot comes first unless asked otherwise; the limit counts what matched."""
    history(store)
    assert [row.id for row in store.executions(Executions(**query))] == expected.split()


def test_a_scan_of_many_rows_shows_each_once(store):
    """However many pages a scan takes, no row is missing or comes twice, also among slots of one time."""
    seen = Seen(store.read(NOBODY).now)
    wanted = [ask(f"lease-{number:04}", slot_at=number // 40) for number in range(1200)]
    assert None not in store.swap([claim(seen, each) for each in wanted])
    found = [(row.slot_at, row.job) for row in store.executions(Executions(oldest_first=True))]
    assert found == sorted((each.slot_at, each.job) for each in wanted)
    assert [(row.slot_at, row.job) for row in store.executions(Executions())] == found[::-1]


def test_a_scan_may_be_left_or_mixed_with_other_calls(store):
    """A scan that is not read to its end holds nothing back from other calls."""
    history(store)
    scan = store.executions(Executions())
    assert next(scan).id == "a/s4"
    run(store, ask("third"))
    assert next(scan).id == "b/s4"
    del scan
    run(store, ask("third"))


def test_held_leases_come_with_their_runs_those_first_that_end_first(store):
    """Only held leases are shown; `expired` keeps those that are over by the store's clock."""
    history(store)
    ends = {"late": 5 * HOUR, "over": -HOUR, "soon": 2 * HOUR, "long over": -5 * HOUR}
    for name, lock_at_most in ends.items():
        win(store, ask(name, lock_at_most=lock_at_most))
    run(store, ask("free"))
    held = list(store.held_leases(HeldLeases()))
    assert [seen.lease.name for seen in held] == ["long over", "over", "lease b", "lease a", "soon", "late"]
    for seen in held:
        assert seen.execution == seen.holding
        assert (seen.holding.lease, seen.holding.state) == (seen.lease.name, "running")
        assert (seen.lease.token, seen.lease.slot) == (seen.holding.token, seen.holding.slot)
    assert [seen.lease.name for seen in store.held_leases(HeldLeases(expired=True))] == ["long over", "over"]
    assert [seen.lease.name for seen in store.held_leases(HeldLeases(limit=3))] == ["long over", "over", "lease b"]
    assert [seen.lease.name for seen in store.held_leases(HeldLeases(expired=True, limit=1))] == ["long over"]
    over = next(store.held_leases(HeldLeases(expired=True)))
    assert store.swap([abandon(over, "sweeper", keep_for=HOUR)]) == [over.lease.token]
    assert [seen.lease.name for seen in store.held_leases(HeldLeases(expired=True))] == ["over"]


# --- pruning ----------------------------------------------------------------------------------------------------------


def test_pruning_deletes_only_what_is_past_its_own_keep_until(store):
    """What runs, waits, or is to be kept longer stays; what goes can never be claimed again (I8)."""
    old = [ask(slot=f"old-{number}", slot_at=number, keep_for=-HOUR) for number in (1, 3, 2)]
    for wanted in old:
        run(store, wanted)
    kept = ask(slot="kept", slot_at=2, keep_for=HOUR)
    run(store, kept)
    running = ask(slot="running", slot_at=1, keep_for=-HOUR)
    win(store, running)
    queued = ask(slot="queued", slot_at=1, keep_for=-HOUR, overlap="queue")
    store.swap([claim(store.read(queued.key), queued)])
    assert store.prune() == 3
    assert store.prune() == 0
    assert sorted(rows(store)) == ["pay/kept", "pay/queued", "pay/running"]
    assert lease_of(store).pruned_through == 3
    for wanted in old:
        assert store.read(wanted.key).execution is None
        assert claim(store.read(wanted.key), wanted) == Refusal("pruned")
    assert claim(store.read(kept.key), replace(kept, nonce="again")) == Refusal("done", kept.nonce)


def test_pruning_leaves_a_holder_what_it_holds(store):
    """A lease that is held while others of its rows are pruned is renewed and settled as before (I3)."""
    run(store, ask(slot_at=5, keep_for=-HOUR))
    grant = win(store, ask(slot_at=9))
    before = lease_of(store)
    assert store.prune() == 1
    assert lease_of(store) == replace(before, pruned_through=5)
    assert store.swap([renew(grant, HOUR)]) == [grant.token]
    assert store.swap([settle(grant, "succeeded")]) == [grant.token]
    assert lease_of(store).pruned_through == 5


def test_what_was_pruned_never_gets_less(store):
    """An older row that is pruned later does not take `pruned_through` back (I8)."""
    run(store, ask(slot_at=9, keep_for=-HOUR))
    assert store.prune() == 1
    revived = ask("other", slot_at=3, keep_for=-HOUR)
    run(store, replace(revived, job="other"))
    older = Execution("pay", "older", "pay", 4, 4, "waiting", 0, 0, None)
    assert store.swap([Change(None, (Insert(older),))]) == [0]
    run(store, ask(slot="older", slot_at=4, keep_for=-HOUR))
    assert store.prune() == 2
    assert (lease_of(store).pruned_through, lease_of(store, "other").pruned_through) == (9, 3)


def test_pruning_goes_in_steps(store):
    """At most so many rows go at once, those first that were to be kept shortest."""
    for number in range(5):
        run(store, ask(slot=f"s{number}", slot_at=number, keep_for=-(number + 1) * HOUR))
    assert store.prune(limit=2) == 2
    assert sorted(rows(store)) == ["pay/s0", "pay/s1", "pay/s2"]
    assert [store.prune(limit=2), store.prune(limit=2)] == [2, 1]
    assert rows(store) == {}
    assert lease_of(store).pruned_through == 4


def test_what_was_revived_is_not_pruned(store):
    """An execution that waits again has no keep-until (I3, I8)."""
    run(store, ask(slot="s", keep_for=-HOUR), "failed")
    store.swap([revive(rows(store)["pay/s"])])
    assert store.prune() == 0
    assert rows(store)["pay/s"].state == "waiting"


# --- life of a store --------------------------------------------------------------------------------------------------


def test_namespaces_are_apart(open_another):
    """Two applications with jobs of the same ID on one store never see each other's rows, nor prune them."""
    spaces = ("here", "there", "", "he", "Here", "{here}", "%")
    stores = {space: open_another(space) for space in spaces}
    names = {space: job_name("pay", namespace=space) for space in spaces}
    assert len(set(names.values())) == len(spaces)
    grants = {}
    for space, store in stores.items():
        assert rows(store) == {}
        grants[space] = win(store, ask(names[space], "same", slot_at=7, keep_for=-HOUR))
    for space, store in stores.items():
        assert list(rows(store)) == [f"{names[space]}/same"]
        assert [seen.lease.name for seen in store.held_leases(HeldLeases())] == [names[space]]
        assert store.swap([settle(grants[space], "failed")]) == [grants[space].token]
    assert stores["here"].prune() == 1
    assert [len(rows(store)) for store in stores.values()] == [0, 1, 1, 1, 1, 1, 1]
    assert [lease_of(store, names[space]).pruned_through for space, store in stores.items()] == [7, 0, 0, 0, 0, 0, 0]


def test_nodes_that_open_the_same_store_share_it(open_another):
    """What one node writes, another reads."""
    here, there = open_another(), open_another()
    wanted = ask()
    grant = win(here, wanted)
    assert there.read(wanted.key).lease.holder == wanted.nonce
    assert there.swap([settle(grant, "succeeded")]) == [grant.token]
    assert rows(here) == rows(there)


@pytest.mark.backends("sqlite", "postgresql", "mariadb", "redis")
def test_a_store_is_described_well_enough_to_open_it_elsewhere(store):
    """The description survives pickling, and what it opens shows the same rows, in the same namespace."""
    wanted = ask()
    grant = win(store, wanted)
    description = pickle.loads(pickle.dumps(store.describe()))
    assert description.namespace == store.namespace == "test"
    there = open_described(description)
    try:
        there.open()
        assert there.read(wanted.key).execution == store.read(wanted.key).execution
        assert there.swap([settle(grant, "succeeded")]) == [grant.token]
    finally:
        there.close()
    assert list(rows(store).values())[0].state == "succeeded"  # noqa: RUF015 - there is one


@pytest.mark.backends("memory")
def test_memory_cannot_be_opened_elsewhere(store):
    """A store that no other process can see says so."""
    with pytest.raises(ConfigError, match="process"):
        store.describe()


def test_a_closed_store_opens_again_by_itself(store):
    """Closing gives back connections and no rows; the next call works, whichever it is."""
    wanted = ask()
    grant = win(store, wanted)
    for use in (
        lambda: store.read(wanted.key).execution.state == "running",
        lambda: store.swap([renew(grant, HOUR)]) == [grant.token],
        lambda: len(rows(store)) == 1,
        lambda: len(list(store.held_leases(HeldLeases()))) == 1,
        lambda: store.prune() == 0,
        lambda: store.open() is not None,
        lambda: store.swap([settle(grant, "succeeded")]) == [grant.token],
    ):
        store.close()
        assert use()
    store.close()
    store.close()


def test_opening_again_changes_nothing(store):
    """A second `open` neither fails nor forgets."""
    run(store, ask(slot="s"))
    before = rows(store)
    store.open()
    assert rows(store) == before


def test_many_threads_use_one_store(store):
    """Twelve threads share one store object, and each sees answers to its own calls only."""

    def work(number):
        for turn in range(6):
            wanted = ask(f"lease-{number}", f"s{turn}", func=f"m:f{number}")
            grant = win(store, wanted)
            seen = store.read(wanted.key)
            assert (seen.lease.name, seen.lease.func, seen.execution.slot) == (wanted.lease, wanted.func, wanted.slot)
            assert store.swap([renew(grant, HOUR)]) == [grant.token]
            assert store.swap([settle(grant, "succeeded", f"{number}/{turn}")]) == [grant.token]
        return {row.error for row in store.executions(Executions(job=f"lease-{number}"))}

    with ThreadPoolExecutor(12) as pool:
        written = list(pool.map(work, range(12)))
    assert written == [{f"{number}/{turn}" for turn in range(6)} for number in range(12)]


def test_many_nodes_open_an_empty_store_at_once(open_another):
    """Whoever comes first makes what is missing, and all of them can work."""
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: open_another("crowd"), range(8)))
    run(stores[0], ask(slot="s"))
    run(stores[7], ask("other"))


def test_a_short_lease_ends_by_the_stores_own_clock(store):
    """A lease that was live is over when its time has passed, without anybody writing (I1, I6)."""
    wanted = ask(lock_at_most=SECOND // 5)
    grant = win(store, wanted)
    other = ask(slot="next")
    assert claim(store.read(other.key), other).reason == "held"
    deadline = time.monotonic() + 10
    while isinstance(decision := claim(store.read(other.key), other), Refusal):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert store.swap([renew(grant, HOUR)]) == [None]
    assert store.swap([decision]) != [None]
    assert rows(store)[f"pay/{wanted.slot}"].state == "lost"
    assert store.swap([settle(grant, "succeeded")]) == [None]
