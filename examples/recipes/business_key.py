"""Let the database reject duplicates: a unique key of the business itself turns a second reminder into an error.

It holds across executions, where an execution ID does not: two slots, or a person and a job, may want the same reminder.

Run it with: python examples/recipes/business_key.py [database URL]
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import sqlalchemy as sa

metadata = sa.MetaData()
reminder = sa.Table(
    "reminder",
    metadata,
    sa.Column("invoice_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("reminder_type", sa.String(20), primary_key=True),
    sa.Column("sent_by", sa.String(20), nullable=False),
)


def remind(engine: sa.Engine, node: str, invoice: int) -> bool:
    """What each node does; says whether it was the one."""
    try:
        with engine.begin() as db:
            db.execute(sa.insert(reminder).values(invoice_id=invoice, reminder_type="second", sent_by=node))
            # Add the message to the outbox here, in the same transaction.
    except sa.exc.IntegrityError:
        return False
    return True


def main(url: str) -> bool:
    engine = sa.create_engine(url)
    metadata.create_all(engine)
    with ThreadPoolExecutor(4) as nodes:
        tries = [(f"node {node}", invoice) for invoice in range(10) for node in range(4)]
        sent = list(nodes.map(lambda each: remind(engine, *each), tries))
    engine.dispose()
    print(f"10 invoices, {len(tries)} tries, {sum(sent)} reminders")
    return sum(sent) == 10  # noqa: PLR2004 - as above


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        url = sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{Path(folder) / 'app.db'}"
        raise SystemExit(0 if main(url) else 1)
