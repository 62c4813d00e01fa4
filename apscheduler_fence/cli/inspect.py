"""Commands that only look: `status`, `runs`, `show`, `missing`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, cast, get_args

import click
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from apscheduler_fence.cli.exits import NO, Failure
from apscheduler_fence.cli.output import (
    lasting,
    node,
    plain,
    print_json,
    print_pairs,
    print_table,
    to_the_second,
    utc,
    visible,
)
from apscheduler_fence.cli.store_options import (
    DURATION,
    DURATION_OR_NONE,
    MOMENT,
    StoreChoice,
    ago,
    json_option,
    store_options,
)
from apscheduler_fence.lease import State

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta

    from apscheduler.triggers.base import BaseTrigger

    from apscheduler_fence.history import Held, Missing, Record

SHOWN = 50
"""Slots that `missing` prints; its JSON has all."""


@click.command()
@click.option("--since", type=MOMENT, default="24h", show_default=True, help="Count slots from this time on.")
@store_options()
@json_option
def status(choice: StoreChoice, since: datetime | timedelta, as_json: bool) -> None:
    """Show the leases held now, and how each job has fared.

    A lease that is "over" belongs to a node that died or cannot reach the store; the next node that looks ends it.
    """
    with choice.history() as history:
        now = history.now()
        begin = ago(since, history)
        held, counts = history.held(), history.counts(since=begin)
    if as_json:
        print_json({"now": now, "leases": held, "since": begin, "jobs": counts})
        return
    print_table(
        f"leases held at {to_the_second(now)}",
        ("execution", "node", "<held>", "<ends in>", "<token>"),
        [(_under(lease), node(lease.holder), lasting(now - lease.since), _left(lease, now), str(lease.token))
         for lease in held],
        wide=("execution", "node"),
    )  # fmt: skip
    click.echo()
    states = cast("tuple[State, ...]", ("succeeded", "failed", "lost", "running", "waiting"))
    print_table(
        f"slots since {to_the_second(begin)}",
        ("job", *(f"<{state}>" for state in states), "<other>"),
        [_tally(job, of, states) for job, of in counts.items()],
        wide=("job",),
    )


def _under(lease: Held) -> str:
    own = lease.execution_id.startswith(f"{lease.lease}/")
    return lease.execution_id if own else f"{lease.execution_id} (lease {lease.lease})"


def _left(lease: Held, now: datetime) -> str:
    return "over" if lease.over else lasting(lease.until - now)


def _tally(job: str, of: Mapping[State, int], states: tuple[State, ...]) -> list[str]:
    others = sum(of.values()) - sum(of.get(state, 0) for state in states)
    return [job, *(str(of.get(state, 0) or "") for state in states), str(others or "")]


@click.command()
@click.option("--job", default=None, help="Only this job.")
@click.option(
    "--state", "states", multiple=True, type=click.Choice(get_args(State)), help="Only this state; repeatable."
)
@click.option("--since", type=MOMENT, default=None, help="Only slots from this time on.")
@click.option("--limit", type=click.IntRange(1), default=20, show_default=True, help="At most so many, the newest.")
@store_options()
@json_option
def runs(
    *,
    choice: StoreChoice,
    job: str | None,
    states: tuple[State, ...],
    since: datetime | timedelta | None,
    limit: int,
    as_json: bool,
) -> None:
    """List executions, newest slot first."""
    with choice.history() as history:
        found = list(history.runs(job, states, ago(since, history), limit))
    if as_json:
        print_json([in_full(record) for record in found])
        return
    print_table(
        "executions",
        ("execution", "state", "<try>", "started", "<took>", "node"),
        [(record.id, record.state, _tries(record), _started(record), lasting(record.took), node(record.holder))
         for record in found],
        wide=("execution", "node"),
    )  # fmt: skip


def in_full(record: Record) -> dict[str, Any]:
    """A record as JSON has it: its fields, and how long it took."""
    fields: dict[str, Any] = plain(record)
    return {**fields, "took": plain(record.took)}


def _tries(record: Record) -> str:
    return f"{record.attempt}/{record.max_attempts}" if record.delivery == "at_least_once" else str(record.attempt)


def _started(record: Record) -> str:
    text = to_the_second(record.started_at)
    # The date stands in the slot already, unless the run came on another day; the year does in any case.
    return text[11:] if text[:11] == record.slot[:11] else text[5:].replace("T", " ")


@click.command()
@click.argument("execution_id")
@store_options()
@json_option
def show(choice: StoreChoice, execution_id: str, as_json: bool) -> None:
    """Show all that is recorded of one execution.

    Exit code 1: there is no record of it.
    """
    with choice.history() as history:
        record = history.run(execution_id)
        name = history.full_name(execution_id)
    if record is None:
        raise Failure(f"there is no record of {name}", NO)
    if as_json:
        print_json(in_full(record))
        return
    print_record(record)


def print_record(record: Record) -> None:
    """Print a record, a field a line, and its error below."""
    given = in_full(record)
    error = given.pop("error")
    given["took"] = lasting(record.took)
    print_pairs({name.replace("_", " "): str(value) for name, value in given.items() if value not in (None, "")})
    if error:
        click.echo()
        click.echo(visible(error))


@click.command()
@click.option("--job", required=True, help="The job.")
@click.option(
    "--cron", default=None, help="Its schedule, five fields, as APScheduler's CronTrigger.from_crontab reads it."
)
@click.option("--every", type=DURATION, default=None, help="Its interval, for example 10m.")
@click.option("--timezone", default=None, help="The zone that --cron is in. [this host's]")
@click.option("--jitter", type=DURATION, default=None, help="The trigger's jitter.")
@click.option("--since", type=MOMENT, required=True, help="From which time on.")
@click.option("--until", type=MOMENT, default=None, help="Up to which time. [now, less the grace]")
@click.option(
    "--grace", type=DURATION_OR_NONE, default="1m", show_default=True, help="How late a node may come to a slot."
)
@click.option("--lease", default=None, help="The lease of the job, if its policy names one.")
@store_options()
@json_option
def missing(
    *,
    choice: StoreChoice,
    job: str,
    cron: str | None,
    every: timedelta | None,
    timezone: str | None,
    jitter: timedelta | None,
    since: datetime | timedelta,
    until: datetime | timedelta | None,
    grace: timedelta,
    lease: str | None,
    as_json: bool,
) -> None:
    """List the slots of a schedule that no node has run.

    A slot that has a record is not missing, whatever became of it: see `runs --state lost`. In crontab numbers, 0 is
    Monday to APScheduler; names (mon, tue, …) mean the same everywhere.

    Exit code 1: slots are missing.
    """
    trigger = _trigger(cron, every, timezone, jitter)
    with choice.history() as history:
        begin = ago(since, history)
        assert begin is not None  # noqa: S101 - the option is required
        found = history.missing(job, trigger, begin, ago(until, history), lease=lease, grace=grace)
    if as_json:
        listed = [{"execution_id": slot.execution_id, "slot": slot.name} for slot in found.slots]
        print_json({**plain(found), "slots": listed})
    else:
        _print_missing(found)
    sys.exit(NO if found.slots else 0)


def _trigger(cron: str | None, every: timedelta | None, timezone: str | None, jitter: timedelta | None) -> BaseTrigger:
    if (cron is None) == (every is None):
        raise click.UsageError("give either --cron or --every")
    seconds = None if jitter is None else jitter.total_seconds()
    try:
        if cron is None:
            trigger: BaseTrigger = IntervalTrigger(seconds=cast("timedelta", every).total_seconds())
        else:
            trigger = CronTrigger.from_crontab(cron, timezone=timezone)
    except (ValueError, LookupError) as error:
        raise click.UsageError(f"the schedule cannot be read: {error}") from error
    trigger.jitter = seconds
    return trigger


def _print_missing(found: Missing) -> None:
    for slot in found.slots[:SHOWN]:
        click.echo(visible(slot.execution_id))
    if len(found.slots) > SHOWN:
        click.echo(f"… and {len(found.slots) - SHOWN} more")
    if found.pruned:
        click.echo(f"records before {utc(found.since)} were pruned", err=True)
    click.echo(
        f"{len(found.slots)} of {found.expected} slots missing between {to_the_second(found.since)} "
        f"and {to_the_second(found.until)}"
    )
