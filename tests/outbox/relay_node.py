"""One relay as a process of its own.

Usage: relay_node.py DATABASE_URL ENDPOINT_URL
"""

import json
import sys
import time
import urllib.request

import sqlalchemy

from apscheduler_fence.outbox import Message, Outbox


def main(database: str, endpoint: str) -> None:
    waits = {"connect_args": {"timeout": 30}} if database.startswith("sqlite") else {}
    outbox = Outbox(
        sqlalchemy.create_engine(database, **waits), batch=10, claim_for="1s", backoff="20ms", max_attempts=99
    )

    def send(message: Message) -> None:
        headers = {"Idempotency-Key": f'"{message.idempotency_key}"', "Content-Type": "application/json"}
        body = json.dumps(message.payload).encode()
        with urllib.request.urlopen(urllib.request.Request(endpoint, body, headers), timeout=10):
            pass

    print(json.dumps({"ready": True}), flush=True)  # noqa: T201 - standard output is the channel
    while True:
        outbox.relay(send)
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
