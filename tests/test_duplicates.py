"""The experiment about duplicate runs must come out as `docs/duplicates.md` says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "duplicates.py"


def run(*arguments):
    return subprocess.run(
        [sys.executable, PROGRAM, *arguments], capture_output=True, text=True, timeout=110, check=False
    )


@pytest.fixture(scope="module")
def short():
    """The short form, once for all tests here."""
    done = run("--slots", "4", "--period", "0.6", "--skew", "0.2", "--json")
    assert done.stdout, done.stderr
    return {"exit code": done.returncode, **json.loads(done.stdout)}


def test_every_setup_does_what_is_expected_of_it(short):
    """The locks that let duplicates through do so, ours do not, and the exit code says that all came out so."""
    assert [(each["setup"], each["expected"]) for each in short["setups"] if not each["ok"]] == []
    assert (short["exit code"], short["ok"], len(short["setups"])) == (0, True, 10)


def test_what_is_counted_is_what_the_job_has_written(short):
    """Runs and duplicates of a row are those of its timeline."""
    for each in short["setups"]:
        slots = [run["slot"] for run in each["timeline"]]
        assert (each["runs"], each["duplicates"]) == (len(slots), len(slots) - len(set(slots)))


def test_a_skew_that_would_show_nothing_is_refused():
    """A node that is late by less than the job takes cannot find it finished: exit code 2 and the reason."""
    done = run("--skew", "0.01")
    assert done.returncode == 2
    assert "--skew" in done.stderr
