"""What a lock lets through: two processes, one job, one shared store, and a count of the runs that should not have been.

The experiment that was published about ShedLock, rebuilt, and extended by rows that it did not have. All times follow
from the period (`--period`), so that an experiment of minutes takes seconds. One of the two nodes is late: it starts its
runs later than it should by `--skew`, as a node does whose clock is behind.

    python benchmarks/duplicates.py                                   # 21 slots of a second, on a SQLite file
    python benchmarks/duplicates.py --store postgresql+psycopg://…/scratch --only 3,7
    python benchmarks/duplicates.py --slots 4 --period 0.6 --skew 0.2  # short
    python benchmarks/duplicates.py --plot timeline.png               # needs matplotlib

Exit code 0 means that every setup did what is expected of it, those that are meant to fail included.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import logging
import math
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger
from measure import environment, environment_line
from sqlalchemy import Column, Engine, Integer, MetaData, Table, create_engine, insert

from apscheduler_fence.errors import StaleToken
from apscheduler_fence.fence import Fence, current_fence
from apscheduler_fence.guard import Guard
from apscheduler_fence.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

JOB = "settle"
RESOURCE = "ledger"
SHORT = 0.06
"""How long the job takes, in periods: less than any skew, so that a late node finds it finished."""
LONG = 2.5
"""How long the long job takes, in periods."""


@dataclass(frozen=True, slots=True)
class Setup:
    """One row of the table. Durations are in periods."""

    number: int
    title: str
    expected: str
    policy: dict[str, Any] | None = field(default_factory=dict)
    work: float = SHORT
    late: bool = False
    slow_start: bool = False
    fault: str = ""


LEASE_ONLY = {"once_per_slot": False}

SETUPS = (
    Setup(1, "no lock", "duplicates", None, late=True),
    Setup(2, "lease only, one node starts slowly", "some duplicates", LEASE_ONLY, slow_start=True),
    Setup(3, "lease only, one clock late", "duplicates", LEASE_ONLY, late=True),
    Setup(4, "lease and lock_at_least, one clock late", "none", {**LEASE_ONLY, "lock_at_least": 0.9}, late=True),
    Setup(
        5, "job longer than lock_at_most, no renewal", "overlaps",
        {**LEASE_ONLY, "lock_at_most": 1.5, "renew": False}, LONG, late=True,
    ),
    Setup(
        6, "the same, lock_at_most longer than the job", "none",
        {**LEASE_ONLY, "lock_at_most": 8, "renew": False}, LONG, late=True,
    ),
    Setup(7, "our defaults, one clock late", "once", late=True),
    Setup(8, "our defaults, long job", "none", work=LONG, late=True),
    Setup(9, "holder paused past its lease, guard", "no stale write", {"lock_at_most": 0.8}, 0.3, fault="pause"),
    Setup(
        10, "node killed mid-run, at-least-once", "all done",
        {"lock_at_most": 0.8, "delivery": "at_least_once", "overlap": "queue"}, 0.3, fault="kill",
    ),
)  # fmt: skip


# --- one node ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Orders:
    """What a node is told. Durations are in seconds; `begin` is a time of `time.time`."""

    node: str
    store: str
    namespace: str
    log: str
    resource: str
    begin: float
    slots: int
    period: float
    work: float
    late: float
    late_slots: int
    policy: dict[str, Any] | None
    guarded: bool


ledger = Table("ledger", MetaData(), Column("id", Integer, primary_key=True), Column("token", Integer))
guard = Guard()


class LateThreadPool(ThreadPoolExecutor):  # type: ignore[misc]
    """A thread pool that starts the runs of the first slots late."""

    def __init__(self, late: float, slots: int) -> None:
        super().__init__(max_workers=10)
        self._late, self._slots = late, slots

    def _do_submit_job(self, job: Any, run_times: Any) -> None:
        submit = super()._do_submit_job
        if self._late <= 0 or self._slots <= 0:
            submit(job, run_times)
            return
        self._slots -= 1
        threading.Timer(self._late, submit, (job, run_times)).start()


class Node:
    """A scheduler with the one job, which writes down when it was entered and left."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.log = os.open(orders.log, os.O_WRONLY | os.O_APPEND)
        self.resource: Engine | None = create_engine(f"sqlite:///{orders.resource}") if orders.guarded else None

    def note(self, what: str, run: str, slot: int, token: int) -> None:
        """Append one line; in one piece, since the other node writes to the same file."""
        line = {"at": time.time(), "what": what, "node": self.orders.node, "run": run, "slot": slot, "token": token}
        os.write(self.log, (json.dumps(line) + "\n").encode())

    def job(self) -> None:
        """The job."""
        run, slot, token = uuid.uuid4().hex, self.slot(), self.token()
        self.note("start", run, slot, token)
        time.sleep(self.orders.work)
        if self.resource is not None:
            self.note(self.write(self.resource), run, slot, token)
        self.note("end", run, slot, token)

    def slot(self) -> int:
        """The number of the slot that this run is for."""
        orders = self.orders
        due = time.time() - orders.late if orders.policy is None else current_fence().scheduled_at.timestamp()
        return math.floor((due - orders.begin) / orders.period + 0.01)

    def token(self) -> int:
        """The fencing token of this run, if it has any."""
        return 0 if self.orders.policy is None else current_fence().token

    def write(self, resource: Engine) -> str:
        """Write to the guarded resource, and say whether that was accepted."""
        fence: Fence = current_fence()
        try:
            with guard.writing(resource, RESOURCE, fence=fence) as db:
                db.execute(insert(ledger).values(token=fence.token))
        except StaleToken:
            return "stale"
        return "written"

    def run(self) -> None:
        """Run until standard input is closed."""
        orders = self.orders
        inner = LateThreadPool(orders.late, orders.late_slots)
        fenced = {
            "type": "fenced", "store": orders.store, "namespace": orders.namespace, "inner": inner,
            "sweep": max(0.1, orders.period / 5), **(orders.policy or {}),
        }  # fmt: skip
        scheduler = BackgroundScheduler(
            timezone=timezone.utc, executors={"default": inner if orders.policy is None else fenced}
        )
        first, last = (
            datetime.fromtimestamp(orders.begin + number * orders.period, timezone.utc)
            for number in (0, orders.slots - 1)
        )
        trigger = IntervalTrigger(seconds=orders.period, start_date=first, end_date=last, timezone=timezone.utc)
        scheduler.add_job(self.job, trigger, id=JOB, max_instances=20, misfire_grace_time=None, coalesce=False)
        scheduler.start()
        sys.stdin.read()
        scheduler.shutdown()


def node_main() -> None:
    """Be one node: wait for orders on standard input."""
    logging.getLogger("apscheduler_fence").setLevel(logging.CRITICAL)  # what happens is told from the log of the job
    logging.getLogger("apscheduler").setLevel(logging.CRITICAL)
    print("ready", flush=True)
    Node(Orders(**json.loads(sys.stdin.readline()))).run()


class Process:
    """A node in a process of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._popen = subprocess.Popen(
            [sys.executable, __file__, "--node"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait_until_ready(self) -> None:
        """Wait for the imports to be over."""
        assert self._popen.stdout is not None
        if self._popen.stdout.readline() != "ready\n":
            raise SystemExit(f"{self.name} did not start")

    def order(self, orders: Orders) -> None:
        """Tell the node what to run."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(asdict(orders)) + "\n")
        self._popen.stdin.flush()

    def send(self, number: int) -> None:
        """Send a signal."""
        self._popen.send_signal(number)

    def stop(self) -> None:
        """Let the node end its runs and itself."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        if self._popen.stdout.closed:
            return
        self._popen.send_signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        try:
            self._popen.wait(30)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._popen.stdout.close()


# --- one setup --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """One entry into the job. Times are in seconds from the first slot; `finished` False: its node was killed."""

    node: str
    slot: int
    start: float
    end: float
    finished: bool
    duplicate: bool


@dataclass(frozen=True, slots=True)
class Result:
    """What was seen of one setup."""

    setup: int
    title: str
    expected: str
    slots: int
    runs: int
    slots_done: int
    duplicates: int
    overlaps: int
    longest_overlap: float
    stale_refused: int
    stale_accepted: int
    ok: bool
    timeline: tuple[Run, ...]


class Experiment:
    """Two nodes, one setup, one log."""

    def __init__(self, setup: Setup, options: argparse.Namespace, folder: Path, nodes: dict[str, Process]) -> None:
        self.setup, self.options, self.nodes = setup, options, nodes
        self.log, self.resource = folder / f"{setup.number}.log", folder / f"{setup.number}.db"
        self.log.touch()
        self.store = options.store or f"sqlite:///{folder / 'fence.db'}"
        self.namespace = f"duplicates-{uuid.uuid4().hex[:8]}"
        self.killed: dict[str, float] = {}
        self.begin = 0.0

    def lines(self, what: str = "") -> list[dict[str, Any]]:
        """What the job has written so far."""
        found = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in found if not what or line["what"] == what]

    def run(self) -> Result:
        """Run the setup to its end and count."""
        if self.setup.fault == "pause":
            engine = create_engine(f"sqlite:///{self.resource}")
            guard.create(engine)
            ledger.metadata.create_all(engine)
            engine.dispose()
        store = open_store(self.store, self.namespace)
        store.open()
        store.close()
        self._start()
        {"pause": self._pause, "kill": self._kill}.get(self.setup.fault, lambda: None)()
        self._wait_for_the_last()
        for node in self.nodes.values():
            node.stop()
        return self._count()

    def _start(self) -> None:
        for node in self.nodes.values():
            node.wait_until_ready()
        setup, options = self.setup, self.options
        period = options.period
        self.begin = math.ceil((time.time() + 0.7) / period) * period
        late_slots = max(1, options.slots // 3) if setup.slow_start else options.slots
        policy = setup.policy
        if policy is not None:
            policy = {
                name: value * period if name in ("lock_at_most", "lock_at_least") else value
                for name, value in policy.items()
            }
        for name, node in self.nodes.items():
            late = options.skew if name == "node-2" and (setup.late or setup.slow_start) else 0.0
            node.order(
                Orders(
                    name, self.store, self.namespace, str(self.log), str(self.resource), self.begin, options.slots,
                    period, setup.work * period, late, late_slots, policy, setup.fault == "pause",
                )
            )  # fmt: skip

    # --- faults -------------------------------------------------------------------------------------------------------

    def _pause(self) -> None:
        """Again and again, stop the node that has just entered the job until the other has written under a newer token."""
        period, last = self.options.period, self.options.slots - 2
        slot = 0
        while slot < last:
            started = self._until(partial(self._noted, "start", "slot", slot), 6 * period)
            if not started or started[0]["slot"] >= last:
                return
            victim = started[0]
            node = self.nodes[victim["node"]]
            node.send(signal.SIGSTOP)
            self._until(partial(self._noted, "written", "token", victim["token"] + 1), 6 * period)
            node.send(signal.SIGCONT)
            slot = max(line["slot"] for line in self.lines("start")) + 2

    def _kill(self) -> None:
        """Kill the node that enters the job of the slot in the middle."""
        period, slots = self.options.period, self.options.slots
        started = self._until(partial(self._noted, "start", "slot", slots // 2), (slots + 2) * period + 5)
        if started:
            victim = started[0]["node"]
            self.nodes[victim].send(signal.SIGKILL)
            self.killed[victim] = time.time()
            self._until(self._all_done, 10 * period + 10)

    def _noted(self, what: str, number: str, least: int) -> list[dict[str, Any]]:
        return [line for line in self.lines(what) if line[number] >= least]

    def _all_done(self) -> bool:
        return len({line["slot"] for line in self.lines("end")}) == self.options.slots

    @staticmethod
    def _until(condition: Callable[[], Any], seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := condition()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    def _wait_for_the_last(self) -> None:
        options = self.options
        last = self.begin + (options.slots - 1) * options.period + options.skew
        time.sleep(max(0.0, last + max(0.3, 0.3 * options.period) - time.time()))

    # --- counting -----------------------------------------------------------------------------------------------------

    def _timeline(self) -> Iterator[Run]:
        ends = {line["run"]: line["at"] for line in self.lines("end")}
        seen: set[int] = set()
        for line in sorted(self.lines("start"), key=lambda line: line["at"]):
            finished = line["run"] in ends
            end = ends[line["run"]] if finished else self.killed.get(line["node"], line["at"])
            yield Run(
                line["node"], line["slot"], line["at"] - self.begin, end - self.begin, finished, line["slot"] in seen
            )
            seen.add(line["slot"])

    def _stale_accepted(self) -> int:
        if self.setup.fault != "pause":
            return 0
        with contextlib.closing(sqlite3.connect(self.resource)) as db:
            tokens = [token for (token,) in db.execute("SELECT token FROM ledger ORDER BY id")]
        return sum(token < max(tokens[:number], default=0) for number, token in enumerate(tokens))

    def _count(self) -> Result:
        runs = tuple(self._timeline())
        overlaps = list(_overlaps(runs))
        duplicates = sum(run.duplicate for run in runs)
        done = len({run.slot for run in runs if run.finished})
        refused, accepted = len(self.lines("stale")), self._stale_accepted()
        slots = self.options.slots
        ok = {
            "duplicates": duplicates >= slots / 2,
            "some duplicates": duplicates >= 1,
            "overlaps": bool(overlaps),
            "none": bool(runs) and not duplicates and not overlaps,
            "once": done == len(runs) == slots and not overlaps,
            "no stale write": refused >= 1 and not accepted,
            "all done": done == slots and bool(self.killed),
        }[self.setup.expected]
        return Result(
            self.setup.number, self.setup.title, self.setup.expected, slots, len(runs), done, duplicates,
            len(overlaps), max(overlaps, default=0.0), refused, accepted, ok, runs,
        )  # fmt: skip


def _overlaps(runs: tuple[Run, ...]) -> Iterator[float]:
    """For each run that began while an earlier one went on: for how many seconds both did."""
    until = 0.0
    for run in runs:
        if run.start < until:
            yield min(run.end, until) - run.start
        until = max(until, run.end)


# --- what is shown ----------------------------------------------------------------------------------------------------

HEADINGS = (
    f"{'':>2}  {'setup':42} {'slots':>5} {'runs':>5} {'done':>5} {'duplicates':>10} {'overlaps':>8} {'longest':>8} "
    f"{'stale writes':>12}  expected"
)


def row_of(result: Result) -> str:
    """One line of the table."""
    stale = f"{result.stale_accepted} of {result.stale_accepted + result.stale_refused}" if result.setup == 9 else "-"  # noqa: PLR2004
    longest = f"{result.longest_overlap:.2f} s" if result.overlaps else "-"
    return (
        f"{result.setup:2}  {result.title:42} {result.slots:5} {result.runs:5} {result.slots_done:5} "
        f"{result.duplicates:10} {result.overlaps:8} {longest:>8} {stale:>12}  {result.expected}"
        f"{'' if result.ok else ' - NOT SO'}"
    )


def plot(results: list[Result], path: str) -> None:
    """Draw the runs of each setup on a line per node; duplicates are red, and an overlap lies on both lines at once."""
    import matplotlib as mpl  # noqa: PLC0415 - only a picture needs it

    mpl.use("agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(len(results), 1, figsize=(12, 1.3 * len(results) + 0.6), sharex=True, squeeze=False)
    for axis, result in zip(axes[:, 0], results, strict=True):
        for index, node in enumerate(("node-2", "node-1")):
            for run in (run for run in result.timeline if run.node == node):
                color = "tab:red" if run.duplicate else "tab:blue"
                axis.broken_barh(
                    [(run.start, max(run.end - run.start, 0.02))], (index + 0.15, 0.7), color=color,
                    hatch=None if run.finished else "//", alpha=0.8,
                )  # fmt: skip
        for begin, end in _shared(result.timeline):
            axis.axvspan(begin, end, color="tab:orange", alpha=0.35, linewidth=0)
        axis.set_yticks([0.5, 1.5], ["node-2", "node-1"])
        axis.set_ylim(0, 2)
        axis.set_title(f"{result.setup}: {result.title}", loc="left", fontsize=9)
    axes[-1, 0].set_xlabel("seconds from the first slot; red: a duplicate, orange: two runs at once")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _shared(runs: tuple[Run, ...]) -> Iterator[tuple[float, float]]:
    until = 0.0
    for run in runs:
        if run.start < until:
            yield run.start, min(run.end, until)
        until = max(until, run.end)


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", default="", help="any store's URL (default: a new SQLite file)")
    parser.add_argument("--slots", type=int, default=21, help="default: 21")
    parser.add_argument("--period", type=float, default=1.0, help="seconds between two slots (default: 1)")
    parser.add_argument("--skew", type=float, default=0.3, help="seconds by which one node is late (default: 0.3)")
    parser.add_argument("--only", default="", help="numbers of setups, separated by commas")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    parser.add_argument("--plot", metavar="FILE", help="draw a timeline of every setup")
    parser.add_argument("--node", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.slots < 4:  # noqa: PLR2004 - fewer leave no room for a fault in the middle
        parser.error("--slots: at least 4")
    if not 2 * SHORT * options.period <= options.skew <= 0.5 * options.period:
        parser.error("--skew must be longer than the short job and at most half a period")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib, which is not installed: pip install matplotlib")
    return options


def run_all(setups: list[Setup], options: argparse.Namespace, folder: Path) -> Iterator[Result]:
    """Run the setups one after the other; the nodes of the next are started early, since imports take a while."""
    with contextlib.ExitStack() as started:

        def pair() -> dict[str, Process]:
            nodes = {name: Process(name) for name in ("node-1", "node-2")}
            for node in nodes.values():
                started.callback(node.stop)
            return nodes

        following = pair()
        for number, setup in enumerate(setups, 1):
            nodes, following = following, pair() if number < len(setups) else {}
            result = Experiment(setup, options, folder, nodes).run()
            if not options.json:
                print(row_of(result), flush=True)
            yield result


def main() -> int:
    """Run the setups one after the other."""
    options = options_of()
    if options.node:
        node_main()
        return 0
    chosen = {int(number) for number in options.only.split(",")} if options.only else set(range(1, len(SETUPS) + 1))
    with tempfile.TemporaryDirectory(prefix="duplicates-") as folder:
        if not options.json:
            print(HEADINGS, flush=True)
        setups = [setup for setup in SETUPS if setup.number in chosen]
        results = list(run_all(setups, options, Path(folder)))
    ok = all(result.ok for result in results)
    store = (options.store or "sqlite").partition("://")[0]
    about = {**environment(), "store": store}
    if options.json:
        given = {"slots": options.slots, "period": options.period, "skew": options.skew}
        print(json.dumps({"ok": ok, **about, **given, "setups": [asdict(result) for result in results]}))
    else:
        print(f"\non {store}; {environment_line(about)}")
    if options.plot:
        plot(results, options.plot)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
