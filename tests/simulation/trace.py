"""Steps as short lines, so that a failing world can be read from top to bottom."""

from apscheduler_fence.events import EVENT_JOB_LOST, EVENT_JOB_REFUSED, EVENT_LEASE_LOST, EVENT_LEASE_OVERDUE
from apscheduler_fence.lease import Change, Execution, Insert, Key, Lease, Seen, Update

NAMES = {
    EVENT_JOB_REFUSED: "refused", EVENT_LEASE_LOST: "lease lost", EVENT_JOB_LOST: "job lost",
    EVENT_LEASE_OVERDUE: "overdue",
}  # fmt: skip


def brief(value):
    """One step's detail in a few words; times in seconds within the hour, tokens without their common start."""
    match value:
        case Key():
            return f"{value.lease} {_slot(value.slot)}"
        case Seen():
            rows = " | ".join(brief(row) for row in (value.execution, value.holding, value.waiting))
            return f"at {_time(value.now)}: {brief(value.lease)} | {rows}"
        case Lease():
            free = f"{value.name}#{_time(value.token)} hold_until {_time(value.hold_until)}"
            return free if value.holder is None else f"{free} by {value.holder} until {_time(value.expires_at)}"
        case Execution():
            return f"{_slot(value.slot)} {value.state}#{_time(value.token)} attempt {value.attempt} by {value.holder}"
        case Change():
            lease = value.lease
            expected = f"{lease.name}#{_time(lease.token)} of {lease.holder}"
            return f"{expected}, {lease.condition}: {lease.write} {' '.join(map(brief, value.executions))}"
        case Insert():
            return f"+{_slot(value.row.slot)} {value.row.state} by {value.row.holder}"
        case Update():
            return f"{_slot(value.slot)} {value.was}#{_time(value.token)} -> {value.state} by {value.holder}"
        case list():
            return "[" + "; ".join(map(brief, value)) + "]"
    if hasattr(value, "code"):
        about = getattr(value, "execution_id", value.job_id)
        cause = getattr(value, "reason", None) or getattr(value, "exception", None) or ""
        return f"{NAMES.get(value.code, f'APScheduler {value.code}')} {about} {cause}"
    return _time(value) if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _slot(name):
    return name.partition("T")[2] or name


def _time(micros):
    return "none" if micros is None else f"{micros % 3_600_000_000 / 1e6:.6f}"
