"""What nodes suffer: a kill, a long pause, a wrong clock."""

import sys

import pytest
from faults import Cluster
from servers.process import faketime_library
from waiting import eventually

from apscheduler_fence import EVENT_JOB_REFUSED

needs_faketime = pytest.mark.skipif(faketime_library() is None, reason="libfaketime is not installed")


@pytest.mark.backends("redis")
def test_a_run_whose_node_is_killed_is_lost_once_and_announced_once(store_url):
    """SIGKILL in the middle of a run: the survivor says so, runs what comes next, and never that slot again."""
    with Cluster(store_url) as cluster:
        doomed, survivor = cluster.join(), cluster.join()
        cluster.serve()
        run = cluster.runs_on(doomed)["run"]
        doomed.kill()
        eventually(lambda: run in cluster.lost())
        cluster.serve(survivor)
        cluster.judge()
        assert [message["run"] for message in cluster.said(what="left", run=run)] == []
        assert cluster.states()[run] == "lost"
        assert set(cluster.states().values()) == {"succeeded", "lost"}


@pytest.mark.backends("sqlite")
def test_at_least_once_a_killed_run_begins_again_on_the_survivor(store_url):
    """SIGKILL in the middle of a run: the same execution has a second attempt, under a larger token."""
    with Cluster(store_url, delivery="at_least_once") as cluster:
        doomed, survivor = cluster.join(), cluster.join()
        cluster.serve()
        begun = cluster.runs_on(doomed)
        doomed.kill()
        again = cluster.first(survivor, what="entered", run=begun["run"])
        assert again["attempt"] == 2
        assert again["token"] > begun["token"]
        cluster.serve(survivor)
        cluster.judge()
        assert set(cluster.states().values()) == {"succeeded"}


@pytest.mark.backends("postgresql", "redis")
def test_a_node_paused_past_its_lease_records_nothing_on_waking(store_url):
    """SIGSTOP until others have run later slots, SIGCONT: it learns that its lease is lost, and the run stays lost."""
    with Cluster(store_url) as cluster:
        paused, other = cluster.join(), cluster.join()
        cluster.serve()
        begun = cluster.runs_on(paused)
        paused.freeze()
        assert cluster.next(other, what="entered")["token"] > begun["token"]
        cluster.serve(other)
        paused.thaw()
        assert cluster.first(paused, what="left", run=begun["run"])["lost"]
        eventually(lambda: begun["run"] in cluster.leases_lost(paused))
        cluster.serve(paused)
        cluster.judge()
        assert cluster.states()[begun["run"]] == "lost"
        assert begun["run"] in cluster.lost()


@needs_faketime
@pytest.mark.backends("redis")
def test_a_slow_clock_comes_to_what_is_done_and_a_fast_one_is_told_so(store_url):
    """Neither 10 s behind nor 1 h ahead runs a slot of the others; the fast node's error names its clock."""
    with Cluster(store_url) as cluster:
        right = cluster.join()
        cluster.serve(right)
        first = cluster.said(what="entered")[0]["slot"]
        slow, fast = cluster.join(faketime="-10s"), cluster.join(faketime="+1h")
        eventually(lambda: [each for each in cluster.said(fast, what="event") if "clock of this node" in each["error"]])
        # Before the first node began there were slots that nobody has run: it is rightly the slow one that does.
        done = {"code": EVENT_JOB_REFUSED, "reason": "done"}
        eventually(lambda: [each for each in cluster.said(slow, **done) if each["slot"] >= first], within=30)
        cluster.serve(right)
        cluster.stop()
        sys.stdout.write(f"{cluster.summary()}\n")
        assert cluster.said(fast, what="entered") == []
        assert not _ran(cluster, slow) & _ran(cluster, right)
        assert {message["error"] for message in cluster.said(right, what="event")} <= {"None"}


def _ran(cluster, node):
    return {message["run"] for message in cluster.said(node, what="entered")}
