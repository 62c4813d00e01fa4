"""What commands print: one JSON document, or tables that can be read on 80 columns.

No colour and no control character is printed unless standard output is a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from apscheduler_fence.slots import EPOCH, MICROSECOND, format_time

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def console() -> Console:
    """Where tables go. A job's name is never taken for markup."""
    return Console(highlight=False, markup=False, emoji=False)


def print_json(value: Any) -> None:
    """Print one JSON document: times as UTC text, durations as seconds."""
    click.echo(json.dumps(plain(value), indent=2, ensure_ascii=False))


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    match value:
        case datetime():
            return utc(value)
        case timedelta():
            return value.total_seconds()
        case Mapping():
            return {str(key): plain(each) for key, each in value.items()}
        case list() | tuple():
            return [plain(each) for each in value]
        case _ if is_dataclass(value):
            return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        case _:
            return value


def utc(moment: datetime) -> str:
    """A time as slots are written: `2026-09-02T10:00:00Z`."""
    return format_time((moment - EPOCH) // MICROSECOND)


def to_the_second(moment: datetime | None) -> str:
    """A time for a table, cut to its second."""
    return "" if moment is None else utc(moment.replace(microsecond=0))


def lasting(duration: timedelta | None) -> str:
    """A duration as a person says it: `0.35s`, `12s`, `3m05s`, `2h05m`, `4d03h`."""
    if duration is None:
        return ""
    seconds = duration.total_seconds()
    if abs(seconds) < 9.995:  # noqa: PLR2004 - what two decimals would round to ten
        return f"{seconds:.2f}s"
    sign, whole = ("-" if seconds < 0 else ""), round(abs(seconds))
    for unit, longest, smaller, length in (("m", 3600, "s", 60), ("h", 86_400, "m", 3600), ("d", None, "h", 86_400)):
        if whole < 60:  # noqa: PLR2004 - seconds
            return f"{sign}{whole}s"
        if longest is None or whole < longest:
            rest = whole % length * (60 if smaller != "h" else 24) // length
            return f"{sign}{whole // length}{unit}{rest:02}{smaller}"
    raise AssertionError(whole)


def node(holder: str | None) -> str:
    """The host and process of a holder, without the nonce of its claim."""
    return "" if holder is None else holder.rpartition(":")[0] or holder


def visible(text: str) -> str:
    """Text from elsewhere that cannot move the cursor: control characters are written out."""
    return "".join(char if char.isprintable() or char in "\n\t" else repr(char)[1:-1] for char in text)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, wide: Sequence[str] = ()) -> None:
    """Print a table; only `wide` columns are broken into lines, and numbers stand to the right of columns in `<…>`."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        right = column.startswith("<")
        table.add_column(
            column.strip("<>"),
            justify="right" if right else "left",
            overflow="fold",
            no_wrap=column not in wide,
        )
    for row in rows:
        table.add_row(*map(visible, row))
    console().print(table)


def print_pairs(pairs: Mapping[str, str]) -> None:
    """Print what belongs together as name and value, a line each."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in pairs.items():
        grid.add_row(name, visible(value))
    console().print(grid)
