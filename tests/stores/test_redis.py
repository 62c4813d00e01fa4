"""What is particular to Redis: round trips, numbers, names, clusters, losses, and clients that repeat themselves."""

import contextlib
import itertools
import os
import pickle
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import freezegun
import pytest
import redis
from redis.crc import key_slot
from redis.sentinel import Sentinel
from servers import Proxy, Redis

from apscheduler_fence.errors import ConfigError, StoreError
from apscheduler_fence.lease import Ask, Change, Execution, Insert, Key, Refusal, claim, granted, renew, settle
from apscheduler_fence.stores.base import Executions, HeldLeases
from apscheduler_fence.stores.redis import RedisStore

_numbers = itertools.count(1)
SECOND = 1_000_000


def ask(lease="pay", slot=None, **terms):
    """A claim that no other test makes."""
    number = next(_numbers)
    defaults = {"job": lease, "slot_at": number, "scheduled_at": number, "lock_at_most": 30 * SECOND}
    return Ask(lease=lease, slot=slot or f"s{number}", nonce=f"host:1:{number}", **{**defaults, **terms})


def win(store, wanted):
    """Claim, and return what was granted."""
    (token,) = store.swap([claim(store.read(wanted.key), wanted)])
    assert token is not None
    return granted(wanted, token, 1)


def run(store, wanted, outcome="succeeded"):
    """Claim and settle."""
    grant = win(store, wanted)
    assert store.swap([settle(grant, outcome)]) == [grant.token]
    return grant


@contextlib.contextmanager
def opened(source, namespace="", **options):
    """A store that is closed at the end."""
    store = RedisStore(source, namespace, **options)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def store(redis_server):
    """A store in an empty namespace of the shared server."""
    with opened(redis_server.url, f"test-{next(_numbers)}") as store:
        yield store


@contextlib.contextmanager
def commands_sent(server):
    """The commands that clients send in the block, without those that scripts run."""
    sent = []
    with server.client() as client, server.client() as last:
        last.ping()  # connects before anything counts
        with client.monitor() as monitor:
            yield sent
            last.echo("over")
            sent += _monitored(monitor)


def _monitored(monitor):
    while (seen := monitor.next_command())["command"].upper() != "ECHO OVER":
        if seen["client_type"] != "lua":
            yield seen["command"].split()[0].upper()


def calls(server, command):
    """How often the server has run a command."""
    with server.client() as client:
        return client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"]


# --- round trips ------------------------------------------------------------------------------------------------------


def test_a_claim_costs_two_round_trips_and_its_settle_one(redis_server, store):
    """A winner reads, swaps, and settles, and each is one command."""
    run(store, ask())  # connects, and makes the scripts known
    with commands_sent(redis_server) as sent:
        run(store, ask())
    assert sent == ["EVALSHA"] * 3


def test_a_loser_reads_once_and_writes_nothing(redis_server, store):
    """A claim of a slot that is done is one read that changes nothing in the server."""
    first = ask()
    run(store, first)
    with redis_server.client() as client:
        before = client.info("persistence")["rdb_changes_since_last_save"]
        with commands_sent(redis_server) as sent:
            assert claim(store.read(first.key), replace(first, nonce="another")) == Refusal("done", first.nonce)
        assert client.info("persistence")["rdb_changes_since_last_save"] == before
    assert sent == ["EVALSHA"]


def test_many_leases_are_renewed_in_few_round_trips(redis_server, store):
    """1,000 renewals are two commands, and each has an answer of its own, in order."""
    leases = [ask(f"lease-{number}") for number in range(1000)]
    tokens = store.swap([claim(store.read(wanted.key), wanted) for wanted in leases])
    grants = [granted(wanted, token, 1) for wanted, token in zip(leases, tokens, strict=True)]
    grants[7] = replace(grants[7], holder="somebody else")
    with commands_sent(redis_server) as sent:
        renewed = store.swap([renew(grant, 30 * SECOND) for grant in grants])
    assert sent == ["EVALSHA"] * 2
    assert renewed == [*tokens[:7], None, *tokens[8:]]


def test_an_error_text_of_a_megabyte_is_sent_alone(redis_server, store):
    """What is sent in one command is bounded in bytes too."""
    grants = [win(store, ask(f"big-{number}")) for number in range(3)]
    with commands_sent(redis_server) as sent:
        assert None not in store.swap([settle(grant, "failed", "x" * 600_000) for grant in grants])
    assert sent == ["EVALSHA"] * 3


def test_scripts_that_the_server_has_forgotten_are_sent_again(redis_server, store):
    """SCRIPT FLUSH, as a restart, costs one more round trip and no error."""
    run(store, ask())
    redis_server.execute("SCRIPT", "FLUSH")
    with commands_sent(redis_server) as sent:
        store.read(ask().key)
        store.read(ask().key)
    assert sent == ["EVALSHA", "EVAL", "EVALSHA"]


def test_forgotten_scripts_are_sent_again_with_what_follows_them(redis_sentinel):
    """The same with WAIT in the same round trip."""
    with opened(redis_sentinel.url, f"test-{next(_numbers)}", min_replicas=1) as store:
        redis_sentinel.master().execute("SCRIPT", "FLUSH")
        run(store, ask())


# --- numbers and names ------------------------------------------------------------------------------------------------


def test_times_keep_every_microsecond(store):
    """Sums of 16 digits come back exact; Lua's own conversion to text would round them."""
    for offset in (1_234_567, 1_000_001, 9):
        wanted = ask("exact", lock_at_most=offset, lock_at_least=0, keep_for=offset)
        seen = store.read(wanted.key)
        grant = win(store, wanted)
        seen = store.read(wanted.key)
        assert seen.lease.expires_at - seen.lease.acquired_at == offset
        assert seen.execution.started_at == seen.lease.acquired_at
        assert seen.lease.token == seen.execution.token == grant.token
        store.swap([settle(grant, "failed")])
        row = store.read(wanted.key).execution
        assert row.keep_until - row.finished_at == offset


def test_a_token_near_the_largest_exact_number_grows_by_one(redis_server, store):
    """Above the clock a token is the last one plus one, to the last digit."""
    run(store, ask())
    key = f"fence:{{{store.namespace}}}:lease:pay"
    redis_server.execute("HSET", key, "token", str(2**53 - 4))
    assert [run(store, ask()).token for _ in range(3)] == [2**53 - 3, 2**53 - 2, 2**53 - 1]


@pytest.mark.parametrize("namespace", ["", "%", "app", "{app}", "a}b{c", "a:b", "über", "a b"])
def test_all_keys_of_a_namespace_share_a_hash_slot(redis_server, namespace):
    """Whatever braces the namespace and the names hold, one node of a cluster has all of it."""
    with opened(redis_server.url, namespace, prefix=f"p{next(_numbers)}") as store:
        run(store, ask("{x}y"), outcome="failed")
        win(store, ask("{}"))
        waiting = Execution("q}{", "{s}", "w{", 1, 1, "waiting", 0, 0, None)
        assert store.swap([Change(None, (Insert(waiting),))]) == [0]
        with redis_server.client(decode_responses=False) as client:
            keys = list(client.scan_iter(match=store._options[0][1] + ":*"))
        assert len(keys) > 8
        assert {key_slot(key) for key in keys} == {key_slot(store._base)}


def test_namespaces_do_not_see_each_other(redis_server):
    """Two applications with the same names, one of them without a namespace, are apart."""
    with contextlib.ExitStack() as stack:
        names = ("", "%", "%25", "{}", "a", "a:lease")
        prefix = f"p{next(_numbers)}"
        stores = [stack.enter_context(opened(redis_server.url, name, prefix=prefix)) for name in names]
        for store in stores:
            wanted = ask(slot="same")
            assert store.read(wanted.key).lease is None
            run(store, wanted)


def test_awkward_names_and_texts_come_back_as_they_were(store):
    """Names that would collide if they were only joined are kept apart; texts may hold what is no valid UTF-8."""
    pairs = [
        ("a\tb", "c"),
        ("a", "b\tc"),
        ("a%09b", "c"),
        ("a/b", "c d"),
        ("ключ", "{0}"),
        ("a\0", "\n"),
        ("'\"\\", "]]"),
    ]
    for number, (job, slot) in enumerate(pairs):
        wanted = ask(job, slot, func=f"module:f{number}", lock_at_least=0)
        assert store.read(wanted.key).execution is None
        error = f"no such file: 'caf\udce9' \0 {number}"
        assert store.swap([settle(win(store, wanted), "failed", error)]) != [None]
        row = store.read(wanted.key).execution
        assert (row.job, row.slot, row.func, row.error) == (job, slot, f"module:f{number}", error)
    assert {(row.job, row.slot) for row in store.executions(Executions())} == set(pairs)


def test_rows_of_one_time_come_in_the_order_of_their_names(store):
    """Ties are broken by job and slot, also where one name begins with another or holds what must be escaped."""
    names = [(job, slot) for job in ("a", "a b", "a-b", "a%", "ab", "a{", "ü") for slot in ("1", "10", "1 ", "é")]
    rows = [Execution(job, slot, "tied", 5, 5, "waiting", 0, 0, None) for job, slot in names]
    store.swap([Change(None, (Insert(row),)) for row in rows])
    found = [(row.job, row.slot) for row in store.executions(Executions(lease="tied", oldest_first=True))]
    assert found == sorted(names)
    assert store.read(Key("tied", "", "")).waiting.job == "a"


@pytest.mark.parametrize("oldest_first", [True, False])
def test_a_scan_over_many_pages_misses_nothing_while_rows_go(store, oldest_first):
    """Pages go on in the right place among equal times, although the row they ended with is gone."""
    rows = [Execution("many", f"{number:04}", "many", 7, 7, "waiting", 0, 0, None) for number in range(1200)]
    store.swap([Change(None, (Insert(row),)) for row in rows])
    found = []
    with store_client(store) as client:
        for row in store.executions(Executions(job="many", oldest_first=oldest_first)):
            found.append(row.slot)
            if len(found) == 500:
                client.zrem(store._base + b"job:many", f"many\t{row.slot}")
    assert found == sorted((row.slot for row in rows), reverse=not oldest_first)


@contextlib.contextmanager
def store_client(store):
    """A plain client of a store's own server."""
    client = redis.Redis.from_url(store._url, protocol=2)
    try:
        yield client
    finally:
        client.close()


# --- what is left behind ----------------------------------------------------------------------------------------------


def test_no_key_expires_by_itself(store):
    """A row that Redis dropped would be a slot that can run again."""
    run(store, ask())
    win(store, ask())
    with store_client(store) as client:
        keys = list(client.scan_iter(match=store._base + b"*", count=1000))
        assert len(keys) > 5
        assert {client.ttl(key) for key in keys} == {-1}


def test_prune_leaves_the_leases_and_nothing_else(store):
    """Rows and their places in every index go; how far that went stays, and refuses what was pruned."""
    slots = [ask("tidy", keep_for=0) for _ in range(450)]
    for wanted in slots:
        run(store, wanted)
    assert store.prune(limit=30) == 30
    assert store.prune() == 420
    assert store.prune() == 0
    with store_client(store) as client:
        keys = list(client.scan_iter(match=store._base + b"*", count=1000))
    assert keys == [store._base + b"lease:tidy"]
    again = replace(slots[-1], nonce="again")
    assert claim(store.read(again.key), again) == Refusal("pruned")


def test_prune_notes_what_it_deletes_even_where_the_lease_is_gone(store):
    """A lease row that is missing is written anew, with the token of the row that goes."""
    wanted = ask("gone", keep_for=0)
    grant = run(store, wanted)
    with store_client(store) as client:
        client.delete(store._base + b"lease:gone")
    assert store.prune() == 1
    lease = store.read(wanted.key).lease
    assert (lease.token, lease.pruned_through, lease.holder) == (grant.token, wanted.slot_at, None)


# --- losses -----------------------------------------------------------------------------------------------------------


def test_tokens_grow_although_a_crash_forgot_everything():
    """Killed without persistence and started again, the server grants larger tokens than before."""
    with Redis() as server, opened(server.url) as store:
        before = [run(store, ask()).token for _ in range(3)]
        server.kill()
        with pytest.raises(StoreError):
            store.read(ask().key)
        server.start()
        assert store.read(ask().key).lease is None
        after = [run(store, ask()).token for _ in range(3)]
    assert sorted({*before, *after}) == before + after


def test_a_server_that_is_short_of_memory_refuses_the_whole_change():
    """An out-of-memory error leaves nothing half written."""
    with Redis(options={"maxmemory": "1"}) as server, opened(server.url) as store:
        wanted = ask()
        change = claim(store.read(wanted.key), wanted)
        with pytest.raises(StoreError, match=r"OOM|used memory"):
            store.swap([change])
        assert server.execute("DBSIZE") == 0


def _retrying(url):
    return redis.Redis.from_url(url, retry=redis.retry.Retry(redis.backoff.NoBackoff(), 5), decode_responses=True)


@pytest.mark.parametrize("make", [str, _retrying], ids=["url", "client that retries"])
def test_a_swap_whose_reply_was_lost_is_not_sent_again(redis_server, make):
    """The outcome is unknown and said to be; the server ran the script once, and the row shows the claim's nonce."""
    with Proxy(redis_server.port) as proxy, contextlib.ExitStack() as stack:
        source = make(proxy.through(redis_server.url))
        if not isinstance(source, str):
            stack.callback(source.close)
        store = stack.enter_context(opened(source, f"test-{next(_numbers)}"))
        run(store, ask())
        wanted = ask()
        change = claim(store.read(wanted.key), wanted)
        before = calls(redis_server, "evalsha")
        lost = proxy.lose_next_reply(b"EVALSHA")
        with pytest.raises(StoreError) as caught:
            store.swap([change])
        assert lost.is_set()
        assert isinstance(caught.value.__cause__, redis.ConnectionError)
        assert calls(redis_server, "evalsha") == before + 1
        assert store.read(wanted.key).lease.holder == wanted.nonce


def test_a_read_whose_reply_was_lost_is_sent_once_more(redis_server):
    """A read changes nothing, so a dropped connection costs a second one and no error."""
    with Proxy(redis_server.port) as proxy, opened(proxy.through(redis_server.url), f"test-{next(_numbers)}") as store:
        wanted = ask()
        run(store, wanted)
        lost = proxy.lose_next_reply(b"EVALSHA")
        assert store.read(wanted.key).execution.state == "succeeded"
        assert lost.is_set()


def test_the_client_that_was_handed_in_is_left_alone(redis_server):
    """It keeps its retries and its decoding, and its connection stays open when the store is closed."""
    with _retrying(redis_server.url) as client:
        before = dict(client.connection_pool.connection_kwargs), client.client_id()
        with opened(client, f"test-{next(_numbers)}") as store:
            run(store, ask())
        assert (client.connection_pool.connection_kwargs, client.client_id()) == before
        assert client.echo("still here") == "still here"


def test_a_frozen_server_is_an_error_after_the_timeout():
    """Nobody waits longer than the timeout for an answer, and the store goes on when the server does."""
    with Redis() as server, opened(server.url, timeout=0.3) as store:
        run(store, ask())
        with server.frozen():
            for call in (lambda: store.read(ask().key), lambda: store.swap([renew(granted(ask(), 1, 1), 1)])):
                begun = time.monotonic()
                with pytest.raises(StoreError, match="Timeout"):
                    call()
                assert 0.2 < time.monotonic() - begun < 1.5
        run(store, ask())


def test_a_client_without_timeouts_gets_them():
    """A handed-in client that would wait for ever is used through a copy that does not."""
    with (
        Redis() as server,
        redis.Redis.from_url(server.url, socket_timeout=None) as client,
        opened(client, timeout=0.3) as store,
        server.frozen(),
    ):
        begun = time.monotonic()
        with pytest.raises(StoreError, match="Timeout"):
            store.read(ask().key)
        assert time.monotonic() - begun < 1.5


def test_a_forked_child_makes_connections_of_its_own(redis_server, store):
    """After `forget` neither process reads the other's replies, and the parent's connection stays open."""
    grant = win(store, ask())
    mine = _client_ids(redis_server)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on: this process has threads
        child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            store.forget()
            ok = len(list(store.held_leases(HeldLeases()))) == 1
            store.close()
            os._exit(0 if ok else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.swap([settle(grant, "succeeded")]) == [grant.token]
    assert mine <= _client_ids(redis_server)


def _client_ids(server):
    with server.client() as client:
        own = client.client_id()
        return {each["id"] for each in client.client_list() if int(each["id"]) != own}


# --- Sentinel, replicas -----------------------------------------------------------------------------------------------


def test_a_failover_is_survived_and_tokens_grow(redis_sentinel):
    """After the master died, the same store works on the next one, and its tokens are larger."""
    with opened(redis_sentinel.url, f"test-{next(_numbers)}", timeout=1.0) as store:
        before = run(store, ask()).token
        redis_sentinel.master().kill()
        with pytest.raises(StoreError):
            store.read(ask().key)
        after = _eventually(lambda: run(store, ask())).token
    assert after > before


def _eventually(act, seconds=20):
    deadline = time.monotonic() + seconds
    while True:
        try:
            return act()
        except StoreError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def test_a_client_made_by_sentinel_is_followed_to_its_master(redis_sentinel):
    """`Sentinel.master_for` works as a source; `slave_for` is refused, with what to use instead."""
    manager = Sentinel(redis_sentinel.addresses, socket_timeout=1)
    master, replica = manager.master_for(redis_sentinel.service), manager.slave_for(redis_sentinel.service)
    with contextlib.ExitStack() as stack:
        for client in (master, replica, *manager.sentinels):
            stack.callback(client.close)
            stack.callback(client.connection_pool.disconnect)
        run(stack.enter_context(opened(master, f"test-{next(_numbers)}")), ask())
        with pytest.raises(ConfigError, match="master_for"):
            RedisStore(replica)


def test_a_replica_is_an_error_and_a_warning(redis_sentinel):
    """A store on a replica says so when it is opened, and refuses claims as store errors."""
    with opened(redis_sentinel.replicas()[0].url, f"test-{next(_numbers)}") as store:
        assert any("replica" in warning for warning in store.open())
        wanted = ask()
        with pytest.raises(StoreError, match="primary"):
            store.swap([claim(store.read(wanted.key), wanted)])


def test_too_few_replicas_are_no_grant_and_are_not_read_back_as_one(redis_sentinel):
    """A change that the replicas do not have yet is an error, and looks undone to its claimer, until they have it."""
    url = redis_sentinel.master().url
    with opened(url, f"test-{next(_numbers)}", min_replicas=2, timeout=0.6) as store:
        assert not any("replicas" in warning for warning in store.open())
        run(store, ask())
        wanted = ask()
        change = claim(store.read(wanted.key), wanted)
        with redis_sentinel.replicas()[0].frozen():
            with pytest.raises(StoreError, match="min_replicas is 2"):
                store.swap([change])
            store.close()  # WAIT on a new connection knows nothing of what another one wrote
            with pytest.raises(StoreError, match="min_replicas is 2"):
                store.read(wanted.key)
            store.read(ask("another").key)
        assert _eventually(lambda: store.read(wanted.key)).lease.holder == wanted.nonce


# --- Cluster ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("live", [False, True], ids=["url", "client"])
def test_each_namespace_lives_on_one_node_of_a_cluster(redis_cluster, live):
    """Claims, scans and pruning work whichever node owns the namespace."""
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(redis_cluster.client()) if live else redis_cluster.url
        for number in range(6):
            store = stack.enter_context(opened(source, f"{{ns-{number}}}-{next(_numbers)}"))
            store.open()
            wanted = ask("{job}", keep_for=0)
            run(store, wanted)
            assert [row.slot for row in store.executions(Executions(job="{job}"))] == [wanted.slot]
            assert store.prune() == 1


def test_while_a_slot_moves_nothing_is_granted_and_afterwards_all_is_there(redis_cluster):
    """A script on a node that has only some of the rows would find a lease free that is held: calls fail instead."""
    namespace = f"moving-{next(_numbers)}"
    with opened(redis_cluster.url, namespace) as store:
        wanted = ask()
        grant = win(store, wanted)
        slot = key_slot(store._base)
        ids = {node: node.execute("CLUSTER", "MYID") for node in redis_cluster.nodes}
        owner = next(node for node in redis_cluster.nodes if _keys_in(node, slot))
        other = next(node for node in redis_cluster.nodes if node is not owner)
        for source, target in ((owner, other), (other, owner)):  # and back, for the tests that follow
            target.execute("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
            source.execute("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
            for key in (None, *_keys_in(source, slot)):
                if key is not None:
                    source.execute("MIGRATE", "127.0.0.1", target.port, key, 0, 1000)
                with pytest.raises(StoreError, match="being moved"):
                    store.read(wanted.key)
            for node in (target, source, *redis_cluster.nodes):
                node.execute("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
            assert store.read(wanted.key).lease.holder == wanted.nonce
        assert store.swap([settle(grant, "succeeded")]) == [grant.token]


def _keys_in(node, slot):
    return node.execute("CLUSTER", "GETKEYSINSLOT", slot, 100)


def test_a_plain_url_of_a_cluster_is_refused(redis_cluster):
    """The message says which form is meant."""
    with (
        opened(redis_cluster.nodes[0].url) as store,
        pytest.raises(ConfigError, match=r"redis\+cluster://"),
    ):
        store.open()


def test_a_cluster_node_that_died_is_an_error_until_it_is_back(redis_cluster):
    """The owner of the namespace is searched for again and again."""
    with opened(redis_cluster.url, f"test-{next(_numbers)}", timeout=0.5) as store:
        run(store, ask())
        owner = next(node for node in redis_cluster.nodes if _keys_in(node, key_slot(store._base)))
        owner.kill()
        for _ in range(3):
            with pytest.raises(StoreError):
                store.read(ask().key)
        owner.start()
        _eventually(lambda: run(store, ask()))


# --- opening ----------------------------------------------------------------------------------------------------------


def test_a_server_that_keeps_what_it_is_told_gives_no_warning():
    """Append-only file, no eviction, clocks that agree."""
    with Redis(aof=True) as server, opened(server.url) as store:
        assert store.open() == []


def test_what_lets_a_server_forget_is_warned_of():
    """Eviction, no append-only file, and replicas that are missing are each named."""
    with Redis(options={"maxmemory-policy": "allkeys-lru"}) as server, opened(server.url, min_replicas=1) as store:
        evicts, forgets, lonely = store.open()
    assert "allkeys-lru" in evicts
    assert "append-only" in forgets
    assert "min_replicas is 1" in lonely


def test_clocks_that_disagree_are_both_named():
    """A host whose clock is far from the store's is told what both say."""
    with Redis(aof=True) as server, opened(server.url) as store, freezegun.freeze_time("2031-05-06T07:08:09Z"):
        (warning,) = store.open()
    assert "2031-05-06T07:08:09Z" in warning
    assert f"Redis's {time.strftime('%Y-', time.gmtime())}" in warning


def test_another_process_opens_the_store_by_its_description(redis_server):
    """It survives pickling, and holds every option."""
    with opened(redis_server.url, "ns", prefix="p", timeout=1.5, min_replicas=0) as store:
        description = pickle.loads(pickle.dumps(store.describe()))
    with opened(description.url, description.namespace, **dict(description.options)) as other:
        assert other.describe() == description


def test_a_live_client_cannot_be_described(redis_server):
    """The message says what to give instead."""
    with redis.Redis.from_url(redis_server.url) as client, pytest.raises(ConfigError, match="URL"):
        RedisStore(client).describe()


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://me:hunter2@host/",
        "redis+cluster://me:hunter2@host:1,host:x/0",
        "redis+cluster://:hunter2@host:1/3",
        "redis://me:hun/ter2@host:1/0",
        "redis://me:hunter2@host:port",
        "redis://me:hunter2@host:1/0?sokcet_timeout=1",
        "postgresql://me:hunter2@host/db",
    ],
)
def test_a_wrong_url_is_refused_without_repeating_its_password(url):
    """The error comes before any connection, and neither it nor its cause shows the secret."""
    with pytest.raises(ConfigError) as caught:
        RedisStore(url)
    assert "ter2" not in str(caught.value)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("wrong", [{"prefix": "a{b"}, {"prefix": ""}, {"timeout": 0}, {"min_replicas": -1}])
def test_an_option_out_of_range_is_refused_by_name(wrong):
    """The message begins with the option."""
    with pytest.raises(ConfigError, match=f"^{next(iter(wrong))} "):
        RedisStore("redis://localhost", **wrong)


def test_what_is_no_redis_client_is_refused():
    """An asyncio client, for one."""
    with pytest.raises(ConfigError, match="synchronous"):
        RedisStore(object())


def test_a_wrong_password_is_an_error_that_does_not_show_it():
    """Authentication failures are store errors: they can be mended while the application runs."""
    with Redis() as server:
        server.execute("CONFIG", "SET", "requirepass", "correct")
        try:
            with opened(server.url.replace("//", "//:hunter2@")) as store, pytest.raises(StoreError) as caught:
                store.read(ask().key)
            with opened(server.url.replace("//", "//:correct@")) as store:
                run(store, ask())
        finally:
            with server.client(password="correct") as client:
                client.config_set("requirepass", "")
    assert "hunter2" not in str(caught.value)


def test_a_unix_socket_works(tmp_path_factory):
    """`unix://` with a database number."""
    path = tmp_path_factory.mktemp("redis") / "s"
    with Redis(options={"unixsocket": str(path)}), opened(f"unix://{path}?db=1") as store:
        run(store, ask())


def test_without_redis_py_the_error_says_what_to_install():
    """Importing the store where redis-py is missing names the extra."""
    code = (
        "import sys; sys.modules['redis'] = None\n"
        "from apscheduler_fence.errors import ConfigError\n"
        "try: import apscheduler_fence.stores.redis\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert 'pip install "apscheduler-fence[redis]"' in done.stdout
