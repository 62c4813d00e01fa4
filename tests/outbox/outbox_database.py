"""An outbox in a database, and what was sent from it."""

import itertools

from sqlalchemy import update

from apscheduler_fence.bearer import Bearer
from apscheduler_fence.outbox import Message, Outbox
from apscheduler_fence.stores.sql import StoreClock

_numbers = itertools.count(1)


def bearer(execution="job/1", token=1):
    """A run that adds messages."""
    return Bearer(token, execution, "job")


class Mail:
    """An outbox, and a handler that remembers what it was handed."""

    def __init__(self, engine, **options):
        self.engine = engine
        self.outbox = Outbox(engine, **{"backoff": 0, **options})
        self.outbox.create()
        self.sent: list[Message] = []

    def again(self, **options):
        """The same outbox with other options."""
        return Mail(self.engine, **options)

    def add(self, payload, *, key=None, fence=None, **options):
        """Add and commit one message."""
        with self.engine.begin() as db:
            key = key or f"key-{next(_numbers)}"
            return self.outbox.add(db, "mail", payload, key=key, fence=fence or bearer(), **options)

    def send(self, message):
        """The handler."""
        self.sent.append(message)

    def relay(self):
        """Relay once, and return the payloads that were sent."""
        self.sent.clear()
        self.outbox.relay(self.send)
        return [message.payload for message in self.sent]

    def set(self, **values):
        """Change every row, as time or another process would."""
        with self.engine.begin() as db:
            db.execute(update(self.outbox._table).values(values))

    def claim_as_another(self, seconds=60):
        """Let another relay claim everything, for so many seconds."""
        self.set(claimed_by="another", claimed_until=StoreClock() + seconds * 1_000_000)
