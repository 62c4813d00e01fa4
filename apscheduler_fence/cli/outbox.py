"""`outbox`: look after the messages of an outbox, or relay them from the command line."""

from __future__ import annotations

import importlib
import signal
import sys
import time
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import click
from rich.console import Console
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from apscheduler_fence.errors import FenceError
from apscheduler_fence.outbox import Outbox
from apscheduler_fence.policy import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable

    from apscheduler_fence.outbox import Entry, Handler, MessageState

P = ParamSpec("P")
R = TypeVar("R")


def _told(command: Callable[P, R]) -> Callable[P, R]:
    """Say in one line what went wrong, without a traceback."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except FenceError as error:
            raise click.ClickException(str(error)) from error
        except SQLAlchemyError as error:
            raise click.ClickException(str(getattr(error, "orig", None) or error)) from error

    return wrapped


@click.group()
@click.option(
    "--database", envvar="APSCHEDULER_FENCE_OUTBOX", required=True, help="URL of the database that the outbox is in."
)
@click.option("--table-prefix", default="fence_", show_default=True)
@click.option("--schema", default=None, help="A schema other than the connection's own.")
@click.pass_context
@_told
def outbox(context: click.Context, database: str, table_prefix: str, schema: str | None) -> None:
    """Messages that were written together with their cause, and are sent afterwards."""
    context.obj = Outbox(database, table_prefix=table_prefix, schema=schema)
    context.call_on_close(context.obj.close)


@outbox.command("list")
@click.option("--state", type=click.Choice(["waiting", "sent", "dead"]), default=None, help="Only these.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="At most so many, oldest first.")
@click.pass_obj
@_told
def list_messages(messages: Outbox, state: MessageState | None, limit: int) -> None:
    """Show messages."""
    entries = messages.entries(state, limit=limit)
    table = Table()
    for column in ("id", "topic", "state", "order key", "attempt", "due", "execution", "error"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        table.add_row(*_cells(entry))
    Console(highlight=False, width=None if sys.stdout.isatty() else 200).print(table)
    click.echo(f"{len(entries)} messages")


def _cells(entry: Entry) -> tuple[str, ...]:
    message, due = entry.message, f"{entry.due_at:%Y-%m-%d %H:%M:%S}Z"
    return (
        message.id,
        message.topic,
        entry.state,
        entry.order_key or "",
        str(message.attempt),
        due if entry.state == "waiting" else "",
        entry.execution_id,
        (entry.error or "")[:200],
    )


@outbox.command()
@click.argument("ids", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="All dead messages.")
@click.pass_obj
@_told
def retry(messages: Outbox, ids: tuple[str, ...], everything: bool) -> None:
    """Send dead messages again, by their IDs or all of them."""
    if bool(ids) == everything:
        raise click.UsageError("give the IDs of dead messages, or --all")
    click.echo(f"{messages.retry(*ids)} messages are due again")


@outbox.command()
@click.option("--state", type=click.Choice(["sent", "dead"]), required=True, help="Which messages to delete.")
@click.option("--older-than", default="0s", show_default=True, help="Only those sent or parked longer ago: 90m, 30d.")
@click.pass_obj
@_told
def purge(messages: Outbox, state: Any, older_than: str) -> None:
    """Delete messages that were sent, or that are dead.

    An execution that is run again after its messages were deleted adds them again.
    """
    click.echo(f"{messages.purge(state, older_than)} messages deleted")


@outbox.command()
@click.argument("handler")
@click.option("--every", default=None, help="Go on, and look for messages this often: 500ms, 5s. Without it: once.")
@click.pass_obj
@_told
def relay(messages: Outbox, handler: str, every: str | None) -> None:
    """Send what is due with HANDLER, a function as package.module:name that takes one Message."""
    send = _load(handler)
    pause = None if every is None else parse_duration(every, "--every").total_seconds()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was claimed is given back at either signal
    try:
        click.echo(f"{messages.relay(send)} messages sent")
        while pause is not None:
            time.sleep(pause)
            if sent := messages.relay(send):
                click.echo(f"{sent} messages sent")
    except KeyboardInterrupt:
        click.echo("stopped")


def _load(reference: str) -> Handler:
    module, _, name = reference.partition(":")
    sys.path.insert(0, "")  # as `python -m` does, so that an application is found in the folder it is started from
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise click.BadParameter(f"{reference!r} cannot be loaded: {error}", param_hint="HANDLER") from error
    if not callable(found):
        raise click.BadParameter(f"{reference!r} is not a function", param_hint="HANDLER")
    return cast("Handler", found)
