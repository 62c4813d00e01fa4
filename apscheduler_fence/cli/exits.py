"""Exit codes: one meaning each, for all commands.

Those above 64 are of `sysexits.h`, which cron mailers, systemd and Kubernetes users know from other tools.
"""

from __future__ import annotations

from typing import Any

import click

from apscheduler_fence.errors import ConfigError, FenceError, StoreError

NO = 1
"""The answer is no: no such record, nobody holds the lease, slots are missing, something is wrong."""
USAGE = 2
"""The command line cannot be understood."""
UNAVAILABLE = 69
"""The store could not be reached, or answered with an error."""
SOFTWARE = 70
"""Anything else that went wrong."""
REFUSED = 75
"""`run`: the command was not run here, because another node has the slot or the lease."""
CONFIG = 78
"""A setting is wrong."""
NOT_FOUND = 127
"""`run`: there is no such command. As in a shell."""
SIGNAL = 128
"""`run`: plus the number of the signal that ended the command. As in a shell."""


class Failure(click.ClickException):
    """Ends the program with a message and an exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.exit_code = code  # type: ignore[misc]  # click reads it from the instance


def failure_of(error: FenceError) -> Failure:
    """The end of the program that an error means."""
    match error:
        case StoreError():
            return Failure(str(error), UNAVAILABLE)
        case ConfigError():
            return Failure(str(error), CONFIG)
        case _:
            return Failure(str(error), SOFTWARE)


class FailingGroup(click.Group):
    """A group whose commands may raise this package's errors."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; its errors become messages and exit codes."""
        try:
            return super().invoke(ctx)
        except FenceError as error:
            raise failure_of(error) from error
