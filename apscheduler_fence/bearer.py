"""On whose behalf something is written to a resource."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from apscheduler_fence.errors import InvalidToken
from apscheduler_fence.fence import current_fence
from apscheduler_fence.slots import NAME_LIMIT, validate_name

EXECUTION_LIMIT = NAME_LIMIT + 97
"""Characters of an execution ID: a job's name, a slash, and a slot's name."""

TOKEN_LIMIT = 2**53
"""The first number that a double cannot tell from its neighbour: some resources, and every Lua script, count in doubles."""


class Bears(Protocol):
    """A `Fence`, or its three parts that count at a resource, come by another way."""

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
    validate_name(bearer.execution_id, "execution_id", limit=EXECUTION_LIMIT)
    validate_name(bearer.lease, "lease")
    return bearer


def require_token(resource: str, bearer: Bears) -> None:
    """See that a token is one that every resource can compare.

    Raises:
        InvalidToken: it is not a whole number from 1 to 2**53 - 1.
    """
    token: object = bearer.token
    if not isinstance(token, int) or isinstance(token, bool) or not 0 < token < TOKEN_LIMIT:
        raise InvalidToken(resource, token, "a token is a whole number from 1 to 2**53 - 1")
