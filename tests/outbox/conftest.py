"""A database of each kind with an outbox in it."""

import pytest
import sqlalchemy
from outbox_database import Mail


@pytest.fixture
def mail(store_url):
    """An empty outbox."""
    mail = Mail(sqlalchemy.create_engine(store_url))
    yield mail
    mail.engine.dispose()
