"""Which store a command works on, and how times are written on the command line."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, TypeVar

import click

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.history import History
from apscheduler_fence.policy import parse_duration
from apscheduler_fence.slots import validate_name
from apscheduler_fence.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from apscheduler_fence.stores.base import Store

STORE_VARIABLE = "APSCHEDULER_FENCE_STORE"

C = TypeVar("C", bound="Callable[..., Any]")


@dataclass(frozen=True, slots=True)
class StoreChoice:
    """The store options of one command line."""

    url: str
    namespace: str = ""
    table_prefix: str | None = None
    schema: str | None = None

    def open(self) -> Store:
        """Make the store; nothing is connected yet."""
        given = {"table_prefix": self.table_prefix, "schema": self.schema}
        namespace = validate_name(self.namespace, "--namespace") if self.namespace else ""
        return open_store(self.url, namespace, **{name: value for name, value in given.items() if value is not None})

    def history(self) -> History:
        """Questions to the store."""
        return History(self.open())


def store_options(required: bool = True) -> Callable[[C], C]:
    """Give a command `--store`, `--namespace`, `--table-prefix` and `--schema`, as one argument `choice`.

    It is None if there is no store and none is required.
    """

    def decorate(command: C) -> C:
        @click.option("--store", "url", envvar=STORE_VARIABLE, show_envvar=True, required=required,
                      help="The store's URL.")  # fmt: skip
        @click.option("--namespace", default="", help="The namespace= of the executors.")
        @click.option("--table-prefix", default=None, help="SQL stores: the prefix of the tables' names. [fence_]")
        @click.option("--schema", default=None, help="SQL stores: a schema other than the connection's own.")
        @functools.wraps(command)
        def with_choice(
            url: str | None, namespace: str, table_prefix: str | None, schema: str | None, **others: Any
        ) -> Any:
            choice = None if url is None else StoreChoice(url, namespace, table_prefix, schema)
            return command(choice=choice, **others)

        return with_choice  # type: ignore[return-value]

    return decorate


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")


class _Moment(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.3 only
    """A moment, or how long ago it was."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime | timedelta:
        """Read `2026-09-02`, `2026-09-02T10:00:00Z`, an offset in place of the Z, or a duration."""
        if isinstance(value, datetime | timedelta):
            return value
        try:
            return parse_duration(value, "")
        except ConfigError:
            pass
        try:
            return parse_moment(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def parse_moment(text: str) -> datetime:
    """Read a time with its UTC offset; a date alone is its first moment in UTC.

    Raises:
        ValueError: it is no such time.
    """
    try:
        moment = datetime.fromisoformat(text[:-1] + "+00:00" if text[-1:] in ("Z", "z") else text)
    except ValueError:
        raise ValueError(
            f"{text!r} is neither a time such as 2026-09-02T10:00:00Z or 2026-09-02 nor a duration such as 2h"
        ) from None
    if moment.utcoffset() is None:
        if "T" in text or " " in text:
            raise ValueError(f"{text!r} lacks its UTC offset: write for example {text}Z or {text}+02:00")
        moment = moment.replace(tzinfo=timezone.utc)
    return moment


class _Duration(click.ParamType):  # type: ignore[type-arg]  # as above
    """A duration as options of jobs have it."""

    name = "duration"

    def __init__(self, *, zero: bool = False) -> None:
        self._zero = zero

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Read `30s`, `1h30m`, `PT9M` or seconds."""
        if isinstance(value, timedelta):
            return value
        try:
            duration = parse_duration(value, "")
        except ConfigError:
            self.fail(f"{value!r} is not a duration such as 30s, 1h30m or PT9M", param, ctx)
        if duration < timedelta(0) or (duration == timedelta(0) and not self._zero):
            self.fail(f"{value!r} is too short", param, ctx)
        return duration


MOMENT = _Moment()
DURATION = _Duration()
DURATION_OR_NONE = _Duration(zero=True)


def ago(moment: datetime | timedelta | None, history: History) -> datetime | None:
    """The moment that was meant, by the store's clock."""
    return history.now() - moment if isinstance(moment, timedelta) else moment
