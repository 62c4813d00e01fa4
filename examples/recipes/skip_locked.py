"""Share a batch of work: each node takes rows that nobody else has locked, and nobody waits for anybody.

Needs PostgreSQL 9.5, MySQL 8 or MariaDB 10.6. SQLite has one writer at a time and knows no row locks; there BEGIN IMMEDIATE
gives the same result, one node after the other.

Run it with: python examples/recipes/skip_locked.py [database URL]
"""

import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import sqlalchemy as sa

metadata = sa.MetaData()
task = sa.Table(
    "task",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("done", sa.Boolean, nullable=False),
)


def work(engine: sa.Engine) -> list[int]:
    """What each node does; returns the tasks it has done."""
    done: list[int] = []
    while True:
        with engine.begin() as db:
            mine = (
                sa.select(task.c.id).where(~task.c.done).order_by(task.c.id).limit(3).with_for_update(skip_locked=True)
            )
            batch = list(db.execute(mine).scalars())
            if not batch:
                return done
            # Work here, in the same transaction: if this node dies, its rows are free again.
            db.execute(sa.update(task).where(task.c.id.in_(batch)).values(done=True))
        done += batch


def main(url: str) -> bool:
    engine = sa.create_engine(url)
    if engine.dialect.name == "sqlite":
        begin_at_once(engine)
    metadata.create_all(engine)
    with engine.begin() as db:
        db.execute(sa.insert(task), [{"id": number, "done": False} for number in range(1, 41)])
    with ThreadPoolExecutor(4) as nodes:
        shares = list(nodes.map(lambda _: work(engine), range(4)))
    engine.dispose()
    print(f"40 tasks, done by 4 nodes: {' + '.join(str(len(share)) for share in shares)}")
    return sorted(number for share in shares for number in share) == list(range(1, 41))


def begin_at_once(engine: sa.Engine) -> None:
    """Take SQLite's write lock before the first read."""

    @sa.event.listens_for(engine, "connect")
    def connect(connection: Any, _: object) -> None:
        connection.isolation_level = None

    @sa.event.listens_for(engine, "begin")
    def begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        url = sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{Path(folder) / 'app.db'}"
        raise SystemExit(0 if main(url) else 1)
