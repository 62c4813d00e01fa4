"""Virtual time, machines, processes and a network, and a seeded scheduler that decides what happens next."""

import asyncio
import contextlib
import heapq
import itertools
import logging
import random
from collections import deque
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from functools import partial

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MISSED
from apscheduler.triggers.date import DateTrigger
from apscheduler.triggers.interval import IntervalTrigger
from greenlet import getcurrent, greenlet

from apscheduler_fence import keeper, runner
from apscheduler_fence.errors import LeaseLost, StaleToken, StoreError
from apscheduler_fence.events import EVENT_JOB_REFUSED
from apscheduler_fence.policy import Instant, Policy, in_micros
from apscheduler_fence.slots import Slot
from apscheduler_fence.stores.memory import MemoryStore

from .trace import brief
from .truth import Truth, effects_of, must

EPOCH = 1_800_000_000.0
TIMEOUT = 2.0
PATIENCE = 10.0
FAULTS = (
    "network", "pause", "suspend", "crash", "shutdown", "clock", "outage", "loss", "rollback", "store_ahead", "store_back",
)  # fmt: skip


@dataclass
class Job:
    """One job as every machine knows it. `phase` is by machine: intervals start when their machine did."""

    name: str
    lease: str
    trigger: object
    period: float
    policy: Policy
    grace: int | None
    careful: bool
    """Whether it looks at its fence before each effect."""
    phase: list


@dataclass
class Machine:
    """A host with three clocks, one of which can be wrong. Pausing it pauses all its processes."""

    world: object
    index: int
    rate: float
    skew: float
    monotonic_lag: float = 0.0
    boottime_lag: float = 0.0
    paused_until: float = 0.0

    @property
    def paused(self):
        return self.paused_until > self.world.now

    def clock(self):
        ticked = self.world.now * self.rate
        return Instant(1e4 + ticked - self.monotonic_lag, 2e4 + ticked - self.boottime_lag, EPOCH + ticked + self.skew)

    def when(self, wall):
        """The true time at which this machine's wall clock shows `wall`."""
        return (wall - EPOCH - self.skew) / self.rate


class Process:
    """One scheduler process: the real node and keeper, and the wire to the store."""

    def __init__(self, world, machine, number):
        self.world, self.machine, self.number = world, machine, number
        self.dead = self.stopping = self.gave_up = False
        self.tasks = {}
        self.nonces = itertools.count(1)
        self.armed = itertools.count(1)
        self.arming = {}
        self.next = {}
        self.recovering = set()
        self.node = VirtualNode(Wire(self), world.terms, self.emit, machine.clock, self.recover)
        self.node.keeper._wake = Wake(world)
        self.node.keeper._ensure_thread = self._ensure_keeper
        self._ensure_keeper()

    def __repr__(self):
        return f"p{self.number}@m{self.machine.index}"

    def emit(self, event):
        self.world.note(self, "event", event)
        self.world.truth.heard(event)

    def _ensure_keeper(self):
        keeper = self.node.keeper
        if keeper._thread is None:
            keeper._thread = Task(self, "keeper", self._keep)
        keeper._nudged = True
        keeper._wake.notify_all()

    def _keep(self):
        self.node.keeper._run()
        self.gave_up = bool(self.node.keeper._unsettled or self.node.keeper._unannounced)

    def die(self):
        self.dead = True
        for task in list(self.tasks.values()):
            task.fiber.throw()
        self.tasks.clear()

    # --- its scheduler ------------------------------------------------------------------------------------------------

    def boot(self):
        wall = self.machine.clock().wall
        for job in self.world.jobs:
            # A job store that outlived the process remembers what was missed.
            first = (wall - EPOCH - job.phase[self.machine.index]) / job.period - self.world.random.choice(
                (0, 0, 1, 12)
            )
            self.next[job.name] = max(0, int(first) + 1)
            self.arm(job)

    def arm(self, job):
        number = self.arming[job.name] = next(self.armed)
        if self.next[job.name] < self.world.slots and not (self.dead or self.stopping):
            late = self.world.random.choice((0, 0.001, 0.02, 1.0)) * self.world.random.random()
            due = self.machine.when(self._run_time(job)) + late
            self.world.at(max(self.world.now, due), self._fire, job, number)

    def _run_time(self, job):
        return EPOCH + self.next[job.name] * job.period + job.phase[self.machine.index]

    def _fire(self, job, number):
        if self.arming.get(job.name) != number or self.dead or self.stopping:
            return
        if self.machine.paused:
            self.world.at(self.machine.paused_until, self._fire, job, number)
            return
        if self.machine.clock().wall >= self._run_time(job):
            run_time = datetime.fromtimestamp(self._run_time(job), timezone.utc)
            self.next[job.name] += 1
            Task(self, f"{job.name}@{run_time:%H:%M:%S.%f}", partial(self._run, job, run_time, job.grace))
        self.arm(job)

    def recover(self, row):
        """As the executor does: have a waiting execution run here."""
        slot = Slot(row.job, row.slot, row.slot_at, row.scheduled_at)
        if slot not in self.recovering and not self.stopping:
            self.recovering.add(slot)
            [job] = (job for job in self.world.jobs if job.name == row.job)
            Task(self, f"{row.id} again", partial(self._run_again, job, slot, row.lease))
        return True

    def _run_again(self, job, slot, lease):
        try:
            self._run(replace(job, lease=lease), runner.in_time(slot.scheduled_at), None, slot)
        finally:
            self.recovering.discard(slot)

    def _run(self, job, run_time, grace, slot=None):
        world, task = self.world, self.world.current
        run = runner.Run(
            job.name, "default", job.name, job.lease, _job, (), {}, job.trigger, (run_time,), job.policy, grace,
            slot=slot,
        )  # fmt: skip
        task.began = world.now
        event = world.drive(runner.run_slot(run, run_time, self.node), task, job)
        if task.grant is None:
            task.decided()
        if event is None:
            return
        world.note(self, "end", event)
        slot = slot or runner.slot_of(job.name, job.trigger, run_time)
        if event.code == EVENT_JOB_REFUSED:
            world.truth.refused(event.reason, task.seen, (slot.job, slot.name), slot.at)
            world.explained[slot.execution_id].append(event.reason)
        elif event.code in (EVENT_JOB_ERROR, EVENT_JOB_MISSED) and task.grant is None:
            world.errors += event.code == EVENT_JOB_ERROR
            world.explained[slot.execution_id].append("error")


def _job(fence):
    """What a node would call; the world plays it instead."""


class VirtualNode(runner.Node):
    """The real one, with holders that are numbered."""

    def nonce(self):
        process = self.store.process
        return f"{process!r}:{next(process.nonces)}"


class Task:
    """A thread of a process: one run, or the keeper. Its steps happen when the world says so."""

    def __init__(self, process, name, act):
        self.process, self.name = process, name
        self.seen = self.grant = None
        self.began = 0.0
        self.ticket = 0
        self.fiber = greenlet(act, parent=process.world.hub)
        if not process.dead:
            process.tasks[id(self)] = self
            process.world.at(process.world.now, self.resume, self.ticket)

    def resume(self, ticket, value=None, error=None):
        """Go on, if this is what the task still waits for."""
        process, world = self.process, self.process.world
        if process.dead or ticket != self.ticket:
            return
        if process.machine.paused:
            world.at(process.machine.paused_until, self.resume, ticket, value, error)
            return
        self.ticket += 1
        world.current = self
        self.fiber.switch(*((value, error) if self.ticket > 1 else ()))
        world.current = None
        if self.fiber.dead:
            process.tasks.pop(id(self), None)

    def wait(self):
        value, error = self.process.world.hub.switch()
        if error is not None:
            raise error
        return value

    def sleep(self, seconds):
        self.process.world.at(self.process.world.now + seconds, self.resume, self.ticket)
        self.wait()

    def decided(self):
        """I7: a store that does not answer is given up in time, unless the whole machine stood still."""
        world = self.process.world
        if not world.stood_still:
            took, most = world.now - self.began, PATIENCE + 3 * TIMEOUT + 3.0 if world.faults else world.prompt
            must(took <= most, "I7: waited too long for the store", took, self.name)


class Wake:
    """The keeper's condition variable in virtual time. As with a real one, nobody hears a call that did not wait for it."""

    def __init__(self, world):
        self.world = world
        self.waiting = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self, timeout):
        task = self.world.current
        self.waiting = task, task.ticket
        self.world.at(self.world.now + timeout, task.resume, task.ticket)
        task.wait()
        self.waiting = None

    def notify_all(self):
        if self.waiting is not None:
            task, ticket = self.waiting
            self.world.at(self.world.now, task.resume, ticket)


class Wire:
    """A process's way to the store: every call takes time, and may fail in all the ways in which calls do."""

    namespace = ""

    def __init__(self, process):
        self.process = process

    def open(self):
        if self.process.world.down:
            raise StoreError("cannot connect")
        return []

    def close(self):
        pass

    def read(self, key):
        seen = self._call("read", key, partial(self.process.world.truth.read, key))
        self.process.world.current.seen = seen
        return seen

    def swap(self, changes):
        truth = self.process.world.truth
        return self._call("swap", changes, lambda: [truth.swap(change, self.process) for change in changes])

    def held_leases(self, query):
        return iter(self._call("held_leases", query, partial(self.process.world.truth.held_leases, query)))

    def executions(self, query):
        return iter(self._call("executions", query, partial(self.process.world.truth.executions, query)))

    def prune(self, limit):
        return self._call("prune", "", partial(self.process.world.truth.prune, limit))

    def _call(self, verb, what, act):
        world, task = self.process.world, self.process.world.current
        there, back = world.latency(), world.latency()
        fate = world.fate()
        world.note(self.process, f"{verb} sent by {task.name}", what)
        arrives = world.now + there
        gives_up = None
        if fate == "request lost":
            arrives, gives_up = None, world.now + TIMEOUT
        elif fate == "reply lost":
            gives_up = arrives + world.random.random() * (TIMEOUT - min(there, TIMEOUT))
        elif fate == "arrives late":
            gives_up = world.now + world.random.random() * TIMEOUT
            arrives = gives_up + world.random.expovariate(0.2)
        elif there + back > TIMEOUT:
            gives_up = world.now + TIMEOUT
        if arrives is not None:
            answer = (task, task.ticket, back) if gives_up is None else None
            world.at(arrives, self._arrive, verb, act, answer)
        if gives_up is not None:
            world.at(gives_up, task.resume, task.ticket, None, StoreError(f"no answer ({fate})"))
        return task.wait()

    def _arrive(self, verb, act, answer):
        world = self.process.world
        result = error = None
        if world.down:
            error = StoreError("connection refused")
        else:
            result = act()
        world.note(self.process, f"{verb} arrives", error or result)
        if answer is not None:
            task, ticket, back = answer
            world.at(world.now + back, task.resume, ticket, result, error)


@dataclass
class World:
    """One simulated cluster from start to rest. Everything in it follows from the seed.

    Args:
        seed: decides everything.
        trace: keep every step as text, in place of the last few.
        faults: which kinds of faults there are; drawn from the seed if not given.
    """

    seed: int
    trace: bool = False
    faults: tuple | None = None
    steps: deque = field(default_factory=deque)

    def __post_init__(self):
        self.random = draw = random.Random(self.seed)
        self.now = 0.0
        self.queue, self.order = [], itertools.count()
        self.hub = getcurrent()
        self.current = None
        self.down = False
        self.step_of_store = 0.0
        self.explained = _Lists()
        self.errors = 0
        if self.faults is None:
            count = draw.choice((0, 0, 1, 1, 2, 2, 3, 4, len(FAULTS)))
            self.faults = tuple(sorted(draw.sample(FAULTS, count)))
        self.quiet = "network" not in self.faults
        self.stood_still = bool({"pause", "suspend"} & {*self.faults})
        self.slow = draw.choice((0.001, 0.01, 0.1))
        self.slots = draw.choice((20, 40, 60))
        self._draw_terms(draw)
        oldest = self.terms.retention + self.terms.max_early
        self.truth = Truth(MemoryStore(clock=self.store_clock), in_micros(oldest))
        self.machines = [self._machine(index) for index in range(draw.choice((2, 2, 3, 4)))]
        self._draw_jobs(draw)
        self.processes = []
        self.numbers = itertools.count(1)
        self.end = self.slots * max(job.period for job in self.jobs) + 1.0

    def _draw_terms(self, draw):
        self.lock_at_most = draw.choice((3.0, 9.0, 30.0))
        self.terms = runner.Terms(
            store_patience=PATIENCE,
            retention=timedelta(seconds=draw.choice((60, 120, 86400))),
            keeper=keeper.Settings(
                sweep=timedelta(seconds=draw.choice((5, 5, 20))),
                prune=timedelta(seconds=draw.choice((30, 60))),
                lock_at_most=timedelta(seconds=self.lock_at_most),
                patience=PATIENCE,
            ),
        )

    def _machine(self, index):
        draw = self.random
        skew = draw.choice((0, 0, draw.uniform(-0.5, 0.5), draw.uniform(-20, 20)))
        return Machine(self, index, 1 + draw.uniform(-1e-3, 1e-3), skew)

    def _draw_jobs(self, draw):
        period = draw.choice((5.0, 12.0, 20.0))
        shared = draw.random() < 0.3
        self.jobs = []
        for number in range(1 if not shared else 2):
            interval = draw.random() < 0.3
            policy = Policy(
                lock_at_most=timedelta(seconds=self.lock_at_most),
                lock_at_least=timedelta(seconds=draw.choice((0, 0, period / 2))),
                renew=draw.random() < 0.8 or not self.faults,
                max_runtime=draw.choice((None, None, timedelta(seconds=2 * self.lock_at_most)))
                if self.faults
                else None,
            )
            if draw.random() < 0.6:
                policy = replace(
                    policy,
                    delivery=draw.choice(("at_most_once", "at_least_once", "at_least_once")),
                    retries=draw.choice((0, 0, 2)),
                    overlap=draw.choice(("skip", "skip", "queue", "allow", "replace")),
                    queue_limit=draw.choice((2, 1000)),
                )
            name = f"job{number}"
            self.jobs.append(
                Job(
                    name, "shared" if shared else name,
                    IntervalTrigger(seconds=int(period)) if interval else DateTrigger(datetime.now(timezone.utc)),
                    period, policy, grace=draw.choice((None, 1, 60)), careful=draw.random() < 0.5,
                    phase=[period * draw.random() if interval else 0.0 for _ in self.machines],
                )
            )  # fmt: skip
        # In a calm world nobody waits but where slots get in line, which takes some more swaps.
        self.prompt = 1.5 if all(job.policy.overlap == "skip" for job in self.jobs) else 5.0
        self.longest = draw.choice((0.2 * period, 0.2 * period, 3 * self.lock_at_most if self.faults else 0.9 * period))

    # --- time ---------------------------------------------------------------------------------------------------------

    def store_clock(self):
        return int((EPOCH + self.now + self.step_of_store) * 1e6)

    def at(self, when, act, *args):
        """Let something happen; what falls on the same moment happens in any order."""
        heapq.heappush(self.queue, (when, self.random.random(), next(self.order), act, args))

    def _advance(self, until):
        truth, queue = self.truth, self.queue
        while queue and queue[0][0] <= until:
            self.now, _, _, act, args = heapq.heappop(queue)
            act(*args)
            truth.check_trust(self.processes)

    def note(self, who, what, detail=""):
        """Remember a step for the trace."""
        if self.trace:
            self.steps.append(f"{self.now:10.4f} {who} {what}: {brief(detail)}")

    # --- playing the driver -------------------------------------------------------------------------------------------

    def drive(self, flow, task, job):
        reply = error = None
        while True:
            try:
                step = flow.throw(error) if error is not None else flow.send(reply)
            except StopIteration as end:
                return end.value
            reply = error = None
            match step:
                case runner.Call():
                    reply = self._play(step.fence, task, job)
                case runner.Sleep(seconds):
                    task.sleep(seconds)
                case _:
                    try:
                        reply = runner.answer(step, task.process.node.store)
                    except Exception as raised:  # noqa: BLE001 - as in the runner's own drivers
                        error = raised

    def _play(self, fence, task, job):
        draw = self.random
        if task.grant is None:
            task.decided()
        grant = task.grant = self.truth.entered(fence, fence._hold)
        self.note(task.process, "enters", fence)
        outcome = runner.Outcome()
        effects = effects_of(fence.execution_id)
        duration = draw.random() * self.longest
        for operation in range(effects):
            task.sleep(duration / effects)
            try:
                if job.careful:
                    fence.check()
                self.truth.write(grant, fence, operation)
            except (LeaseLost, StaleToken) as error:
                outcome = runner.Outcome(error=error)
                break
            self.note(task.process, "writes", f"{fence.execution_id} {operation}")
        else:
            outcome = draw.choice((*[outcome] * 8, runner.Outcome(error=OSError("a job that fails")),
                                   runner.Outcome(error=asyncio.CancelledError())))  # fmt: skip
        grant.returned = "cancelled" if outcome.cancelled else "succeeded" if outcome.error is None else "failed"
        return outcome

    # --- network and faults -------------------------------------------------------------------------------------------

    def latency(self):
        slow = self.slow * (20 if self.random.random() < 0.02 and self.faults else 1)
        return slow * (0.5 + self.random.random())

    def fate(self):
        if self.quiet or self.random.random() > 0.1:
            return "ok"
        return self.random.choice(("request lost", "reply lost", "arrives late"))

    def _draw_faults(self):
        for kind in self.faults:
            if kind != "network":
                for _ in range(self.random.choice((1, 2, 4))):
                    self.at(self.random.random() * self.end, self._inject, kind)

    def _inject(self, kind):
        draw = self.random
        machine = draw.choice(self.machines)
        living = [process for process in self.processes if not process.dead and not process.stopping]
        self.note(f"m{machine.index}", "fault", kind)
        if kind in ("pause", "suspend"):
            self._pause(machine, draw.choice((0.5, 1.2, 3.5)) * self.lock_at_most * draw.random(), kind)
        elif kind == "clock":
            # A suspended machine whose wall clock is set back at the same time is beyond what a node can see.
            back = 1 if "suspend" in self.faults else draw.choice((-1, 1))
            machine.skew += back * draw.choice((0.3, 3.0, 40.0)) * draw.random()
            self._rearm(machine)
        elif kind in ("crash", "shutdown") and living:
            process = draw.choice(living)
            if kind == "crash":
                process.die()
            else:
                process.stopping = True
                process.node.keeper.stop()
            self.at(self.now + draw.expovariate(0.2), self._start, process.machine)
        elif kind == "outage":
            self.down = True
            self.at(self.now + draw.choice((1, 8, 40)) * draw.random(), self._repair)
        elif kind in ("loss", "rollback"):
            snapshot = ({}, {}, set()) if kind == "loss" else self.truth.snapshot()
            self.at(self.now + (0 if kind == "loss" else 10 * draw.random()), self.truth.restore, snapshot)
        elif kind == "store_ahead":
            self.step_of_store += 60 * draw.random()
            self.truth.disturb()
        elif kind == "store_back":
            self.step_of_store -= draw.choice((1, 60, 100)) * draw.random()
            self.truth.set_back = True

    def _pause(self, machine, seconds, kind):
        begins = max(self.now, machine.paused_until)
        machine.paused_until = begins + seconds
        if kind == "suspend":
            machine.monotonic_lag += seconds * machine.rate
            if self.random.random() < 0.5:  # a snapshot that was restored: only the wall clock tells
                machine.boottime_lag += seconds * machine.rate

    def _repair(self):
        self.down = False

    def _start(self, machine):
        process = Process(self, machine, next(self.numbers))
        self.processes.append(process)
        process.boot()

    def _rearm(self, machine):
        for process in self.processes:
            if process.machine is machine and not process.dead and not process.stopping:
                for job in self.jobs:
                    process.arm(job)

    # --- a whole life -------------------------------------------------------------------------------------------------

    def run(self):
        """Play the world to its end and return how many slots there were.

        Raises:
            Violation: something happened that must never happen.
        """
        with _captured(self):
            try:
                for machine in self.machines:
                    self._start(machine)
                self._draw_faults()
                self._advance(self.end)
                self._calm_down()
                self.truth.check_end()
                self._check_slots()
            finally:
                for process in self.processes:
                    process.die()
        return self.slots * len(self.jobs)

    def _calm_down(self):
        """Faults end; what is left over must settle by itself, and every process must be able to stop."""
        rest = 12 * self.lock_at_most + 2 * PATIENCE + 100.0
        self._advance(self.end + rest)
        self.quiet, self.down, self.faults_over = True, False, True
        if not any(not process.dead and not process.stopping for process in self.processes):
            self._start(self.machines[0])
        self._advance(self.now + rest)
        for process in self.processes:
            if not process.dead and not process.stopping:
                process.stopping = True
                process.node.keeper.stop()
        self._advance(self.now + rest)
        for process in self.processes:
            must(process.dead or not process.tasks, "a process never came to rest", process,
                 [task.name for task in process.tasks.values()])  # fmt: skip

    def _check_slots(self):
        """Every slot was run, or every node that tried said why not."""
        truth = self.truth
        granted = {grant.execution for grant in truth.grants.values()}
        for execution, reasons in self.explained.items():
            elsewhere = {"done", "running", "lost"} & {*reasons}
            must(not elsewhere or execution in granted, "refused as run elsewhere, and run nowhere", execution, reasons)
        if not self.faults:
            self._check_calm(granted)

    def _check_calm(self, granted):
        truth = self.truth
        if all(job.policy.overlap != "replace" for job in self.jobs):
            must(not truth.lost_by and not truth.leases_lost, "something got lost in a calm world", truth.lost_by)
        must(not self.errors, "an error in a calm world")
        for execution, reasons in self.explained.items():
            excused = {"held", "spacing", "pruned", "error", "full"} & {*reasons}
            must(execution in granted or excused, "nobody ran a slot in a calm world", execution, reasons)


class _Lists(dict):
    def __missing__(self, key):
        self[key] = []
        return self[key]


class _Log(logging.Handler):
    """The package's log as part of the trace; an error inside the keeper, which it survives, is a violation here."""

    def __init__(self, world):
        super().__init__()
        self.world = world

    def emit(self, record):
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            raise error
        if self.world.trace:
            task = self.world.current
            self.world.note(task.process if task else "-", "log", record.getMessage())


@contextlib.contextmanager
def _captured(world):
    """Take the package's log and its two random back-offs into the world."""
    log, handler = logging.getLogger("apscheduler_fence"), _Log(world)
    before = log.level, log.propagate, runner.random, keeper.random
    log.addHandler(handler)
    log.setLevel(logging.INFO if world.trace else logging.ERROR)
    log.propagate = False
    runner.random = keeper.random = world.random
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate, runner.random, keeper.random = before[1:]


def simulate_many(slots, first=0):
    """Play worlds from the first seed on until so many slots were simulated; yield each world when it has ended."""
    seed, done = first, 0
    while done < slots:
        world = World(seed)
        world.run()
        done += len(world.jobs) * world.slots
        seed += 1
        yield world
