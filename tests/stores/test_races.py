"""Who meets in the same instant: threads and processes that want the same slots, on every store."""

import contextlib
import json
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from claims import HOUR, ask, compete, nonce, rows
from servers import Node

from apscheduler_fence.lease import Grant, Refusal, abandon, is_mine, renew, retry, settle
from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.base import HeldLeases

THREADS, SLOTS = 8, 12
PROCESSES = 4


def at_once(work, threads=THREADS):
    """Calls `work(number)` on so many threads, all let go together, and returns what each returned."""
    start = threading.Barrier(threads, timeout=30)

    def released(number):
        start.wait()
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(released, range(threads)))


def slot_of(number, **terms):
    """A claim that every thread makes, each with a nonce of its own."""
    return replace(ask(slot=f"slot-{number}", slot_at=number + 1, scheduled_at=number + 1, **terms), nonce=nonce())


def test_each_slot_has_one_winner(store):
    """Of all who want a slot one gets it, the others learn that it runs or is done, and tokens grow (I1, I2)."""
    together = threading.Barrier(THREADS, timeout=30)
    unguarded = [0]

    def work(_):
        won = []
        for number in range(SLOTS):
            together.wait()
            grant = compete(store, slot_of(number))
            if isinstance(grant, Grant):
                seen = unguarded[0]
                assert store.swap([renew(grant, HOUR)]) == [grant.token]  # time in which another might come between
                unguarded[0] = seen + 1
                assert store.swap([settle(grant, "succeeded")]) == [grant.token]
                won.append((number, grant.token))
            else:
                assert grant.reason in ("running", "done")
            together.wait()
        return won

    won = sorted(sum(at_once(work), []))  # noqa: RUF017 - a dozen
    assert [number for number, _ in won] == list(range(SLOTS))
    tokens = [token for _, token in won]
    assert tokens == sorted(set(tokens))
    assert unguarded == [SLOTS]
    assert Counter(row.state for row in rows(store).values()) == {"succeeded": SLOTS}


def test_a_holder_is_alone(store):
    """Of slots of one lease that are all wanted at once, no two run at the same time: no update is lost (I1)."""
    unguarded, winners = [0], []

    def work(number):
        for turn in range(4):
            wanted = slot_of(number * 4 + turn)
            while isinstance(grant := compete(store, wanted), Refusal):
                assert grant.reason == "held"
            seen = unguarded[0]
            store.read(wanted.key)
            unguarded[0] = seen + 1
            winners.append(grant.token)
            assert store.swap([settle(grant, "succeeded")]) == [grant.token]

    at_once(work)
    assert unguarded == [THREADS * 4]
    assert winners == sorted(set(winners))


def test_first_claims_of_new_leases_have_one_winner(store):
    """Where there is no row yet to compare, one insert wins, whichever slots are wanted (I1)."""

    def work(number):
        leases = [f"new-{lease}" for lease in range(SLOTS)]
        random.Random(number).shuffle(leases)  # so that the statements of two threads cross
        return [compete(store, ask(lease, lock_at_most=HOUR)) for lease in leases]

    answers = sum(at_once(work), [])  # noqa: RUF017 - a hundred
    assert Counter(grant.lease for grant in answers if isinstance(grant, Grant)) == dict.fromkeys(
        [f"new-{lease}" for lease in range(SLOTS)], 1
    )
    assert {answer.reason for answer in answers if isinstance(answer, Refusal)} == {"held"}


def test_an_expired_run_is_taken_over_or_ended_once(store):
    """Sweepers, claimers, and the late holder meet over a lease that is over: one of them moves it (I3)."""
    for turn in range(8):
        late = compete(store, slot_of(turn, lock_at_most=-HOUR))
        (over,) = store.held_leases(HeldLeases(expired=True))

        def work(number, late=late, over=over, turn=turn):
            if number == 0:
                return "settled" if store.swap([settle(late, "succeeded")]) != [None] else None
            if number == 1:
                return "renewed" if store.swap([renew(late, HOUR)]) != [None] else None
            if number % 2:
                return "swept" if store.swap([abandon(over, nonce(), keep_for=HOUR)]) != [None] else None
            grant = compete(store, slot_of(100 + turn))
            return grant if isinstance(grant, Grant) else None

        answers = at_once(work)
        assert "renewed" not in answers
        (next_run,) = [answer for answer in answers if isinstance(answer, Grant)]
        ended = answers.count("settled") + answers.count("swept")
        row = rows(store)[f"pay/slot-{turn}"]
        assert ended <= 1
        assert row.state == ("succeeded" if "settled" in answers else "lost")
        assert store.swap([settle(next_run, "succeeded")]) == [next_run.token]


def test_a_storm_leaves_what_runs_under_what_is_held(store):
    """Claims, renewals, retries, sweeps and settles in any order: rows and leases still agree, and nothing broke."""

    def work(number):
        chance, mine = random.Random(number), []
        for turn in range(25):
            match chance.randrange(6):
                case 0 | 1:
                    wanted = ask(
                        f"lease-{chance.randrange(3)}", f"s{turn}-{number}", lock_at_most=chance.choice([HOUR, -HOUR]),
                        delivery=chance.choice(["at_most_once", "at_least_once"]), max_attempts=2,
                    )  # fmt: skip
                    grant = compete(store, wanted)
                    mine += [grant] if isinstance(grant, Grant) else []
                case 2 if mine:
                    store.swap([renew(grant, HOUR) for grant in mine])
                case 3 if mine:
                    grant, name = mine.pop(), nonce()
                    (token,) = store.swap([retry(grant, name, HOUR)])
                    if token is not None:
                        mine.append(replace(grant, token=token, holder=name, attempt=grant.attempt + 1))
                case 4 if mine:
                    store.swap([settle(mine.pop(0), chance.choice(["succeeded", "failed", "cancelled"]))])
                case _:
                    over = list(store.held_leases(HeldLeases(expired=True)))
                    store.swap([abandon(seen, nonce(), keep_for=HOUR) for seen in over])

    at_once(work)
    running = {(row.job, row.slot, row.token) for row in rows(store).values() if row.state == "running"}
    held = list(store.held_leases(HeldLeases()))
    assert running == {(seen.lease.job, seen.lease.slot, seen.lease.token) for seen in held}
    assert all(is_mine(seen, seen.holding.holder) for seen in held)


# --- real processes ---------------------------------------------------------------------------------------------------


def take_part(url, number, counter, signal):
    """What each process does: claim every slot, and count in a file that nothing else guards."""
    store = open_store(url, "race")
    won, refused = [], Counter()
    report(ready=True)
    while not signal.exists():
        time.sleep(0.001)
    for slot in range(SLOTS * 4):
        while isinstance(answer := compete(store, slot_of(slot)), Refusal) and answer.reason == "held":
            time.sleep(0.001)
        if isinstance(answer, Refusal):
            refused[answer.reason] += 1
            continue
        count = int(counter.read_text())
        counter.write_text(str(count + 1))
        assert store.swap([settle(answer, "succeeded", str(number))]) == [answer.token]
        won.append((slot, answer.token))
    store.close()
    report(won=won, refused=refused)


def report(**message):
    """Tells the test."""
    print(json.dumps(message), flush=True)  # noqa: T201


@pytest.mark.backends("sqlite", "postgresql", "mariadb", "redis")
def test_processes_share_slots_without_losing_one(store_url, tmp_path):
    """Four processes want the same slots of an empty store: each slot is won once, and no count is lost (I1, I2)."""
    counter, signal = tmp_path / "counter", tmp_path / "go"
    counter.write_text("0")
    with contextlib.ExitStack() as started:
        nodes = [
            started.enter_context(Node(__file__, store_url, str(number), counter, signal))
            for number in range(PROCESSES)
        ]
        for node in nodes:
            node.receive(ready=True, timeout=30)
        signal.touch()
        for node in nodes:
            assert node.wait(60) == 0, node.stderr
        told = [node.messages[-1] for node in nodes]
    won = sorted(tuple(win) for node in told for win in node["won"])
    assert [slot for slot, _ in won] == list(range(SLOTS * 4))
    assert len({token for _, token in won}) == SLOTS * 4
    assert counter.read_text() == str(SLOTS * 4)
    refused = sum((Counter(node["refused"]) for node in told), Counter())
    assert set(refused) <= {"running", "done"}
    assert sum(refused.values()) == SLOTS * 4 * (PROCESSES - 1)


if __name__ == "__main__":
    take_part(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
