"""Run each APScheduler job once per schedule slot in the whole cluster, fenced."""

from apscheduler_fence.errors import (
    AlreadyApplied,
    ConfigError,
    FenceError,
    InvalidToken,
    LeaseLost,
    Retry,
    StaleToken,
    StoreError,
)
from apscheduler_fence.events import (
    EVENT_FENCE_ALL,
    EVENT_JOB_LOST,
    EVENT_JOB_RECOVERED,
    EVENT_JOB_REFUSED,
    EVENT_LEASE_LOST,
    EVENT_LEASE_OVERDUE,
    FenceEvent,
    JobRefusedEvent,
    LeaseEvent,
)
from apscheduler_fence.executor import FencedExecutor, run_now
from apscheduler_fence.fence import Fence, current_fence
from apscheduler_fence.history import History
from apscheduler_fence.policy import Backoff, Policy, fenced, unfenced

__version__ = "0.1.0"

__all__ = [
    "EVENT_FENCE_ALL",
    "EVENT_JOB_LOST",
    "EVENT_JOB_RECOVERED",
    "EVENT_JOB_REFUSED",
    "EVENT_LEASE_LOST",
    "EVENT_LEASE_OVERDUE",
    "AlreadyApplied",
    "Backoff",
    "ConfigError",
    "Fence",
    "FenceError",
    "FenceEvent",
    "FencedExecutor",
    "History",
    "InvalidToken",
    "JobRefusedEvent",
    "LeaseEvent",
    "LeaseLost",
    "Policy",
    "Retry",
    "StaleToken",
    "StoreError",
    "__version__",
    "current_fence",
    "fenced",
    "run_now",
    "unfenced",
]
