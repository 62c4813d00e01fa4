"""`doctor`: an application's configuration and its store, checked before production does it."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING

import click

from apscheduler_fence.cli.application import Application, load, read
from apscheduler_fence.cli.checks import Finding, check_application, check_records, identity
from apscheduler_fence.cli.exits import NO, UNAVAILABLE
from apscheduler_fence.cli.output import print_json, print_table
from apscheduler_fence.cli.store_options import json_option, store_options
from apscheduler_fence.errors import ConfigError, StoreError
from apscheduler_fence.history import History
from apscheduler_fence.stores.base import masked

if TYPE_CHECKING:
    from collections.abc import Iterator

    from apscheduler_fence.cli.store_options import StoreChoice
    from apscheduler_fence.stores.base import Store


@click.command()
@click.argument("reference", required=False, metavar="[MODULE:SCHEDULER]")
@store_options(required=False)
@json_option
def doctor(reference: str | None, choice: StoreChoice | None, as_json: bool) -> None:
    """Check a scheduler's configuration, and its store.

    MODULE:SCHEDULER is imported from the current directory; it is a scheduler, or a function that makes one, and should
    not start it. Checked are: job IDs that differ on every node; dates and calendar intervals counted from a node's
    start; jitter that reaches the next slot; lock_at_least against the schedule; lock_at_most and max_runtime against
    recorded runs, where they end a lease; coroutine functions on executors that never await them; several jobs under
    one name; and of each store what it says itself: its clock against this host's, eviction and persistence of Redis,
    isolation, journal and file system of SQL databases.

    Exit code 1: there are errors or warnings. 69: a store could not be reached; the rest was checked.
    """
    application = Application((), ()) if reference is None else _application(reference)
    stores = {identity(store): store for store in application.stores}
    if choice is not None:
        given = choice.open()
        stores.setdefault(identity(given), given)
    if reference is None and not stores:
        raise click.UsageError("give a reference MODULE:SCHEDULER, or --store, or both")
    findings = list(check_application(application, datetime.now().astimezone()))
    reached = True
    for store in stores.values():
        with contextlib.closing(store):
            try:
                findings += _with_store(application, store)
            except StoreError as error:
                reached = False
                findings.append(Finding("error", "store", str(error)))
            except ConfigError as error:
                findings.append(Finding("error", "store", str(error)))
    _report(findings, application, list(stores.values()), as_json=as_json)
    sys.exit(UNAVAILABLE if not reached else NO if any(each.level != "note" for each in findings) else 0)


def _application(reference: str) -> Application:
    scheduler = load(reference)
    application = read(scheduler)
    if application.running:
        scheduler.shutdown(wait=False)
    return application


def _with_store(application: Application, store: Store) -> Iterator[Finding]:
    for warning in store.open():
        yield Finding("warning", "store", warning)
    history = History(store)
    for job in application.jobs:
        if job.fenced is not None and identity(job.fenced.store) == identity(store):
            yield from check_records(job, job.fenced, history)


def _report(findings: list[Finding], application: Application, stores: list[Store], *, as_json: bool) -> None:
    if as_json:
        print_json(
            {"jobs": [job.id for job in application.jobs], "stores": list(map(_shown, stores)), "findings": findings}
        )
        return
    if findings:
        order = ("error", "warning", "note")
        rows = [
            (each.level, each.where, each.message)
            for each in sorted(findings, key=lambda each: order.index(each.level))
        ]
        print_table("findings", ("level", "where", "what"), rows, wide=("where", "what"))
        click.echo()
    count = Counter(each.level for each in findings)
    click.echo(
        f"jobs: {len(application.jobs)}, stores: {len(stores)}, "
        f"errors: {count['error']}, warnings: {count['warning']}, notes: {count['note']}"
    )


def _shown(store: Store) -> str:
    try:
        return masked(store.describe().url)
    except ConfigError:
        return type(store).__name__
