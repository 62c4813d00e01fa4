"""Many writers with tokens in any order at one resource: what is accepted is in order, and once."""

import contextlib
import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
import sqlalchemy
from guard_bank import TOKEN, Bank, bearer
from sqlalchemy.exc import DBAPIError

from apscheduler_fence.errors import AlreadyApplied, StaleToken
from apscheduler_fence.guard_redis import RedisGuard
from apscheduler_fence.stores.sql.engines import is_transient

WRITERS = 16
OPERATIONS = int(os.environ.get("FENCE_GUARD_OPERATIONS", "400"))
"""Writes that are tried, each operation twice. 10,000 is the full experiment."""

SPREAD = 20


def attempts():
    """Two attempts of each operation, an execution of its own, under tokens that rise and are out of order."""
    chance = random.Random(1)
    tries = []
    for number in range(OPERATIONS // 2):
        for _ in range(2):
            when = number + chance.randint(-SPREAD, SPREAD)
            tries.append(
                (when, bearer(SPREAD + max(0, when + chance.randint(0, SPREAD)), f"pay/{number}"), f"op-{number}")
            )
    return [(run, operation) for _, run, operation in sorted(tries, key=lambda each: each[0])]


def all_at_once(write):
    """Let the writers make all attempts; gives how each ended."""

    def one(attempt):
        run, operation = attempt
        while True:
            try:
                write(run, operation)
            except (StaleToken, AlreadyApplied) as refusal:  # noqa: PERF203 - the database may ask for another try
                return operation, type(refusal).__name__
            except DBAPIError as error:
                if not is_transient(error):
                    raise
            else:
                return operation, "applied"

    with ThreadPoolExecutor(WRITERS) as pool:
        return list(pool.map(one, attempts()))


def hold_to_the_truth(outcomes, log):
    """The log, in the order of the commits, holds tokens that never fall and no operation twice."""
    tokens = [token for token, _ in log]
    applied = Counter(operation for operation, outcome in outcomes if outcome == "applied")
    repeated = {operation for operation, outcome in outcomes if outcome == "AlreadyApplied"}
    assert tokens == sorted(tokens)
    assert Counter(operation for _, operation in log) == applied
    assert set(applied.values()) == {1}
    assert repeated <= set(applied)
    assert len(applied) > OPERATIONS // 20
    assert Counter(outcome for _, outcome in outcomes).keys() == {"applied", "StaleToken", "AlreadyApplied"}
    return tokens


@pytest.mark.timeout(120 + OPERATIONS // 10)
@pytest.mark.backends("sqlite", "postgresql", "mariadb")
def test_accepted_tokens_never_decrease_and_operations_are_applied_once(store_url):
    """Sixteen writers meet at one resource of a database."""
    waiting = {"connect_args": {"timeout": 60}} if store_url.startswith("sqlite") else {}
    bank = Bank(store_url, pool_size=WRITERS, **waiting)
    log = sqlalchemy.Table(
        "log",
        sqlalchemy.MetaData(),
        sqlalchemy.Column("id", sqlalchemy.Integer, primary_key=True),
        sqlalchemy.Column("token", sqlalchemy.BigInteger),
        sqlalchemy.Column("operation", sqlalchemy.String(40)),
    )
    log.create(bank.engine)

    def write(run, operation):
        with bank.engine.begin() as db:
            db.execute(sqlalchemy.select(1))
            bank.guard.check(db, "account:42", operation, fence=run)
            # After the check for once: its lock makes the order of these rows that of the commits.
            db.execute(sqlalchemy.insert(log).values(token=run.token, operation=operation))

    outcomes = all_at_once(write)
    with bank.engine.connect() as db:
        rows = db.execute(sqlalchemy.select(log.c.token, log.c.operation).order_by(log.c.id)).all()
    tokens = hold_to_the_truth(outcomes, [tuple(row) for row in rows])
    assert bank.rows("fence_resource")[0][2] == tokens[-1]
    bank.engine.dispose()


@pytest.mark.timeout(120 + OPERATIONS // 10)
@pytest.mark.backends("redis")
def test_accepted_tokens_never_decrease_in_redis(store_url):
    """Sixteen writers meet at one resource in Redis."""
    with contextlib.closing(RedisGuard(store_url)) as guard:

        def write(run, operation):
            guard.execute("account:42", ("RPUSH", "log", f"{run.token} {operation}"), operation=operation, fence=run)

        outcomes = all_at_once(write)
    with contextlib.closing(redis.Redis.from_url(store_url, decode_responses=True)) as client:
        rows = [line.split() for line in client.lrange("log", 0, -1)]
    tokens = hold_to_the_truth(outcomes, [(int(token), operation) for token, operation in rows])
    assert tokens[0] > TOKEN
