"""What the examples show must run."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.relative_to(EXAMPLES).as_posix())
def test_an_example_runs_to_its_end(path, tmp_path):
    """Each example is a program that ends by itself, with exit code 0 and something to read."""
    done = subprocess.run([sys.executable, path], cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip()
