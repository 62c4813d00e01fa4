"""`run`: one command under lease, slot and fence, for cron, systemd timers and Kubernetes CronJobs."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click
from apscheduler.triggers.date import DateTrigger

from apscheduler_fence.cli.exits import NOT_FOUND, REFUSED, SIGNAL, SOFTWARE, Failure, failure_of
from apscheduler_fence.cli.output import node, to_the_second, utc, visible
from apscheduler_fence.cli.store_options import DURATION, StoreChoice, parse_moment, store_options
from apscheduler_fence.errors import FenceError
from apscheduler_fence.events import JobRefusedEvent
from apscheduler_fence.fence import Fence  # noqa: TC001 - a job's annotation is read when it runs
from apscheduler_fence.keeper import Settings
from apscheduler_fence.policy import parse_options, resolve
from apscheduler_fence.runner import Node, Run, Terms, run_here
from apscheduler_fence.slots import job_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

    from apscheduler_fence.policy import Policy
    from apscheduler_fence.runner import Event

NEVER = timedelta(days=36500)
"""After which a waiting execution of an unknown job is given up: here every other job is unknown."""
LOOK_AT_LEASE = 0.5
"""Seconds between two looks at whether the lease is still held, with `--stop-when-lost`."""
FORWARDED = [
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
]
STOPPING = ("SIGTERM", "SIGINT", "SIGHUP")


class CommandFailed(FenceError):  # noqa: N818 - the name says what happened
    """The command ended with another exit code than 0, or by a signal."""


class CommandStopped(asyncio.CancelledError):
    """The command ended because it was told to. An execution that ends with this is recorded as cancelled."""


@dataclass(eq=False)
class Command:
    """A command as a job: what it is handed stands in its environment, and its exit code is its outcome.

    `code` is that of its latest run, as a shell would have it; None if it has not run.
    """

    arguments: Sequence[str]
    stop_when_lost: bool = False
    stopped: str = ""
    code: int | None = None
    child: subprocess.Popen[bytes] | None = None
    unsent: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        # What the record shows as its function: not the arguments, in which there may be secrets.
        self.__module__, self.__qualname__ = "command", Path(self.arguments[0]).name

    def __call__(self, fence: Fence) -> None:
        """Run it to its end.

        Raises:
            CommandFailed: it has not ended well.
            CommandStopped: nor could it, having been told to stop.
        """
        self.child = None
        self.ended.clear()
        if self.stopped:
            self.code = SIGNAL + signal.Signals[self.stopped]
            raise CommandStopped(f"stopped by {self.stopped} before it began")
        self.child = subprocess.Popen(_leashed(self.arguments), env={**os.environ, **environment(fence)})  # noqa: S603
        for number in self.unsent:
            self.child.send_signal(number)
        threading.Thread(target=self._wait, args=(self.child,), daemon=True).start()
        # Not Popen.wait: with a time limit it asks twenty times a second, and between signals we have nothing to do.
        while not self.ended.wait(LOOK_AT_LEASE if self.stop_when_lost else None):
            if fence.lost and not self.stopped:
                self.stop(signal.SIGTERM, "a lost lease")
        code = self.child.returncode
        self.code = code if code >= 0 else SIGNAL - code
        if code == 0:
            return
        how = f"exited with {code}" if code > 0 else f"was ended by {_signal_name(-code)}"
        if self.stopped:
            raise CommandStopped(f"{self.arguments[0]} {how}, stopped by {self.stopped}")
        raise CommandFailed(f"{self.arguments[0]} {how}")

    def _wait(self, child: subprocess.Popen[bytes]) -> None:
        child.wait()
        self.ended.set()

    def stop(self, number: int, why: str = "") -> None:
        """Pass a signal on."""
        name = _signal_name(number)
        if name in STOPPING:
            self.stopped = why or name
        if number == signal.SIGINT and _terminal_tells_all():
            return
        if self.child is None:
            self.unsent.append(number)
        else:
            self.child.send_signal(number)


def environment(fence: Fence) -> Mapping[str, str]:
    """What a command is told, as environment variables."""
    return {
        "FENCE_TOKEN": str(fence.token),
        "FENCE_EXECUTION_ID": fence.execution_id,
        "FENCE_JOB": fence.job,
        "FENCE_SLOT": fence.slot,
        "FENCE_SCHEDULED_AT": utc(fence.scheduled_at),
        "FENCE_ATTEMPT": str(fence.attempt),
        "FENCE_LEASE": fence.lease,
        "FENCE_IDEMPOTENCY_KEY": fence.key(),
    }


def _leashed(arguments: Sequence[str]) -> list[str]:
    if sys.platform != "linux":
        return [*arguments]
    script = Path(__file__).with_name("child.py")
    return [sys.executable, "-I", "-S", str(script), str(os.getpid()), *arguments]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _terminal_tells_all() -> bool:
    """Whether Ctrl-C reaches the command anyway: a terminal sends it to every process in its foreground."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):
        return False


@contextmanager
def _forwarding(command: Command) -> Iterator[None]:
    def forward(number: int, _: FrameType | None) -> None:
        command.stop(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _ForMail(logging.Handler):
    """Writes log lines as one wants them in a mail from cron: each once, and of a traceback the last line."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        first, *more = record.getMessage().splitlines() or [""]
        line = f"{first}: {more[-1].rpartition('.')[2]}" if more else first
        if line not in self.said:
            self.said.append(line)
            click.echo(f"apscheduler-fence: {visible(line)}", err=True)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--name", required=True, help="The job's name: the same on all hosts, another for each job.")
@click.option("--slot", "at", default=None, metavar="TIME", help="The scheduled time that this run is for.")
@click.option("--every", type=DURATION, default=None, help="The period: this run is for the period that it falls into.")
@click.option("--lock-at-most", default="30s", show_default=True, help="How long the lease outlives a host that died.")
@click.option("--lock-at-least", default="0", show_default=True, help="How long no other slot may start.")
@click.option("--max-runtime", default=None, help="Stop renewing the lease after so long.")
@click.option("--no-renew", is_flag=True, help="Let --lock-at-most be a hard limit.")
@click.option(
    "--retries",
    type=click.IntRange(0, 1000),
    default=0,
    show_default=True,
    help="How often a command that fails is run again.",
)
@click.option("--retry-delay", default=None, help="How long to wait before that. [1s]")
@click.option("--delivery", type=click.Choice(["at_most_once", "at_least_once"]), default="at_most_once", show_default=True,
              help="Whether a later start for the same slot takes over from a host that died.")  # fmt: skip
@click.option(
    "--max-attempts", type=click.IntRange(1, 1000), default=None, help="With at_least_once: how many such attempts. [3]"
)
@click.option("--lease", default=None, help="A lease that several jobs share.")
@click.option("--retention", type=DURATION, default="30d", show_default=True, help="How long the record is kept.")
@click.option(
    "--patience", type=DURATION, default="10s", show_default=True, help="How long to wait for a store that is away."
)
@click.option("--refused-code", type=click.IntRange(0, 255), default=REFUSED, show_default=True,
              help="The exit code if the command is not run here.")  # fmt: skip
@click.option("--stop-when-lost", is_flag=True, help="Send the command SIGTERM when its lease is lost.")
@click.option("-v", "--verbose", is_flag=True, help="Say more on standard error.")
@store_options()
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def run(
    *,
    choice: StoreChoice,
    name: str,
    at: str | None,
    every: timedelta | None,
    retention: timedelta,
    patience: timedelta,
    refused_code: int,
    stop_when_lost: bool,
    verbose: bool,
    arguments: Sequence[str],
    **options: object,
) -> None:
    """Run COMMAND once per slot in all hosts that share the store.

    Start the same line on every host, from cron, a systemd timer or a Kubernetes CronJob. One of them runs the command;
    the others end with exit code 75 (--refused-code). Without --slot and --every there is only the lease: two runs do
    not overlap, but a late host runs the command again.

    The command finds FENCE_TOKEN, FENCE_EXECUTION_ID, FENCE_IDEMPOTENCY_KEY, FENCE_JOB, FENCE_SLOT, FENCE_SCHEDULED_AT,
    FENCE_ATTEMPT and FENCE_LEASE in its environment. SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 are passed on to it.

    Exit codes: the command's own, or 128 and the number of the signal that ended it; 75 refused; 69 the store could not
    be reached, and the command was not started; 78 a setting is wrong; 127 there is no such command; 70 anything else.
    """
    if at is not None and every is not None:
        raise click.UsageError("give --slot or --every, not both")
    if shutil.which(arguments[0]) is None:
        raise Failure(f"{arguments[0]}: there is no such command", NOT_FOUND)
    log = _log_to_stderr(verbose)
    given = {**options, "once_per_slot": at is not None or every is not None, "slot": every}
    given["renew"] = not given.pop("no_renew")
    policy = resolve(parse_options({key: value for key, value in given.items() if value is not None}, "run"))
    command = Command(arguments, stop_when_lost)
    settings = Settings(patience=patience.total_seconds(), retention=retention, orphan_after=NEVER)
    here = Node(choice.open(), Terms(settings.patience, retention=retention, keeper=settings), lambda _: None)
    with _forwarding(command):
        event = _run(_submission(command, policy, name, choice.namespace, _moment(at)), here)
    sys.exit(command.code if command.code is not None else _exit_code(event, refused_code, log.said))


def _moment(at: str | None) -> datetime:
    if at is None:
        return datetime.now(timezone.utc).replace(microsecond=0)
    try:
        return parse_moment(at)
    except ValueError as error:
        raise click.UsageError(f"--slot: {error}") from error


def _log_to_stderr(verbose: bool) -> _ForMail:
    handler = _ForMail()
    logger = logging.getLogger("apscheduler_fence")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if verbose else logging.WARNING)
    return handler


def _submission(command: Command, policy: Policy, name: str, namespace: str, moment: datetime) -> Run:
    job = job_name(name, namespace=namespace)
    return Run(
        job_id=name,
        jobstore="default",
        job=job,
        lease=job if policy.lease is None else job_name(policy.lease, namespace=namespace),
        function=command,
        args=(),
        kwargs={},
        trigger=DateTrigger(moment),
        run_times=(moment,),
        policy=policy,
    )


def _run(submission: Run, here: Node) -> Event:
    here.keeper.start("run")
    try:
        [event] = run_here(submission, here)
    finally:
        here.keeper.stop()
        here.keeper.join(2 * here.terms.store_patience)
    return event


def _exit_code(event: Event, refused_code: int, said: Sequence[str]) -> int:
    """The exit code if the command was not run."""
    if isinstance(event, JobRefusedEvent):
        click.echo(f"apscheduler-fence: {_refusal(event)}", err=True)
        return refused_code
    match event.exception:
        case FenceError() as error:
            failure = failure_of(error)
        case error:
            failure = Failure(f"{type(error).__name__}: {error}", SOFTWARE)
    if not any(failure.message in line for line in said):
        failure.show()
    return failure.exit_code


def _refusal(event: JobRefusedEvent) -> str:
    who = f" by {node(event.holder)}" if event.holder else ""
    until = "" if event.until is None else f", until {to_the_second(event.until)}"
    why = {
        "done": f"has been run{who}",
        "running": f"is being run{who}{until}",
        "held": f"cannot start: another slot holds the lease{who}{until}",
        "spacing": f"cannot start yet: --lock-at-least keeps it back{until}",
        "lost": "was lost with the host that ran it; `retry` lets it run again",
        "pruned": "is older than the records that are kept",
        "early": "is ahead of the store's clock",
    }
    return f"{event.execution_id} {why.get(event.reason, event.reason)}"
