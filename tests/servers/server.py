"""What all servers have in common."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from servers.leash import Process, private_folder, remove_folder
from servers.ports import free_port

if TYPE_CHECKING:
    from typing_extensions import Self


def program(name: str, *patterns: str) -> str | None:
    """The path of a program: from PATH, else the newest match of the glob patterns (relative to `/`), else None."""
    by_version = [sorted(Path("/").glob(pattern), key=_version) for pattern in patterns]
    return shutil.which(name) or next((str(paths[-1]) for paths in by_version if paths), None)


def _version(path: Path) -> list[int]:
    return [int(part) for part in path.parts if part.isdigit()]


def user_below_root(name: str) -> str | None:
    """The user for a server that refuses to run as root; None if this process is not root's."""
    return name if os.geteuid() == 0 else None


def run(command: Sequence[str | Path], user: str | None = None) -> None:
    """Runs a program to its end.

    Raises:
        RuntimeError: it failed; the message holds its output.
    """
    extra = [] if user else None
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd="/", user=user, group=user, extra_groups=extra
    )
    if done.returncode:
        message = f"{command[0]} failed with {done.returncode}\n{done.stdout}{done.stderr}"
        raise RuntimeError(message)


class Controls(ABC):
    """What can be done to a server, or to a group of servers as if it were one."""

    @classmethod
    @abstractmethod
    def available(cls) -> bool:
        """Whether its programs are installed on this machine."""

    @abstractmethod
    def start(self) -> None:
        """Starts what is not running, on its old data if there is any; returns when it answers."""

    @abstractmethod
    def stop(self) -> None:
        """Shuts down cleanly; what is persistent is kept."""

    @abstractmethod
    def kill(self) -> None:
        """Kills everything with SIGKILL; what was written to files is kept."""

    @abstractmethod
    def freeze(self) -> None:
        """Stops all processes with SIGSTOP: connections stay open, and nobody answers."""

    @abstractmethod
    def thaw(self) -> None:
        """Ends `freeze`."""

    @abstractmethod
    def close(self) -> None:
        """Ends everything and removes the data."""

    def restart(self) -> None:
        """Stops and starts."""
        self.stop()
        self.start()

    def mend(self) -> None:
        """Undoes what a test may have left: thaws, and starts what is down."""
        self.thaw()
        self.start()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Frozen inside the `with` block."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def __enter__(self) -> "Self":
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Server(Controls):
    """One server process on `127.0.0.1`, with `port` and, once started, `folder`."""

    user: ClassVar[str | None] = None  # whom it runs as if this process is root's
    stop_signal: ClassVar[int] = signal.SIGTERM
    close_signal: ClassVar[int] = getattr(signal, "SIGKILL", signal.SIGTERM)
    not_yet: ClassVar[tuple[type[Exception], ...]]  # what `ping` raises while the server starts

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self._folder: Path | None = None
        self._process: Process | None = None

    @abstractmethod
    def install(self) -> None:
        """Fills the empty folder before the first start."""

    @abstractmethod
    def command(self) -> Sequence[str | Path]:
        """The program that runs in the foreground, with its arguments."""

    @abstractmethod
    def ping(self) -> None:
        """Asks something over a new connection; raises one of `not_yet` if there is no answer."""

    @property
    def folder(self) -> Path:
        """Its private folder."""
        assert self._folder is not None, "not started yet"
        return self._folder

    @property
    def running(self) -> bool:
        """Whether its process exists, frozen or not."""
        return self._process is not None and self._process.running

    @property
    def pid(self) -> int:
        """Its main process."""
        assert self._process is not None, "not started yet"
        return self._process.pid

    @property
    def log(self) -> str:
        """What it has said since the first start."""
        return (self.folder / "log").read_text(errors="replace")

    def start(self) -> None:
        if self.running:
            return
        user = self.user and user_below_root(self.user)
        if self._folder is None:
            self._folder = private_folder(f"fence-{type(self).__name__.lower()}-", user)
            self.install()
        with (self.folder / "log").open("ab") as log:
            self._process = Process(self.command(), stdout=log, stderr=subprocess.STDOUT, user=user)
        self._wait_for_answer(30)

    def _wait_for_answer(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self.ping()
            except self.not_yet:
                if not self.running or time.monotonic() > deadline:
                    message = f"{type(self).__name__} did not start\n{self.log[-4000:]}"
                    raise RuntimeError(message) from None
            time.sleep(0.01)

    def stop(self) -> None:
        if self._process:
            self._process.end(self.stop_signal)

    def kill(self) -> None:
        if self._process:
            self._process.kill()

    def freeze(self) -> None:
        if self._process:
            self._process.freeze()

    def thaw(self) -> None:
        if self._process:
            self._process.thaw()

    def close(self) -> None:
        if self._process:
            self._process.end(self.close_signal)
            self._process = None
        if self._folder:
            remove_folder(self._folder)
            self._folder = None
