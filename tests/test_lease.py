"""The rules as tables: what was seen and what is asked, and exactly what follows.

Names of invariants (I1 to I8) are those of the design; each stands where a rule carries it.
"""

from dataclasses import FrozenInstanceError, replace

import pytest

from apscheduler_fence.lease import (
    FINAL_STATES,
    Ask,
    Change,
    Execution,
    Grant,
    Insert,
    Key,
    Lease,
    LeaseMove,
    Refusal,
    Seen,
    Update,
    abandon,
    after_failure,
    broken,
    claim,
    granted,
    is_live,
    is_mine,
    move_state,
    next_token,
    release,
    renew,
    retry,
    revive,
    settle,
    settled,
)

NOW = 1_800_000_000_000_000
SECOND = 1_000_000
MOST, LEAST, KEEP = 30 * SECOND, 5 * SECOND, 3600 * SECOND

FREE = Lease("pay", token=7, acquired_at=NOW - 90 * SECOND)
HELD = Lease("pay", 7, "other", "pay", "s1", NOW - SECOND, expires_at=NOW + 1)
OVER = replace(HELD, expires_at=NOW)
SPACED = replace(FREE, hold_until=NOW + 1)
OVER_AND_SPACED = replace(OVER, hold_until=NOW + 1)

ASK = Ask(
    "pay", "pay", "s2", slot_at=NOW, scheduled_at=NOW + 3, nonce="mine", lock_at_most=MOST, lock_at_least=LEAST,
    keep_for=KEEP, func="m:f", jobstore="shared", job_id="pay-id",
)  # fmt: skip
QUEUE = replace(ASK, overlap="queue")
REPLACE = replace(ASK, overlap="replace")

TWICE = {"delivery": "at_least_once", "max_attempts": 2}


def row(slot, state, attempt=1, token=7, holder="other", **terms):
    """An execution of the lease, as a store would show it."""
    slot_at = {"s0": NOW - 120 * SECOND, "s1": NOW - 60 * SECOND, "s2": NOW, "s3": NOW + 60 * SECOND}[slot]
    return Execution("pay", slot, "pay", slot_at, slot_at, state, attempt, token, holder, **terms)


S1_RUNS = row("s1", "running")
S1_RUNS_OF_2 = row("s1", "running", **TWICE)
S1_RUNS_2_OF_2 = row("s1", "running", attempt=2, **TWICE)


def grant_of(ask, lease, condition):
    """The lease move by which `ask` gets what `lease` shows."""
    token, holder = (None, None) if lease is None else (lease.token, lease.holder)
    return LeaseMove(
        "pay", token, holder, condition, "grant", "mine", "pay", ask.slot, ask.lock_at_most, ask.lock_at_least, "m:f"
    )  # fmt: skip


def new_row(state, attempt, **terms):
    """The row of the slot that is asked for, inserted."""
    return Insert(
        Execution(
            "pay", "s2", "pay", NOW, NOW + 3, state, attempt, 0, "mine", func="m:f", jobstore="shared",
            job_id="pay-id", **terms,
        )
    )  # fmt: skip


def ended(slot, state, attempt=1, by="mine"):
    """The move that ends, or sends back to waiting, the run that stood under token 7."""
    return Update("pay", slot, "running", 7, state, attempt, by, keep_for=KEEP)


def begun(slot, was, token, attempt):
    """The move by which a row that is there starts its next attempt."""
    return Update("pay", slot, was, token, "running", attempt, "mine", granted=True)


def freed(lease, condition):
    """The lease move that leaves nobody holding."""
    return LeaseMove("pay", lease.token, lease.holder, condition, "free")


FIRST_RUN = (new_row("running", 1),)

# --- claim: grants ----------------------------------------------------------------------------------------------------

GRANTS = {
    "no lease row yet": (Seen(NOW), ASK, Change(grant_of(ASK, None, "open"), FIRST_RUN)),
    "free": (Seen(NOW, FREE), ASK, Change(grant_of(ASK, FREE, "open"), FIRST_RUN)),
    "free, on the microsecond that spacing ends": (
        Seen(NOW, replace(SPACED, hold_until=NOW)), ASK, Change(grant_of(ASK, FREE, "open"), FIRST_RUN),
    ),
    "over, its run already final": (
        Seen(NOW, OVER, None, row("s1", "succeeded")), ASK, Change(grant_of(ASK, OVER, "open"), FIRST_RUN),
    ),
    "over, its row gone": (Seen(NOW, OVER), ASK, Change(grant_of(ASK, OVER, "open"), FIRST_RUN)),
    "over, its row running under a newer token": (
        Seen(NOW, OVER, None, row("s1", "running", token=8)), ASK, Change(grant_of(ASK, OVER, "open"), FIRST_RUN),
    ),
    "over, at most once: the displaced run is lost": (
        Seen(NOW, OVER, None, S1_RUNS), ASK,
        Change(
            grant_of(ASK, OVER, "open"), (ended("s1", "lost"), *FIRST_RUN),
            displaced=replace(S1_RUNS, state="lost", holder="mine"),
        ),
    ),
    "over, at least once with attempts left: the displaced run waits": (
        Seen(NOW, OVER, None, S1_RUNS_OF_2), ASK,
        Change(
            grant_of(ASK, OVER, "open"), (ended("s1", "waiting"), *FIRST_RUN),
            displaced=replace(S1_RUNS_OF_2, state="waiting", holder="mine"),
        ),
    ),
    "over, at least once with none left: the displaced run is lost": (
        Seen(NOW, OVER, None, S1_RUNS_2_OF_2), ASK,
        Change(
            grant_of(ASK, OVER, "open"), (ended("s1", "lost", 2), *FIRST_RUN),
            displaced=replace(S1_RUNS_2_OF_2, state="lost", holder="mine"),
        ),
    ),
    "a slot as early as allowed": (
        Seen(NOW - 60 * SECOND, FREE), ASK, Change(grant_of(ASK, FREE, "open"), FIRST_RUN),
    ),
    "a slot just after the newest pruned one": (
        Seen(NOW, replace(FREE, pruned_through=NOW - 1)), ASK, Change(grant_of(ASK, FREE, "open"), FIRST_RUN),
    ),
    "a slot that waits for its first attempt": (
        Seen(NOW, FREE, row("s2", "waiting", 0, 0, "other"), None, row("s2", "waiting", 0, 0, "other")), ASK,
        Change(grant_of(ASK, FREE, "open"), (begun("s2", "waiting", 0, 1),)),
    ),
    "a waiting slot is not early, whatever the clock says": (
        Seen(NOW - 3600 * SECOND, FREE, row("s2", "waiting", 0, 0)), ASK,
        Change(grant_of(ASK, FREE, "open"), (begun("s2", "waiting", 0, 1),)),
    ),
    "a waiting slot was not pruned, however far pruning went": (
        Seen(NOW, replace(FREE, pruned_through=NOW), row("s2", "waiting", 0, 0)), ASK,
        Change(grant_of(ASK, FREE, "open"), (begun("s2", "waiting", 0, 1),)),
    ),
}  # fmt: skip

TAKE_OVERS = {
    "waiting at attempt 1": (
        Seen(NOW, FREE, row("s2", "waiting", token=6, **TWICE)), ASK,
        Change(grant_of(ASK, FREE, "over"), (begun("s2", "waiting", 6, 2),)),
    ),
    "waiting at attempt 1, within the spacing of the last grant": (
        Seen(NOW, SPACED, row("s2", "waiting", token=6, **TWICE)), ASK,
        Change(grant_of(ASK, SPACED, "over"), (begun("s2", "waiting", 6, 2),)),
    ),
    "running under a lease that is over": (
        Seen(NOW, replace(OVER, slot="s2"), row("s2", "running", **TWICE), row("s2", "running", **TWICE)), ASK,
        Change(grant_of(ASK, OVER, "over"), (begun("s2", "running", 7, 2),)),
    ),
    "running under a lease that is over, within its spacing": (
        Seen(
            NOW, replace(OVER_AND_SPACED, slot="s2"), row("s2", "running", **TWICE), row("s2", "running", **TWICE)
        ), ASK,
        Change(grant_of(ASK, OVER_AND_SPACED, "over"), (begun("s2", "running", 7, 2),)),
    ),
    "waiting, while another run stands under a lease that is over": (
        Seen(NOW, OVER, row("s2", "waiting", token=6, **TWICE), S1_RUNS), ASK,
        Change(
            grant_of(ASK, OVER, "over"), (ended("s1", "lost"), begun("s2", "waiting", 6, 2)),
            displaced=replace(S1_RUNS, state="lost", holder="mine"),
        ),
    ),
    "queued, the oldest that waits": (
        Seen(
            NOW, SPACED, row("s2", "waiting", token=6, **TWICE), None, row("s2", "waiting", token=6, **TWICE)
        ), QUEUE,
        Change(grant_of(QUEUE, SPACED, "over"), (begun("s2", "waiting", 6, 2),)),
    ),
}  # fmt: skip

# --- claim: refusals --------------------------------------------------------------------------------------------------

REFUSALS = {
    **{
        f"the slot is {state}": (Seen(NOW, FREE, row("s2", state)), ASK, Refusal("done", "other"))
        for state in FINAL_STATES
        if state != "lost"
    },
    "the slot is lost": (Seen(NOW, FREE, row("s2", "lost")), ASK, Refusal("lost", "other")),
    "the slot is done, and the lease is somebody's": (
        Seen(NOW, HELD, row("s2", "succeeded"), S1_RUNS), ASK, Refusal("done", "other"),
    ),
    "the slot runs": (
        Seen(NOW, replace(HELD, slot="s2"), row("s2", "running"), row("s2", "running")), ASK,
        Refusal("running", "other", NOW + 1),
    ),
    "the slot runs, though this claim could have another attempt": (
        Seen(NOW, replace(HELD, slot="s2"), row("s2", "running", **TWICE), row("s2", "running", **TWICE)), ASK,
        Refusal("running", "other", NOW + 1),
    ),
    "the slot ran, at most once, until its lease was over": (
        Seen(NOW, replace(OVER, slot="s2"), row("s2", "running"), row("s2", "running")), ASK,
        Refusal("running", "other", NOW),
    ),
    "the slot ran its last attempt until its lease was over": (
        Seen(NOW, replace(OVER, slot="s2"), row("s2", "running", 2, **TWICE), row("s2", "running", 2, **TWICE)), ASK,
        Refusal("running", "other", NOW),
    ),
    "the slot runs under another lease": (
        Seen(NOW, FREE, row("s2", "running", token=9, **TWICE)), ASK, Refusal("running", "other"),
    ),
    "the slot runs and there is no lease row": (
        Seen(NOW, None, row("s2", "running", **TWICE)), ASK, Refusal("running", "other"),
    ),
    "the lease is held": (Seen(NOW, HELD, None, S1_RUNS), ASK, Refusal("held", "other", NOW + 1)),
    "the lease is held, and the slot waits": (
        Seen(NOW, HELD, row("s2", "waiting", 0, 0), S1_RUNS), ASK, Refusal("held", "other", NOW + 1),
    ),
    "free within the spacing": (Seen(NOW, SPACED), ASK, Refusal("spacing", None, NOW + 1)),
    "over within the spacing": (
        Seen(NOW, OVER_AND_SPACED, None, S1_RUNS), ASK, Refusal("spacing", "other", NOW + 1),
    ),
    "the newest pruned slot": (Seen(NOW, replace(FREE, pruned_through=NOW)), ASK, Refusal("pruned")),
    "an older slot than the newest pruned": (Seen(NOW, replace(HELD, pruned_through=NOW + 9)), ASK, Refusal("pruned")),
    "a slot a microsecond too early": (Seen(NOW - 60 * SECOND - 1, FREE), ASK, Refusal("early", until=NOW)),
    "too early even for the first row": (Seen(NOW - 60 * SECOND - 1), ASK, Refusal("early", until=NOW)),
    "too early to be queued": (Seen(NOW - 60 * SECOND - 1, HELD), QUEUE, Refusal("early", until=NOW)),
    "queued already, behind a holder": (
        Seen(NOW, HELD, row("s2", "waiting", 0, 0), S1_RUNS, row("s2", "waiting", 0, 0)), QUEUE,
        Refusal("queued", "other", NOW + 1),
    ),
    "queued already, within the spacing": (
        Seen(NOW, SPACED, row("s2", "waiting", 0, 0), None, row("s2", "waiting", 0, 0)), QUEUE,
        Refusal("queued", until=NOW + 1),
    ),
    "queued already, behind one that waits longer": (
        Seen(NOW, FREE, row("s2", "waiting", 0, 0), None, row("s1", "waiting", 0, 0, "ahead")), QUEUE,
        Refusal("queued", "ahead"),
    ),
    "replace, but the run that stands there is of a later slot": (
        Seen(NOW, replace(HELD, slot="s3"), None, row("s3", "running")), REPLACE, Refusal("held", "other", NOW + 1),
    ),
    "replace, but the run that stands there is of the same time": (
        Seen(NOW, HELD, None, replace(S1_RUNS, job="refund", slot_at=NOW)), REPLACE,
        Refusal("held", "other", NOW + 1),
    ),
    "replace, but nothing is recorded as running": (
        Seen(NOW, HELD, None, row("s1", "succeeded")), REPLACE, Refusal("held", "other", NOW + 1),
    ),
}  # fmt: skip

# --- claim: queue and replace -----------------------------------------------------------------------------------------

LINE_UP = (new_row("waiting", 0),)
S1_WAITS = row("s1", "waiting", 0, 0)
S3_WAITS = row("s3", "waiting", 0, 0)

QUEUED = {
    "behind a holder: only if the holder is still live": (
        Seen(NOW, HELD, None, S1_RUNS), QUEUE, Change(LeaseMove("pay", 7, "other", "live", "none"), LINE_UP),
    ),
    "behind a holder and others": (
        Seen(NOW, HELD, None, S1_RUNS, S3_WAITS), QUEUE, Change(LeaseMove("pay", 7, "other", "live", "none"), LINE_UP),
    ),
    "within the spacing: with a new token, so that no claim that saw an empty line wins": (
        Seen(NOW, SPACED), QUEUE, Change(LeaseMove("pay", 7, None, "over", "bump"), LINE_UP),
    ),
    "behind one that waits, though the lease is free": (
        Seen(NOW, FREE, None, None, S1_WAITS), QUEUE, Change(LeaseMove("pay", 7, None, "over", "bump"), LINE_UP),
    ),
    "into a line of later slots": (
        Seen(NOW, FREE, None, None, S3_WAITS), QUEUE, Change(LeaseMove("pay", 7, None, "over", "bump"), LINE_UP),
    ),
    "an expired holder in front of a line is ended first": (
        Seen(NOW, OVER, None, row("s0", "running"), S1_WAITS), QUEUE,
        Change(
            freed(OVER, "over"), (ended("s0", "lost"),),
            displaced=replace(row("s0", "running"), state="lost", holder="mine"),
        ),
    ),
    "an expired holder within its spacing is ended first": (
        Seen(NOW, OVER_AND_SPACED, None, S1_RUNS_OF_2), QUEUE,
        Change(
            freed(OVER, "over"), (ended("s1", "waiting"),),
            displaced=replace(S1_RUNS_OF_2, state="waiting", holder="mine"),
        ),
    ),
    "nobody in front: at once": (Seen(NOW, FREE), QUEUE, Change(grant_of(QUEUE, FREE, "open"), FIRST_RUN)),
    "an expired holder and nobody in front: at once": (
        Seen(NOW, OVER, None, S1_RUNS), QUEUE,
        Change(
            grant_of(QUEUE, OVER, "open"), (ended("s1", "lost"), *FIRST_RUN),
            displaced=replace(S1_RUNS, state="lost", holder="mine"),
        ),
    ),
    "the first of the line": (
        Seen(NOW, FREE, row("s2", "waiting", 0, 0), None, row("s2", "waiting", 0, 0)), QUEUE,
        Change(grant_of(QUEUE, FREE, "open"), (begun("s2", "waiting", 0, 1),)),
    ),
}  # fmt: skip

REPLACED = {
    "an earlier slot that still runs, whatever its expiry will be by then": (
        Seen(NOW, HELD, None, S1_RUNS), REPLACE,
        Change(
            grant_of(REPLACE, HELD, "any"), (ended("s1", "superseded"), *FIRST_RUN),
            displaced=replace(S1_RUNS, state="superseded", holder="mine"),
        ),
    ),
    "an earlier slot that could have another attempt": (
        Seen(NOW, HELD, None, S1_RUNS_OF_2), REPLACE,
        Change(
            grant_of(REPLACE, HELD, "any"), (ended("s1", "superseded"), *FIRST_RUN),
            displaced=replace(S1_RUNS_OF_2, state="superseded", holder="mine"),
        ),
    ),
    "by a slot that waits": (
        Seen(NOW, HELD, row("s2", "waiting", 0, 0), S1_RUNS), REPLACE,
        Change(
            grant_of(REPLACE, HELD, "any"), (ended("s1", "superseded"), begun("s2", "waiting", 0, 1)),
            displaced=replace(S1_RUNS, state="superseded", holder="mine"),
        ),
    ),
    "a lease that is over is claimed as any other": (
        Seen(NOW, OVER, None, S1_RUNS), REPLACE,
        Change(
            grant_of(REPLACE, OVER, "open"), (ended("s1", "lost"), *FIRST_RUN),
            displaced=replace(S1_RUNS, state="lost", holder="mine"),
        ),
    ),
}  # fmt: skip


def table(cases):
    """Parametrise by the rows of a table."""
    return pytest.mark.parametrize(("seen", "ask", "expected"), cases.values(), ids=cases.keys())


@table(GRANTS)
def test_a_claim_is_granted_by_comparing_what_was_read(seen, ask, expected):
    """A lease that is free or over, and past its spacing, is claimed together with the row of the slot (I1, I4)."""
    assert claim(seen, ask) == expected
    assert expected.grants


@table(TAKE_OVERS)
def test_the_next_attempt_ignores_spacing(seen, ask, expected):
    """An attempt that did not end is followed by the next one of the same execution, whatever `lock_at_least` says."""
    assert claim(seen, ask) == expected
    assert expected.grants


@table(REFUSALS)
def test_a_claim_is_refused_with_a_reason(seen, ask, expected):
    """A refusal says why, who is in the way and until when (I1, I3, I6, I8)."""
    assert claim(seen, ask) == expected


@table(QUEUED)
def test_with_overlap_queue_slots_run_in_their_order(seen, ask, expected):
    """A slot that cannot run now gets in line, and none goes ahead of one that waits."""
    assert claim(seen, ask) == expected


@table(REPLACED)
def test_with_overlap_replace_a_later_slot_ends_an_earlier_one(seen, ask, expected):
    """The lease changes hands in one swap, and the earlier run is recorded as superseded."""
    assert claim(seen, ask) == expected
    assert expected.grants


@pytest.mark.parametrize("overlap", ["skip", "queue", "allow", "replace"])
@pytest.mark.parametrize("state", FINAL_STATES)
def test_no_overlap_policy_runs_a_final_slot_again(overlap, state):
    """A final execution is refused under every overlap policy and whatever the lease looks like (I3)."""
    for lease in (None, FREE, HELD, OVER, SPACED):
        seen = Seen(NOW, lease, row("s2", state, **TWICE), S1_RUNS)
        assert isinstance(claim(seen, replace(ASK, overlap=overlap)), Refusal)


# --- the holder's own moves -------------------------------------------------------------------------------------------

GRANT = Grant("pay", "pay", "s2", 8, "mine", 1, keep_for=KEEP)


def test_a_renewal_needs_a_lease_that_is_mine_and_not_over():
    """Renewal compares token, holder and the store's clock, so it never revives a lease and never moves another's (I3)."""
    assert renew(GRANT, MOST) == Change(LeaseMove("pay", 8, "mine", "live", "extend", lock_at_most=MOST))


@pytest.mark.parametrize("outcome", FINAL_STATES)
def test_a_settle_records_the_outcome_and_frees_the_lease_together(outcome):
    """Expiry is not compared: if nobody took over, a finished run is a finished run; a stale holder moves nothing (I3)."""
    assert settle(GRANT, outcome, "boom") == Change(
        LeaseMove("pay", 8, "mine", "any", "free"),
        (Update("pay", "s2", "running", 8, outcome, 1, "mine", keep_for=KEEP, error="boom"),),
    )


@pytest.mark.parametrize(
    ("delivery", "attempt", "outcome", "state"),
    [
        ("at_least_once", 1, "cancelled", "waiting"),
        ("at_least_once", 2, "cancelled", "cancelled"),
        ("at_most_once", 1, "cancelled", "cancelled"),
        ("at_least_once", 1, "failed", "failed"),
        ("at_least_once", 1, "succeeded", "succeeded"),
    ],
)
def test_only_a_cancelled_run_goes_back_to_waiting(delivery, attempt, outcome, state):
    """A run that was cancelled is tried again if it may be; one that failed or succeeded has an outcome."""
    grant = replace(GRANT, delivery=delivery, max_attempts=2, attempt=attempt)
    (move,) = settle(grant, outcome).executions
    assert move.state == state


def test_a_retry_is_a_new_attempt_under_a_new_token_and_nonce():
    """A retry needs a live lease of its own and changes its name, so that nothing sent before it can match (I1, I2)."""
    assert retry(GRANT, "mine too", MOST, "boom") == Change(
        LeaseMove("pay", 8, "mine", "live", "regrant", "mine too", "pay", "s2", MOST),
        (Update("pay", "s2", "running", 8, "running", 2, "mine too", granted=True, error="boom"),),
    )


def test_what_a_winner_holds_is_what_it_must_show():
    """The grant of a claim carries everything its renewals and settle compare or write."""
    ask = replace(ASK, **TWICE)
    assert granted(ask, 8, 2) == Grant("pay", "pay", "s2", 8, "mine", 2, "at_least_once", 2, KEEP)


# --- answers that were lost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "had_worked"),
    [
        (row("s2", "succeeded", token=8, holder="mine"), True),
        (row("s2", "failed", token=8, holder="mine"), False),
        (row("s2", "lost", token=8, holder="sweeper"), False),
        (row("s2", "succeeded", token=8, holder="sweeper"), False),
        (row("s2", "succeeded", token=9, holder="mine"), False),
        (row("s2", "running", token=8, holder="mine"), False),
        (None, False),
    ],
)
def test_a_settle_had_worked_only_if_the_very_state_is_there(found, had_worked):
    """Another final state, holder or token means that the lease was lost before the settle arrived (I3)."""
    assert settled(Seen(NOW, FREE, found), GRANT, settle(GRANT, "succeeded")) is had_worked


@pytest.mark.parametrize(
    ("lease", "mine"),
    [(None, False), (FREE, False), (HELD, False), (replace(HELD, holder="mine"), True)],
)
def test_a_claim_without_an_answer_is_settled_by_its_nonce(lease, mine):
    """The claim worked if the lease shows its nonce, which no other claim ever has."""
    assert is_mine(Seen(NOW, lease), "mine") is mine


# --- moves of third parties -------------------------------------------------------------------------------------------

ABANDONED = {
    "at most once": (
        Seen(NOW, OVER, S1_RUNS, S1_RUNS),
        Change(
            freed(OVER, "over"), (ended("s1", "lost", by="sweeper"),),
            replace(S1_RUNS, state="lost", holder="sweeper"),
        ),
    ),
    "at least once": (
        Seen(NOW, OVER, S1_RUNS_OF_2, S1_RUNS_OF_2),
        Change(
            freed(OVER, "over"), (ended("s1", "waiting", by="sweeper"),),
            replace(S1_RUNS_OF_2, state="waiting", holder="sweeper"),
        ),
    ),
    "at least once, its last attempt": (
        Seen(NOW, OVER, S1_RUNS_2_OF_2, S1_RUNS_2_OF_2),
        Change(
            freed(OVER, "over"), (ended("s1", "lost", 2, by="sweeper"),),
            replace(S1_RUNS_2_OF_2, state="lost", holder="sweeper"),
        ),
    ),
    "nothing recorded as running": (Seen(NOW, OVER), Change(freed(OVER, "over"))),
    "live": (Seen(NOW, HELD, S1_RUNS, S1_RUNS), None),
    "free": (Seen(NOW, FREE), None),
    "no row": (Seen(NOW), None),
}  # fmt: skip


@pytest.mark.parametrize(("seen", "expected"), ABANDONED.values(), ids=ABANDONED.keys())
def test_only_what_is_over_is_abandoned(seen, expected):
    """The run's end and the lease's go in one swap, which carries the sweeper's nonce (I1, I3)."""
    assert abandon(seen, "sweeper", keep_for=KEEP) == expected


def test_a_release_ignores_expiry():
    """An operator ends a live run as a sweeper ends one that is over; renewals do not defeat it."""
    for lease in (HELD, OVER):
        assert release(Seen(NOW, lease, None, S1_RUNS), "operator", keep_for=KEEP) == Change(
            freed(lease, "any"),
            (ended("s1", "lost", by="operator"),),
            displaced=replace(S1_RUNS, state="lost", holder="operator"),
        )
    assert release(Seen(NOW, HELD, None, S1_RUNS_OF_2), "operator", keep_for=KEEP).displaced.state == "waiting"


@pytest.mark.parametrize("lease", [None, FREE])
def test_there_is_nothing_to_release_where_nobody_holds(lease):
    """Releasing a free lease is no change."""
    assert release(Seen(NOW, lease), "operator", keep_for=KEEP) is None


@pytest.mark.parametrize(
    ("found", "had_worked"),
    [
        (row("s1", "lost", holder="sweeper"), True),
        (row("s1", "lost", holder="another sweeper"), False),
        (row("s1", "succeeded", holder="other"), False),
        (row("s1", "running"), False),
        (None, False),
    ],
)
def test_an_abandon_had_worked_only_if_the_row_names_the_sweeper(found, had_worked):
    """A loss whose answer was lost is announced by the sweeper whose nonce is in the row, and by no other."""
    change = abandon(Seen(NOW, OVER, S1_RUNS, S1_RUNS), "sweeper", keep_for=KEEP)
    assert broken(Seen(NOW, FREE, found), change) is had_worked


@pytest.mark.parametrize(
    ("found", "max_attempts"),
    [
        (row("s1", "lost"), 2),
        (row("s1", "failed", 2, max_attempts=2), 3),
        (row("s1", "cancelled", 1, max_attempts=3), 4),
        (row("s1", "lost", 3, max_attempts=1), 4),
    ],
)
def test_a_revived_execution_waits_with_one_more_attempt_allowed(found, max_attempts):
    """An operator's retry leaves the attempt number where it was and touches no lease (I3)."""
    assert revive(found) == Change(
        None,
        (Update("pay", "s1", found.state, 7, "waiting", found.attempt, "other", max_attempts=max_attempts),),
    )


@pytest.mark.parametrize("state", ["waiting", "running", "succeeded", "superseded"])
def test_what_is_open_or_succeeded_is_not_revived(state):
    """Only an execution that ended without success can be given another attempt (I3)."""
    assert revive(row("s1", state)) is None


# --- predicates and values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lease", "live"),
    [(None, False), (FREE, False), (OVER, False), (HELD, True), (replace(HELD, expires_at=NOW - 1), False)],
)
def test_a_lease_is_live_until_the_microsecond_it_ends(lease, live):
    """Held and not expired; at `expires_at` itself it is over."""
    assert is_live(lease, NOW) is live


@pytest.mark.parametrize(("last", "now", "token"), [(0, NOW, NOW), (NOW, NOW, NOW + 1), (NOW + 5, NOW, NOW + 6)])
def test_tokens_grow_whatever_the_clock_or_the_store_lost(last, now, token):
    """A token is larger than the last one, and at least the store's clock (I2)."""
    assert next_token(last, now) == token
    assert token < 2**53


@pytest.mark.parametrize(
    ("delivery", "attempt", "cancelled", "state"),
    [
        ("at_most_once", 1, False, "lost"),
        ("at_most_once", 1, True, "cancelled"),
        ("at_least_once", 1, False, "waiting"),
        ("at_least_once", 1, True, "waiting"),
        ("at_least_once", 2, False, "lost"),
        ("at_least_once", 2, True, "cancelled"),
    ],
)
def test_a_run_without_an_outcome_is_tried_again_only_if_it_may_be(delivery, attempt, cancelled, state):
    """At least once, and attempts left: waiting; otherwise it has ended."""
    found = row("s1", "running", attempt, delivery=delivery, max_attempts=2)
    assert after_failure(found, cancelled=cancelled) == state


def test_only_moves_that_give_the_lease_to_the_claimer_grant():
    """A claim that ends an expired holder or gets in line has not won anything yet."""
    assert retry(GRANT, "mine too", MOST).grants
    for change in (renew(GRANT, MOST), settle(GRANT, "failed"), revive(row("s1", "lost"))):
        assert not change.grants
    for name in ("an expired holder in front of a line is ended first", "behind a holder and others"):
        assert not QUEUED[name][2].grants


def test_a_move_says_which_state_it_leaves():
    """Inserts and updates answer alike."""
    assert move_state(new_row("waiting", 0)) == "waiting"
    assert move_state(ended("s1", "lost")) == "lost"


def test_an_ask_reads_what_it_decides_on():
    """The key of an ask names its lease and its slot."""
    assert replace(ASK, lease="shared").key == Key("shared", "pay", "s2")


def test_an_execution_id_is_the_job_and_the_slot():
    """It does not depend on attempt, token or holder."""
    assert row("s1", "running").id == row("s1", "lost", 5, 9, None).id == "pay/s1"


@pytest.mark.parametrize("value", [FREE, S1_RUNS, ASK, GRANT, GRANTS["free"][2], Refusal("done")])
def test_values_cannot_change(value):
    """What was read or decided stays what it was."""
    field = next(iter(value.__dataclass_fields__))
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, "else")
