"""Child processes and folders that cannot outlive this process."""

import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from servers import janitor

_lock = threading.Lock()
_janitor: "subprocess.Popen[bytes] | None" = None


def _tell(message: str) -> None:
    global _janitor  # noqa: PLW0603 - one janitor for this process, started by the first thing to clear away
    with _lock:
        if _janitor is None:
            _janitor = subprocess.Popen(
                [sys.executable, "-I", "-S", janitor.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
            atexit.register(_dismiss, _janitor, os.getpid())
        _janitor.stdin.write(os.fsencode(message) + b"\n")


def _dismiss(hired: "subprocess.Popen[bytes]", by: int) -> None:
    if os.getpid() == by:
        hired.communicate()


def private_folder(prefix: str, owner: str | None = None) -> Path:
    """Makes a folder that is removed with this process at the latest.

    Args:
        prefix: how its name begins.
        owner: the user it is given to; all folders above it are then ones that this user may traverse.
    """
    above = next(filter(_traversable, (tempfile.gettempdir(), "/tmp", "/var/tmp"))) if owner else None
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=above))
    _tell(f"+folder {folder}")
    if owner:
        shutil.chown(folder, owner)
    return folder


def _traversable(folder: str) -> bool:
    path = Path(folder).resolve()
    return path.is_dir() and all(each.stat().st_mode & 0o001 for each in (path, *path.parents))


def remove_folder(folder: Path) -> None:
    """Removes what `private_folder` made."""
    shutil.rmtree(folder, ignore_errors=True)
    _tell(f"-folder {folder}")


class Process:
    """A child process that is killed, frozen and thawed together with all its descendants.

    Args:
        command: the program and its arguments.
        stdout: where its output goes, as for `subprocess.Popen`; its input is empty.
        stderr: where its messages go.
        user: the user to run as, if this process is root's.
        env: its whole environment; inherited if None.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        stdout: int | IO[Any],
        stderr: int | IO[Any],
        user: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=env,
            user=user,
            group=user,
            extra_groups=[] if user else None,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self.stdout = self._popen.stdout
        self._frozen = False
        self._registered = True
        _tell(f"+process {self.pid}")

    @property
    def running(self) -> bool:
        """Whether it has not ended yet; a frozen process is running."""
        if self._popen.poll() is None:
            return True
        self._forget()
        return False

    def wait(self, timeout: float) -> int:
        """Waits until it has ended and returns its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        code = self._popen.wait(timeout)
        self._forget()
        return code

    def end(self, number: int, timeout: float = 30.0) -> None:
        """Asks it to end by a signal and waits for that; kills it if it has not ended after `timeout` seconds."""
        if self.running:
            self.thaw()
            self._popen.send_signal(number)
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
        else:
            self.wait(0)

    def kill(self) -> None:
        """Kills it and its descendants with SIGKILL, and returns when all of them are gone."""
        doomed = set(janitor.kill_tree(self.pid)) if self.running else set()
        self.wait(30)
        deadline = time.monotonic() + 30
        while doomed & janitor.running().keys() and time.monotonic() < deadline:
            time.sleep(0.002)

    def freeze(self) -> None:
        """Stops it and its descendants with SIGSTOP: their sockets stay open and nobody answers."""
        if self.running:
            self._frozen = True
            janitor.freeze_tree(self.pid)

    def thaw(self) -> None:
        """Lets it and its descendants go on."""
        if self._frozen and self.running:
            janitor.thaw_tree(self.pid)
        self._frozen = False

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Sends it, and none of its descendants, a signal."""
        self._popen.send_signal(number)

    def _forget(self) -> None:
        # At once: the system may give the number to a process that is none of ours.
        if self._registered:
            self._registered = False
            _tell(f"-process {self.pid}")
