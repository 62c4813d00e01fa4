"""The product's main promise, on real processes and real servers."""

import contextlib
import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest
from servers import Node

from apscheduler_fence import EVENT_JOB_REFUSED
from apscheduler_fence.slots import format_time
from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.base import Executions

SCRIPT = Path(__file__).with_name("scheduler_node.py")
JOBS = ("cron", "interval")
KINDS = ["background"] * 8 + ["asyncio"] * 4
SLOTS = int(os.environ.get("FENCE_CLUSTER_SLOTS", "6"))
"""Slots of each job. 60 is the full experiment."""


@pytest.mark.timeout(SLOTS + 90)
@pytest.mark.backends("sqlite", "postgresql", "mariadb", "redis")
def test_twelve_processes_run_each_slot_of_each_job_exactly_once(store_url, tmp_path):
    """Eight BackgroundSchedulers and four AsyncIOSchedulers, each with its own job store, share nothing but the store."""
    with contextlib.ExitStack() as cluster:
        nodes = [
            cluster.enter_context(Node(SCRIPT, kind, store_url, tmp_path, str(number)))
            for number, kind in enumerate(KINDS)
        ]
        for node in nodes:
            node.receive(timeout=60, ready=True)
        begin = int(time.time()) + 6
        _write_at_once(tmp_path / "go", json.dumps([begin, SLOTS]))
        for node in nodes:
            assert node.wait(timeout=SLOTS + 40) == 0, node.stderr
        messages = [message for node in nodes for message in node.messages]

    entered = Counter(message["entered"] for message in messages if "entered" in message)
    assert set(entered.values()) == {1}
    assert {message["event"] for message in messages if "event" in message} <= {EVENT_JOB_REFUSED}
    scheduled = {f"{job}/{format_time((begin + number) * 1_000_000)}" for job in JOBS for number in range(SLOTS)}
    # An interval's last window may be one more: each node has a phase of its own.
    assert {name for name in entered if name.startswith("cron/")} <= scheduled
    left_out = scheduled - set(entered)
    # On a machine that stalls for a second a slot may meet the one before it, which is what overlap="skip" is for.
    assert {message["reason"] for message in messages if message.get("run") in left_out} <= {"held"}
    assert len(left_out) <= len(scheduled) // 8, sorted(left_out)

    store = open_store(store_url)
    with contextlib.closing(store):
        for job in JOBS:
            rows = list(store.executions(Executions(job=job, oldest_first=True)))
            assert {row.id for row in rows} == {name for name in entered if name.startswith(f"{job}/")}
            assert {row.state for row in rows} == {"succeeded"}
            by_grant = sorted(rows, key=lambda row: row.started_at)
            assert [row.token for row in by_grant] == sorted({row.token for row in rows})


def _write_at_once(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.rename(path)
