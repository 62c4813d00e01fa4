"""The demo: what a newcomer runs first."""

import json
import subprocess
import sys


def test_the_demo_enters_every_slot_once_although_a_node_is_killed():
    """It says so in one JSON document, and by its exit code."""
    command = [sys.executable, "-m", "apscheduler_fence.cli", "demo", "--seconds", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    told = json.loads(done.stdout)
    entered = [slot["entered"] for slot in told["slots"].values()]
    assert told["ok"] == (done.returncode == 0)
    assert told["summary"]["duplicates"] == "0"
    assert all(len(names) <= 1 for names in entered)
    assert told["killed"] in {name for names in entered for name in names}
    assert {run["state"] for run in told["executions"]} <= {"succeeded", "lost"}
