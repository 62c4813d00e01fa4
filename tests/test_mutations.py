"""The simulation is not blind: of the bugs planted in the code, one at a time, it notices every one.

Those in rules that the runner does not use yet (retries, take-overs, queueing, replacing) are planted in `test_protocol.py`.
"""

import pytest
from simulation.mutations import MUTATIONS, Mutation, noticed, planted

from apscheduler_fence import policy


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.why)
def test_a_planted_bug_is_noticed(mutation: Mutation) -> None:
    """With this bug some world breaks a promise."""
    assert noticed(mutation) is not None


def test_a_bug_that_cannot_be_planted_is_an_error() -> None:
    """A mutation whose place has gone is not passed over in silence."""
    with pytest.raises(ValueError, match="0 times, not once"), planted(Mutation("?", policy.elapsed, "nowhere", "")):
        pass


def test_a_planted_bug_is_gone_afterwards() -> None:
    """Planting changes nothing for the tests that follow."""
    whole = policy.trusted_for
    with planted(next(mutation for mutation in MUTATIONS if mutation.where is whole)):
        assert policy.trusted_for is not whole
    assert policy.trusted_for is whole
