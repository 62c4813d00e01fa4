"""A webhook is sent, its relay is killed before it can record that, and the next relay sends it again: one effect.

The endpoint deduplicates by `Idempotency-Key`. Without that no outbox could promise one effect, only that none is lost.

Run it with: python examples/outbox_webhook.py
"""

import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import urllib.request
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import sqlalchemy as sa
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.schedulers.background import BackgroundScheduler

from apscheduler_fence import Fence, fenced
from apscheduler_fence.outbox import Message, Outbox

FIRST_OF_MONTH = datetime(2026, 9, 1, tzinfo=timezone.utc)

metadata = sa.MetaData()
invoice = sa.Table("invoice", metadata, sa.Column("id", sa.Integer, primary_key=True), sa.Column("cents", sa.Integer))

# --- the application --------------------------------------------------------------------------------------------------


@fenced(lock_at_most="10s")
def write_invoice(url: str, *, fence: Fence) -> None:
    """The invoice, the message about it and the record of this run commit together, or none of them does."""
    engine = sa.create_engine(url)
    with engine.begin() as db:
        db.execute(sa.insert(invoice).values(id=1, cents=4200))
        Outbox(engine).add(db, "invoice", {"id": 1, "cents": 4200}, key="invoice-1")
        fence.settle_in(db)
    print(f"{fence.execution_id}: invoice and message are committed")
    engine.dispose()


def run_once(url: str) -> None:
    done = threading.Event()
    scheduler = BackgroundScheduler(executors={"default": {"type": "fenced", "store": url}})
    scheduler.add_listener(lambda _: done.set(), EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
    scheduler.add_job(
        write_invoice, "date", args=[url], id="write_invoice", run_date=FIRST_OF_MONTH, misfire_grace_time=None
    )
    scheduler.start()
    done.wait(30)
    scheduler.shutdown()


def relay(url: str, endpoint: str) -> None:
    """A process that relays; as a job it would be `add_job(outbox.relay, "interval", seconds=5, args=[send])`."""

    def send(message: Message) -> None:
        print(f"relay {os.getpid()} sends {message.idempotency_key}, attempt {message.attempt}", flush=True)
        headers = {"Idempotency-Key": f'"{message.idempotency_key}"', "X-Relay": str(os.getpid())}
        request = urllib.request.Request(endpoint, json.dumps(message.payload).encode(), headers)  # noqa: S310 - our own
        with urllib.request.urlopen(request, timeout=10):  # noqa: S310 - as above
            pass

    outbox = Outbox(sa.create_engine(url), claim_for="1s")
    while not outbox.relay(send):
        time.sleep(0.1)


# --- the endpoint -----------------------------------------------------------------------------------------------------


class Endpoint(BaseHTTPRequestHandler):
    """Accepts each key once. It takes the first request, and its relay dies before the answer arrives."""

    effects: dict[str, dict[str, int]] = {}  # noqa: RUF012 - the handler is made anew for each request
    requests = 0

    def do_POST(self) -> None:
        payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = self.headers["Idempotency-Key"]
        print(f"endpoint: {key} is {'a duplicate' if key in self.effects else 'new'}", flush=True)
        self.effects.setdefault(key, payload)
        Endpoint.requests += 1
        if Endpoint.requests == 1:
            print("endpoint: the relay is killed", flush=True)
            os.kill(int(self.headers["X-Relay"]), signal.SIGKILL)
            return
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing else."""


def main(url: str) -> bool:
    engine = sa.create_engine(url)
    metadata.create_all(engine)
    outbox = Outbox(engine)
    outbox.create()
    run_once(url)
    with HTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        spawn = multiprocessing.get_context("spawn")
        for _ in range(2):
            process = spawn.Process(target=relay, args=(url, f"http://127.0.0.1:{server.server_port}/"))
            process.start()
            process.join()
        server.shutdown()
    (entry,) = outbox.entries("sent")
    print(f"sent in attempt {entry.message.attempt}; requests: {Endpoint.requests}, effects: {len(Endpoint.effects)}")
    engine.dispose()
    return (Endpoint.requests, len(Endpoint.effects)) == (2, 1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        raise SystemExit(0 if main(f"sqlite:///{Path(folder) / 'shop.db'}") else 1)
