"""One line of configuration, written in any of the ways APScheduler knows, on any of its schedulers."""

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from datetime import timezone
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED
from apscheduler.executors.debug import DebugExecutor
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.asyncio import AsyncIOScheduler
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.schedulers.blocking import BlockingScheduler
from apscheduler.schedulers.tornado import TornadoScheduler
from tornado.ioloop import IOLoop
from waiting import eventually
from watched import Watched, moment

from apscheduler_fence import (
    EVENT_JOB_REFUSED,
    EVENT_LEASE_OVERDUE,
    ConfigError,
    FencedExecutor,
    current_fence,
)
from apscheduler_fence.stores import open_store
from apscheduler_fence.stores.base import Executions

SCRIPT = Path(__file__).with_name("one_slot.py")


def threads_while_running():
    return current_fence().execution_id, threading.current_thread().name


async def task_name():
    return current_fence().execution_id, asyncio.current_task().get_name()


# --- every scheduler --------------------------------------------------------------------------------------------------


def test_a_background_scheduler_runs_its_jobs_in_its_thread_pool(url, rows):
    """BackgroundScheduler: the default inner executor is its thread pool."""
    node = Watched(BackgroundScheduler(executors={"default": {"type": "fenced", "store": url}}))
    node.run(threads_while_running)
    node.scheduler.start()
    execution, thread = node.heard.one(EVENT_JOB_EXECUTED).retval
    node.scheduler.shutdown()
    assert execution == rows()[0].id
    assert thread.startswith("ThreadPoolExecutor")


def test_a_blocking_scheduler_runs_its_jobs_in_its_thread_pool(url, rows):
    """BlockingScheduler: the same, from a thread that it blocks."""
    node = Watched(BlockingScheduler(executors={"default": {"type": "fenced", "store": url}}))
    node.run(threads_while_running)
    blocked = threading.Thread(target=node.scheduler.start)
    blocked.start()
    execution, _ = node.heard.one(EVENT_JOB_EXECUTED).retval
    node.scheduler.shutdown()
    blocked.join(5)
    assert not blocked.is_alive()
    assert execution == rows()[0].id


async def on_a_loop(scheduler):
    """Runs a plain and a coroutine function, and shuts the scheduler down."""
    node, at = Watched(scheduler), moment()
    node.run(threads_while_running, job_id="plain", at=at)
    node.run(task_name, job_id="coroutine", at=at)
    scheduler.start()
    for _ in range(500):
        if len(node.heard.of(EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)) == 2:
            break
        await asyncio.sleep(0.01)
    scheduler.shutdown()
    await asyncio.sleep(0.05)
    # Tornado itself may deliver from the pool's thread what a plain function returned.
    assert not any("fence" in name for name in node.heard.threads)
    return {event.job_id: event.retval for event in node.heard.of(EVENT_JOB_EXECUTED)}


def test_an_asyncio_scheduler_awaits_coroutines_and_threads_the_rest(url, rows):
    """AsyncIOScheduler: coroutine functions run in a task on the loop, plain ones in the loop's pool."""
    ran = asyncio.run(on_a_loop(AsyncIOScheduler(executors={"default": {"type": "fenced", "store": url}})))
    assert {row.id for row in rows()} == {execution for execution, _ in ran.values()}
    assert ran["plain"][1].startswith("asyncio_")
    assert ran["coroutine"][1].startswith("Task-")


def test_a_tornado_scheduler_awaits_coroutines_and_threads_the_rest(url, rows):
    """TornadoScheduler: the same on its I/O loop."""

    async def application():
        scheduler = TornadoScheduler(
            io_loop=IOLoop.current(), executors={"default": {"type": "fenced", "store": url, "max_workers": "2"}}
        )
        ran = await on_a_loop(scheduler)
        scheduler._executors["default"]._inner.executor.shutdown()
        return ran

    ran = asyncio.run(application())
    assert {row.id for row in rows()} == {execution for execution, _ in ran.values()}
    assert ran["plain"][1].startswith("ThreadPoolExecutor")
    assert ran["coroutine"][1].startswith("Task-")


@pytest.mark.parametrize("kind", ["gevent", "gevent-patched", "twisted"])
def test_gevent_and_twisted_run_their_jobs_and_hear_the_keeper(kind, tmp_path):
    """A job longer than its lease keeps it; a coroutine function is an error; the keeper's event comes by the loop."""
    url = f"sqlite:///{tmp_path / 'fence.db'}"
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", SCRIPT, kind, url],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    events = {code: retval for code, retval in told["events"] if code in (EVENT_JOB_EXECUTED, EVENT_JOB_ERROR)}
    assert events == {EVENT_JOB_EXECUTED: "job/2026-09-02T10:00:00Z", EVENT_JOB_ERROR: None}, done.stderr
    store = open_store(url)
    assert [(row.id, row.state) for row in store.executions(Executions())] == [
        ("job/2026-09-02T10:00:00Z", "succeeded")
    ]
    store.close()
    assert len(told["threads"]) == 1
    assert "keeper" not in told["threads"][0]
    assert EVENT_LEASE_OVERDUE in [code for code, _ in told["events"]]
    assert "Traceback" not in done.stderr


# --- every way to write it --------------------------------------------------------------------------------------------


def ran_in(scheduler):
    """Runs a job on it and returns its event and the fenced executor's keeper's last word on the lease."""
    node = Watched(scheduler)
    node.run(lambda: (current_fence(), round(current_fence().remaining()), threading.current_thread().name))
    scheduler.start()
    event = node.heard.one(EVENT_JOB_EXECUTED | EVENT_JOB_ERROR)
    scheduler.shutdown()
    return event.retval


def test_an_instance(url):
    """`executors={"default": FencedExecutor("…")}`."""
    assert ran_in(BackgroundScheduler(executors={"default": FencedExecutor(url)}))[0].job == "job"


def test_the_dict_form(url):
    """`{"type": "fenced", "store": …, "lock_at_most": "20s"}`."""
    fenced = {"type": "fenced", "store": url, "lock_at_most": "20s"}
    assert ran_in(BackgroundScheduler(executors={"default": fenced}))[1] == 20


def test_the_class_form(url):
    """`{"class": "apscheduler_fence:FencedExecutor", …}`."""
    fenced = {"class": "apscheduler_fence:FencedExecutor", "store": url}
    assert ran_in(BackgroundScheduler(executors={"default": fenced}))[0].job == "job"


def test_the_flat_form_of_ini_files(url):
    """Every value is text, and what is the inner executor's reaches it."""
    prefix = "apscheduler.executors.default"
    settings = {
        f"{prefix}.type": "fenced",
        f"{prefix}.store": url,
        f"{prefix}.namespace": "billing",
        f"{prefix}.inner": "threadpool",
        f"{prefix}.max_workers": "3",
        f"{prefix}.pool_kwargs.thread_name_prefix": "flat",
        f"{prefix}.lock_at_most": "PT20S",
        f"{prefix}.lock_at_least": "500ms",
        f"{prefix}.renew": "false",
        f"{prefix}.max_runtime": "none",
        f"{prefix}.once_per_slot": "yes",
        f"{prefix}.store_patience": "5",
        f"{prefix}.retention": "7d",
        f"{prefix}.max_early": "30s",
        f"{prefix}.max_catch_up": "10",
        f"{prefix}.sweep": "2s",
        f"{prefix}.policies.other.lock_at_most": "9m",
        f"{prefix}.policies.housekeeping": "none",
    }
    scheduler = BackgroundScheduler(settings)
    fence, left, thread = ran_in(scheduler)
    assert (fence.job, left) == ("billing/job", 20)
    assert thread.startswith("flat")
    executor = scheduler._executors["default"]
    assert executor._inner._pool._max_workers == 3
    assert executor._policies["housekeeping"] is None


def test_add_executor_by_name_while_the_scheduler_runs(url):
    """`scheduler.add_executor("fenced", "late", store=…)`."""
    node = Watched(BackgroundScheduler())
    node.scheduler.start()
    node.scheduler.add_executor("fenced", "late", store=url)
    node.run(current_fence, executor="late")
    assert node.heard.one(EVENT_JOB_EXECUTED).retval.job == "job"
    node.scheduler.shutdown()


def test_the_entry_point():
    """APScheduler finds the plugin by its alias."""
    [plugin] = entry_points(group="apscheduler.executors", name="fenced")
    assert plugin.load() is FencedExecutor


def test_the_store_from_the_environment(monkeypatch, url):
    """`APSCHEDULER_FENCE_STORE` is read when no store is given."""
    monkeypatch.setenv("APSCHEDULER_FENCE_STORE", url)
    assert ran_in(BackgroundScheduler(executors={"default": {"type": "fenced"}}))[0].job == "job"


def test_no_store_at_all(monkeypatch):
    """With neither, the error says what to give."""
    monkeypatch.delenv("APSCHEDULER_FENCE_STORE", raising=False)
    with pytest.raises(ConfigError, match=r"no store: .* APSCHEDULER_FENCE_STORE"):
        FencedExecutor()


def test_namespaces_keep_two_applications_apart(start):
    """The same job in the same slot runs once in each namespace."""
    nodes, at = [start(namespace="billing"), start(namespace="billing"), start(namespace="shop")], moment()
    for node in nodes:
        node.run(int, at=at)
    eventually(lambda: sum(len(node.heard.of(EVENT_JOB_EXECUTED | EVENT_JOB_REFUSED)) for node in nodes) == 3)
    ran = Counter(node.executor._namespace for node in nodes if node.heard.of(EVENT_JOB_EXECUTED))
    assert ran == {"billing": 1, "shop": 1}


# --- the inner executor -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inner", "options", "thread"),
    [
        (None, {"max_workers": 1, "pool_kwargs": {"thread_name_prefix": "mine"}}, "mine_0"),
        ("threadpool", {"max_workers": "1", "pool_kwargs": {"thread_name_prefix": "mine"}}, "mine_0"),
        (ThreadPoolExecutor(1, {"thread_name_prefix": "mine"}), {}, "mine_0"),
        ("debug", {}, "APScheduler"),
        (DebugExecutor(), {}, "APScheduler"),
    ],
    ids=["default", "threadpool", "instance", "debug", "debug instance"],
)
def test_the_inner_executor_carries_the_runs(start, inner, options, thread):
    """By default, by alias with options, or an instance."""
    node = start(inner=inner, **options)
    node.run(lambda: threading.current_thread().name)
    assert node.heard.one(EVENT_JOB_EXECUTED).retval == thread


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lock_at_mots": "30s"}, "lock_at_mots"),
        ({"inner": "threadpool", "max_wrokers": 3}, "max_wrokers"),
        ({"inner": DebugExecutor(), "max_workers": 3}, "max_workers: inner= is an instance"),
        ({"inner": "threadpool", "max_workers": "many"}, "max_workers='many'"),
        ({"inner": "threadpol"}, "inner='threadpol'"),
        ({"inner": "fenced"}, "inner= must be another executor"),
        ({"inner": "processpool"}, "memory store lives in one process"),
    ],
)
def test_what_the_inner_executor_does_not_take_is_an_error_at_start(url, options, message):
    """An option that nobody knows is named."""
    scheduler = BackgroundScheduler(executors={"default": FencedExecutor(url, **options)})
    with pytest.raises(ConfigError, match=message):
        scheduler.start()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lock_at_most": "soon"}, "lock_at_most='soon'"),
        ({"policies": {"job": {"lock_at_mots": 3}}}, r"policies\['job'\]: unknown option lock_at_mots"),
        ({"policies": {"job": "9m"}}, r"policies\['job'\]='9m'"),
        ({"policies": "job"}, "policies='job'"),
        ({"namespace": "a\nb"}, "namespace"),
        ({"store_patience": "-1s"}, "store_patience"),
        ({"retention": "1s"}, "retention"),
        ({"max_catch_up": "0"}, "max_catch_up='0'"),
        ({"max_catch_up": "all"}, "max_catch_up='all'"),
        ({"sweep": 0}, "sweep=0"),
    ],
)
def test_a_wrong_value_is_an_error_at_once(url, options, message):
    """The message names the option."""
    with pytest.raises(ConfigError, match=message):
        FencedExecutor(url, **options)


def test_an_executor_cannot_be_handed_an_unknown_scheme():
    """A store that no library knows is a ConfigError."""
    with pytest.raises(ConfigError):
        FencedExecutor("no-url")


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_a_scheduler_can_be_started_again(url):
    """The inner executor is built afresh, so unlike APScheduler's own pools it works after a shutdown."""
    node = Watched(BackgroundScheduler(executors={"default": FencedExecutor(url)}, timezone=timezone.utc))
    for number in range(3):
        node.scheduler.start()
        node.run(int, job_id=f"job {number}")
        eventually(lambda number=number: len(node.heard.of(EVENT_JOB_EXECUTED)) == number + 1)
        node.scheduler.shutdown()


def test_an_executor_can_be_removed(start):
    """`remove_executor` shuts it down; its threads end."""
    node = start()
    node.run(int)
    node.heard.one(EVENT_JOB_EXECUTED)
    keeper = node.executor._node.keeper
    node.scheduler.remove_executor("default")
    keeper.join(5)
    assert keeper._thread is None
