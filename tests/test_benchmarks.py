"""What `docs/performance.md` tells people to run must run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

SHORT = {
    "cost_of_a_run.py": ("--rounds", "2", "--only", "sqlite"),
    "overhead.py": ("--rounds", "1", "--jobs", "5", "--seconds", "0.5", "--only", "memory,sqlite"),
    "herd.py": ("--rounds", "1", "--sizes", "5", "--only", "memory,sqlite"),
    "keeper.py": ("--leases", "5", "--rounds", "1", "--only", "memory,sqlite"),
}


@pytest.mark.parametrize("program", SHORT)
def test_a_benchmark_measures_what_it_was_asked_to(program):
    """The short form of each ends with exit code 0 and one JSON document with a row for each store."""
    command = [sys.executable, BENCHMARKS / program, *SHORT[program], "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {"sqlite"} <= {row.get("store") or row.get("executor") for row in rows}
