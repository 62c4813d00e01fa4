"""What can be wrong with an application and its store, each check a function that yields findings."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from apscheduler_fence.cli.output import lasting
from apscheduler_fence.errors import ConfigError
from apscheduler_fence.lease import Key
from apscheduler_fence.runner import awaits, reference
from apscheduler_fence.slots import generated_id, shortest_period, trigger_warnings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from datetime import datetime, timedelta

    from apscheduler_fence.cli.application import Application, FencedJob, PlannedJob
    from apscheduler_fence.history import History
    from apscheduler_fence.stores.base import Store

Level = Literal["error", "warning", "note"]

OBSERVED = 200
"""Runs of a job whose length is looked at."""
CLOSE = 0.8


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to mend (error), to think about (warning) or to know (note), and where."""

    level: Level
    where: str
    message: str


Findings: TypeAlias = "Iterator[Finding]"


def check_application(application: Application, now: datetime) -> Findings:
    """What is wrong with the jobs and can be seen without the store; `now` is this host's time, aware."""
    if application.running:
        yield Finding(
            "warning", "scheduler", "importing this module starts the scheduler, also in tools such as this one"
        )
    for alias in application.unread:
        yield Finding("note", alias, "jobs that earlier starts have left in this job store were not looked at")
    for job in application.jobs:
        yield from check_job(job, now)
    yield from check_names(application.jobs)


def check_job(job: PlannedJob, now: datetime) -> Findings:
    """What is wrong with one job by itself."""
    if awaits(job.function) and not job.awaited:
        yield Finding("error", job.id, f"{reference(job.function)} is a coroutine function, which executor "
                      f"{job.executor!r} never awaits: use AsyncIOScheduler, or make it a plain function")  # fmt: skip
    if job.wrong is not None:
        yield Finding("error", job.id, f"it will not run: {job.wrong}")
    elif not job.executor_is_fenced:
        yield Finding("note", job.id, f"every node runs it: executor {job.executor!r} is not fenced")
    if job.fenced is None:
        return
    policy = job.fenced.policy
    if policy.name is None and generated_id(job.id) and not job.shared:
        yield Finding("error", job.id, f"{reference(job.function)} has no ID of its own, and another one on every node: "
                      "give add_job(..., id=...) or @fenced(name=...)")  # fmt: skip
    if policy.slot is None:
        for warning in trigger_warnings(job.trigger, added_at=now):
            yield Finding("warning", job.id, warning)
    yield from _check_durations(job, job.fenced, now)


def _check_durations(job: PlannedJob, fenced: FencedJob, now: datetime) -> Findings:
    policy = fenced.policy
    period = shortest_period(job.trigger, since=now)
    if period is not None and policy.lock_at_least >= period:
        yield Finding("warning", job.id, f"lock_at_least ({lasting(policy.lock_at_least)}) is not shorter than the time "
                      f"between two slots ({lasting(period)}): the second will be refused")  # fmt: skip
    if fenced.store_timeout > policy.lock_at_most / 3:
        yield Finding("warning", job.id, f"the store may take {lasting(fenced.store_timeout)} to fail, more than a third "
                      f"of lock_at_most ({lasting(policy.lock_at_most)}): lower timeout= or raise lock_at_most=")  # fmt: skip


def check_names(jobs: Iterable[PlannedJob]) -> Findings:
    """Jobs that would suppress each other."""
    named: defaultdict[tuple[object, str], list[PlannedJob]] = defaultdict(list)
    for job in jobs:
        if job.fenced is not None:
            named[identity(job.fenced.store), job.fenced.name].append(job)
    for (_, name), those in named.items():
        if len(those) > 1:
            listed = ", ".join(f"{job.id} ({reference(job.function)})" for job in those)
            yield Finding("error", name, f"several jobs have this name in the cluster, and of each slot only one of them "
                          f"will run: {listed}")  # fmt: skip


def identity(store: Store) -> object:
    """What two stores have in common that keep the same rows."""
    try:
        description = store.describe()
    except ConfigError:
        return id(store)
    return description.url, description.namespace, description.options


# --- with the store ---------------------------------------------------------------------------------------------------


def check_records(job: PlannedJob, fenced: FencedJob, history: History) -> Findings:
    """What is wrong with a job, going by what the store has recorded of it."""
    policy = fenced.policy
    seen = fenced.store.read(Key(fenced.lease, "", "")).lease
    here = reference(job.function)
    if seen is not None and seen.func not in (None, here) and fenced.lease == fenced.name:
        yield Finding("warning", job.id, f"the name {fenced.name!r} was last used by {seen.func}, and here it is {here}: "
                      "if that is another application's job, give the executors different namespace= options")  # fmt: skip
    limit, option = (policy.max_runtime, "max_runtime") if policy.renew else (policy.lock_at_most, "lock_at_most")
    if limit is not None:
        yield from _check_length(job, limit, option, _longest(history, fenced.name))


def _longest(history: History, name: str) -> timedelta | None:
    ended = history.runs(name, states=("succeeded", "failed"), limit=OBSERVED)
    return max((record.took for record in ended if record.took is not None), default=None)


def _check_length(job: PlannedJob, limit: timedelta, option: str, longest: timedelta | None) -> Findings:
    if longest is None or longest < CLOSE * limit:
        return
    exceeded = longest >= limit
    consequence = "its lease ended under it" if exceeded else "its lease may end under it"
    yield Finding("error" if exceeded else "warning", job.id, f"a run has taken {lasting(longest)}, and {option} is "
                  f"{lasting(limit)}: {consequence}, and another node may start the job meanwhile")  # fmt: skip
