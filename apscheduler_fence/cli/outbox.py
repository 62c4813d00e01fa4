"""`outbox`: look after the messages of an outbox, or relay them from the command line."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import click
from sqlalchemy.exc import SQLAlchemyError

from apscheduler_fence.cli.exits import NO, UNAVAILABLE, Failure
from apscheduler_fence.cli.output import print_json, print_table, to_the_second
from apscheduler_fence.cli.store_options import DURATION, DURATION_OR_NONE, json_option
from apscheduler_fence.outbox import Outbox

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

    from apscheduler_fence.outbox import Handler, MessageState

P = ParamSpec("P")
R = TypeVar("R")

ERROR_SHOWN = 120


def _reachable(command: Callable[P, R]) -> Callable[P, R]:
    """Say in one line that the database could not be used."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except SQLAlchemyError as error:
            raise Failure(str(getattr(error, "orig", None) or error), UNAVAILABLE) from error

    return wrapped


@click.group()
@click.option("--database", envvar="APSCHEDULER_FENCE_OUTBOX", show_envvar=True, required=True,
              help="The URL of the database that the outbox is in.")  # fmt: skip
@click.option("--table-prefix", default="fence_", show_default=True, help="How the table's name begins.")
@click.option("--schema", default=None, help="A schema other than the connection's own.")
@click.pass_context
@_reachable
def outbox(context: click.Context, database: str, table_prefix: str, schema: str | None) -> None:
    """Messages that were written together with their cause, and are sent afterwards."""
    context.obj = Outbox(database, table_prefix=table_prefix, schema=schema)
    context.call_on_close(context.obj.close)


@outbox.command("list")
@click.option("--state", type=click.Choice(["waiting", "sent", "dead"]), default=None, help="Only these.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many, the oldest.")
@json_option
@click.pass_obj
@_reachable
def list_messages(messages: Outbox, state: MessageState | None, limit: int, as_json: bool) -> None:
    """List messages, oldest first."""
    entries = messages.entries(state, limit=limit)
    if as_json:
        print_json(entries)
        return
    print_table(
        "messages",
        ("id", "topic", "state", "<try>", "due", "error"),
        [(entry.message.id, entry.message.topic, entry.state, str(entry.message.attempt),
          to_the_second(entry.due_at) if entry.state == "waiting" else "", (entry.error or "")[:ERROR_SHOWN])
         for entry in entries],
        wide=("id", "topic", "error"),
    )  # fmt: skip


@outbox.command()
@click.argument("ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All dead messages.")
@click.pass_obj
@_reachable
def retry(messages: Outbox, ids: tuple[str, ...], everything: bool) -> None:
    """Send dead messages again, by their IDs or all of them.

    Exit code 1: none of them is dead.
    """
    if bool(ids) == everything:
        raise click.UsageError("give the IDs of dead messages, or --all")
    again = messages.retry(*ids)
    if not again:
        raise Failure("there is no such dead message" if ids else "no message is dead", NO)
    click.echo(f"{again} messages are due again")


@outbox.command()
@click.option("--state", type=click.Choice(["sent", "dead"]), required=True, help="Which messages to delete.")
@click.option("--older-than", type=DURATION_OR_NONE, default="0s", show_default=True,
              help="Only those that were sent or parked longer ago.")  # fmt: skip
@click.pass_obj
@_reachable
def purge(messages: Outbox, state: Any, older_than: timedelta) -> None:
    """Delete messages that were sent, or that are dead.

    An execution that is run again after its messages were deleted adds them again.
    """
    click.echo(f"{messages.purge(state, older_than)} messages deleted")


@outbox.command()
@click.argument("handler")
@click.option("--every", type=DURATION, default=None, help="Go on, and look for messages this often. [once]")
@click.pass_obj
@_reachable
def relay(messages: Outbox, handler: str, every: timedelta | None) -> None:
    """Send what is due with HANDLER, a function as package.module:name that takes one Message.

    Any number of relays may run at the same time. Ctrl-C and SIGTERM end one in order.
    """
    send = _load(handler)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was claimed is given back at either signal
    try:
        click.echo(f"{messages.relay(send)} messages sent")
        while every is not None:
            time.sleep(every.total_seconds())
            if sent := messages.relay(send):
                click.echo(f"{sent} messages sent")
    except KeyboardInterrupt:
        click.echo("stopped")


def _load(reference: str) -> Handler:
    module, _, path = reference.partition(":")
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - sys.path holds text; as `python -m` and gunicorn do
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.BadParameter(f"{reference!r} cannot be imported: {error}", param_hint="HANDLER") from error
    if not callable(found):
        raise click.BadParameter(f"{reference!r} is not a function", param_hint="HANDLER")
    return cast("Handler", found)
