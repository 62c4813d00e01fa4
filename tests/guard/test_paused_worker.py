"""The failure that leases cannot prevent, with real processes: paused past its lease, a worker wakes up and writes."""

import contextlib
import itertools
import os
import time
from pathlib import Path

import pytest
import redis
import sqlalchemy
from guard_bank import Bank
from servers import Node

SCRIPT = Path(__file__).with_name("paused_worker.py")
ROUNDS = int(os.environ.get("FENCE_PAUSE_ROUNDS", "5"))
"""Pauses on each resource. 50 is the full experiment."""

PAUSE = 0.2  # seconds; the lease is over after 0.15


def prepare(url):
    """An account with a log of the tokens that wrote to it; gives a function that reads both."""
    if url.startswith("redis"):

        def read():
            with contextlib.closing(redis.Redis.from_url(url)) as client:
                return int(client.get("account:42")), [int(token) for token in client.lrange("log", 0, -1)]

        return read
    bank = Bank(url)
    number = "SERIAL" if url.startswith("postgresql") else "INTEGER AUTO_INCREMENT"
    key = "INTEGER" if url.startswith("sqlite") else number
    with bank.engine.begin() as db:
        db.execute(sqlalchemy.text(f"CREATE TABLE log (id {key} PRIMARY KEY, token BIGINT)"))
    bank.engine.dispose()

    def read():
        with bank.engine.connect() as db:
            tokens = db.execute(sqlalchemy.text("SELECT token FROM log ORDER BY id")).scalars().all()
        balance = bank.balance
        bank.engine.dispose()
        return balance, tokens

    return read


def order(folder, number, what):
    """Tell the worker whose folder it is."""
    (folder / f"{number}.{what}").touch()


def pause_and_wake(store_url, tmp_path, guarded):
    """A claims and reads and is stopped; B claims, reads and writes; A goes on and writes. Gives what A said."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    said = []
    with contextlib.ExitStack() as stack:
        a, b = (stack.enter_context(Node(SCRIPT, store_url, store_url, folder, guarded)) for folder in folders)
        for node in (a, b):
            node.receive(timeout=30, ready=True)
        for number in range(ROUNDS):
            order(folders[0], number, "go")
            token = a.receive(number=number)["token"]
            with_a_stopped = time.monotonic()
            a.freeze()
            order(folders[0], number, "write")
            order(folders[1], number, "go")
            order(folders[1], number, "write")
            assert b.receive(number=number)["token"] > token
            assert "wrote" in b.receive(number=number)
            time.sleep(max(0.0, with_a_stopped + PAUSE - time.monotonic()))
            a.thaw()
            said.append(a.receive(number=number))
    return said


@pytest.mark.timeout(60 + 2 * ROUNDS)
@pytest.mark.backends("sqlite", "postgresql", "mariadb", "redis")
def test_no_write_of_a_worker_that_was_paused_is_accepted(store_url, tmp_path):
    """However often it happens, the resource refuses whoever wakes up, and only his successors' writes are there."""
    read = prepare(store_url)
    said = pause_and_wake(store_url, tmp_path, "guarded")
    balance, tokens = read()
    assert all("stale" in message for message in said), said
    assert balance == len(tokens) == ROUNDS
    assert tokens == sorted(tokens)


@pytest.mark.timeout(60 + 2 * ROUNDS)
@pytest.mark.backends("sqlite", "postgresql", "mariadb", "redis")
def test_the_same_worker_without_a_guard_overwrites_its_successor(store_url, tmp_path):
    """That is what makes the test above worth something: without the guard the stale writes are accepted."""
    read = prepare(store_url)
    said = pause_and_wake(store_url, tmp_path, "unguarded")
    _, tokens = read()
    assert all("wrote" in message for message in said), said
    assert sum(later < earlier for earlier, later in itertools.pairwise(tokens)) == ROUNDS
