"""Ends processes and removes folders once the process that registered them is gone, however it went.

Run as a script it reads lines from its standard input (`+process 123`, `-process 123`, `+folder /path`, `-folder /path`)
and, when that pipe closes, clears away what is still registered. A parent-death signal would be shorter, but it is
Linux only, follows the *thread* that forked, is lost when a server changes its user, and leaves folders behind.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

GRACE = 2.0  # seconds; a server that is asked to end gives back its shared memory, one that is killed does not


def running() -> dict[int, int]:
    """The parent of every process that is not a zombie."""
    parents = {}
    if not Path("/proc/self/stat").exists():
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], check=True, capture_output=True, text=True)
        for line in listing.stdout.splitlines():
            pid, parent, state = line.split()[:3]
            if not state.startswith("Z"):
                parents[int(pid)] = int(parent)
        return parents
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    return parents


def tree(root: int) -> list[int]:
    """The process and all its descendants, parents first; their process groups do not matter."""
    parents = running()
    found = [root] if root in parents else []
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return found


def send(pids: list[int], number: int) -> None:
    """Sends a signal to those of the processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def freeze_tree(root: int) -> list[int]:
    """Stops the process and all its descendants, and returns them."""
    frozen: list[int] = []
    while fresh := [pid for pid in tree(root) if pid not in frozen]:
        send(fresh, signal.SIGSTOP)
        frozen += fresh
    return frozen


def thaw_tree(root: int) -> None:
    """Lets a frozen process and all its descendants go on."""
    send(tree(root), signal.SIGCONT)


def kill_tree(root: int) -> list[int]:
    """Kills the process and all its descendants at once, and returns them; frozen first, so that none escapes."""
    doomed = freeze_tree(root)
    send(doomed, signal.SIGKILL)
    return doomed


def _clear(processes: set[int], folders: set[str]) -> None:
    send(sorted(processes), signal.SIGTERM)
    for pid in processes:
        thaw_tree(pid)  # a frozen one would not hear it
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and processes & running().keys():
        time.sleep(0.05)
    for pid in processes:
        kill_tree(pid)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Follows the registrations until the parent is gone."""
    registered: dict[str, set[str]] = {"process": set(), "folder": set()}
    parent = os.getppid()
    unread = b""
    # A forked child of the parent may keep the pipe open, so the parent itself is looked at too.
    while os.getppid() == parent:
        if not select.select([0], [], [], 1.0)[0]:
            continue
        received = os.read(0, 65536)
        if not received:
            break
        *lines, unread = (unread + received).split(b"\n")
        for line in lines:
            kind, _, what = os.fsdecode(line).partition(" ")
            change = set.add if kind[0] == "+" else set.discard
            change(registered[kind[1:]], what)
    _clear({int(pid) for pid in registered["process"]}, registered["folder"])


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    main()
