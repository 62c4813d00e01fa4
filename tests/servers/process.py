"""Python programs as real processes of a cluster under test."""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.leash import Process, private_folder, remove_folder

if TYPE_CHECKING:
    from typing_extensions import Self

# Since Python 3.11 `time.sleep` sleeps until an absolute time, which libfaketime 0.9.10 turns into an invalid argument;
# it leaves all other waits alone.
_SLEEP = "import select, time\ntime.sleep = lambda seconds: select.select([], [], [], seconds) and None\n"


def faketime_library() -> str | None:
    """The path of libfaketime, which gives a process a wrong clock; None if it is not installed."""
    return next((str(path) for path in Path("/usr/lib").glob("*/faketime/libfaketime.so.1")), None)


class Node:
    """A Python process that reports by printing one JSON object a line, started at once and killed at the end of `with`.

    It runs the interpreter of this process and can import what this process can.

    Args:
        arguments: Python's command line: a script or `"-m", "module"` or `"-c", "code"`, and what follows.
        faketime: how far its wall clock is off, as `"+1h"` or `"-90s"`; its monotonic clock stays right.
        env: variables to set besides the inherited ones.
    """

    def __init__(
        self, *arguments: str | Path, faketime: str | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self._folder = private_folder("fence-node-")
        path = os.pathsep.join([str(self._folder), *filter(None, sys.path)])
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **(env or {})}
        if faketime is not None:
            environment |= _wrong_clock(faketime)
            (self._folder / "sitecustomize.py").write_text(_SLEEP)
        with (self._folder / "stderr").open("wb") as stderr:
            command = [sys.executable, *arguments]
            self._process = Process(command, stdout=subprocess.PIPE, stderr=stderr, env=environment)
        self.messages: list[dict[str, Any]] = []
        self._unread: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended, frozen or not."""
        return self._process.running

    @property
    def stderr(self) -> str:
        """What it has written to its standard error so far."""
        return (self._folder / "stderr").read_text(errors="replace")

    def receive(self, timeout: float = 10.0, **expected: Any) -> dict[str, Any]:
        """Waits for the next message that has the expected values, and passes over the others; `messages` keeps all.

        Raises:
            TimeoutError: there was none within `timeout` seconds.
            RuntimeError: the process ended before; the message holds its standard error.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                message = self._unread.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                text = f"no message {expected} within {timeout} s\n{self.stderr[-4000:]}"
                raise TimeoutError(text) from None
            if message is None:
                self._unread.put(None)
                text = f"the process ended before a message {expected}\n{self.stderr[-4000:]}"
                raise RuntimeError(text)
            if expected.items() <= message.items():
                return message

    def wait(self, timeout: float = 10.0) -> int:
        """Waits until it has ended by itself and all its messages were read; returns its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        code = self._process.wait(timeout)
        self._reader.join(timeout)
        return code

    def signal(self, number: int) -> None:
        """Sends it a signal, such as SIGTERM for an orderly end."""
        self._process.signal(number)

    def kill(self) -> None:
        """Kills it and its descendants with SIGKILL."""
        self._process.kill()
        self._reader.join(10)

    def freeze(self) -> None:
        """Stops it and its descendants with SIGSTOP, as a long pause of the machine would."""
        self._process.freeze()

    def thaw(self) -> None:
        """Ends `freeze`."""
        self._process.thaw()

    def close(self) -> None:
        """Kills it if it still runs and removes what it has written."""
        self.kill()
        for left in Path("/dev/shm").glob(
            f"*faketime_s*_{self.pid}"
        ):  # libfaketime removes them at an orderly exit only
            left.unlink()
        if self._folder.exists():
            remove_folder(self._folder)

    def __enter__(self) -> "Self":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        with self._process.stdout as lines:
            for line in lines:
                message = _parsed(line)
                self.messages.append(message)
                self._unread.put(message)
        self._unread.put(None)


def _parsed(line: bytes) -> dict[str, Any]:
    text = line.decode(errors="replace").rstrip("\n")
    with contextlib.suppress(json.JSONDecodeError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    return {"text": text}


def _wrong_clock(offset: str) -> dict[str, str]:
    library = faketime_library()
    if library is None:
        message = "libfaketime is not installed"
        raise RuntimeError(message)
    return {"LD_PRELOAD": library, "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
