"""Sign once, send as often as needed: identical bytes are one transaction, bytes signed anew are another one.

Run it with: python examples/recipes/identical_bytes.py [database URL]
"""

import hashlib
import secrets
import sys
import tempfile
from pathlib import Path

import sqlalchemy as sa

from apscheduler_fence import Fence
from apscheduler_fence.prepared import prepared
from apscheduler_fence.testing import fake_fence

ledger: dict[str, bytes] = {}
"""Stands for a network that knows a transaction by the hash of its bytes, and keeps each once."""


def sign() -> bytes:
    """A signature is different each time, because of the nonce in it."""
    return f"pay 10 to bob, nonce {secrets.token_hex(8)}".encode()


def broadcast(transaction: bytes) -> None:
    ledger[hashlib.sha256(transaction).hexdigest()] = transaction


def transfer(engine: sa.Engine, *, fence: Fence) -> None:
    """The job: what is broadcast was committed before, so every retry and take-over finds it."""
    broadcast(prepared(engine, "transfer-to-bob", sign, fence=fence))


def main(url: str) -> bool:
    engine = sa.create_engine(url)
    prepared.create(engine)
    for attempt in (1, 2, 3):
        transfer(engine, fence=fake_fence(token=attempt, attempt=attempt))
    print(f"3 attempts, broadcast as {len(ledger)} transaction")
    engine.dispose()
    return len(ledger) == 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        url = sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{Path(folder) / 'app.db'}"
        raise SystemExit(0 if main(url) else 1)
