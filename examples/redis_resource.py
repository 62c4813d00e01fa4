"""A resource in Redis refuses whoever has become stale, and applies each operation once.

Run it with: python examples/redis_resource.py [Redis URL]; without one, a Redis server of its own is started.
"""

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from redis.exceptions import ConnectionError as NotYet

from apscheduler_fence.errors import AlreadyApplied, StaleToken
from apscheduler_fence.guard_redis import RedisGuard
from apscheduler_fence.testing import fake_fence


def restock(guard: RedisGuard) -> None:
    """What a job does; under a fenced executor the guard knows by itself on whose behalf."""
    stock, log = guard.execute(
        "{shelf:7}",
        ("INCRBY", "{shelf:7}:stock", 10),
        ("RPUSH", "{shelf:7}:log", "restocked"),
        operation="restock",
    )
    print(f"stock {stock}, {log} entries in the log")


def main(url: str) -> None:
    with contextlib.closing(RedisGuard(url)) as guard:
        guard.execute("{shelf:7}", ("DEL", "{shelf:7}:stock", "{shelf:7}:log"), fence=fake_fence(token=1))
        with fake_fence(token=41, job="restock"):
            restock(guard)
        with fake_fence(token=42, job="restock"):  # the next attempt of the same execution
            try:
                restock(guard)
            except AlreadyApplied as repeat:
                print(f"not again: {repeat}")
            guard.claim("{shelf:7}")
        with fake_fence(token=41, job="restock"):  # the first one, after a long pause
            try:
                restock(guard)
            except StaleToken as refusal:
                print(f"too late: {refusal}")
                return
    raise SystemExit(1)


@contextlib.contextmanager
def own_server() -> Iterator[str]:
    """A Redis server for as long as this program runs."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        print(
            "There is no redis-server here: name one, as in python examples/redis_resource.py redis://localhost:6379/0"
        )
        raise SystemExit(0)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: S603 - a program that was found above
        try:
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            server.kill()
            server.wait()


def until_it_answers(url: str) -> None:
    """Wait for a server that has just been started."""
    with contextlib.closing(RedisGuard(url)) as guard:
        while True:
            with contextlib.suppress(NotYet):
                guard.claim("{start}", fence=fake_fence())
                return


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with own_server() as url:
            until_it_answers(url)
            main(url)
