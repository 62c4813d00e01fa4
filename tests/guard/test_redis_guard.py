"""The guard of resources in Redis."""

import contextlib
import pickle
import time

import pytest
from guard_bank import TOKEN, bearer
from redis.exceptions import ConnectionError as Unreachable
from redis.exceptions import ResponseError
from servers import Proxy

from apscheduler_fence.bearer import TOKEN_LIMIT
from apscheduler_fence.errors import AlreadyApplied, ConfigError, FenceError, InvalidToken, StaleToken
from apscheduler_fence.guard import DAY
from apscheduler_fence.guard_redis import RedisGuard
from apscheduler_fence.testing import fake_fence

pytestmark = pytest.mark.backends("redis")
DEPOSIT = ("HINCRBY", "account:42", "balance", 5)


@pytest.fixture
def guard(store_url):
    """A guard on an empty database."""
    with contextlib.closing(RedisGuard(store_url)) as guard:
        yield guard


def balance(guard):
    """Read the account in the name of a token newer than all others."""
    return guard.execute("account:42", ("HGET", "account:42", "balance"), fence=bearer(10**6, lease="reader"))[0]


def test_commands_run_together_and_their_replies_come_back(guard):
    """All commands of one call are executed at one instant, in order."""
    replies = guard.execute(
        "account:42",
        DEPOSIT,
        ("SET", b"raw\x00key", b"\xff\x00"),
        ("GET", b"raw\x00key"),
        ("GET", "none"),
        fence=bearer(1),
    )
    assert replies == [5, b"OK", b"\xff\x00", None]


def test_a_stale_token_executes_nothing(guard):
    """A token below the highest is refused with that one; the same and newer ones are accepted."""
    for token in (2, 2, 3):
        guard.execute("account:42", DEPOSIT, fence=bearer(token))
    with pytest.raises(StaleToken) as refusal:
        guard.execute("account:42", DEPOSIT, fence=bearer(1))
    assert (refusal.value.resource, refusal.value.token, refusal.value.highest) == ("account:42", TOKEN + 1, TOKEN + 3)
    assert balance(guard) == b"15"


def test_neighbouring_tokens_of_sixteen_digits_are_told_apart(guard):
    """No digit of a token in microseconds is lost in the script."""
    now = time.time_ns() // 1000
    guard.claim("account:42", fence=fake_fence(token=now + 1))
    with pytest.raises(StaleToken) as refusal:
        guard.claim("account:42", fence=fake_fence(token=now))
    assert refusal.value.highest == now + 1


def test_an_equal_token_is_accepted_from_the_same_execution_only(guard):
    """The execution that had a token first keeps it."""
    guard.claim("account:42", fence=bearer(1))
    guard.claim("account:42", fence=bearer(1))
    with pytest.raises(StaleToken, match="from another execution"):
        guard.claim("account:42", fence=bearer(1, "pay/2026-01-01T00:00:01Z"))


def test_two_leases_do_not_reject_each_other(guard):
    """Tokens of different leases have no order."""
    for token, lease in ((9, "pay"), (1, "refund")):
        guard.execute("account:42", DEPOSIT, fence=bearer(token, f"{lease}/x", lease))
    assert balance(guard) == b"10"


def test_a_retry_with_a_larger_token_does_not_apply_an_operation_twice(guard):
    """Only the operation's name can tell a retry from new work."""
    guard.execute("account:42", DEPOSIT, operation="settle", fence=bearer(1))
    with pytest.raises(AlreadyApplied, match="'settle'"):
        guard.execute("account:42", DEPOSIT, operation="settle", fence=bearer(2))
    guard.execute("account:42", DEPOSIT, operation="fee", fence=bearer(2))
    guard.execute("account:42", DEPOSIT, operation="settle", fence=bearer(3, "pay/2026-01-01T00:00:01Z"))
    assert balance(guard) == b"15"


@pytest.mark.parametrize("token", [TOKEN_LIMIT, 0, True, "7"])
def test_what_can_be_no_token_is_refused(guard, token):
    """A number that a double cannot hold, or that is none, is never sent."""
    with pytest.raises(InvalidToken):
        guard.claim("account:42", fence=fake_fence(token=token))


def test_a_token_far_ahead_of_the_servers_clock_is_refused(guard):
    """One wild number must not close a resource for ever."""
    now = time.time_ns() // 1000
    with pytest.raises(InvalidToken, match="ahead"):
        guard.claim("account:42", fence=fake_fence(token=now + DAY + 60_000_000))
    guard.claim("account:42", fence=fake_fence(token=now + DAY - 60_000_000))


def test_a_command_that_fails_is_reported_and_those_before_it_stand(guard):
    """As in MULTI; an operation is not applied if its first command failed, and applied if a later one did."""
    wrong = ("INCR", "account:42")
    guard.execute("account:42", DEPOSIT, fence=bearer(1))
    with pytest.raises(ResponseError, match=r"command 1 of 2.*WRONGTYPE"):
        guard.execute("account:42", wrong, DEPOSIT, operation="a", fence=bearer(1))
    guard.execute("account:42", DEPOSIT, operation="a", fence=bearer(1))
    with pytest.raises(ResponseError, match="command 2 of 2"):
        guard.execute("account:42", DEPOSIT, wrong, operation="b", fence=bearer(1))
    with pytest.raises(AlreadyApplied):
        guard.execute("account:42", DEPOSIT, operation="b", fence=bearer(1))
    assert balance(guard) == b"15"


def test_a_lost_reply_is_an_error_and_not_a_second_execution(guard, store_url, redis_server):
    """Nothing is sent twice; with an operation the caller may try again, and learns that it was done."""
    with Proxy(redis_server.port) as proxy, contextlib.closing(RedisGuard(proxy.through(store_url))) as behind:
        behind.claim("account:42", fence=bearer(1))
        proxy.lose_next_reply()
        with pytest.raises(Unreachable):
            behind.execute("account:42", DEPOSIT, operation="settle", fence=bearer(1))
        with pytest.raises(AlreadyApplied):
            behind.execute("account:42", DEPOSIT, operation="settle", fence=bearer(1))
    assert balance(guard) == b"5"


def test_operations_are_forgotten_after_a_while(store_url):
    """A remembered operation does not stay for ever."""
    with contextlib.closing(RedisGuard(store_url, keep_operations="50ms")) as guard:
        guard.execute("account:42", DEPOSIT, operation="settle", fence=bearer(1))
        time.sleep(0.1)
        guard.execute("account:42", DEPOSIT, operation="settle", fence=bearer(1))


def test_a_resource_can_be_claimed_and_pickled(guard):
    """A process pool's child makes its own guard from the URL."""
    resource = pickle.loads(pickle.dumps(guard.resource("account:42")))
    with contextlib.closing(resource.guard):
        resource.claim(bearer(2))
    with pytest.raises(StaleToken):
        guard.claim("account:42", fence=bearer(1))


def test_a_live_client_is_used_through_a_copy(redis_server):
    """A client that decodes replies and retries lends its address only."""
    redis_server.execute("FLUSHDB")
    with redis_server.client() as client, contextlib.closing(RedisGuard(client)) as guard:
        assert guard.execute("account:42", DEPOSIT, ("HGET", "account:42", "balance"), fence=bearer(1)) == [5, b"5"]


def test_without_a_fence_nothing_is_executed_in_anybodys_name(guard):
    """Outside a fenced job the guard says what to do; inside one it knows the run."""
    with pytest.raises(FenceError, match="no fenced job"):
        guard.execute("account:42", DEPOSIT)
    with fake_fence(token=TOKEN):
        guard.execute("account:42", DEPOSIT)
    assert balance(guard) == b"5"


@pytest.mark.parametrize("name", ["a}b", "{}x", "", "x "])
def test_a_name_whose_fence_would_land_on_another_node_is_refused(guard, name):
    """So is one that is no name at all."""
    with pytest.raises(ConfigError):
        guard.claim(name, fence=bearer(1))


def test_in_a_cluster_a_resource_its_tagged_keys_and_its_fence_are_on_one_node(redis_cluster):
    """Other keys are refused before anything is executed."""
    with contextlib.closing(RedisGuard(redis_cluster.url)) as guard:
        for number in range(8):
            name = f"account:{number}"
            guard.execute(name, ("INCR", name), ("RPUSH", f"{{{name}}}:log", "x"), operation="o", fence=bearer(1))
            with pytest.raises(AlreadyApplied):
                guard.execute(name, ("INCR", name), operation="o", fence=bearer(1))
            tagged = f"{{user:{number}}}:balance"
            guard.execute(tagged, ("INCR", tagged), fence=bearer(1))
        with pytest.raises(ConfigError, match="hash tag"):
            guard.execute("account:1", ("INCR", "account:1"), ("INCR", "account:2"), fence=bearer(1))
        assert guard.execute("account:1", ("GET", "account:1"), fence=bearer(1)) == [b"1"]
