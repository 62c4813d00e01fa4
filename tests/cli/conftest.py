"""The console script, run as a program of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).with_name("apscheduler-fence")
PROGRAM = [os.fspath(SCRIPT)] if SCRIPT.exists() else [sys.executable, "-m", "apscheduler_fence.cli"]


@pytest.fixture
def cli(store_url, tmp_path):
    """Runs the console script on the test's store and returns what came of it; `code` is the exit code to expect."""
    path = os.pathsep.join([os.fspath(tmp_path), *filter(None, sys.path)])

    def cli(*arguments, code=0, store=None, **variables):
        env = {**os.environ, "PYTHONPATH": path, "APSCHEDULER_FENCE_STORE": store or store_url, **variables}
        if store == "":
            del env["APSCHEDULER_FENCE_STORE"]
        done = subprocess.run(
            [*PROGRAM, *map(str, arguments)],
            env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done

    return cli
