"""MariaDB."""

import os
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

import pymysql

from servers.server import Server, program, run


def _program(name: str) -> str | None:
    return program(name, f"usr/sbin/{name}", f"usr/bin/{name}", f"opt/homebrew/bin/{name}")


class MariaDB(Server):
    """A MariaDB server with the user `root` and no passwords.

    Args:
        durable: write as in production. False spares the waits for the disk: commits survive `kill`, not a power cut.
        options: settings as on its command line, without the dashes.
        port: a given port instead of a free one.
    """

    not_yet = (pymysql.OperationalError,)

    def __init__(
        self, *, durable: bool = False, options: Mapping[str, str] | None = None, port: int | None = None
    ) -> None:
        super().__init__(port)
        self._options = {**({} if durable else {"innodb-flush-log-at-trx-commit": "2"}), **(options or {})}

    @classmethod
    def available(cls) -> bool:
        return bool(_program("mariadbd") and _program("mariadb-install-db"))

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the database `mysql`."""
        return self.database_url("mysql")

    def database_url(self, name: str) -> str:
        """The SQLAlchemy URL of a database."""
        return f"mariadb+pymysql://root@127.0.0.1:{self.port}/{name}"

    def connect(self, database: str = "mysql") -> pymysql.Connection:
        """A new autocommit connection of the bare driver."""
        return pymysql.connect(
            host="127.0.0.1",
            port=self.port,
            user="root",
            database=database,
            autocommit=True,
            ssl_disabled=True,
            connect_timeout=5,
            read_timeout=30,
        )

    def execute(self, statement: str, database: str = "mysql") -> list[tuple]:
        """Runs one statement in a connection of its own and returns its rows."""
        with closing(self.connect(database)) as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def create_database(self, name: str) -> str:
        """Makes an empty database and returns its URL."""
        self.execute(f"CREATE DATABASE `{name}`")
        return self.database_url(name)

    def drop_database(self, name: str) -> None:
        """Ends the connections to a database and removes it: an open transaction would block that."""
        for (connection,) in self.execute(f"SELECT id FROM information_schema.processlist WHERE db = '{name}'"):
            with suppress(pymysql.OperationalError):  # it has ended by itself
                self.execute(f"KILL {connection}")
        self.execute(f"DROP DATABASE IF EXISTS `{name}`")

    def install(self) -> None:
        run(
            [
                *(_program("mariadb-install-db"), "--no-defaults", f"--datadir={self.folder / 'data'}", *_as_root()),
                *("--auth-root-authentication-method=normal", "--skip-test-db"),
            ]
        )

    def command(self) -> Sequence[str | Path]:
        options = {
            "datadir": str(self.folder / "data"),
            "port": str(self.port),
            "bind-address": "127.0.0.1",
            "socket": str(self.folder / "sock"),
            "pid-file": str(self.folder / "pid"),
            **self._options,
        }
        settings = [f"--{name}={value}" for name, value in options.items()]
        return [_program("mariadbd"), "--no-defaults", "--skip-name-resolve", *_as_root(), *settings]

    def ping(self) -> None:
        self.execute("SELECT 1")


def _as_root() -> list[str]:
    return ["--user=root"] if os.geteuid() == 0 else []
