"""The outbox's promise, with real processes: relays die at any moment, and every message has one effect."""

import contextlib
import os
import random
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
import sqlalchemy
from endpoint import deduplicating_endpoint
from outbox_database import Mail, bearer
from servers import Node
from waiting import eventually

SCRIPT = Path(__file__).with_name("relay_node.py")
MESSAGES = int(os.environ.get("FENCE_OUTBOX_MESSAGES", "120"))
"""Messages that flow. 2,000 is the full experiment."""

KILLS = int(os.environ.get("FENCE_OUTBOX_KILLS", "3"))
"""How often each relay is killed. 30 is the full experiment."""

RELAYS = 3
ORDERS = 12


def live_and_die(database, endpoint, number):
    """One relay after the other, each of which is killed at a moment that nobody chose; the last one stays."""
    chance = random.Random(number)
    for _ in range(KILLS):
        with Node(SCRIPT, database, endpoint) as relay:
            relay.receive(timeout=60, ready=True)
            time.sleep(chance.uniform(0, 0.4))
            relay.kill()


def add_messages(mail):
    """Messages in several orders, some of which are rolled back, for about as long as relays are killed."""
    for number in range(MESSAGES):
        time.sleep(0.8 * KILLS / MESSAGES)
        order = f"order-{number % ORDERS}"
        for payload, commits in (([order, number], True), (["rolled back", number], False)):
            if not commits and number % 10:
                continue
            with mail.engine.connect() as db:
                db.execute(sqlalchemy.text("SELECT 1"))
                mail.outbox.add(db, "order", payload, key=f"{number}", order_key=order, fence=bearer(f"job/{commits}"))
                if commits:
                    db.commit()
                else:
                    db.rollback()


@pytest.mark.timeout(120 + MESSAGES + 20 * KILLS)
@pytest.mark.backends("sqlite", "postgresql", "mariadb")
def test_every_message_has_exactly_one_effect_although_relays_are_killed(store_url):
    """None is lost, none is applied twice, each order is kept, and what was rolled back is never sent."""
    waits = {"connect_args": {"timeout": 30}} if store_url.startswith("sqlite") else {}
    mail = Mail(sqlalchemy.create_engine(store_url, **waits), claim_for="1s")
    with deduplicating_endpoint(failures=0.05) as endpoint, contextlib.ExitStack() as stack:
        lives = [
            threading.Thread(target=live_and_die, args=(store_url, endpoint.url, number)) for number in range(RELAYS)
        ]
        for life in lives:
            life.start()
        add_messages(mail)
        for life in lives:
            life.join()
        last = stack.enter_context(Node(SCRIPT, store_url, endpoint.url))
        eventually(lambda: len(endpoint.effects) >= MESSAGES, within=60 + MESSAGES)
        eventually(lambda: not mail.outbox.entries("waiting"), within=30)
        last.kill()
    by_order = defaultdict(list)
    for order, number in endpoint.effects:
        by_order[order].append(number)
    assert sorted(number for numbers in by_order.values() for number in numbers) == list(range(MESSAGES))
    assert all(numbers == sorted(numbers) for numbers in by_order.values())
    assert len(mail.outbox.entries("sent", limit=10 * MESSAGES)) == MESSAGES
    print(f"{endpoint.duplicates} duplicates swallowed by the endpoint")  # noqa: T201 - for people who run it
    mail.engine.dispose()
