"""The store in an SQL database, through SQLAlchemy Core."""

from apscheduler_fence.stores.sql.setup import ddl
from apscheduler_fence.stores.sql.store import SqlStore
from apscheduler_fence.stores.sql.tables import StoreClock

__all__ = ["SqlStore", "StoreClock", "ddl"]
