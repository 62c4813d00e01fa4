"""For the unit tests of people who write jobs: a fence without a scheduler, and a cluster without waiting."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from itertools import combinations
from typing import TYPE_CHECKING, Any

from apscheduler.triggers.date import DateTrigger

from apscheduler_fence.errors import ConfigError
from apscheduler_fence.events import JobRefusedEvent
from apscheduler_fence.fence import Fence, Hold, entered
from apscheduler_fence.lease import Grant
from apscheduler_fence.policy import Instant, in_micros, instant, label_of, parse_duration, parse_options, resolve
from apscheduler_fence.runner import (
    Call,
    Node,
    Outcome,
    Run,
    Sleep,
    Terms,
    answer,
    awaits,
    call,
    call_async,
    run_slot,
)
from apscheduler_fence.slots import Slot, format_time, validate_name
from apscheduler_fence.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from typing_extensions import Self

    from apscheduler_fence.events import FenceEvent
    from apscheduler_fence.policy import Duration, Policy

__all__ = ["FakeFence", "SimulatedRun", "Simulation", "fake_fence", "simulate"]


class FakeFence(Fence):
    """A fence that needs no scheduler and no store. As a context manager it is the current one inside the block."""

    __slots__ = ("_blocks",)
    _blocks: list[AbstractContextManager[Fence]]

    def __enter__(self) -> Self:
        if not hasattr(self, "_blocks"):
            object.__setattr__(self, "_blocks", [])
        self._blocks.append(entered(self))
        self._blocks[-1].__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocks.pop().__exit__(kind, error, trace)

    def lose(self) -> None:
        """Let the lease be lost from now on."""
        assert self._hold is not None  # noqa: S101 - fake_fence made it
        self._hold.lost = True


def fake_fence(
    *,
    token: int = 1,
    job: str = "job",
    scheduled_at: datetime = datetime(2026, 1, 1, tzinfo=timezone.utc),
    attempt: int = 1,
    lost: bool = False,
    **policy: Any,
) -> FakeFence:
    """A fence for a unit test: hand it to the job, or enter it so that `current_fence()` finds it.

    Args:
        token: the fencing token.
        job: the job's name; with `scheduled_at` it makes the execution ID.
        scheduled_at: the slot; an aware datetime.
        attempt: which attempt of the execution this is.
        lost: whether its lease is lost from the start; `lose()` loses it later.
        policy: options of `Policy`, such as `lock_at_most="5s"`, as `@fenced` takes them.

    Raises:
        ConfigError: `scheduled_at` is naive, `job` is not a usable name, or an option is wrong.
    """
    if scheduled_at.utcoffset() is None:
        raise ConfigError(f"scheduled_at={scheduled_at!r} needs a time zone: datetime(..., tzinfo=timezone.utc)")
    validate_name(job, "job")
    at = (scheduled_at - datetime(1970, 1, 1, tzinfo=timezone.utc)) // timedelta(microseconds=1)
    slot = Slot(job, format_time(at), at, at)
    began: Instant = instant()
    terms = resolve(parse_options(policy, "fake_fence"))
    lease = terms.lease or job
    grant = Grant(lease, job, slot.name, token, "fake:0:0", attempt)
    hold = Hold(grant, slot, terms, since=began, began=began, job_id=job, lost=lost, settle_in=_pretend)
    in_utc = scheduled_at.astimezone(timezone.utc)
    return FakeFence(token, slot.execution_id, job, lease, slot.name, in_utc, attempt, hold)


def _pretend(_db: object, _change: object, _undone: object) -> bool:
    """A fake fence's `settle_in` writes nothing: there is no store."""
    return True


# --- a cluster without waiting ----------------------------------------------------------------------------------------

START = datetime(2026, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The job function was entered once.

    Attributes:
        node: the number of the node that ran it, from 0.
        execution_id: the logical run; a second run with the same one is a duplicate.
        scheduled_at: when it was scheduled for, in UTC.
        token: its fencing token; 0 for a job that is not fenced.
        began: when the function was entered, in simulated seconds.
        ended: when it had returned, in simulated seconds.
        value: what it returned.
        error: what it raised.
        lost: whether its lease was lost before it ended.
    """

    node: int
    execution_id: str
    scheduled_at: datetime
    token: int
    began: float
    ended: float
    value: Any = None
    error: BaseException | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Simulation:
    """What came of all slots on all nodes.

    Attributes:
        slots: when the slots were scheduled for.
        runs: every time the function was entered, in the order of their beginnings.
        refusals: a node's attempts to run a slot that another node had, or that the rules forbade.
        events: what listeners would have heard besides: lost leases, overdue runs, lost executions.
    """

    slots: tuple[datetime, ...]
    runs: tuple[SimulatedRun, ...]
    refusals: tuple[JobRefusedEvent, ...]
    events: tuple[FenceEvent, ...] = ()

    @property
    def entered(self) -> tuple[datetime, ...]:
        """The slots that were run, each once."""
        return tuple(sorted({run.scheduled_at for run in self.runs}))

    @property
    def missed(self) -> tuple[datetime, ...]:
        """The slots that no node ran."""
        return tuple(slot for slot in self.slots if slot not in self.entered)

    @property
    def duplicates(self) -> tuple[SimulatedRun, ...]:
        """The runs of slots that were run more than once."""
        counts = Counter(run.scheduled_at for run in self.runs)
        return tuple(run for run in self.runs if counts[run.scheduled_at] > 1)

    @property
    def overlaps(self) -> tuple[tuple[SimulatedRun, SimulatedRun], ...]:
        """The pairs of runs that were under way at the same time."""
        return tuple((a, b) for a, b in combinations(self.runs, 2) if a.began < b.ended and b.began < a.ended)

    @property
    def errors(self) -> tuple[SimulatedRun, ...]:
        """The runs that raised something, a failed assertion inside the job for example."""
        return tuple(run for run in self.runs if run.error is not None)


def simulate(
    job: Callable[..., Any],
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    nodes: int = 2,
    slots: int = 20,
    period: Duration = 60.0,
    takes: Duration = 0.0,
    skew: Duration = 0.0,
    pause: Duration = 0.0,
    seed: int = 0,
    **options: Any,
) -> Simulation:
    """Run a job on several nodes that share one store, in simulated time: what takes hours there takes milliseconds here.

    The job's own function is called, on this thread. A plain function takes no time but `takes`; in a coroutine function
    `asyncio.sleep` and timeouts pass in simulated time. Work in other threads and real I/O have no place in it. Time that
    the job reads from `time` or `datetime` is real.

    Args:
        job: a function or a coroutine function, decorated with `@fenced` or not.
        args: positional arguments of the job.
        kwargs: keyword arguments of the job.
        nodes: how many nodes there are.
        slots: how many slots the job has.
        period: the time between two slots.
        takes: how long every run goes on after a plain function has returned.
        skew: how late the clock of the last node is; those between are late by their share.
        pause: for how long the first node stands still every time it gets the lease: after its last look at the lease,
            and before the job function is entered. Nothing on that node goes on meanwhile, renewal included.
        seed: chooses the latencies of the store, and with them who wins.
        options: options of `Policy` that override those of the decorator.

    Raises:
        ConfigError: an option is unknown, or its value is not allowed.
    """
    label = label_of(job)
    policy = None
    if label is None or label.options is not None:
        policy = resolve(label.options or {} if label is not None else {}, parse_options(options, "simulate"))
    elif options:
        raise ConfigError("simulate: options make no difference to an @unfenced job")
    cluster = _Cluster(
        job, tuple(args), dict(kwargs or {}), policy, slots,
        _seconds(period, "period"), _seconds(takes, "takes"), _seconds(pause, "pause"), random.Random(seed),  # noqa: S311
    )  # fmt: skip
    late = _seconds(skew, "skew")
    loop = _VirtualLoop()
    try:
        loop.run_until_complete(cluster.run([late * index / max(1, nodes - 1) for index in range(nodes)]))
    finally:
        loop.close()
    return Simulation(
        tuple(cluster.slot(number) for number in range(slots)),
        tuple(sorted(cluster.runs, key=lambda run: (run.began, run.node))),
        tuple(cluster.refusals),
        tuple(cluster.events),
    )


def _seconds(duration: Duration, option: str) -> float:
    return parse_duration(duration, option).total_seconds()


class _VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer instead of waiting for it."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_ImpatientSelector(self))

    def time(self) -> float:
        return self.now


class _ImpatientSelector(selectors.SelectSelector):
    def __init__(self, loop: _VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout is not None:
            self._loop.now += timeout
        return ready


@dataclass(eq=False)
class _Cluster:
    """Several nodes with one job; `run` plays all its slots."""

    job: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    policy: Policy | None
    slots: int
    period: float
    takes: float
    pause: float
    random: random.Random
    runs: list[SimulatedRun] = field(default_factory=list)
    refusals: list[JobRefusedEvent] = field(default_factory=list)
    events: list[FenceEvent] = field(default_factory=list)

    def slot(self, number: int) -> datetime:
        return START + timedelta(seconds=self.period * number)

    async def run(self, lateness: Sequence[float]) -> None:
        store = MemoryStore(clock=self._store_clock)
        nodes = [_VirtualNode(self, store, index, late) for index, late in enumerate(lateness)]
        keepers = [asyncio.ensure_future(node.keep()) for node in nodes]
        await asyncio.gather(*(node.schedule() for node in nodes))
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    @staticmethod
    def _store_clock() -> int:
        return in_micros(START - datetime(1970, 1, 1, tzinfo=timezone.utc)) + round(_now() * 1e6)


@dataclass(eq=False)
class _VirtualNode:
    cluster: _Cluster
    store: MemoryStore
    index: int
    late: float
    stands_until: float = 0.0

    def __post_init__(self) -> None:
        self.node = Node(self.store, Terms(), self.cluster.events.append, self._clock)

    def _clock(self) -> Instant:
        now = _now()
        return Instant(now, now, START.timestamp() + now - self.late)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await asyncio.sleep(self.stands_until - _now())

    async def keep(self) -> None:
        """The keeper's loop."""
        most = self.cluster.policy.lock_at_most.total_seconds() if self.cluster.policy is not None else 60.0
        while True:
            await self._sleep(min(max(self.node.keeper.step(), 0.001), most / 10))

    async def schedule(self) -> None:
        """What a scheduler does: run the job whenever this node's clock says so."""
        under_way = []
        for number in range(self.cluster.slots):
            await self._sleep(max(0.0, number * self.cluster.period + self.late - _now()))
            under_way.append(asyncio.ensure_future(self._run(self.cluster.slot(number))))
        await asyncio.gather(*under_way)

    async def _run(self, run_time: datetime) -> None:
        cluster = self.cluster
        run = Run(
            "job", "default", "job", "job", cluster.job, cluster.args, cluster.kwargs, DateTrigger(run_time),
            (run_time,), cluster.policy,
        )  # fmt: skip
        flow = run_slot(run, run_time, self.node)
        reply: Any = None
        error: Exception | None = None
        while True:
            try:
                step = flow.throw(error) if error is not None else flow.send(reply)
            except StopIteration as end:
                if isinstance(end.value, JobRefusedEvent):
                    cluster.refusals.append(end.value)
                return
            reply = error = None
            match step:
                case Call():
                    reply = await self._call(step, run_time)
                case Sleep(seconds):
                    await self._sleep(seconds)
                case _:
                    await self._sleep(cluster.random.uniform(0.0005, 0.002))
                    try:
                        reply = answer(step, self.store)
                    except Exception as raised:  # noqa: BLE001 - the flow knows what each error means
                        error = raised
                    await self._sleep(cluster.random.uniform(0.0005, 0.002))

    async def _call(self, step: Call, run_time: datetime) -> Outcome:
        fence = step.fence
        if self.index == 0 and self.cluster.pause:
            self.stands_until = _now() + self.cluster.pause
            await self._sleep(0)
        began = _now()
        outcome = await call_async(step) if awaits(step.function) else call(step)
        await self._sleep(self.cluster.takes if not awaits(step.function) else 0)
        name = fence.execution_id if fence is not None else f"job/{format_time(_micros_of(run_time))}"
        self.cluster.runs.append(
            SimulatedRun(
                self.index, name, run_time, fence.token if fence is not None else 0, began, _now(),
                outcome.value, outcome.error, fence is not None and fence.lost,
            )
        )  # fmt: skip
        return outcome


def _now() -> float:
    return asyncio.get_running_loop().time()


def _micros_of(moment: datetime) -> int:
    return in_micros(moment - datetime(1970, 1, 1, tzinfo=timezone.utc))
