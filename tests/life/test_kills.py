"""Three real processes, of which a random one is killed every two seconds."""

import collections
import contextlib
import os
import random
import sqlite3
import time
from pathlib import Path

import pytest
from servers import Node
from waiting import eventually

from apscheduler_fence import EVENT_JOB_LOST, EVENT_JOB_RECOVERED
from apscheduler_fence.slots import format_time
from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.base import Executions

SCRIPT = Path(__file__).with_name("kill_node.py")
SECONDS = int(os.environ.get("FENCE_KILLS_SECONDS", "12"))
"""How long slots come in and nodes die. 60, which are 200 slots of each job, is the full experiment."""
PERIOD = 0.3
SLOTS = round(SECONDS / PERIOD)


@pytest.mark.timeout(SECONDS + 90)
@pytest.mark.backends("postgresql", "redis")
def test_nothing_recorded_is_lost_or_doubled_while_nodes_are_killed(store_url, tmp_path):
    """At least once all succeed, with one effect each; at most once none is entered twice and the unfinished are lost.

    With `queue` every slot has run in the end, and the tokens of each lease only grow.
    """
    begin = (int(time.time()) // 3 + 2) * 3
    messages, killed = _run_and_kill(store_url, tmp_path, begin)
    with contextlib.closing(open_store(store_url)) as store:
        rows = {job: list(store.executions(Executions(job=job))) for job in ("least", "most", "queued")}
    with contextlib.closing(sqlite3.connect(tmp_path / "resource.db")) as resource:
        entered = resource.execute("SELECT lease, execution, attempt, token FROM entered ORDER BY at").fetchall()
        effects = {execution for (execution,) in resource.execute("SELECT execution FROM effect")}
    states = {job: collections.Counter(row.state for row in of_job) for job, of_job in rows.items()}
    attempts = collections.Counter(row.attempt for job in ("least", "queued") for row in rows[job])
    print(  # noqa: T201 - the figures of the experiment, shown by pytest -s
        f"\n{SECONDS} s, {SLOTS} slots per job, {len(killed)} kills: {states}; attempts needed {dict(attempts)}; "
        f"{len(entered)} entered, {len(effects)} effects"
    )

    for job in ("least", "queued"):
        assert set(states[job]) == {"succeeded"}
        assert {row.id for row in rows[job]} == {each for each in effects if each.startswith(f"{job}/")}
    expected = {f"queued/{format_time(round((begin + n * PERIOD) * 1e6))}" for n in range(SLOTS)}
    assert {row.id for row in rows["queued"]} == expected

    assert set(states["most"]) <= {"succeeded", "lost"}
    runs = collections.Counter(execution for lease, execution, *_ in entered if lease == "most")
    assert set(runs.values()) == {1}
    announced = collections.Counter(each["run"] for each in messages if each.get("event") == EVENT_JOB_LOST)
    assert set(announced.values()) <= {1}
    lost = {row.id: row for of_job in rows.values() for row in of_job if row.state == "lost"}
    assert set(announced) <= set(lost)
    # The one that had ended it may itself have been killed before it could say so.
    assert {int(lost[each].holder.split(":")[1]) for each in lost.keys() - announced.keys()} <= killed

    for job in ("least", "most", "queued"):
        tokens = [token for lease, _, _, token in entered if lease == job]
        assert tokens == sorted(set(tokens))
    again = {execution for lease, execution, attempt, _ in entered if attempt > 1}
    assert again <= {each["run"] for each in messages if each.get("event") == EVENT_JOB_RECOVERED} | {
        row.id for job in rows for row in rows[job] if row.attempt > 2
    }


def _run_and_kill(store_url, folder, begin):
    chance, messages, killed = random.Random(4), [], set()
    _create_resource(folder)

    def node():
        return cluster.enter_context(Node(SCRIPT, store_url, folder, str(begin), str(SLOTS)))

    with contextlib.ExitStack() as cluster:
        nodes = [node() for _ in range(3)]
        for each in nodes:
            each.receive(timeout=30, ready=True)
        while time.time() < begin + SECONDS:
            time.sleep(2)
            number = chance.randrange(3)
            killed.add(nodes[number].pid)
            nodes[number].kill()
            messages += nodes[number].messages
            nodes[number] = node()
        with contextlib.closing(open_store(store_url)) as store:
            open_ones = Executions(states=("waiting", "running"))
            eventually(lambda: not list(store.executions(open_ones)), within=30)
        (folder / "stop").touch()
        for each in nodes:
            assert each.wait(timeout=30) == 0, each.stderr
            messages += each.messages
    return messages, killed


def _create_resource(folder):
    with Node("-c", f"import sys; sys.argv[2:] = [{str(folder)!r}]; import kill_node; kill_node.create()", "x") as made:
        assert made.wait(timeout=30) == 0, made.stderr
