"""Jobs for process pools: importable in a child by their name."""

import time
from pathlib import Path

from apscheduler_fence import fenced


@fenced(retries=3, retry_delay=0.05)
def succeeds_at_third_attempt(path, fence):
    with Path(path).open("a") as file:
        file.write(f"{fence.execution_id} {fence.attempt} {fence.token}\n")
    if fence.attempt < 3:
        raise ValueError(fence.attempt)
    return fence.attempt


@fenced(overlap="queue")
def takes_a_moment(path, fence):
    time.sleep(0.3)
    with Path(path).open("a") as file:
        file.write(f"{fence.slot}\n")
