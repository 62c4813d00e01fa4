"""The executor that stands between a scheduler and its ordinary executor, on both sides.

Downwards it hands the inner executor a look-alike of the job whose function is the whole fenced run. Upwards it is the
inner executor's scheduler: it unpacks the events that the run returned and passes them on. The inner executor is
transport only; which one it is makes no difference to what a slot, a lease and a fence are.
"""

from __future__ import annotations

import collections
import concurrent.futures
import inspect
import itertools
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from apscheduler.events import EVENT_JOB_ADDED, EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, JobEvent, JobExecutionEvent
from apscheduler.executors.base import BaseExecutor, MaxInstancesReachedError
from apscheduler.jobstores.base import JobLookupError
from apscheduler.jobstores.memory import MemoryJobStore

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.keeper import Settings
from apscheduler_fence.policy import OPTIONS, Policy, duration_option, label_of, parse_options, resolve
from apscheduler_fence.runner import (
    Node,
    Run,
    Terms,
    awaits,
    failed,
    never_awaited,
    run_here,
    run_in_child,
    run_on_loop,
)
from apscheduler_fence.slots import generated_id, job_name, trigger_warnings, validate_name
from apscheduler_fence.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from apscheduler.job import Job
    from apscheduler.schedulers.base import BaseScheduler

    from apscheduler_fence.events import FenceEvent
    from apscheduler_fence.stores.base import Store

logger = logging.getLogger(__name__)

# An inner executor would log a refused slot as "executed successfully". Disabled by name, so in pool children too.
SILENCED = "apscheduler_fence.inner"
logging.getLogger(SILENCED).disabled = True

STORE_VARIABLE = "APSCHEDULER_FENCE_STORE"
STORE_OPTIONS = ("create_tables", "table_prefix", "schema", "timeout", "min_replicas")
STORE_THREADS = 8


class FencedExecutor(BaseExecutor):  # type: ignore[misc]
    """Runs each job once per schedule slot in all processes that share a store.

    Plugin alias: `fenced`. All options may be text, as in ini files.

    Args:
        store: a URL, a live SQLAlchemy engine or a redis-py client; the variable APSCHEDULER_FENCE_STORE if not given.
        namespace: keeps two applications on one store apart.
        inner: the executor that carries the runs: an APScheduler alias such as `"processpool"`, or an instance. If not
            given, the scheduler's own default.
        policies: options by job ID, for functions that cannot be decorated; they override a decorator's. None in place
            of options lets every node run that job for itself.
        store_patience: how long a slot waits for a store that does not answer before it is given up (10 s).
        retention: how long finished executions are kept (30 days). Older slots can never run again.
        max_early: how far ahead of the store's clock a slot may be claimed (1 min).
        max_catch_up: how many run times of one submission are run, the newest ones (100).
        sweep: how often abandoned leases are looked for (5 s).
        options: `create_tables`, `table_prefix`, `schema`, `timeout` and `min_replicas` go to the store; the options of
            `Policy` are the defaults of all jobs; whatever is left goes to the inner executor.

    Raises:
        ConfigError: an option is unknown, or its value is not allowed.
    """

    def __init__(
        self,
        store: object = None,
        *,
        namespace: str = "",
        inner: str | BaseExecutor | None = None,
        policies: Mapping[str, Mapping[str, Any] | None] | None = None,
        store_patience: timedelta | float | str = 10.0,
        retention: timedelta | float | str = timedelta(days=30),
        max_early: timedelta | float | str = timedelta(minutes=1),
        max_catch_up: int | str = 100,
        sweep: timedelta | float | str = 5.0,
        **options: Any,
    ) -> None:
        super().__init__()
        self._namespace = validate_name(namespace, "namespace") if namespace else ""
        self._inner_choice = inner
        self._policies = {
            job_id: None if given is None else parse_options(given, f"policies[{job_id!r}]")
            for job_id, given in (policies or {}).items()
        }
        self._defaults = parse_options({name: options.pop(name) for name in OPTIONS if name in options}, "executor")
        self._store_timeout = duration_option("timeout", timedelta(milliseconds=10))(options.get("timeout", 2.0))
        self._store: Store = open_store(
            _given_store(store),
            self._namespace,
            **{name: options.pop(name) for name in STORE_OPTIONS if name in options},
        )
        self._inner_options = options
        self._max_catch_up = _count(max_catch_up, "max_catch_up")
        self._terms = Terms(
            store_patience=duration_option("store_patience", timedelta(0))(store_patience).total_seconds(),
            max_early=duration_option("max_early", timedelta(0))(max_early),
            retention=duration_option("retention", timedelta(minutes=1), timedelta(days=36500))(retention),
            keeper=Settings(
                sweep=duration_option("sweep", timedelta(milliseconds=50))(sweep),
                lock_at_most=resolve(self._defaults).lock_at_most,
            ),
        )
        self._node = Node(self._store, self._terms, self._hear)
        self._inner: BaseExecutor | None = None
        self._in_children = False
        self._on_loop = False
        self._stopped = False
        self._tickets = itertools.count(1)
        self._submitted: dict[str, Run] = {}
        self._running: dict[tuple[str, str], int] = collections.defaultdict(int)
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._hop: Hop = _Courier()
        _forget_after_fork(self)

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, scheduler: BaseScheduler, alias: str) -> None:
        """Build the inner executor and start the keeper's thread. Touches no store.

        Raises:
            ConfigError: the inner executor does not take the options that are left.
        """
        super().start(scheduler, alias)
        self._inner = self._build_inner(scheduler)
        self._in_children = _is_process_pool(self._inner)
        if self._in_children:
            self._store.describe()  # refuses now what could not be opened in a child
        self._stopped = False
        self._hop, self._on_loop = _hop_for(scheduler)
        self._pool = concurrent.futures.ThreadPoolExecutor(STORE_THREADS, f"apscheduler-fence-store-{alias}")
        self._inner.start(_Upwards(self, scheduler), alias)
        self._inner._logger = logging.getLogger(SILENCED)
        self._inner._run_job_error = self._inner_failed  # its own would only log
        scheduler.add_listener(self._job_added, EVENT_JOB_ADDED)
        self._node.keeper.start(alias)

    def _build_inner(self, scheduler: BaseScheduler) -> BaseExecutor:
        choice, options = self._inner_choice, self._inner_options
        if isinstance(choice, BaseExecutor):
            if options:
                raise ConfigError(f"unknown option {', '.join(sorted(options))}: inner= is an instance and takes none")
            return choice
        try:
            if choice is None:
                default = scheduler._create_default_executor()
                return type(default)(**options) if options else default
            return scheduler._create_plugin_instance("executor", choice, dict(options))
        except TypeError as error:
            raise ConfigError(
                f"unknown option among {', '.join(sorted(options)) or 'none'}: neither this executor nor the inner one "
                f"takes it ({error})"
            ) from error
        except LookupError as error:
            raise ConfigError(f"inner={choice!r}: {error}") from error

    def shutdown(self, wait: bool = True) -> None:
        """Stop the inner executor. Leases of runs that go on stay held and renewed until these have really ended."""
        if self._inner is not None:
            self._inner.shutdown(wait)
        if self._scheduler is not None:
            self._scheduler.remove_listener(self._job_added)
        with self._lock or threading.Lock():
            self._stopped = True
        self._close_pool_when_idle()
        self._node.keeper.stop()
        if wait and not self._on_loop and not self._node.keeper.held:
            self._node.keeper.join(self._terms.store_patience)

    def _close_pool_when_idle(self) -> None:
        # A cancelled coroutine submits its settle after shutdown() has returned.
        if self._stopped and not self._submitted and self._pool is not None:
            self._pool.shutdown(wait=False)

    def forget(self) -> None:
        """In a forked child: leases, connections and threads are the parent's."""
        self._node.forget()
        self._store.forget()

    # --- down: from the scheduler to the inner executor ---------------------------------------------------------------

    def submit_job(self, job: Job, run_times: Sequence[datetime]) -> None:
        """Hand the inner executor the whole fenced run in place of the job. Touches no store.

        Raises:
            MaxInstancesReachedError: so many runs of the job are under way on this node.
        """
        assert self._lock is not None  # noqa: S101 - as in APScheduler: the executor has been started
        assert self._inner is not None  # noqa: S101
        key = (job._jobstore_alias, job.id)
        try:
            run = self._run_of(job, run_times)
        except ConfigError as error:
            self._refuse(job, run_times, error)
            return
        with self._lock:
            if self._running[key] >= job.max_instances:
                raise MaxInstancesReachedError(job)
            self._running[key] += 1
            ticket = f"{job.id}#{next(self._tickets)}"
            self._submitted[ticket] = run
        try:
            self._inner.submit_job(_LookAlike(ticket, self._carried(run), job._jobstore_alias), run_times)
        except BaseException:
            self._take_ticket(ticket)
            raise

    def _do_submit_job(self, job: Job, run_times: Sequence[datetime]) -> None:
        raise NotImplementedError("submit_job is overridden whole")

    def _carried(self, run: Run) -> Callable[[], Any]:
        if self._in_children:
            return partial(run_in_child, run, self._store.describe(), self._terms)
        if awaits(run.function) and self._pool is not None:
            return partial(run_on_loop, run, self._node, self._pool)
        return partial(run_here, run, self._node)

    def _run_of(self, job: Job, run_times: Sequence[datetime]) -> Run:
        policy = self._policy_of(job)
        if policy is not None:
            self._check_identity(job, policy)
        dropped = len(run_times) - self._max_catch_up
        if dropped > 0:
            logger.warning(
                'Job "%s" is %d run times behind: the oldest %d are dropped, the newest %d run (max_catch_up)',
                job.id, len(run_times), dropped, self._max_catch_up,
            )  # fmt: skip
        name = policy.name if policy is not None else None
        cluster_name = job_name(job.id, jobstore=job._jobstore_alias, namespace=self._namespace, name=name)
        shared = policy.lease if policy is not None else None
        return Run(
            job_id=job.id,
            jobstore=job._jobstore_alias,
            job=cluster_name,
            lease=cluster_name if shared is None else job_name("", namespace=self._namespace, name=shared),
            function=job.func,
            args=tuple(job.args),
            kwargs=dict(job.kwargs),
            trigger=job.trigger,
            run_times=tuple(run_times[max(dropped, 0) :]),
            policy=policy,
            misfire_grace_time=job.misfire_grace_time,
        )

    def _policy_of(self, job: Job) -> Policy | None:
        label = label_of(job.func)
        options = label.options if label is not None else {}
        if job.id in self._policies:
            given = self._policies[job.id]
            return None if given is None else resolve(self._defaults, options or {}, given)
        return None if options is None else resolve(self._defaults, options)

    def _check_identity(self, job: Job, policy: Policy) -> None:
        local = isinstance(self._scheduler._jobstores.get(job._jobstore_alias), MemoryJobStore)
        if policy.name is None and local and generated_id(job.id):
            raise ConfigError(
                f"job {job.name!r} has no ID of its own: APScheduler made up another on every node, so no two of them "
                "would agree on a slot. Give add_job(..., id=...) or @fenced(name=...)"
            )
        if not local and (_is_callable_instance(job.func) or _is_class_of_callables(job.func)):
            raise ConfigError(
                f"job {job.id!r} is a callable object in a persistent job store, which keeps only a reference to its "
                "class: schedule a bound method or a function instead"
            )

    def _refuse(self, job: Job, run_times: Sequence[datetime], error: ConfigError) -> None:
        logger.error('Job "%s" was not run: %s', job.id, error)
        for run_time in run_times:
            event = JobExecutionEvent(EVENT_JOB_ERROR, job.id, job._jobstore_alias, run_time, exception=error)
            self._hop(partial(self._scheduler._dispatch_event, event))

    # --- up: from the inner executor to the scheduler -----------------------------------------------------------------

    def _take_ticket(self, ticket: str) -> Run | None:
        assert self._lock is not None  # noqa: S101 - as above
        with self._lock:
            run = self._submitted.pop(ticket, None)
            if run is not None:
                key = (run.jobstore, run.job_id)
                self._running[key] -= 1
                if not self._running[key]:
                    del self._running[key]
        return run

    def _returned(self, event: JobExecutionEvent) -> None:
        """The inner executor has carried a run to its end."""
        run = self._take_ticket(event.job_id)
        if run is None:
            return
        result = event.retval
        if inspect.iscoroutine(result):
            result.close()
            result = [failed(run, at, never_awaited(run.function)) for at in run.run_times]
            logger.error('Job "%s" was not run: %s', run.job_id, result[0].exception)
        elif event.code != EVENT_JOB_EXECUTED:
            result = [failed(run, at, event.exception, event.traceback) for at in run.run_times]
        for each in result:
            self._scheduler._dispatch_event(each)
        self._close_pool_when_idle()

    def _inner_failed(self, ticket: str, error: BaseException, _traceback: object = None) -> None:
        """The inner executor could not carry a run: a pool child died, or something did not survive pickling."""
        inner = self._inner
        if inner is not None and inner._lock is not None:
            with inner._lock:
                inner._instances.pop(ticket, None)
        run = self._take_ticket(ticket)
        if run is None:
            return
        logger.error('Job "%s": its run ended without an answer: %r', run.job_id, error)
        for at in run.run_times:
            self._scheduler._dispatch_event(failed(run, at, error))
        self._close_pool_when_idle()

    def _hear(self, event: FenceEvent) -> None:
        """An event from the keeper's thread, on which no listener may run."""
        if self._scheduler is not None:
            self._hop(partial(self._scheduler._dispatch_event, event))

    # --- what can be said when a job is added -------------------------------------------------------------------------

    def _job_added(self, event: JobEvent) -> None:
        try:
            job = self._scheduler._lookup_job(event.job_id, event.jobstore)[0]
        except JobLookupError:
            return
        if self._scheduler._executors.get(job.executor) is not self:
            return
        policy = self._policy_of(job)
        if policy is None:
            return
        try:
            job_name(job.id, jobstore=event.jobstore, namespace=self._namespace, name=policy.name)
            job._jobstore_alias = event.jobstore
            self._check_identity(job, policy)
        except ConfigError as error:
            logger.error('Job "%s" will not run: %s', job.id, error)
        for warning in trigger_warnings(job.trigger, added_at=datetime.now(timezone.utc)):
            logger.warning('Job "%s": %s', job.id, warning)
        if self._store_timeout > policy.lock_at_most / 3:
            logger.warning(
                'Job "%s": the store may take %s to fail, which is more than a third of lock_at_most (%s): lower '
                "timeout= or raise lock_at_most=",
                job.id, self._store_timeout, policy.lock_at_most,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _LookAlike:
    """What an inner executor needs to see of a job. The ticket is its ID, so that two submissions never meet."""

    id: str
    func: Callable[[], Any]
    _jobstore_alias: str
    args: tuple[()] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_instances: int = 1
    misfire_grace_time: None = None


class _Upwards:
    """The inner executor's scheduler: the real one, but for events."""

    def __init__(self, executor: FencedExecutor, scheduler: BaseScheduler) -> None:
        self._executor = executor
        self._real = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def _dispatch_event(self, event: JobExecutionEvent) -> None:
        self._executor._returned(event)


# --- hop: where other threads meet the scheduler's --------------------------------------------------------------------

Hop: TypeAlias = Callable[[Callable[[], None]], object]


class _Courier:
    """Calls what it is given, in order, on a thread of its own that goes away when there is nothing to do."""

    IDLE = 5.0

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting = False

    def __call__(self, act: Callable[[], None]) -> None:
        with self._lock:
            self._calls.put(act)
            if not self._waiting:
                self._waiting = True
                threading.Thread(target=self._run, name="apscheduler-fence-events", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                act = self._calls.get(timeout=self.IDLE)
            except queue.Empty:
                with self._lock:
                    if self._calls.empty():
                        self._waiting = False
                        return
                continue
            act()


def _hop_for(scheduler: BaseScheduler) -> tuple[Hop, bool]:
    """How a thread gets something called where the scheduler runs, and whether that is an event loop."""
    if getattr(scheduler, "_eventloop", None) is not None:
        return _or_here(scheduler._eventloop.call_soon_threadsafe), True
    if getattr(scheduler, "_ioloop", None) is not None:
        return _or_here(scheduler._ioloop.add_callback), True
    if getattr(scheduler, "_reactor", None) is not None:
        return _or_here(scheduler._reactor.callFromThread), True
    if any(cls.__module__ == "apscheduler.schedulers.gevent" for cls in type(scheduler).__mro__):
        return _gevent_hop(), True
    return _Courier(), False


def _or_here(hop: Hop) -> Hop:
    def to_loop(act: Callable[[], None]) -> None:
        try:
            hop(act)
        except RuntimeError:  # the loop is closed; what is said must still be heard
            act()

    return to_loop


def _gevent_hop() -> Hop:
    import gevent  # noqa: PLC0415 - only its own scheduler's users have it

    hub = gevent.get_hub()
    waiting: collections.deque[Callable[[], None]] = collections.deque()
    watcher = hub.loop.async_()

    def wake() -> None:
        while waiting:
            gevent.spawn(waiting.popleft())

    watcher.start(wake)

    def to_hub(act: Callable[[], None]) -> None:
        waiting.append(act)
        watcher.send()

    return to_hub


# --- reading options --------------------------------------------------------------------------------------------------


def _given_store(store: object) -> object:
    given = store if store is not None and store != "" else os.environ.get(STORE_VARIABLE)
    if not given:
        raise ConfigError(
            "no store: give FencedExecutor(store=...) a database or Redis URL, an engine or a client, or set "
            f"{STORE_VARIABLE}"
        )
    return given


def _count(value: object, option: str) -> int:
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(f"{option}={value!r} is not a whole number of at least 1")
    return count


def _forget_after_fork(executor: FencedExecutor) -> None:
    if not hasattr(os, "register_at_fork"):
        return
    known = weakref.ref(executor)

    def forget() -> None:
        alive = known()
        if alive is not None:
            alive.forget()

    os.register_at_fork(after_in_child=forget)


def _is_process_pool(inner: BaseExecutor) -> bool:
    return isinstance(getattr(inner, "_pool", None), concurrent.futures.ProcessPoolExecutor)


def _is_callable_instance(function: object) -> bool:
    return not inspect.isroutine(function) and not inspect.isclass(function) and not isinstance(function, partial)


def _is_class_of_callables(function: object) -> bool:
    return inspect.isclass(function) and "__call__" in vars(function)
