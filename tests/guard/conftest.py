"""A database of each kind with an account in it, guarded."""

import pytest
from guard_bank import Bank


@pytest.fixture
def bank(store_url):
    """An empty account in a database of each kind."""
    bank = Bank(store_url)
    yield bank
    bank.engine.dispose()
