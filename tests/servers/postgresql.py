"""PostgreSQL."""

import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psycopg

from servers.server import Server, program, run, user_below_root

# Not synchronous_commit: without that, commits are still in the memory of the server when it is killed.
_UNSAFE_AND_FAST = {"fsync": "off", "full_page_writes": "off"}


def _program(name: str) -> str | None:
    return program(name, f"usr/lib/postgresql/*/bin/{name}", f"opt/homebrew/opt/postgresql@*/bin/{name}")


class PostgreSQL(Server):
    """A PostgreSQL server with the superuser `postgres` and no passwords.

    Args:
        durable: write as in production. False spares the waits for the disk: commits survive `kill`, not a power cut.
        options: settings as in postgresql.conf.
        port: a given port instead of a free one.
    """

    user = "postgres"
    stop_signal = signal.SIGINT  # "fast": does not wait for clients
    close_signal = getattr(signal, "SIGQUIT", signal.SIGTERM)  # "immediate": no checkpoint, shared memory is given back
    not_yet = (psycopg.OperationalError,)

    def __init__(
        self, *, durable: bool = False, options: Mapping[str, str] | None = None, port: int | None = None
    ) -> None:
        super().__init__(port)
        self._options = {**({} if durable else _UNSAFE_AND_FAST), **(options or {})}

    @classmethod
    def available(cls) -> bool:
        return bool(_program("postgres") and _program("initdb"))

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the database `postgres`."""
        return self.database_url("postgres")

    def database_url(self, name: str) -> str:
        """The SQLAlchemy URL of a database."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{name}"

    def connect(self, database: str = "postgres") -> "psycopg.Connection":
        """A new autocommit connection of the bare driver."""
        return psycopg.connect(
            f"postgresql://postgres@127.0.0.1:{self.port}/{database}", autocommit=True, connect_timeout=5
        )

    def execute(self, statement: str, database: str = "postgres") -> list[tuple]:
        """Runs one statement in a connection of its own and returns its rows."""
        with self.connect(database) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def create_database(self, name: str) -> str:
        """Makes an empty database and returns its URL."""
        self.execute(f'CREATE DATABASE "{name}" TEMPLATE template0')
        return self.database_url(name)

    def drop_database(self, name: str) -> None:
        """Removes a database and ends the connections to it."""
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def install(self) -> None:
        run(
            [
                *(_program("initdb"), "-D", self.folder / "data", "-A", "trust", "-U", "postgres"),
                *("--no-sync", "--no-instructions", "-E", "UTF8", "--locale=C"),
            ],
            user_below_root(self.user),
        )

    def command(self) -> Sequence[str | Path]:
        options = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",  # a path in a deep temporary folder would be too long for a socket
            "dynamic_shared_memory_type": "mmap",  # in the folder, so that nothing is left in /dev/shm by `kill`
            **self._options,
        }
        return [
            _program("postgres"),
            "-D",
            self.folder / "data",
            *(part for name, value in options.items() for part in ("-c", f"{name}={value}")),
        ]

    def ping(self) -> None:
        self.execute("SELECT 1")

    def close(self) -> None:
        if not self.running and self._folder:
            self._give_back_shared_memory()
        super().close()

    def _give_back_shared_memory(self) -> None:
        # The kernel keeps the segment of a killed server for ever, and there are 4096 at most.
        left = self.folder / "data" / "postmaster.pid"
        lines = left.read_text().splitlines() if left.exists() else []
        if len(lines) > 6 and shutil.which("ipcrm"):
            subprocess.run(["ipcrm", "-m", lines[6].split()[1]], check=False, stderr=subprocess.DEVNULL)
