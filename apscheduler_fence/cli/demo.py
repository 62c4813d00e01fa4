"""`demo`: several schedulers, one store, one job a second, and a node that dies on the way."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from apscheduler_fence.cli.demo_node import JOB, LOCK_AT_MOST, SWEEP, WORK, Orders, Schedule
from apscheduler_fence.errors import FenceError
from apscheduler_fence.slots import format_time, job_name
from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.base import Executions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from apscheduler_fence.lease import Execution

LATER_BY = 0.2
"""By how many seconds each node's clock is behind that of the one before."""


@dataclass(slots=True)
class SlotStory:
    """What was heard of one slot."""

    entered: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)


class DemoNode:
    """A scheduler in a process of its own; its reports arrive in a queue shared by all nodes."""

    def __init__(self, name: str, late: float, reports: queue.Queue[tuple[str, dict[str, Any]]]) -> None:
        self.name, self.late = name, late
        self.process = subprocess.Popen(
            [sys.executable, "-m", "apscheduler_fence.cli.demo_node"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=(reports,), daemon=True)
        self._reader.start()

    def _read(self, reports: queue.Queue[tuple[str, dict[str, Any]]]) -> None:
        assert self.process.stdout is not None  # noqa: S101 - it is a pipe
        for line in self.process.stdout:
            reports.put((self.name, json.loads(line)))

    def tell(self, what: Orders | Schedule) -> None:
        """Tell the node where and when to run."""
        assert self.process.stdin is not None  # noqa: S101 - as above
        self.process.stdin.write(json.dumps(asdict(what)) + "\n")
        self.process.stdin.flush()

    def stop(self) -> None:
        """Let the node shut down, and wait for it."""
        assert self.process.stdin is not None  # noqa: S101 - as above
        assert self.process.stdout is not None  # noqa: S101 - as above
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        self.process.stdout.close()


@click.command()
@click.option("--seconds", type=click.IntRange(3, 3600), default=15, show_default=True, help="Slots, one a second.")
@click.option("--nodes", type=click.IntRange(2, 8), default=3, show_default=True, help="Scheduler processes.")
@click.option("--store", default=None, help="A database or Redis URL in place of a temporary SQLite file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def demo(seconds: int, nodes: int, store: str | None, as_json: bool) -> None:
    """Show several schedulers run one job once per slot while one of them is killed.

    Each node's clock is a little further behind than that of the node before. Half-way, the node that is running the
    job is killed: its slot is recorded as lost, and the others go on. Exit code 0 means that every slot was entered
    exactly once.
    """
    console = Console(quiet=as_json, highlight=False, soft_wrap=False)
    with tempfile.TemporaryDirectory(prefix="apscheduler-fence-demo-") as folder:
        url = store or f"sqlite:///{Path(folder, 'fence.db')}"
        try:
            result = Demo(url, seconds, nodes, console).run()
        except FenceError as error:
            raise click.ClickException(str(error)) from error
    if as_json:
        click.echo(json.dumps(result.as_dict()))
    else:
        _print_summary(console, result)
        click.echo(result.last_line())
    sys.exit(0 if result.ok else 1)


@dataclass(slots=True)
class Result:
    """What the demo has seen."""

    expected: list[str]
    stories: dict[str, SlotStory]
    rows: list[Execution]
    killed: str
    errors: list[str]

    @property
    def duplicates(self) -> int:
        """Entries beyond the first, over all slots."""
        return sum(max(0, len(story.entered) - 1) for story in self.stories.values())

    @property
    def ok(self) -> bool:
        """Every slot was entered exactly once, and no other was."""
        entered = {slot: story.entered for slot, story in self.stories.items() if story.entered}
        return set(entered) == set(self.expected) and self.duplicates == 0

    def last_line(self) -> str:
        """The whole result in one line."""
        lost = sum(row.state == "lost" for row in self.rows)
        refused = sum(len(story.refused) for story in self.stories.values())
        return (
            f"slots={len(self.expected)} executions={len(self.rows)} duplicates={self.duplicates} "
            f"lost={lost} refused={refused}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The result for other programs."""
        return {
            "ok": self.ok,
            "summary": dict(part.split("=") for part in self.last_line().split()),
            "killed": self.killed,
            "errors": self.errors,
            "slots": {slot: asdict(self.stories.get(slot, SlotStory())) for slot in self.expected},
            "executions": [{"id": row.id, "state": row.state, "token": row.token} for row in self.rows],
        }


class Demo:
    """Starts the nodes, listens to them, kills one, and counts."""

    def __init__(self, url: str, seconds: int, count: int, console: Console) -> None:
        self.url, self.seconds, self.console = url, seconds, console
        self.namespace = f"demo-{uuid.uuid4().hex[:8]}"
        self.store = open_store(url, self.namespace)
        self.reports: queue.Queue[tuple[str, dict[str, Any]]] = queue.Queue()
        self.stories: dict[str, SlotStory] = defaultdict(SlotStory)
        self.errors: list[str] = []
        self.killed = ""
        self.count = count
        self.nodes: dict[str, DemoNode] = {}

    def run(self) -> Result:
        """Run the demo to its end."""
        try:
            for warning in self.store.open():
                self.console.print(f"warning: {warning}")
            for number in range(self.count):
                name = f"node-{number + 1}"
                node = self.nodes[name] = DemoNode(name, number * LATER_BY, self.reports)
                node.tell(Orders(self.url, self.namespace, node.late))
            for _ in self.nodes:
                self.reports.get(timeout=60)
            begin = int(time.time()) + 2
            expected = [format_time((begin + number) * 1_000_000) for number in range(self.seconds)]
            self._introduce(begin)
            for node in self.nodes.values():
                node.tell(Schedule(begin, self.seconds))
            self._listen(begin, expected)
            rows = list(self._settled_rows())
        finally:
            for node in self.nodes.values():
                node.stop()
            self.store.close()
        return Result(expected, self.stories, rows, self.killed, self.errors)

    def _introduce(self, begin: float) -> None:
        first = datetime.fromtimestamp(begin, timezone.utc)
        self.console.print(
            f"{len(self.nodes)} schedulers share one store; the job runs each second from {first:%H:%M:%S} UTC."
        )
        for node in self.nodes.values():
            self.console.print(f"  {node.name}: pid {node.process.pid}, clock {node.late * 1000:.0f} ms behind")
        self.console.print()

    def _listen(self, begin: float, expected: list[str]) -> None:
        kill_from = expected[len(expected) // 2]
        unprinted = list(expected)
        slack = LATER_BY * len(self.nodes) + WORK + 0.3
        while unprinted:
            due = begin + expected.index(unprinted[0]) + slack
            try:
                name, report = self.reports.get(timeout=max(0.01, due - time.time()))
            except queue.Empty:
                self._print_slot(unprinted.pop(0))
                continue
            self._note(name, report)
            if report["what"] == "entered" and not self.killed and report["slot"] >= kill_from:
                self.killed = name
                self.nodes[name].process.kill()
                self.console.print(f"[bold red]{name} is killed while it runs {report['slot']}[/]")

    def _note(self, name: str, report: dict[str, Any]) -> None:
        match report:
            case {"what": "entered", "slot": slot, "token": token}:
                self.stories[slot].entered.append(name)
                self.stories[slot].tokens.append(token)
            case {"what": "refused", "slot": slot, "reason": reason}:
                self.stories[slot].refused[name] = reason
            case {"what": "lost", "slot": slot}:
                self.console.print(f"[red]{name} announces that {slot} is lost[/]")
            case {"what": "error", "error": error}:
                self.errors.append(f"{name}: {error}")

    def _print_slot(self, slot: str) -> None:
        story = self.stories[slot]
        ran = ", ".join(
            f"[green]{name}[/] token {token}" for name, token in zip(story.entered, story.tokens, strict=True)
        )
        refused = " ".join(f"{name}:{reason}" for name, reason in sorted(story.refused.items()))
        self.console.print(f"{slot[11:19]}  {ran or '[red]nobody[/]'}  [dim]refused {refused or '-'}[/]")

    def _settled_rows(self) -> Iterator[Execution]:
        """The records, once no run is open any more."""
        job = job_name(JOB, namespace=self.namespace)
        deadline = time.monotonic() + 3 * (LOCK_AT_MOST + SWEEP).total_seconds() + 5
        while True:
            rows = list(self.store.executions(Executions(job=job)))
            if all(row.finished_at is not None for row in rows) or time.monotonic() > deadline:
                while not self.reports.empty():
                    self._note(*self.reports.get())
                return iter(rows)
            time.sleep(0.1)


def _print_summary(console: Console, result: Result) -> None:
    table = Table(title=f"{result.killed or 'no node'} was killed", title_justify="left")
    table.add_column("node")
    for column in ("entered", "refused"):
        table.add_column(column, justify="right")
    names = sorted({name for story in result.stories.values() for name in (*story.entered, *story.refused)})
    for name in names:
        entered = sum(story.entered.count(name) for story in result.stories.values())
        refused = sum(name in story.refused for story in result.stories.values())
        table.add_row(name, str(entered), str(refused))
    console.print()
    console.print(table)
    for error in result.errors:
        console.print(f"[red]error[/] {error}")
