"""`init`: the tables, made now or as SQL text for whoever makes them."""

from __future__ import annotations

from typing import Any

import click

from apscheduler_fence.errors import FenceError
from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.sql import ddl


@click.command()
@click.option("--store", envvar="APSCHEDULER_FENCE_STORE", required=True, help="The store's URL.")
@click.option("--table-prefix", default="fence_", show_default=True)
@click.option("--schema", default=None, help="A schema other than the connection's own.")
@click.option("--sql", is_flag=True, help="Print the statements and connect to nothing.")
def init(store: str, table_prefix: str, schema: str | None, sql: bool) -> None:
    """Create what the store needs, or print the SQL that does (--sql).

    Nodes create their tables on first use by themselves; this is for databases in which they may not. Give their
    executors create_tables=False then.
    """
    try:
        if sql:
            click.echo(ddl(store, prefix=table_prefix, schema=schema))
            return
        opened = open_store(store, **_table_options(store, table_prefix, schema))
        try:
            for warning in opened.open():
                click.echo(f"warning: {warning}", err=True)
        finally:
            opened.close()
        click.echo("ready")
    except FenceError as error:
        raise click.ClickException(str(error)) from error


def _table_options(store: str, table_prefix: str, schema: str | None) -> dict[str, Any]:
    if store.startswith(("redis", "unix", "memory")):
        return {}
    return {"table_prefix": table_prefix, "schema": schema}
