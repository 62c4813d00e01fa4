"""Every error this package raises. An expected "no" is not among them: that is a `Refusal`, a value."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta


class FenceError(Exception):
    """Anything that apscheduler-fence raises."""


class ConfigError(FenceError, ValueError):
    """A setting is wrong; the message names the option and what is allowed."""


class StoreError(FenceError):
    """The store could not be reached, or answered with an error.

    It says nothing about whether a change that was being sent has been applied. The driver's own error is the
    `__cause__`.
    """


class LeaseLost(FenceError):  # noqa: N818 - the name says what happened, as `TimeoutError`'s peers do
    """The lease of this run can no longer be trusted; another node may be working already.

    Attributes:
        execution_id: the execution whose lease was lost.
        token: the fencing token the run was given.
    """

    def __init__(self, execution_id: str, token: int) -> None:
        super().__init__(execution_id, token)
        self.execution_id = execution_id
        self.token = token

    def __str__(self) -> str:
        return (
            f"the lease of {self.execution_id} (token {self.token}) can no longer be trusted: "
            "stop, and let the guard at the resource refuse what is still on its way"
        )


class StaleToken(FenceError):  # noqa: N818 - as above
    """A resource has already accepted a newer token than the caller's.

    Attributes:
        resource: the guarded resource.
        token: the caller's token.
        highest: the newest token that the resource has accepted.
    """

    def __init__(self, resource: str, token: int, highest: int) -> None:
        super().__init__(resource, token, highest)
        self.resource = resource
        self.token = token
        self.highest = highest

    def __str__(self) -> str:
        accepted = "it from another execution" if self.token == self.highest else str(self.highest)
        return (
            f"token {self.token} is stale at {self.resource!r}, which has accepted {accepted}: "
            "another holder has taken over, and nothing of this transaction may be kept"
        )


class InvalidToken(FenceError, ValueError):  # noqa: N818 - as above
    """No lease can have been granted under this token, and accepting it could close the resource to everybody for ever.

    Attributes:
        resource: the guarded resource.
        token: the caller's token.
    """

    def __init__(self, resource: str, token: object, reason: str) -> None:
        super().__init__(resource, token, reason)
        self.resource = resource
        self.token = token
        self.reason = reason

    def __str__(self) -> str:
        return f"token {self.token!r} is refused at {self.resource!r}: {self.reason}"


class AlreadyApplied(FenceError):  # noqa: N818 - as above
    """This execution has done this operation before, in an earlier attempt; what was written now is undone.

    Attributes:
        resource: the guarded resource.
        execution_id: the execution.
        operation: the operation that is already applied.
    """

    def __init__(self, resource: str, execution_id: str, operation: str) -> None:
        super().__init__(resource, execution_id, operation)
        self.resource = resource
        self.execution_id = execution_id
        self.operation = operation

    def __str__(self) -> str:
        return f"operation {self.operation!r} of {self.execution_id} is already applied at {self.resource!r}"


class Retry(FenceError):  # noqa: N818 - a request, made by raising it
    """Raised by a job to ask for another attempt of this execution, whatever `retry_on` says; `retries` bounds it.

    Attributes:
        after: how long to wait before (a `timedelta`, seconds, or text such as "30s"); None leaves it to `retry_delay`.
    """

    def __init__(self, message: str = "", *, after: timedelta | float | str | None = None) -> None:
        super().__init__(message or "the job asks to be run again")
        self.after = after
