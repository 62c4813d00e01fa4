"""`init`: the tables, made now or as SQL text for whoever makes them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from apscheduler_fence.cli.store_options import store_options

if TYPE_CHECKING:
    from apscheduler_fence.cli.store_options import StoreChoice


@click.command()
@store_options()
@click.option("--sql", is_flag=True, help="Print the statements and connect to nothing.")
def init(choice: StoreChoice, sql: bool) -> None:
    """Create what the store needs, or print the SQL that does (--sql).

    Nodes create their tables on first use by themselves; this is for databases in which they may not. Give their
    executors create_tables=False then.
    """
    if sql:
        from apscheduler_fence.stores.sql import ddl  # noqa: PLC0415 - no other command needs SQLAlchemy for Redis

        given = {} if choice.table_prefix is None else {"prefix": choice.table_prefix}
        click.echo(ddl(choice.url, schema=choice.schema, **given))
        return
    with contextlib.closing(choice.open()) as store:
        for warning in store.open():
            click.echo(f"warning: {warning}", err=True)
    click.echo("ready")
