"""Claim work by its status, in one statement: of all who try, one gets a row count of 1.

Run it with: python examples/recipes/status_claim.py [database URL]
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
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("status", sa.String(10), nullable=False),
)


def send_reminder(engine: sa.Engine, number: int) -> int:
    """What each node does for each reminder; returns how many it has sent."""
    with engine.begin() as db:
        claimed = db.execute(
            sa.update(reminder).where(reminder.c.id == number, reminder.c.status == "pending").values(status="sending")
        )
    if claimed.rowcount != 1:
        return 0  # another node has it
    # Send it here. Whoever dies now leaves it as "sending": at most once, and somebody has to look at it.
    with engine.begin() as db:
        db.execute(sa.update(reminder).where(reminder.c.id == number).values(status="sent"))
    return 1


def main(url: str) -> bool:
    engine = sa.create_engine(url)
    metadata.create_all(engine)
    with engine.begin() as db:
        db.execute(sa.insert(reminder), [{"id": number, "status": "pending"} for number in range(1, 21)])
    with ThreadPoolExecutor(4) as nodes:
        sent = list(nodes.map(lambda number: send_reminder(engine, number), [*range(1, 21)] * 4))
    engine.dispose()
    print(f"20 reminders, {len(sent)} tries, {sum(sent)} sent")
    return sum(sent) == 20  # noqa: PLR2004 - as above


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        url = sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{Path(folder) / 'app.db'}"
        raise SystemExit(0 if main(url) else 1)
