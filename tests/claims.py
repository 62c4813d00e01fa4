"""Claims that tests make on a store, one call each."""

import itertools
import uuid

from apscheduler_fence.lease import Ask, Grant, Refusal, claim, granted, settle
from apscheduler_fence.stores.base import Executions

SECOND = 1_000_000
HOUR = 3600 * SECOND

_numbers = itertools.count(1)


def ask(lease="pay", slot=None, **terms):
    """A claim that no other test makes: the next slot of the lease's job, an hour at most."""
    number = next(_numbers)
    defaults = {"job": lease, "slot_at": number, "scheduled_at": number, "lock_at_most": HOUR}
    return Ask(lease=lease, slot=slot or f"s{number}", nonce=nonce(), **{**defaults, **terms})


def nonce():
    """A holder that no other claim has."""
    return f"host:{next(_numbers)}:{uuid.uuid4().hex[:16]}"


def win(store, wanted) -> Grant:
    """Claim what nobody else wants, and return what was granted."""
    change = claim(store.read(wanted.key), wanted)
    (token,) = store.swap([change])
    assert token is not None
    (*_, move) = change.executions
    return granted(wanted, token, move.attempt if hasattr(move, "attempt") else 1)


def run(store, wanted, outcome="succeeded", error=None) -> Grant:
    """Claim and settle what nobody else wants."""
    grant = win(store, wanted)
    assert store.swap([settle(grant, outcome, error)]) == [grant.token]
    return grant


def compete(store, wanted) -> Grant | Refusal:
    """Claim what others want too: read, decide, swap, until it is won or refused."""
    while True:
        decision = claim(store.read(wanted.key), wanted)
        if isinstance(decision, Refusal):
            return decision
        (token,) = store.swap([decision])
        if token is not None and decision.grants:
            (*_, move) = decision.executions
            return granted(wanted, token, move.attempt if hasattr(move, "attempt") else 1)


def rows(store):
    """Every execution row, by its id."""
    return {row.id: row for row in store.executions(Executions())}
