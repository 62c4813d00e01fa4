"""A worker that claims a lease, reads, and writes what it has computed: one of two, the first of which is paused.

Usage: paused_worker.py STORE_URL RESOURCE_URL FOLDER guarded|unguarded

For each line of orders, a file `N.go` in the folder: claim, read the balance, say so, wait for `N.write`, write. The file
`N.go` holds the name of the lease.
"""

import contextlib
import json
import sys
import time
from pathlib import Path

import redis
import sqlalchemy
from claims import ask
from guard_bank import Account

from apscheduler_fence.bearer import Bearer
from apscheduler_fence.errors import StaleToken
from apscheduler_fence.guard import Guard
from apscheduler_fence.guard_redis import RedisGuard
from apscheduler_fence.lease import Refusal, claim, granted
from apscheduler_fence.stores import open_store

LEASE_FOR = 150_000
"""Microseconds: `lock_at_most` of the claims."""


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)  # noqa: T201 - standard output is the channel


class SqlAccount:
    """An account in a database; each write is logged in the order of the commits, by the row lock that it takes."""

    def __init__(self, url: str, *, guarded: bool) -> None:
        self.engine = sqlalchemy.create_engine(url)
        self.guard = Guard()
        self.guarded = guarded

    def read(self) -> int:
        with self.engine.connect() as db:
            return db.scalar(sqlalchemy.select(Account.balance))

    def write(self, balance: int, bearer: Bearer) -> None:
        block = self.guard.writing(self.engine, "account:42", "deposit", fence=bearer)
        with block if self.guarded else self.engine.begin() as db:
            db.execute(sqlalchemy.update(Account).values(balance=balance))
            db.execute(sqlalchemy.text("INSERT INTO log (token) VALUES (:token)"), {"token": bearer.token})


class RedisAccount:
    """The same in Redis."""

    def __init__(self, url: str, *, guarded: bool) -> None:
        self.client = redis.Redis.from_url(url)
        self.guard = RedisGuard(url)
        self.guarded = guarded

    def read(self) -> int:
        return int(self.client.get("account:42") or 0)

    def write(self, balance: int, bearer: Bearer) -> None:
        commands = ("SET", "account:42", balance), ("RPUSH", "log", bearer.token)
        if self.guarded:
            self.guard.execute("account:42", *commands, operation="deposit", fence=bearer)
        else:
            for command in commands:
                self.client.execute_command(*command)


def hold(store, lease: str) -> Bearer:
    """Wait until the lease is free or over, and take it for a slot of one's own."""
    while True:
        wanted = ask(lease, slot=f"s{time.time_ns()}", slot_at=time.time_ns() // 1000, lock_at_most=LEASE_FOR)
        decision = claim(store.read(wanted.key), wanted)
        if not isinstance(decision, Refusal):
            (token,) = store.swap([decision])
            if token is not None and decision.grants:
                grant = granted(wanted, token, 1)
                return Bearer(token, f"{grant.job}/{grant.slot}", grant.lease)
        time.sleep(0.01)


def main(store_url: str, resource_url: str, folder: Path, guarded: bool) -> None:
    make = RedisAccount if resource_url.startswith("redis") else SqlAccount
    account = make(resource_url, guarded=guarded)
    number = 0
    with contextlib.closing(open_store(store_url)) as store:
        store.open()
        say(ready=True)
        while True:
            wait_for(folder / f"{number}.go")
            bearer = hold(store, "pay")
            balance = account.read()
            say(number=number, token=bearer.token, read=balance)
            wait_for(folder / f"{number}.write")
            try:
                account.write(balance + 1, bearer)
                say(number=number, wrote=balance + 1)
            except StaleToken as stale:
                say(number=number, stale=stale.token, highest=stale.highest)
            number += 1


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "guarded")
