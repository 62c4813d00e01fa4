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
import threading
import time
import uuid
from asyncio import CancelledError
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from apscheduler.events import (
    EVENT_JOB_ADDED,
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    EVENT_JOB_MODIFIED,
    JobEvent,
    JobExecutionEvent,
)
from apscheduler.executors.base import BaseExecutor, MaxInstancesReachedError
from apscheduler.jobstores.base import JobLookupError
from apscheduler.jobstores.memory import MemoryJobStore

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.events import EVENT_JOB_REFUSED, in_time
from apscheduler_fence.keeper import Settings
from apscheduler_fence.policy import OPTIONS, Policy, duration_option, label_of, parse_options, resolve
from apscheduler_fence.runner import (
    Event,
    Node,
    Run,
    Terms,
    awaits,
    failed,
    forget_after_fork,
    never_awaited,
    run_here,
    run_in_child,
    run_on_loop,
)
from apscheduler_fence.slots import (
    NAME_LIMIT,
    SLOT_LIMIT,
    Slot,
    generated_id,
    job_name,
    manual_slot,
    trigger_warnings,
    validate_name,
)
from apscheduler_fence.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from apscheduler.job import Job
    from apscheduler.schedulers.base import BaseScheduler

    from apscheduler_fence.events import FenceEvent
    from apscheduler_fence.lease import Execution
    from apscheduler_fence.stores.base import Store

logger = logging.getLogger(__name__)

# An inner executor would log a refused slot as "executed successfully". Silenced by name, so in pool children too, and
# by a filter: `logging.config.dictConfig` enables loggers again that were disabled, but leaves their filters alone.
SILENCED = "apscheduler_fence.inner"
logging.getLogger(SILENCED).addFilter(lambda _: False)

STORE_VARIABLE = "APSCHEDULER_FENCE_STORE"
STORE_OPTIONS = ("create_tables", "table_prefix", "schema", "timeout", "min_replicas")
STORE_THREADS = 8
REMEMBERED = 10_000


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
        sweep: how often abandoned leases and waiting executions are looked for (5 s).
        orphan_after: when a waiting execution is given up whose job no node knows (1 h).
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
        orphan_after: timedelta | float | str = timedelta(hours=1),
        **options: Any,
    ) -> None:
        super().__init__()
        self._namespace = validate_name(namespace, "namespace") if namespace else ""
        self._inner_choice = inner
        self._policies = _read_policies(policies)
        if "name" in options:
            raise ConfigError(
                "name is one job's: give it in @fenced or policies, or all jobs would suppress each other"
            )
        self._defaults = parse_options({name: options.pop(name) for name in OPTIONS if name in options}, "executor")
        self._store_timeout = duration_option("timeout", timedelta(milliseconds=10))(options.get("timeout", 2.0))
        self._store: Store = open_store(
            _given_store(store),
            self._namespace,
            **{name: options.pop(name) for name in STORE_OPTIONS if name in options},
        )
        if str(options.get("max_workers")).isdecimal():  # the tornado executor takes no text
            options["max_workers"] = int(options["max_workers"])
        self._inner_options = options
        self._max_catch_up = _count(max_catch_up, "max_catch_up")
        patience = duration_option("store_patience", timedelta(0))(store_patience).total_seconds()
        kept_for = duration_option("retention", timedelta(minutes=1), timedelta(days=36500))(retention)
        self._terms = Terms(
            store_patience=patience,
            max_early=duration_option("max_early", timedelta(0))(max_early),
            retention=kept_for,
            keeper=Settings(
                sweep=duration_option("sweep", timedelta(milliseconds=50))(sweep),
                lock_at_most=resolve(self._defaults).lock_at_most,
                orphan_after=duration_option("orphan_after", timedelta(seconds=1))(orphan_after),
                patience=patience,
                retention=kept_for,
            ),
        )
        self._node = Node(self._store, self._terms, self._hear, recover=self._recover)
        self._inner: BaseExecutor | None = None
        self._in_children = False
        self._on_loop = False
        self._closing = False
        self._stopped = False
        self._tickets = itertools.count(1)
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._forget_runs()
        forget_after_fork(self)

    def _forget_runs(self) -> None:
        self._submitted: dict[str, _Submission] = {}
        self._known: collections.OrderedDict[str, _Known] = collections.OrderedDict()
        self._running: collections.Counter[tuple[str, str]] = collections.Counter()
        self._put_off: collections.defaultdict[tuple[str, str], set[str]] = collections.defaultdict(set)
        self._hop: Hop = _Courier()

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
        self._closing = False
        self._stopped = False
        self._node.stopping.clear()
        self._hop, self._on_loop = _hop_for(scheduler)
        self._pool = concurrent.futures.ThreadPoolExecutor(STORE_THREADS, f"apscheduler-fence-store-{alias}")
        self._inner.start(_Upwards(self, scheduler), alias)
        self._inner._logger = logging.getLogger(SILENCED)
        self._inner._run_job_error = self._inner_failed  # its own would only log
        scheduler.add_listener(self._job_added, EVENT_JOB_ADDED)
        scheduler.add_listener(self._job_modified, EVENT_JOB_MODIFIED)
        self._node.keeper.start(alias)

    def _build_inner(self, scheduler: BaseScheduler) -> BaseExecutor:
        choice, options = self._inner_choice, self._inner_options
        if isinstance(choice, FencedExecutor) or choice == "fenced":
            raise ConfigError(
                "inner= must be another executor: a fenced one in a fenced one would claim every slot twice"
            )
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
        except ValueError as error:
            given = ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))
            raise ConfigError(f"the inner executor does not take {given}: {error}") from error
        except LookupError as error:
            raise ConfigError(f"inner={choice!r}: {error}") from error

    def shutdown(self, wait: bool = True) -> None:
        """Stop the inner executor. Leases of runs that go on stay held and renewed until these have really ended."""
        self._closing = True
        self._node.stopping.set()
        if self._inner is not None:
            self._inner.shutdown(wait)
        if self._scheduler is not None:
            self._scheduler.remove_listener(self._job_added)
            self._scheduler.remove_listener(self._job_modified)
        self._stopped = True
        if self._rest_when_idle() and wait and not self._on_loop:
            self._node.keeper.join(self._terms.store_patience)

    def _rest_when_idle(self) -> bool:
        # Not before: a cancelled coroutine submits its settle, and a queued run claims, after shutdown() has returned.
        if not self._stopped or self._submitted:
            return False
        if self._pool is not None:
            self._pool.shutdown(wait=False)
        self._node.keeper.stop()
        return True

    def forget(self) -> None:
        """In a forked child: leases, connections and threads are the parent's."""
        self._forget_runs()
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
        try:
            run = self._run_of(job, run_times)
        except ConfigError as error:
            logger.error('Job "%s" was not run: %s', job.id, error)
            for run_time in run_times[-self._max_catch_up :]:
                self._hop(partial(self._scheduler._dispatch_event, _config_failed(job, run_time, error)))
            return
        self._remember(run, job.max_instances)
        if not self._submit(run, job.max_instances):
            raise MaxInstancesReachedError(job)

    def _submit(self, run: Run, max_instances: int) -> bool:
        assert self._lock is not None  # noqa: S101 - as in submit_job
        assert self._inner is not None  # noqa: S101
        key = (run.jobstore, run.job_id)
        # What happens while an earlier slot still runs is for the overlap policy to say, here as on other nodes.
        limited = not run.by_hand and (run.policy is None or run.policy.overlap == "skip" or run.slot is not None)
        with self._lock:
            if limited and self._running[key] >= max_instances:
                if run.slot is not None:
                    self._put_off[key].add(run.lease)
                return False
            self._running[key] += 1
            ticket = f"{run.job_id}#{next(self._tickets)}"
            submission = self._submitted[ticket] = _Submission(run)
        look_alike = _LookAlike(ticket, self._carried(ticket, submission), run.jobstore)
        try:
            # One run time stands for all of them: the inner executor would call the function once for each.
            self._inner.submit_job(look_alike, run.run_times[-1:])
        except BaseException:
            self._take_ticket(ticket)
            raise
        finally:
            self._discount(ticket)
        return True

    def _do_submit_job(self, job: Job, run_times: Sequence[datetime]) -> None:
        raise NotImplementedError("submit_job is overridden whole")

    def _carried(self, ticket: str, submission: _Submission) -> Callable[[], Any]:
        run = submission.run
        if self._in_children:
            return partial(run_in_child, run, self._store.describe(), self._terms)
        if awaits(run.function) and self._pool is not None:
            return partial(run_on_loop, run, self._node, self._pool)
        return partial(self._carry, ticket, submission)

    def _carry(self, ticket: str, submission: _Submission) -> list[Event]:
        # Against _inner_failed: each side first says what it does and then looks at what the other has said.
        submission.entered = True
        if submission.given_up:
            submission.events = [failed(submission.run, at, CancelledError()) for at in submission.run.run_times]
        else:
            submission.events = run_here(submission.run, self._node)
        if submission.given_up:
            self._hop(partial(self._deliver, ticket, submission.events))
        return submission.events

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
        cluster_name = self._name_of(job, policy)
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

    def _name_of(self, job: Job, policy: Policy | None) -> str:
        name = policy.name if policy is not None else None
        return job_name(job.id, jobstore=job._jobstore_alias, namespace=self._namespace, name=name)

    def _policy_of(self, job: Job) -> Policy | None:
        label = label_of(job.func)
        options = label.options if label is not None else {}
        if job.id in self._policies:
            given = self._policies[job.id]
            return None if given is None else resolve(self._defaults, options or {}, given)
        return None if options is None else resolve(self._defaults, options)

    def _check_identity(self, job: Job, policy: Policy) -> None:
        jobstore = self._scheduler._jobstores.get(job._jobstore_alias)
        local = isinstance(getattr(jobstore, "_inner", jobstore), MemoryJobStore)  # also behind a shared one
        if policy.name is None and local and generated_id(job.id):
            raise ConfigError(
                f"job {job.name!r} has no ID of its own: APScheduler made up another on every node, so no two of them "
                "would agree on a slot. Give add_job(..., id=...) or @fenced(name=...)"
            )
        if policy.overlap == "allow" and len(policy.lease or self._name_of(job, policy)) > NAME_LIMIT - SLOT_LIMIT - 1:
            raise ConfigError(
                f'job {job.id!r} has overlap="allow", where each slot has a lease of its own name: its name may have '
                f"{NAME_LIMIT - SLOT_LIMIT - 1} characters at most"
            )
        if not local and (_is_callable_instance(job.func) or _is_class_of_callables(job.func)):
            raise ConfigError(
                f"job {job.id!r} is a callable object in a persistent job store, which keeps only a reference to its "
                "class: schedule a bound method or a function instead"
            )

    # --- recorded executions that wait for a node ---------------------------------------------------------------------

    def _remember(self, run: Run, max_instances: int) -> None:
        """Keep how to run a job after its job store has forgotten it, as it does with a `date` job at once."""
        if run.policy is not None:
            other = self._known.get(run.job)
            if other is not None and (other.run.jobstore, other.run.job_id) != (run.jobstore, run.job_id):
                logger.error(
                    'Jobs "%s" and "%s" have the same name in the cluster, %r, and suppress each other: give each its own',
                    other.run.job_id, run.job_id, run.job,
                )  # fmt: skip
            self._known[run.job] = _Known(run, max_instances)
            self._known.move_to_end(run.job)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)

    def _recover(self, row: Execution) -> bool:
        """Have a waiting execution run here, if this node knows its job. Called by the keeper, which never waits."""
        known = self._known.get(row.job) or self._look_up(row)
        if known is None or known.run.policy is None:
            return False
        slot = Slot(row.job, row.slot, row.slot_at, row.scheduled_at)
        run = replace(
            known.run, slot=slot, lease=row.lease, run_times=(in_time(row.scheduled_at),), misfire_grace_time=None
        )  # fmt: skip
        self._hop(partial(self._take_over, run, known.max_instances))
        return True

    def _look_up(self, row: Execution) -> _Known | None:
        # The job store itself: the scheduler's own look-up takes a lock that its shutdown holds while it waits for us.
        store = self._scheduler._jobstores.get(row.jobstore) if self._scheduler is not None else None
        try:
            job: Job | None = store.lookup_job(row.job_id) if store is not None else None
            if job is None or self._scheduler._executors.get(job.executor) is not self:
                return None
            job._jobstore_alias = row.jobstore
            run = self._run_of(job, ())
        except Exception as error:  # noqa: BLE001 - another node may be able to
            logger.warning('Job "%s" of execution %s cannot be loaded here: %s', row.job_id, row.id, error)
            return None
        if run.job != row.job:
            return None
        self._remember(run, job.max_instances)
        known: _Known | None = self._known.get(run.job)
        return known

    def _take_over(self, run: Run, max_instances: int) -> None:
        under_way = any(each.run.slot == run.slot for each in list(self._submitted.values()))
        if not self._closing and not under_way:
            self._submit(run, max_instances)

    def run_now(self, job: Job) -> str:
        """Run a job once, by hand, somewhere in the cluster's order: under its lease, as an execution of its own.

        Returns:
            The execution's ID, `job/manual/<id>`.

        Raises:
            ConfigError: the job cannot be told apart in the cluster, or is not fenced.
        """
        run = self._run_of(job, ())
        if run.policy is None:
            raise ConfigError(f"job {job.id!r} is unfenced: it has no executions, and can be called directly")
        now = time.time_ns() // 1000
        slot = manual_slot(run.job, uuid.uuid4().hex, now)
        run = replace(run, slot=slot, by_hand=True, run_times=(in_time(now),), misfire_grace_time=None)
        self._hop(partial(self._submit, run, job.max_instances))
        return slot.execution_id

    # --- up: from the inner executor to the scheduler -----------------------------------------------------------------

    def _take_ticket(self, ticket: str) -> Run | None:
        assert self._lock is not None  # noqa: S101 - as above
        with self._lock:
            submission = self._submitted.pop(ticket, None)
            if submission is None:
                return None
            key = (submission.run.jobstore, submission.run.job_id)
            self._running[key] -= 1
            if not self._running[key]:
                del self._running[key]
            return submission.run

    def _discount(self, ticket: str, by: int = 0) -> None:
        # What ends inside submit_job leaves a count of zero behind; tickets being unique, these would pile up.
        inner = self._inner
        if inner is not None and inner._lock is not None:
            with inner._lock:
                inner._instances[ticket] -= by
                if not inner._instances[ticket]:
                    del inner._instances[ticket]

    def _returned(self, event: JobExecutionEvent) -> None:
        """The inner executor has carried a run to its end."""
        submission = self._submitted.get(event.job_id)
        if submission is None:
            return
        run, result = submission.run, event.retval
        if inspect.iscoroutine(result):
            result.close()
            result = [failed(run, at, never_awaited(run.function)) for at in run.run_times]
            logger.error('Job "%s" was not run: %s', run.job_id, result[0].exception)
        elif event.code != EVENT_JOB_EXECUTED:
            logger.error('Job "%s": its run ended without an answer: %r', run.job_id, event.exception)
            result = [failed(run, at, event.exception, event.traceback) for at in run.run_times]
        self._deliver(event.job_id, result)

    def _inner_failed(self, ticket: str, error: BaseException, _traceback: object = None) -> None:
        """The inner executor could not carry a run: a pool child died, something did not survive pickling, a shutdown."""
        self._discount(ticket, by=1)
        submission = self._submitted.get(ticket)
        if submission is None:
            return
        submission.given_up = True
        if submission.events is not None:
            self._deliver(ticket, submission.events)
        elif not submission.entered:
            run = submission.run
            logger.error('Job "%s": its run ended without an answer: %r', run.job_id, error)
            self._deliver(ticket, [failed(run, at, error) for at in run.run_times])

    def _deliver(self, ticket: str, events: Sequence[Event]) -> None:
        run = self._take_ticket(ticket)
        if run is None:
            return
        for event in events:
            self._scheduler._dispatch_event(event)
        # Not earlier: with its ticket, this run would stand in the way of the next by `max_instances`.
        freed = self._put_off.pop((run.jobstore, run.job_id), set())
        queued = run.policy is not None and run.policy.overlap == "queue"
        if queued and any(event.code != EVENT_JOB_REFUSED for event in events):
            freed.add(run.lease)
        for lease in freed:
            self._node.keeper.look_behind(lease)
        self._rest_when_idle()

    def _hear(self, event: FenceEvent) -> None:
        """An event from the keeper's thread, on which no listener may run."""
        if self._scheduler is not None:
            self._hop(partial(self._scheduler._dispatch_event, event))

    # --- what can be said when a job is added -------------------------------------------------------------------------

    def _own_job(self, event: JobEvent) -> Job | None:
        try:
            job: Job = self._scheduler._lookup_job(event.job_id, event.jobstore)[0]
        except JobLookupError:
            return None
        if self._scheduler._executors.get(job.executor) is not self or self._policy_of(job) is None:
            return None
        job._jobstore_alias = event.jobstore
        return job

    def _job_modified(self, event: JobEvent) -> None:
        """A take-over must not run the job as it was."""
        job = self._own_job(event)
        if job is not None:
            with suppress(ConfigError):  # which the next submission will say
                self._remember(self._run_of(job, ()), job.max_instances)

    def _job_added(self, event: JobEvent) -> None:
        job = self._own_job(event)
        policy = self._policy_of(job) if job is not None else None
        if job is None or policy is None:
            return
        try:
            self._remember(self._run_of(job, ()), job.max_instances)
        except ConfigError as error:
            logger.error('Job "%s" will not run: %s', job.id, error)
            self._scheduler._dispatch_event(_config_failed(job, job.next_run_time, error))
        if policy.slot is None:
            for warning in trigger_warnings(job.trigger, added_at=datetime.now().astimezone()):
                logger.warning('Job "%s": %s', job.id, warning)
        if self._store_timeout > policy.lock_at_most / 3:
            logger.warning(
                'Job "%s": the store may take %s to fail, which is more than a third of lock_at_most (%s): lower '
                "timeout= or raise lock_at_most=",
                job.id, self._store_timeout, policy.lock_at_most,
            )  # fmt: skip


def _config_failed(job: Job, run_time: datetime | None, error: ConfigError) -> JobExecutionEvent:
    return JobExecutionEvent(EVENT_JOB_ERROR, job.id, job._jobstore_alias, run_time, exception=error)


def run_now(scheduler: BaseScheduler, job_id: str, jobstore: str | None = None) -> str:
    """Run a job of a started scheduler once, now, by hand.

    It runs under the job's lease and is recorded as an execution of its own, which no schedule will repeat. Where the
    lease is held, the job's `overlap` policy decides, and a refusal is an `EVENT_JOB_REFUSED`.

    Returns:
        The execution's ID, `job/manual/<id>`.

    Raises:
        JobLookupError: there is no such job.
        ConfigError: its executor is not a fenced one, or the job is unfenced.
    """
    job, alias = scheduler._lookup_job(job_id, jobstore)
    executor = scheduler._executors.get(job.executor)
    if not isinstance(executor, FencedExecutor) or alias is None:
        raise ConfigError(f"job {job_id!r} does not run on a fenced executor of a started scheduler")
    job._jobstore_alias = alias
    return executor.run_now(job)


@dataclass(frozen=True, slots=True)
class _Known:
    """How to run a job that this node has seen."""

    run: Run
    max_instances: int


@dataclass(slots=True, eq=False)
class _Submission:
    """A run in the inner executor's hands, which may give it up while its thread goes on."""

    run: Run
    entered: bool = False
    events: list[Event] | None = None
    given_up: bool = False


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

Hop: TypeAlias = Callable[[Callable[[], object]], object]


class _Courier:
    """Calls what it is given, in order, on a thread that lasts as long as there is something to call."""

    def __init__(self) -> None:
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._lock = threading.Lock()
        self._running = False

    def __call__(self, act: Callable[[], object]) -> None:
        with self._lock:
            self._calls.append(act)
            if not self._running:
                threading.Thread(target=self._run, name="apscheduler-fence-events", daemon=True).start()
                self._running = True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._running = False
                    return
                act = self._calls.popleft()
            try:
                act()
            except Exception:
                logger.exception("An event could not be delivered")


def _hop_for(scheduler: BaseScheduler) -> tuple[Hop, bool]:
    """How a thread gets something called where the scheduler runs, and whether that is an event loop."""
    if getattr(scheduler, "_eventloop", None) is not None:
        return _or_by_courier(scheduler._eventloop.call_soon_threadsafe), True
    if getattr(scheduler, "_ioloop", None) is not None:
        # Not its own add_callback, which swallows what comes after the loop was closed.
        return _or_by_courier(scheduler._ioloop.asyncio_loop.call_soon_threadsafe), True
    if getattr(scheduler, "_reactor", None) is not None:
        return scheduler._reactor.callFromThread, True
    if any(cls.__module__ == "apscheduler.schedulers.gevent" for cls in type(scheduler).__mro__):
        return _gevent_hop(), True
    return _Courier(), False


def _or_by_courier(hop: Hop) -> Hop:
    courier = _Courier()

    def to_loop(act: Callable[[], object]) -> None:
        try:
            hop(act)
        except RuntimeError:  # the loop is closed; what is said must still be heard
            courier(act)

    return to_loop


def _gevent_hop() -> Hop:
    import gevent  # noqa: PLC0415 - only its own scheduler's users have it

    waiting: collections.deque[Callable[[], object]] = collections.deque()
    watcher = gevent.get_hub().loop.async_(ref=False)  # which does not keep the hub going by itself

    def wake() -> None:
        while waiting:
            gevent.spawn(waiting.popleft())

    watcher.start(wake)

    def to_hub(act: Callable[[], object]) -> None:
        waiting.append(act)
        watcher.send()

    return to_hub


# --- reading options --------------------------------------------------------------------------------------------------


def _given_store(store: object) -> Any:
    given = store if store is not None and store != "" else os.environ.get(STORE_VARIABLE)
    if not given:
        raise ConfigError(
            "no store: give FencedExecutor(store=...) a database or Redis URL, an engine or a client, or set "
            f"{STORE_VARIABLE}"
        )
    return given


def _read_policies(given: object) -> dict[str, dict[str, Any] | None]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"policies={given!r} is not a mapping from job IDs to options")
    policies: dict[str, dict[str, Any] | None] = {}
    for job_id, options in given.items():
        if options is None or (isinstance(options, str) and options.strip().lower() in ("", "none")):
            policies[job_id] = None
        elif isinstance(options, Mapping):
            policies[job_id] = parse_options(options, f"policies[{job_id!r}]")
        else:
            raise ConfigError(f"policies[{job_id!r}]={options!r} is neither a mapping of options nor None")
    return policies


def _count(value: object, option: str) -> int:
    try:
        count = int(str(value))
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(f"{option}={value!r} is not a whole number of at least 1")
    return count


def _is_process_pool(inner: BaseExecutor) -> bool:
    return isinstance(getattr(inner, "_pool", None), concurrent.futures.ProcessPoolExecutor)


def _is_callable_instance(function: object) -> bool:
    return not inspect.isroutine(function) and not inspect.isclass(function) and not isinstance(function, partial)


def _is_class_of_callables(function: object) -> bool:
    return inspect.isclass(function) and any("__call__" in vars(cls) for cls in function.__mro__)
