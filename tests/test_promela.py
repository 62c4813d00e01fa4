"""The model in docs/model holds under the conditions that its README names, and breaks outside them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parent.parent / "docs" / "model" / "fence.pml"

HOLDS = (
    "GUARD STALE",
    "GUARD STALE LOSS",
    "GUARD STALE SET_BACK",
    "GUARD STALE SET_AHEAD",
    "GUARD STALE COUNTER",
    "GROWS LOSS",
    "GROWS SET_BACK",
    "GROWS SET_AHEAD",
    "TWICE",
    "TWICE SET_BACK",
    "TWICE SET_AHEAD",
    "EFFECTS",
    "EFFECTS LOSS OPERATIONS",
    "OVERLAP",
    "OVERLAP SET_BACK",
)
BREAKS = (
    "STALE",
    "GUARD STALE LOSS COUNTER",
    "GUARD STALE LOSS SET_BACK",
    "GROWS LOSS COUNTER",
    "GROWS LOSS SET_BACK",
    "TWICE NO_SLOT",
    "TWICE LOSS",
    "EFFECTS LOSS GUARD",
    "OVERLAP FROM_REPLY",
    "OVERLAP SET_AHEAD",
    "OVERLAP LOSS",
)


@pytest.fixture(scope="module", autouse=True)
def _programs() -> None:
    missing = [program for program in ("spin", "gcc") if shutil.which(program) is None]
    if missing:
        reason = f"{' and '.join(missing)} not installed"
        if os.environ.get("CI"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


def explore(folder: Path, flags: str) -> str:
    """Visit every state of the model with these flags, and return spin's verdict."""

    def run(*command: str) -> str:
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=100).stdout

    run("spin", *(f"-D{flag}" for flag in flags.split()), "-a", str(MODEL))
    run("gcc", "-O1", "-w", "-DSAFETY", "-o", "pan", "pan.c")
    # -E: at the end of time a client that has not begun waits for ever, which is no deadlock.
    verdict = run("./pan", "-E", "-m10000")
    assert "max search depth too small" not in verdict
    return verdict


@pytest.mark.parametrize("flags", HOLDS)
def test_what_is_promised_holds_in_every_state(tmp_path: Path, flags: str) -> None:
    """No order of steps, pauses and these faults breaks the property."""
    assert "errors: 0" in explore(tmp_path, flags)


@pytest.mark.parametrize("flags", BREAKS)
def test_what_is_not_promised_can_be_broken(tmp_path: Path, flags: str) -> None:
    """Without this part, or with these faults together, some order of steps breaks the property."""
    assert "assertion violated" in explore(tmp_path, flags)
