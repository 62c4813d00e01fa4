"""A worker is paused in the middle of a payment, replaced, and refused when it wakes up.

Run it with: python examples/payments.py [database URL]
"""

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import sqlalchemy as sa
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_fence import Fence, fenced
from apscheduler_fence.guard import Guard

AS_READ, INTEREST = 1000, 10

guard = Guard()
metadata = sa.MetaData()
account = sa.Table("account", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("cents", sa.Integer))


@fenced(lock_at_most="1s")
def pay_interest(url: str, paused: bool, *, fence: Fence) -> None:
    engine = sa.create_engine(url)
    with guard.writing(engine, "account:42", "interest") as db:
        cents = db.scalar(sa.select(account.c.cents)) or 0
        if paused:  # as by a frozen virtual machine, a starved CPU or a long garbage collection
            print(f"{fence.execution_id}: has read {cents}, and is paused", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
            print(f"{fence.execution_id}: wakes up, and writes {cents + INTEREST}", flush=True)
        db.execute(sa.update(account).values(cents=cents + INTEREST))
    print(f"{fence.execution_id}: has paid, {cents} -> {cents + INTEREST}", flush=True)
    engine.dispose()


def node(url: str, paused: bool, report: Connection) -> None:
    """An application on one machine; it reports how its runs end."""
    logging.disable()  # what follows is told by the job itself
    scheduler = BackgroundScheduler(executors={"default": {"type": "fenced", "store": url, "timeout": "0.3s"}})
    scheduler.add_listener(lambda event: report.send(repr(event.exception)), EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
    scheduler.add_job(pay_interest, "cron", second="*", args=[url, paused], id="interest", misfire_grace_time=None)
    scheduler.start()
    report.recv()
    scheduler.shutdown()


def main(url: str) -> bool:
    engine = sa.create_engine(url)
    guard.create(engine)
    metadata.create_all(engine)
    with engine.begin() as db:
        db.execute(sa.insert(account).values(id=42, cents=AS_READ))

    spawn = multiprocessing.get_context("spawn")
    (first, first_end), (second, second_end) = spawn.Pipe(), spawn.Pipe()
    worker = spawn.Process(target=node, args=(url, True, first_end))
    worker.start()
    os.waitpid(worker.pid or 0, os.WUNTRACED)  # until it is stopped

    successor = spawn.Process(target=node, args=(url, False, second_end))
    successor.start()
    outcomes = [second.recv(), second.recv()]
    second.send("end")
    successor.join()

    os.kill(worker.pid or 0, signal.SIGCONT)
    refusal = first.recv()
    print(f"refused: {refusal}")
    worker.kill()
    worker.join()

    with engine.connect() as db:
        cents = db.scalar(sa.select(account.c.cents)) or 0
    print(f"the balance is {cents}, and not {AS_READ + INTEREST} again")
    engine.dispose()
    return "StaleToken" in refusal and outcomes == ["None", "None"] and cents > AS_READ + INTEREST


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        url = sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{Path(folder) / 'bank.db'}"
        raise SystemExit(0 if main(url) else 1)
