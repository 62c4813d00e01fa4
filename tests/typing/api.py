"""The public names as a type checker sees them. Checked by `mypy --strict`, never run.

What must be an error stands with its `type: ignore[...]`; were it no longer one, mypy would report the unused comment.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import assert_type

from apscheduler_fence import (
    EVENT_FENCE_ALL,
    EVENT_JOB_LOST,
    EVENT_JOB_REFUSED,
    EVENT_LEASE_LOST,
    EVENT_LEASE_OVERDUE,
    ConfigError,
    Fence,
    FencedExecutor,
    FenceError,
    FenceEvent,
    JobRefusedEvent,
    LeaseEvent,
    LeaseLost,
    Policy,
    StaleToken,
    StoreError,
    __version__,
    current_fence,
    fenced,
    unfenced,
)
from apscheduler_fence.policy import SlotRule
from apscheduler_fence.testing import FakeFence, fake_fence

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from sqlalchemy import Engine

# --- decorators keep signatures ---------------------------------------------------------------------------------------


@fenced(lock_at_most="9m", lock_at_least="30s")
def settle(account: str, *, fence: Fence) -> int:
    return fence.token


@fenced
def bare(account: str) -> None: ...


@fenced()
async def awaited(account: str, fence: Fence) -> bool:
    return fence.lost


@unfenced
def each_node(days: int = 7) -> str:
    return str(days)


class Worker:
    @fenced(name="method")
    def method(self, amount: int, fence: Fence | None = None) -> int:
        return amount

    @classmethod
    @fenced
    def of_class(cls, amount: int) -> Worker:
        return cls()

    @staticmethod
    @fenced(renew=False)
    def static(amount: int) -> float:
        return amount / 2

    @fenced(once_per_slot=False)
    def __call__(self) -> None: ...


def hour(at: datetime) -> datetime:
    return at.replace(minute=0)


@fenced(
    name="n",
    lock_at_most=timedelta(minutes=9),
    lock_at_least=30,
    renew=True,
    max_runtime=None,
    once_per_slot=True,
    slot=hour,
    lease="shared",
)
def every_option() -> None: ...


@fenced(lock_at_most=0.5, max_runtime="PT1H", slot=timedelta(hours=1))
def other_forms() -> None: ...


@fenced(slot="1h", name=None, lease=None)
def text_forms() -> None: ...


assert_type(settle("acct", fence=fake_fence()), int)
assert_type(bare("acct"), None)
assert_type(each_node(), str)
assert_type(Worker().method(5), int)
assert_type(Worker.of_class(5), Worker)
assert_type(Worker.static(5), float)
job: Callable[[str, Fence], Coroutine[Any, Any, bool]] = awaited
with_account = partial(settle, "acct")

settle("acct")  # type: ignore[call-arg]  # called directly, it needs its fence
settle(5, fence=fake_fence())  # type: ignore[arg-type]
settle("acct", fence="mine")  # type: ignore[arg-type]
awaited("acct", 7)  # type: ignore[arg-type, unused-coroutine]
each_node("7")  # type: ignore[arg-type]
Worker().method("5")  # type: ignore[arg-type]

fenced(lock_at_mots="9m")  # type: ignore[call-overload]
fenced(lock_at_most=None)  # type: ignore[call-overload]
fenced(renew="yes")  # type: ignore[call-overload]  # text is for ini files
fenced(slot=each_node)  # type: ignore[arg-type]
fenced("9m")  # type: ignore[call-overload]
unfenced(days=7)  # type: ignore[call-arg]

# --- the executor -----------------------------------------------------------------------------------------------------


def executors(engine: Engine) -> None:
    FencedExecutor()
    FencedExecutor("sqlite:///x.db")
    FencedExecutor(engine, namespace="billing")
    FencedExecutor(
        "postgresql+psycopg://app",
        namespace="billing",
        inner="processpool",
        policies={"settle": {"lock_at_most": "9m"}, "housekeeping": None},
        store_patience="10s",
        retention=timedelta(days=30),
        max_early=60,
        max_catch_up=100,
        sweep=5.0,
        lock_at_most="30s",
        create_tables=False,
        max_workers=20,
    )
    FencedExecutor(inner=FencedExecutor(engine))
    FencedExecutor("memory://", "billing")  # type: ignore[call-arg]
    FencedExecutor(namespace=5)  # type: ignore[arg-type]
    FencedExecutor(policies={"settle": "9m"})  # type: ignore[dict-item]
    FencedExecutor(store_patience=None)  # type: ignore[arg-type]


# --- what a job is handed ---------------------------------------------------------------------------------------------


def use(fence: Fence) -> None:
    assert_type(fence.token, int)
    assert_type(fence.execution_id, str)
    assert_type(fence.job, str)
    assert_type(fence.lease, str)
    assert_type(fence.slot, str)
    assert_type(fence.scheduled_at, datetime)
    assert_type(fence.attempt, int)
    assert_type(fence.lost, bool)
    assert_type(fence.remaining(), float)
    assert_type(fence.key("charge"), str)
    assert_type(fence.key(), str)
    assert_type(fence.headers(), dict[str, str])
    fence.check()
    fence.token = 7  # type: ignore[misc]
    fence.lost = True  # type: ignore[misc]
    fence.key(7)  # type: ignore[arg-type]
    fence.lose()  # type: ignore[attr-defined]  # only a fake one can be lost on purpose


assert_type(current_fence(), Fence)

# --- the policy -------------------------------------------------------------------------------------------------------


def read(policy: Policy) -> None:
    assert_type(policy.name, str | None)
    assert_type(policy.lock_at_most, timedelta)
    assert_type(policy.lock_at_least, timedelta)
    assert_type(policy.renew, bool)
    assert_type(policy.max_runtime, timedelta | None)
    assert_type(policy.once_per_slot, bool)
    assert_type(policy.slot, SlotRule | None)
    assert_type(policy.lease, str | None)
    policy.renew = False  # type: ignore[misc]


# --- events -----------------------------------------------------------------------------------------------------------

assert_type(EVENT_FENCE_ALL | EVENT_JOB_LOST | EVENT_JOB_REFUSED | EVENT_LEASE_LOST | EVENT_LEASE_OVERDUE, int)


def only_done(reason: Literal["done"]) -> None: ...


def listen(event: FenceEvent) -> None:
    assert_type(event.code, int)
    assert_type(event.job_id, str)
    assert_type(event.jobstore, str)
    assert_type(event.execution_id, str)
    assert_type(event.scheduled_run_time, datetime | None)
    assert_type(event.holder, str | None)
    if isinstance(event, JobRefusedEvent):
        assert_type(
            event.reason, Literal["done", "running", "held", "spacing", "lost", "pruned", "early", "queued", "full"]
        )
        assert_type(event.until, datetime | None)
        only_done(event.reason)  # type: ignore[arg-type]  # every reason is to be thought of
    if isinstance(event, LeaseEvent):
        assert_type(event.token, int)
        assert_type(event.attempt, int)
        event.token = 7  # type: ignore[misc]


# --- errors -----------------------------------------------------------------------------------------------------------


def errors(lost: LeaseLost, stale: StaleToken) -> None:
    assert_type(lost.execution_id, str)
    assert_type(lost.token, int)
    assert_type(stale.resource, str)
    assert_type(stale.token, int)
    assert_type(stale.highest, int)

    def one_of(*kinds: type[FenceError]) -> None: ...

    one_of(ConfigError, LeaseLost, StaleToken, StoreError)
    one_of(ValueError)  # type: ignore[arg-type]
    as_value_error: Callable[[str], ValueError] = ConfigError
    as_value_error("x")
    LeaseLost("x")  # type: ignore[call-arg]


# --- for users' own tests ---------------------------------------------------------------------------------------------

with fake_fence(token=7, job="settle", scheduled_at=datetime(2026, 1, 1, tzinfo=timezone.utc), attempt=2) as inside:
    assert_type(inside, FakeFence)
    inside.lose()

assert_type(fake_fence(lost=True, lock_at_most="5s"), FakeFence)
fake_fence(7)  # type: ignore[call-arg]
fake_fence(token="7")  # type: ignore[arg-type]
assert_type(__version__, str)
