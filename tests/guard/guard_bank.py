"""A database with an account in it, guarded."""

import sqlalchemy
from sqlalchemy import orm

from apscheduler_fence.bearer import Bearer
from apscheduler_fence.guard import Guard


class Base(orm.DeclarativeBase):
    """The application's own tables."""


class Account(Base):
    """What is guarded."""

    __tablename__ = "account"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    balance: orm.Mapped[int]


TOKEN = 1_700_000_000_000_000
"""A token as stores grant them: microseconds since the epoch, of a day that has passed."""


def bearer(token=0, execution="pay/2026-01-01T00:00:00Z", lease="pay"):
    """A run that holds a small token, counted from one that a store might grant."""
    return Bearer(TOKEN + token, execution, lease)


class Bank:
    """An account with a balance, and the guard in the same database."""

    def __init__(self, url, **options):
        self.url = url
        self.engine = sqlalchemy.create_engine(url, **options)
        self.session = orm.sessionmaker(self.engine)
        self.guard = Guard()
        self.guard.create(self.engine)
        Base.metadata.create_all(self.engine)
        with self.session.begin() as db:
            db.add(Account(id=42, balance=0))

    @property
    def balance(self):
        with self.engine.connect() as db:
            return db.scalar(sqlalchemy.select(Account.balance))

    def rows(self, table):
        """The rows of one of the guard's tables, without their times."""
        found = self.guard.metadata.tables[table]
        with self.engine.connect() as db:
            return [tuple(row)[:-1] for row in db.execute(sqlalchemy.select(found))]


def add(amount=1):
    """The write."""
    return sqlalchemy.update(Account).values(balance=Account.balance + amount)
