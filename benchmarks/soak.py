"""A mixed cluster under random faults for a given time: broken promises, and growth of memory and threads.

Run it with: python benchmarks/soak.py [SECONDS] [SEED]; ends with 1 if a promise was broken or something grew.

Three clusters at once, on PostgreSQL, Redis with an append-only file, and SQLite, run a job every half second. Nodes are
killed and replaced, and paused; servers are killed and restarted, and paused; connections are cut, delayed, half-open, and
lose their replies. One node of each cluster is left alone and measured: it shares every outage of its server.
"""

import contextlib
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "cluster")]

from faults import Cluster  # noqa: E402 - found by the line above
from servers import Node, PostgreSQL, Proxy, Redis  # noqa: E402

GROWTH = 4.0
"""MiB that a node may be larger in the last quarter than in the second."""


def footprint(node: Node) -> tuple[float, int]:
    """MiB in memory, and threads, of a process."""
    lines = (Path("/proc") / str(node.pid) / "status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return int(values["VmRSS"].split()[0]) / 1024, int(values["Threads"])


@dataclass
class Sufferer:
    """One cluster, and what is done to it."""

    name: str
    cluster: Cluster
    chance: random.Random
    server: PostgreSQL | Redis | None = None
    proxy: Proxy | None = None
    faults: Counter[str] = field(default_factory=Counter)
    samples: list[tuple[float, int]] = field(default_factory=list)
    replaced: int = 0

    def begin(self) -> None:
        """Starts the node that is left alone, one whose connections break, and one that is killed and paused."""
        self.witness = self.cluster.join()
        if self.proxy:
            self.cluster.join(self.proxy.through(self.server.url))
        self.victim = self.cluster.join()
        self.cluster.serve()

    def suffer(self, until: float) -> None:
        """One fault after another, with time in between to recover from most of them."""
        possible: list[Callable[[], None]] = [self.pause_node, self.kill_node]
        if self.server:
            possible += [self.crash_server, self.pause_server]
        if self.proxy:
            possible += [self.cut, self.delay, self.silence, self.lose_replies, self.lose_one_reply]
        while time.monotonic() < until:
            fault = self.chance.choice(possible)
            self.faults[fault.__name__] += 1
            fault()
            self.wait(0.2, 3.0)
            self.samples.append(footprint(self.witness))

    def wait(self, least: float, most: float) -> None:
        """Lets some time pass."""
        time.sleep(self.chance.uniform(least, most))

    def pause_node(self) -> None:
        """Half of these pauses outlive the lease of a second."""
        self.victim.freeze()
        self.wait(0.1, 2.0)
        self.victim.thaw()

    def kill_node(self) -> None:
        """Another takes its place."""
        self.victim.kill()
        self.replaced += 1
        self.victim = self.cluster.join()

    def crash_server(self) -> None:
        """Down for at most 3 s, less than a node's patience."""
        self.server.kill()
        self.wait(0.0, 3.0)
        self.server.start()

    def pause_server(self) -> None:
        """Connections stay open, and nobody answers."""
        with self.server.frozen():
            self.wait(0.1, 2.0)

    def cut(self) -> None:
        """Reset, and refused for a while."""
        self.proxy.refuse = True
        self.proxy.cut()
        self.wait(0.0, 1.5)
        self.proxy.refuse = False

    def delay(self) -> None:
        """Some of these delays are longer than the timeout."""
        self.proxy.delay = self.chance.uniform(0.0, 0.4)
        self.wait(0.5, 2.0)
        self.proxy.delay = 0.0

    def silence(self) -> None:
        """Half-open, and then everything arrives late."""
        self.proxy.blackhole = True
        self.wait(0.1, 2.0)
        self.proxy.blackhole = False

    def lose_replies(self) -> None:
        """What is asked is done, and nobody hears of it."""
        self.proxy.drop_replies = True
        self.wait(0.1, 1.5)
        self.proxy.drop_replies = False
        self.proxy.cut()

    def lose_one_reply(self) -> None:
        """And the connection with it."""
        self.proxy.lose_next_reply()

    def verdict(self) -> list[str]:
        """What was broken, in words; ends the cluster."""
        broken = []
        try:
            left = [node for node in self.cluster.nodes if node.running]
            assert len(left) == len(self.cluster.nodes) - self.replaced, "a node ended by itself"
            self.cluster.serve(*left)
            sys.stdout.write(f"{self.name}: ")
            self.cluster.judge()  # writes what was seen
            states = self.cluster.states()
            open_runs = [run for run, state in states.items() if state in ("running", "waiting")]
            silent = {run for run, state in states.items() if state == "lost"} - self.cluster.lost()
            broken += [f"left open: {open_runs}"] if open_runs else []
            broken += [f"lost and not announced: {sorted(silent)}"] if silent else []
        except AssertionError as error:
            broken.append(f"{error}")
        broken += [f"a node's own error: {node.stderr[-2000:]}" for node in self.cluster.nodes if _erred(node)]
        (before, threads_before), (after, threads_after) = self.quarter(1), self.quarter(3)
        # An executor's pool grows to what its worst outage needed, and never beyond its size.
        if after - before > GROWTH or threads_after > max(
            threads for _, threads in self.samples[: len(self.samples) // 2]
        ):
            broken.append("memory or threads grew")
        sys.stdout.write(
            f"  faults: {dict(self.faults.most_common())}; {self.replaced} nodes replaced\n"
            f"  node left alone: {before:.1f} -> {after:.1f} MiB, {threads_before:.0f} -> {threads_after:.0f} threads "
            "(medians of second and last quarter)\n"
        )
        return [f"{self.name}: {each}" for each in broken]

    def quarter(self, number: int) -> tuple[float, float]:
        """Median footprint in one quarter of the time, counted from 0."""
        size = len(self.samples) // 4
        part = self.samples[number * size : (number + 1) * size] or self.samples
        return statistics.median(mib for mib, _ in part), statistics.median(threads for _, threads in part)


def _erred(node: Node) -> bool:
    return any(sign in node.stderr for sign in ("Traceback", "an error of its own"))


def main(seconds: float, seed: int) -> int:
    """Returns the exit code."""
    sys.stdout.write(f"soak for {seconds:.0f} s, seed {seed}\n")
    chances = [random.Random(f"{seed}/{number}") for number in range(3)]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        sufferers = []
        for server, chance in zip((PostgreSQL(), Redis(aof=True)), chances, strict=False):
            stack.enter_context(server)
            proxy = stack.enter_context(Proxy(server.port))
            cluster = stack.enter_context(Cluster(server.url))
            sufferers.append(Sufferer(type(server).__name__, cluster, chance, server, proxy))
        cluster = stack.enter_context(Cluster(f"sqlite:///{folder}/fence.db"))
        sufferers.append(Sufferer("SQLite", cluster, chances[-1]))
        for sufferer in sufferers:
            sufferer.begin()
        until = time.monotonic() + seconds
        threads = [threading.Thread(target=sufferer.suffer, args=(until,)) for sufferer in sufferers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        broken = [each for sufferer in sufferers for each in sufferer.verdict()]
    sys.stdout.write("\n".join([f"{len(broken)} promises broken", *broken, ""]))
    return 1 if broken else 0


if __name__ == "__main__":
    _, *given = sys.argv
    given += ["60", "1"][len(given) :]
    sys.exit(main(float(given[0]), int(given[1])))
