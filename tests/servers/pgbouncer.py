"""PgBouncer in front of a PostgreSQL server."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import psycopg

from servers.postgresql import PostgreSQL
from servers.server import Server, program


class PgBouncer(Server):
    """A PgBouncer that gives out server connections for one transaction at a time.

    Args:
        target_port: the port of the PostgreSQL server on this machine.
        options: settings as in the section `[pgbouncer]` of its configuration file.
    """

    user = "postgres"
    not_yet = (psycopg.OperationalError,)

    def __init__(self, target_port: int, options: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._target_port = target_port
        self._options = dict(options or {})

    @classmethod
    def available(cls) -> bool:
        return bool(_program()) and PostgreSQL.available()

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the database `postgres` through the pooler."""
        return self.database_url("postgres")

    def database_url(self, name: str) -> str:
        """The SQLAlchemy URL of a database through the pooler."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{name}"

    def install(self) -> None:
        options = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            **self._options,
        }
        settings = "\n".join(f"{name} = {value}" for name, value in options.items())
        (self.folder / "pgbouncer.ini").write_text(
            f"[databases]\n* = host=127.0.0.1 port={self._target_port} user=postgres\n[pgbouncer]\n{settings}\n"
        )

    def command(self) -> Sequence[str | Path]:
        return [_program(), self.folder / "pgbouncer.ini"]

    def ping(self) -> None:
        with psycopg.connect(f"postgresql://postgres@127.0.0.1:{self.port}/postgres", connect_timeout=5) as connection:
            connection.execute("SELECT 1")


def _program() -> str | None:
    return program("pgbouncer", "usr/sbin/pgbouncer")
