"""A cluster that something is done to, and what must be true of it whatever that is."""

import contextlib
import json
import signal
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

from servers import Node
from waiting import eventually

from apscheduler_fence import EVENT_JOB_LOST, EVENT_JOB_REFUSED, EVENT_LEASE_LOST
from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.base import Executions

SCRIPT = Path(__file__).with_name("fault_node.py")
PERIOD = 500
"""Milliseconds from slot to slot, as the nodes have them."""
OPTIONS = {"lock_at_most": "1s", "sweep": "0.3s", "timeout": "0.5s", "store_patience": "4s"}
WORK = 0.2
ANSWERS = {"done", "running", "held"}
TOLD = {"held", "lost", "spacing"}
"""Why a slot may be refused on every node: who reads the events knows that it did not run."""


class Cluster:
    """Nodes that run one job every half second, each slot on one of them; killed at the end of `with`.

    Args:
        store: the URL of the store that all of them share.
        work: seconds that a run takes.
        options: options of the executor on every node.
    """

    def __init__(self, store: str, *, work: float = WORK, **options: object) -> None:
        self._store, self._work, self._options = store, work, {**OPTIONS, **options}
        self._open = contextlib.ExitStack()
        self.nodes: list[Node] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._open.close()

    def join(self, store: str | None = None, *, faketime: str | None = None, **options: object) -> Node:
        """Starts one more node, which may reach the store by another URL and have other options."""
        arguments = (store or self._store, str(self._work), json.dumps({**self._options, **options}))
        node = self._open.enter_context(Node(SCRIPT, *arguments, faketime=faketime))
        self.nodes.append(node)
        return node

    def said(self, *nodes: Node, after: float = 0.0, **expected: object) -> list[dict]:
        """All that these nodes (all, if none are named) have said with these values, in the order of its time."""
        messages = [message for node in nodes or self.nodes for message in list(node.messages)]
        fitting = [each for each in messages if expected.items() <= each.items() and each["at"] > after]
        return sorted(fitting, key=lambda message: message["at"])

    def first(self, *nodes: Node, after: float = 0.0, within: float = 30.0, **expected: object) -> dict:
        """Waits until one of these nodes says this."""
        return eventually(lambda: self.said(*nodes, after=after, **expected), within)[0]

    def next(self, *nodes: Node, **expected: object) -> dict:
        """Waits until one of these nodes says this anew."""
        return self.first(*nodes, after=time.monotonic(), **expected)

    def runs_on(self, node: Node) -> dict:
        """Waits for a run on this node to begin; the others pause if it loses every race."""
        others = [other for other in self.nodes if other is not node and other.running]
        with contextlib.suppress(AssertionError):
            return self.first(node, after=time.monotonic(), within=2.0, what="entered")
        self.next(*others, what="left")
        for other in others:
            other.freeze()
        try:
            return self.next(node, what="entered")
        finally:
            for other in others:
                other.thaw()

    def serve(self, *nodes: Node, within: float = 30.0) -> float:
        """Waits until each of these nodes has an answer about a slot that is yet to come; returns the seconds it took."""
        began, now = time.monotonic(), time.time() * 1000
        for node in nodes or self.nodes:
            eventually(lambda node=node: _serves(node, now), within)
        return time.monotonic() - began

    def stop(self) -> None:
        """Ends all nodes in good order, those apart that were killed."""
        running = [node for node in self.nodes if node.running]
        for node in running:
            node.signal(signal.SIGTERM)
        for node in running:
            assert node.wait(30) == 0, node.stderr

    # --- what must be true --------------------------------------------------------------------------------------------

    def judge(self, *, repeated: int = 0) -> None:
        """Sees one more run begin, ends the nodes, and holds what they said against what was promised.

        Args:
            repeated: how many slots may have run once more, because the store has forgotten them.
        """
        self.next(what="entered")
        self.stop()
        sys.stdout.write(f"{self.summary()}\n")  # pytest -rP shows it
        entered = self.said(what="entered")
        slots = Counter(message["run"] for message in entered if message["attempt"] == 1)
        again = {run: times for run, times in slots.items() if times > 1}
        assert len(again) <= repeated, again
        assert max(slots.values()) <= 2
        self._tokens_grow(entered)
        self._nothing_is_silent(entered)

    def _tokens_grow(self, entered: list[dict]) -> None:
        assert len({message["token"] for message in entered}) == len(entered)
        left = self.said(what="left")
        # One that was paused between its grant and its entry may come in after its successor: it finds its lease lost.
        stale = {message["token"] for message in left if message["lost"]}
        for later in (message for message in entered if message["token"] not in stale):
            earlier = [message["token"] for message in left if message["at"] < later["at"] and not message["lost"]]
            assert max(earlier, default=0) < later["token"], later

    def _nothing_is_silent(self, entered: list[dict]) -> None:
        ran = {message["slot"] for message in entered}
        told = {message["slot"] for message in self.said(what="event") if not _is_refused(message, ANSWERS - TOLD)}
        due = set(range(min(ran), max(ran), PERIOD))
        assert due <= ran | told, sorted(due - ran - told)

    def summary(self) -> str:
        """What was seen, in one line."""
        entered = self.said(what="entered")
        runs = Counter((message["run"], message["attempt"]) for message in entered)
        silence = max(later["at"] - earlier["at"] for earlier, later in pairwise(entered))
        return (
            f"{len(runs)} runs, {len(entered) - len(runs)} repeated, {len(self.lost())} lost and announced, "
            f"{len(self.leases_lost())} leases lost; at most {silence:.1f} s from one run to the next"
        )

    def states(self) -> dict[str, str]:
        """What the store has recorded of each execution."""
        store = open_store(self._store)
        with contextlib.closing(store):
            return {row.id: row.state for row in store.executions(Executions())}

    def lost(self) -> set[str]:
        """The executions that some node has announced as lost."""
        return {message["run"] for message in self.said(what="event", code=EVENT_JOB_LOST)}

    def leases_lost(self, *nodes: Node) -> set[str]:
        """The executions whose lease these nodes have said to have lost."""
        return {message["run"] for message in self.said(*nodes, what="event", code=EVENT_LEASE_LOST)}


def _is_refused(message: dict, reasons: set[str]) -> bool:
    return message.get("code") == EVENT_JOB_REFUSED and message["reason"] in reasons


def _serves(node: Node, since: float) -> bool:
    assert node.running, node.stderr
    return any(_answered(message, since) for message in list(node.messages))


def _answered(message: dict, since: float) -> bool:
    if message["slot"] is None or message["slot"] < since:
        return False
    return message["what"] == "entered" or _is_refused(message, ANSWERS)
