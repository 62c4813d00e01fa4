"""What a guarded write costs beside the same write without a guard, on PostgreSQL, in one run.

Run it with: python benchmarks/guard_cost.py [database URL]; without one it starts a server as the tests do.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import sqlalchemy as sa

from apscheduler_fence.bearer import Bearer
from apscheduler_fence.guard import Guard

ROUNDS = 1500

metadata = sa.MetaData()
account = sa.Table("account", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("cents", sa.Integer))
deposit = sa.update(account).where(account.c.id == 1).values(cents=account.c.cents + 1)


@contextlib.contextmanager
def database() -> Iterator[str]:
    """The URL that was given, or that of a server of one's own that waits for its disk as in production."""
    if len(sys.argv) > 1:
        yield sys.argv[1]
        return
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from servers import PostgreSQL  # noqa: PLC0415 - only if no database was named

    with PostgreSQL(durable=True) as server:
        yield server.url


class Writes:
    """The same write in four forms."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine
        self.guard = Guard()
        self.token = time.time_ns() // 1000 - 3_600_000_000
        self.statements = 0
        sa.event.listen(engine, "before_cursor_execute", self._count)

    def _count(self, *_: object) -> None:
        self.statements += 1

    def run(self) -> Bearer:
        """The next run of a job."""
        self.token += 1
        return Bearer(self.token, f"pay/{self.token}", "pay")

    def plain(self) -> None:
        """No guard."""
        with self.engine.begin() as db:
            db.execute(deposit)

    def checked(self) -> None:
        """`check` in a transaction of the caller's own."""
        with self.engine.begin() as db:
            db.execute(deposit)
            self.guard.check(db, "account:1", fence=self.run())

    def block(self) -> None:
        """`writing`, without an operation."""
        with self.guard.writing(self.engine, "account:1", fence=self.run()) as db:
            db.execute(deposit)

    def block_with_operation(self) -> None:
        """`writing`, with an operation."""
        with self.guard.writing(self.engine, "account:1", "deposit", fence=self.run()) as db:
            db.execute(deposit)


def measure(write: Callable[[], None]) -> float:
    """Microseconds of one write."""
    began = time.perf_counter()
    write()
    return (time.perf_counter() - began) * 1e6


def main() -> None:
    with database() as url:
        engine = sa.create_engine(url)
        writes = Writes(engine)
        writes.guard.create(engine)
        metadata.create_all(engine)
        with engine.begin() as db:
            db.execute(sa.delete(account))
            db.execute(sa.insert(account).values(id=1, cents=0))
        forms = [writes.plain, writes.checked, writes.block, writes.block_with_operation]
        counts = {}
        for form in forms:
            form()  # connections, compiled statements
            before = writes.statements
            form()
            counts[form.__name__] = writes.statements - before
        # In turns, so that a busy machine is equally busy for all of them.
        times = [[measure(form) for form in forms] for _ in range(ROUNDS)]
        medians = [statistics.median(column) for column in zip(*times, strict=True)]
        for form, median in zip(forms, medians, strict=True):
            extra = counts[form.__name__] - counts["plain"]
            print(f"{form.__name__:22} {median:6.0f} us  x{median / medians[0]:.2f}  +{extra} statements")
        engine.dispose()


if __name__ == "__main__":
    main()
