"""What the benchmarks share: servers of their own, rounds in which all contenders take turns, and a note of the machine."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

PACKAGES = (
    "apscheduler-fence",
    "APScheduler",
    "SQLAlchemy",
    "psycopg",
    "PyMySQL",
    "redis",
    "python-redis-lock",
    "pottery",
)


def environment() -> dict[str, Any]:
    """When and on what something was measured."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "versions": versions,
    }


def environment_line(about: Mapping[str, Any]) -> str:
    """The same for people."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return f"{about['date']}, {about['system']}, Python {about['python']}, {versions}"


@contextlib.contextmanager
def servers(*wanted: str, durable: bool = True) -> Iterator[dict[str, Any]]:
    """Start servers of one's own and give each store's URL by name; not `durable` ones do not wait for their disk.

    Names are `memory`, `sqlite`, `postgresql`, `mariadb` and `redis`; those whose server is not installed are left out,
    with a word on standard error. Under the name with `_server` is the server itself.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from servers import MariaDB, PostgreSQL, Redis  # noqa: PLC0415 - found by the line above

    kinds = {
        "postgresql": lambda: PostgreSQL(durable=durable, options={"max_connections": "300"}),
        "mariadb": lambda: MariaDB(durable=durable, options={"max-connections": "300"}),
        "redis": lambda: Redis(aof=durable),
    }
    available = {"postgresql": PostgreSQL, "mariadb": MariaDB, "redis": Redis}
    found: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-"))
        for name in wanted:
            if name == "memory":
                found[name] = "memory://benchmark"
            elif name == "sqlite":
                found[name] = f"sqlite:///{folder}/benchmark.db"
            elif available[name].available():
                server = stack.enter_context(kinds[name]())
                found[f"{name}_server"] = server
                found[name] = server.url if name == "redis" else server.create_database("benchmark")
            else:
                print(f"{name} is not installed here and is left out", file=sys.stderr)
        yield found


def in_turns(contenders: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Call all contenders in every round, in an order that changes, and return the median time of each in µs.

    A busy machine is then equally busy for all of them, so that ratios hold where absolute figures do not.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for call in contenders.values():
        for _ in range(5):  # connections, compiled and prepared statements
            call()
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            began = time.perf_counter()
            contenders[name]()
            times[name].append((time.perf_counter() - began) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of the values lies; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0
