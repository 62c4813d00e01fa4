"""Where a job meets a database of the caller's: on whose behalf it writes, and tables of ours beside his."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import Connection, MetaData
from sqlalchemy.exc import DBAPIError

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.fence import current_fence
from apscheduler_fence.slots import validate_name
from apscheduler_fence.stores.sql.tables import NAME_LENGTH, SLOT_LENGTH

if TYPE_CHECKING:
    from sqlalchemy import Engine

EXECUTION_LENGTH = NAME_LENGTH + 1 + SLOT_LENGTH
CREATIONS = 5

ON_MYSQL: dict[str, Any] = {
    f"{family}_{option}": value
    for family in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"))
}
"""Options of a table that MySQL and MariaDB roll back, and whose text is Unicode."""


class Bears(Protocol):
    """On whose behalf something is written: a `Fence`, or the three parts of one that came by another way."""

    @property
    def token(self) -> int:
        """The fencing token."""

    @property
    def execution_id(self) -> str:
        """The logical run."""

    @property
    def lease(self) -> str:
        """The lease that the token was granted for."""


@dataclass(frozen=True, slots=True)
class Bearer:
    """Token, execution ID and lease of a run elsewhere: what a service checks that was called with them over a network."""

    token: int
    execution_id: str
    lease: str


def bearer_of(fence: Bears | None) -> Bears:
    """The run that was given, or the one this code is part of.

    Raises:
        FenceError: none was given, and this code does not run as a fenced job.
        ConfigError: its execution ID or lease can be none of ours.
    """
    bearer: Bears = current_fence() if fence is None else fence
    validate_name(bearer.execution_id, "execution_id", limit=EXECUTION_LENGTH)
    validate_name(bearer.lease, "lease")
    return bearer


def table_prefix(prefix: str) -> str:
    """Check how the names of tables are to begin.

    Raises:
        ConfigError: not with a plain identifier of at most 32 characters.
    """
    if not (prefix.isascii() and prefix.isidentifier() and len(prefix) <= 32):  # noqa: PLR2004 - as the message says
        raise ConfigError(
            f"table_prefix={prefix!r}: letters, digits and underscores are allowed, 32 at most, not a digit first"
        )
    return prefix


def create_tables(bind: Engine | Connection, metadata: MetaData) -> None:
    """Create what is missing, also while others do the same."""
    for tried in range(1, CREATIONS + 1):
        try:
            return metadata.create_all(bind)
        except DBAPIError:  # most likely somebody else was faster; the next look tells
            if tried == CREATIONS or isinstance(bind, Connection):
                raise
        time.sleep(random.uniform(0.01, 0.05 * tried))  # noqa: S311 - spreads out those that collided
    raise AssertionError
