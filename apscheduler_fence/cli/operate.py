"""Commands that change what is recorded: `retry`, `release`, `prune`."""

from __future__ import annotations

import click

from apscheduler_fence.cli.exits import NO, Failure
from apscheduler_fence.cli.inspect import in_full
from apscheduler_fence.cli.output import node, print_json, to_the_second
from apscheduler_fence.cli.store_options import StoreChoice, json_option, store_options
from apscheduler_fence.lease import Refusal


@click.command()
@click.argument("execution_id")
@store_options()
@json_option
def retry(choice: StoreChoice, execution_id: str, as_json: bool) -> None:
    """Let an execution that was lost, failed or cancelled run once more.

    It waits for a node that has the job, and runs there as the next attempt of the same execution, under a larger token.

    Exit code 1: there is no record of it, it has succeeded, or it is running or waiting already.
    """
    with choice.history() as history:
        try:
            answer = history.retry(execution_id)
        except LookupError as error:
            raise Failure(str(error.args[0]), NO) from error
        name = history.full_name(execution_id)
    if isinstance(answer, Refusal):
        why = "is running or waiting" if answer.reason == "running" else "succeeded or was superseded"
        raise Failure(f"{name} {why}: it is not run again", NO)
    if as_json:
        print_json(in_full(answer))
    else:
        click.echo(f"{answer.id} waits for attempt {answer.attempt + 1}")


@click.command()
@click.argument("name")
@click.option("--token", type=int, default=None, help="Only if it is still held under this token (see `status`).")
@store_options()
@json_option
def release(choice: StoreChoice, name: str, token: int | None, as_json: bool) -> None:
    """Break the lease NAME (by default a job's lease has the job's name).

    The holder is not stopped: it hears of it at its next renewal, and until then only a guard at the resource keeps its
    writes out. Its run is recorded as lost, or waits for its next attempt if it is an at-least-once job. The next grant
    has a larger token.

    Exit code 1: nobody holds the lease, or not under that token.
    """
    with choice.history() as history:
        released = history.release(name, token=token)
        name = history.full_name(name)
    if released is None:
        under = "" if token is None else f" under token {token}"
        raise Failure(f"nobody holds the lease {name}{under}", NO)
    if as_json:
        print_json(released)
        return
    click.echo(f"released {name}: token {released.token} of {node(released.holder)}")
    if released.execution_id is not None:
        click.echo(f"{released.execution_id} is {released.state}")
    if released.spacing_until is not None:
        click.echo(f"lock_at_least keeps the next slot back until {to_the_second(released.spacing_until)}")


@click.command()
@store_options()
@json_option
def prune(choice: StoreChoice, as_json: bool) -> None:
    """Delete the records that are past their time.

    Nodes do this by themselves; a record is kept for as long as the executor that wrote it said (retention=). The slots
    of deleted records can never run again.
    """
    with choice.history() as history:
        pruned = history.prune()
    if as_json:
        print_json({"pruned": pruned})
    else:
        click.echo(f"{pruned} records deleted")
