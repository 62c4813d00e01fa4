"""An application's scheduler, read without being started."""

# ruff: noqa: SLF001 - what an unstarted scheduler has been told stands at underscored names only

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.schedulers.base import BaseScheduler

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.executor import FencedExecutor
from apscheduler_fence.slots import job_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import timedelta

    from apscheduler.triggers.base import BaseTrigger

    from apscheduler_fence.policy import Policy
    from apscheduler_fence.stores.base import Store

AWAITING = {"AsyncIOExecutor": "asyncio", "TornadoExecutor": "tornado"}
"""Executors that await what a coroutine function returns, and their aliases."""


@dataclass(frozen=True, slots=True, eq=False)
class FencedJob:
    """How one job is coordinated.

    Attributes:
        policy: the options that apply to it.
        name: its name in the cluster.
        lease: the lease it runs under.
        store: where that is recorded.
        store_timeout: how long the store may take to fail.
    """

    policy: Policy
    name: str
    lease: str
    store: Store
    store_timeout: timedelta


@dataclass(frozen=True, slots=True, eq=False)
class PlannedJob:
    """A job as a scheduler will run it.

    Attributes:
        id: its ID.
        jobstore: the alias of its job store.
        shared: whether that job store outlives the process, so that nodes may share it.
        function: what is called.
        trigger: when.
        executor: the alias of its executor.
        executor_is_fenced: whether that is a fenced one.
        awaited: whether that executor awaits coroutine functions.
        fenced: how it is coordinated; None if every node runs it.
        wrong: why it will not run, if its name or options do not work.
    """

    id: str
    jobstore: str
    shared: bool
    function: Callable[..., Any]
    trigger: BaseTrigger
    executor: str
    executor_is_fenced: bool
    awaited: bool
    fenced: FencedJob | None
    wrong: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Application:
    """What a scheduler has been told.

    Attributes:
        jobs: the jobs that the program has added.
        stores: the stores of its fenced executors.
        unread: job stores whose earlier jobs were not looked at.
        running: whether importing the program has started the scheduler.
    """

    jobs: tuple[PlannedJob, ...]
    stores: tuple[Store, ...]
    unread: tuple[str, ...] = ()
    running: bool = False


def load(reference: str) -> BaseScheduler:
    """Import `module:scheduler`, where `scheduler` is one or makes one without arguments.

    Raises:
        ConfigError: there is none.
    """
    module_name, _, path = reference.partition(":")
    if not module_name or not path:
        raise ConfigError(f"{reference!r} is no reference: write module:scheduler")
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - sys.path holds text; as `python -m` and gunicorn do
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{reference!r} cannot be imported: {error}") from error
    if not isinstance(found, BaseScheduler) and callable(found):
        found = found()
    if not isinstance(found, BaseScheduler):
        raise ConfigError(f"{reference!r} is no APScheduler 3 scheduler, but {type(found).__name__}")
    return found


def read(scheduler: BaseScheduler) -> Application:
    """What a scheduler has been told.

    Jobs that an earlier start has left in a persistent job store are not read: reading them deletes those that this
    process cannot import.
    """
    stores = {alias: store for alias, store in scheduler._jobstores.items() if not isinstance(store, MemoryJobStore)}
    return Application(
        jobs=tuple(_planned(scheduler, job, alias, shared=alias in stores) for job, alias in _added(scheduler)),
        stores=tuple(each._store for each in scheduler._executors.values() if isinstance(each, FencedExecutor)),
        unread=tuple(stores),
        running=bool(scheduler.running),
    )


def _added(scheduler: BaseScheduler) -> Iterator[tuple[Any, str]]:
    latest = {(alias, job.id): (job, alias) for job, alias, _ in scheduler._pending_jobs}
    yield from latest.values()
    for alias, store in scheduler._jobstores.items():
        if scheduler.running and isinstance(store, MemoryJobStore):
            for job in store.get_all_jobs():
                yield job, alias


def _planned(scheduler: BaseScheduler, job: Any, alias: str, *, shared: bool) -> PlannedJob:
    executor = scheduler._executors.get(job.executor)
    fenced, wrong = None, None
    if isinstance(executor, FencedExecutor):
        job._jobstore_alias = alias
        try:
            fenced = _fenced(executor, job)
        except ConfigError as error:
            wrong = str(error)
    return PlannedJob(
        id=job.id,
        jobstore=alias,
        shared=shared,
        function=job.func,
        trigger=job.trigger,
        executor=job.executor,
        executor_is_fenced=isinstance(executor, FencedExecutor),
        awaited=_awaits(scheduler, executor),
        fenced=fenced,
        wrong=wrong,
    )


def _fenced(executor: FencedExecutor, job: Any) -> FencedJob | None:
    policy = executor._policy_of(job)
    if policy is None:
        return None
    name = executor._name_of(job, policy)
    shared = policy.lease
    return FencedJob(
        policy=policy,
        name=name,
        lease=name if shared is None else job_name("", namespace=executor._namespace, name=shared),
        store=executor._store,
        store_timeout=executor._store_timeout,
    )


def _awaits(scheduler: BaseScheduler, executor: Any) -> bool:
    choice = executor._inner_choice if isinstance(executor, FencedExecutor) else executor
    if isinstance(choice, str):
        return choice in AWAITING.values()
    if choice is None:
        choice = scheduler._create_default_executor()
    return any(cls.__name__ in AWAITING for cls in type(choice).__mro__)
