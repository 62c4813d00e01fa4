"""Several processes on one job store, with the fenced executor: each job once, and every scheduler stays alive."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from jobstore_nodes import SWAPPING, HandScheduler, Recorder, inner_options
from servers import Node, Redis

from apscheduler_fence.jobstore import SharedJobStore

UTC = timezone.utc
SCRIPT = Path(__file__).with_name("jobstore_node.py")
POLL = 0.2


class Cluster:
    """Some node processes on one job store, and a scheduler here that only adds and changes jobs."""

    def __init__(self, stack, url):
        self._stack = stack
        self._url = url
        self.nodes = []
        store = SharedJobStore(**inner_options(url))
        self.scheduler = HandScheduler(
            timezone=UTC,
            jobstores={"default": store},
            executors={"default": Recorder()},
            job_defaults={"misfire_grace_time": None},
        )
        self.scheduler.start()
        stack.callback(self.scheduler.shutdown)

    def start(self, count, env=None, **settings):
        """Starts nodes and waits until their schedulers have looked for jobs."""
        settings = {"jobstore": {**inner_options(self._url), "poll": POLL}, "store": self._url, **settings}
        started = [self._stack.enter_context(Node(SCRIPT, json.dumps(settings), env=env)) for _ in range(count)]
        self.nodes += started
        deadline = time.monotonic() + 30
        while not all(passes(node) for node in started):
            assert time.monotonic() < deadline, [node.stderr[-2000:] for node in started]
            time.sleep(0.02)
        return started

    def runs(self):
        """How often each execution was run, over all nodes."""
        return Counter(message["ran"] for node in self.nodes for message in node.messages if "ran" in message)

    def runs_of(self, prefix):
        """How often each execution of the jobs whose IDs begin like this was run."""
        return {execution: count for execution, count in self.runs().items() if execution.startswith(prefix)}

    def wait_for(self, count, prefix, seconds=30):
        deadline = time.monotonic() + seconds
        while len(self.runs_of(prefix)) < count:
            assert time.monotonic() < deadline, (
                f"{len(self.runs_of(prefix))} of {count}\n{self.nodes[0].stderr[-2000:]}"
            )
            time.sleep(0.05)

    def assert_alive(self):
        """Every scheduler goes on looking for jobs."""
        before = [passes(node) for node in self.nodes]
        deadline = time.monotonic() + 10
        while not all(passes(node) > seen + 1 for node, seen in zip(self.nodes, before, strict=True)):
            assert time.monotonic() < deadline, [(passes(node), node.stderr[-2000:]) for node in self.nodes]
            time.sleep(0.05)


def passes(node):
    """How many passes the loop of a node had completed when it last told."""
    return next((message["passes"] for message in reversed(node.messages) if "passes" in message), 0)


@pytest.fixture
def make_cluster():
    with contextlib.ExitStack() as stack:
        yield lambda url: Cluster(stack, url)


def add_dates(cluster, rounds, jobs=20, every=0.4):
    """Adds jobs that run once, `jobs` of them in the same instant, again and again."""
    first = datetime.now(UTC) + timedelta(seconds=1)
    for round_ in range(rounds):
        for number in range(jobs):
            cluster.scheduler.add_job(
                "jobstore_jobs:report",
                "date",
                run_date=first + timedelta(seconds=round_ * every),
                id=f"date-{round_}-{number}",
            )


def add_every_second(cluster, jobs=3):
    for number in range(jobs):
        cluster.scheduler.add_job("jobstore_jobs:report", "cron", second="*", id=f"cron-{number}")


def assert_once(cluster, rounds):
    cluster.wait_for(rounds * 20, "date-")
    cluster.assert_alive()
    runs = cluster.runs()
    assert len(cluster.runs_of("date-")) == rounds * 20
    assert {execution: count for execution, count in runs.items() if count != 1} == {}
    assert {job.id for job in cluster.scheduler.get_jobs()} == {"cron-0", "cron-1", "cron-2"}


@pytest.mark.parametrize("scheduler", ["background", "asyncio"])
@pytest.mark.backends(*SWAPPING)
def test_each_job_runs_once_and_every_scheduler_stays_alive(make_cluster, store_url, scheduler):
    """Four processes share ten rounds of twenty jobs due in the same instant, and jobs that run every second."""
    cluster = make_cluster(store_url)
    cluster.start(4, scheduler=scheduler)
    add_every_second(cluster)
    add_dates(cluster, 10)
    assert_once(cluster, 10)
    cluster.wait_for(9, "cron-")


@pytest.mark.backends("postgresql")
def test_schedulers_outlive_two_restarts_of_the_database(make_cluster, store_url, postgresql):
    """PostgreSQL restarts twice while jobs are due: nothing is lost, nothing runs twice, nobody dies."""
    cluster = make_cluster(store_url)
    cluster.start(4)
    add_every_second(cluster)
    add_dates(cluster, 10)
    for started in (1, 6):
        cluster.wait_for(started * 20, "date-")
        postgresql.restart()
    assert_once(cluster, 10)


def test_schedulers_outlive_two_restarts_of_redis(make_cluster):
    """Redis restarts twice while jobs are due: nothing is lost, nothing runs twice, nobody dies."""
    with Redis(aof=True) as server:
        cluster = make_cluster(server.url)
        cluster.start(4)
        add_every_second(cluster)
        add_dates(cluster, 10)
        for started in (1, 6):
            cluster.wait_for(started * 20, "date-")
            server.restart()
        assert_once(cluster, 10)


CHANGES = {
    "pause": lambda scheduler: scheduler.pause_job("job"),
    "modify": lambda scheduler: scheduler.modify_job("job", name="new", next_run_time=datetime(2099, 1, 1, tzinfo=UTC)),
    "reschedule": lambda scheduler: scheduler.reschedule_job("job", trigger="cron", month=1),
    "remove": lambda scheduler: scheduler.remove_job("job"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.backends(*SWAPPING)
def test_a_change_stands_against_a_node_that_was_stopped_inside_its_loop(make_cluster, store_url, change):
    """A process that is stopped with a job in hand does not undo, when it goes on, what was done meanwhile."""
    cluster = make_cluster(store_url)
    (node,) = cluster.start(1, stop_inside=True)
    cluster.scheduler.add_job("jobstore_jobs:report", "interval", hours=1, id="job", next_run_time=datetime.now(UTC))
    node.receive(submitted="job")
    wait_until_stopped(node)
    seen = passes(node)
    change(cluster.scheduler)
    changed = attributes(cluster.scheduler.get_job("job"))
    assert passes(node) == seen, "the node must still be stopped"
    node.signal(signal.SIGCONT)
    cluster.assert_alive()
    assert attributes(cluster.scheduler.get_job("job")) == changed
    assert [message for message in node.messages if "submitted" in message] == [{"submitted": "job"}]


def wait_until_stopped(node):
    """A signal that a process sends itself takes a moment; one that ends the stop must not overtake it."""
    deadline = time.monotonic() + 10
    while Path(f"/proc/{node.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def attributes(job):
    return job and {**job.__getstate__(), "trigger": repr(job.trigger)}


NEW_MODULE = """
from jobstore_jobs import report
def run():
    report()
"""


@pytest.mark.backends("postgresql", "redis")
def test_a_rolling_deploy_loses_no_job(make_cluster, store_url, tmp_path, monkeypatch):
    """Nodes that lack a job's module leave it alone, calmly, until nodes that have it run it."""
    (tmp_path / "freshly_deployed.py").write_text(NEW_MODULE)
    cluster = make_cluster(store_url)
    old = cluster.start(2)
    monkeypatch.syspath_prepend(tmp_path)
    for number in range(10):
        cluster.scheduler.add_job("freshly_deployed:run", "date", run_date=datetime.now(UTC), id=f"new-date-{number}")
    cluster.scheduler.add_job("freshly_deployed:run", "interval", seconds=1, id="new-interval")
    monkeypatch.undo()
    before = [passes(node) for node in old]
    time.sleep(1)
    assert all(passes(node) - seen <= 1 / POLL + 2 for node, seen in zip(old, before, strict=True)), "a busy loop"
    with_module = {"PYTHONPATH": ":".join([str(tmp_path), *filter(None, sys.path)])}
    cluster.start(2, env=with_module)
    cluster.wait_for(10, "new-date-")
    cluster.wait_for(3, "new-interval/")
    cluster.assert_alive()
    assert set(cluster.runs().values()) == {1}
    assert all(node.stderr.count('"new-date-1" is left to other nodes') == 1 for node in old)
    assert [job.id for job in cluster.scheduler.get_jobs()] == ["new-interval"]
