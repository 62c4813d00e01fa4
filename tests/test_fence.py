"""What a job is handed, wherever it declares it, and what that says about its lease."""

from __future__ import annotations

import asyncio
import functools
import inspect
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, replace
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, ForwardRef, List, Optional, Union  # noqa: UP035 - what older code is annotated with

import pytest
from apscheduler.jobstores.memory import MemoryJobStore
from apscheduler.jobstores.sqlalchemy import SQLAlchemyJobStore
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.util import check_callable_args
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine

import apscheduler_fence
from apscheduler_fence import Fence, current_fence, fenced, unfenced
from apscheduler_fence.errors import ConfigError, FenceError, LeaseLost
from apscheduler_fence.fence import KEY_LIMIT, Hold, bind, entered
from apscheduler_fence.lease import Grant
from apscheduler_fence.policy import Instant, Policy, annotates_fence, is_handed
from apscheduler_fence.slots import Slot
from apscheduler_fence.testing import FakeFence, fake_fence

if TYPE_CHECKING:
    from apscheduler_fence.fence import Fence as Imported

UTC = timezone.utc
FENCE = fake_fence(token=42, job="settle", scheduled_at=datetime(2026, 9, 2, 10, tzinfo=UTC))
ID = "settle/2026-09-02T10:00:00Z"


def call(function, /, *args, **kwargs):
    """What the job function returns when the runner calls it, once its arguments have passed `add_job`'s check."""
    check_callable_args(function, args, kwargs)
    target, positional, named = bind(function, args, kwargs, FENCE)
    return target(*positional, **named)


def call_unfenced(function, /, *args, **kwargs):
    """As `call`, where the job is to run on every node."""
    check_callable_args(function, args, kwargs)
    target, positional, named = bind(function, args, kwargs, None)
    return target(*positional, **named)


# --- every signature --------------------------------------------------------------------------------------------------


def first(fence: Fence, account, amount):
    return account, amount, fence


def middle(account, fence: Fence, amount):
    return account, amount, fence


def last(account, amount, fence: Fence):
    return account, amount, fence


def keyword_only(account, amount, *, fence: Fence):
    return account, amount, fence


def positional_only_first(fence: Fence, account, amount, /):
    return account, amount, fence


def positional_only_middle(account, fence: Fence, /, amount):
    return account, amount, fence


def before_args(account, fence: Fence, *args):
    return account, args[0], fence


def with_kwargs(account, fence: Fence, amount, **kwargs):
    assert not kwargs
    return account, amount, fence


def named_otherwise(account, mine: Fence, amount):
    return account, amount, mine


def not_annotated(account, fence, amount):
    return account, amount, fence


def imported_for_typing(account, here: apscheduler_fence.Fence, amount):
    return account, amount, here


def or_none(account, mine: Fence | None = None, amount=5):
    return account, amount, mine


def optional(account, mine: Optional[Fence] = None, amount=5):  # noqa: UP045
    return account, amount, mine


async def coroutine(account, fence: Fence, amount):
    return account, amount, fence


SIGNATURES = [
    first, middle, last, keyword_only, positional_only_first, positional_only_middle, before_args,
    with_kwargs, named_otherwise, not_annotated, imported_for_typing, or_none, optional,
]  # fmt: skip


def copied(function):
    """A function of the same code: a label on it stays off the original."""
    copy = type(function)(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__kwdefaults__, copy.__annotations__ = function.__kwdefaults__, function.__annotations__
    copy.__qualname__ = function.__qualname__
    return copy


def of_name(function):
    return function.__name__


@pytest.mark.parametrize("function", SIGNATURES, ids=of_name)
def test_a_labelled_function_is_handed_its_fence_in_its_own_place(function):
    """The caller's arguments count as if the handed parameter were not there."""
    job = fenced(copied(function))
    assert call(job, "acct", 5) == ("acct", 5, FENCE)


@pytest.mark.parametrize("function", [f for f in SIGNATURES if f is not before_args], ids=of_name)
def test_the_callers_own_arguments_may_be_keywords_too(function):
    """Where APScheduler lets a parameter be given by name, it arrives."""
    job = fenced(copied(function))
    only_by_position = [
        p.name for p in inspect.signature(job).parameters.values() if p.kind is inspect.Parameter.POSITIONAL_ONLY
    ]
    given = {"account": "acct", "amount": 5}
    args = [given.pop(name) for name in only_by_position]
    assert call(job, *args, **given) == ("acct", 5, FENCE)


@pytest.mark.parametrize("function", SIGNATURES, ids=of_name)
def test_what_the_caller_passes_by_name_wins(function):
    """A fence in `kwargs` is the one that arrives, whatever kind of parameter takes it."""
    job = fenced(copied(function))
    name = next(name for name, each in inspect.signature(function).parameters.items() if is_handed(each))
    assert call(job, "acct", 5, **{name: "mine"}) == ("acct", 5, "mine")


@pytest.mark.parametrize("function", SIGNATURES, ids=of_name)
def test_a_method_is_handed_its_fence_like_a_function(function):
    """`self` and `cls` shift no argument."""

    def with_self(function):
        parameters = [
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
            *inspect.signature(function).parameters.values(),
        ]

        def method(*args, **kwargs):
            return args[0], function(*args[1:], **kwargs)

        method.__signature__ = inspect.Signature(sorted(parameters, key=lambda each: each.kind))
        return fenced(method)

    kind = type("Kind", (), {
        "method": with_self(function), "classmethod": classmethod(with_self(function)), "__call__": with_self(function),
        "staticmethod": staticmethod(fenced(copied(function))),
    })  # fmt: skip
    me = kind()
    assert call(me.method, "acct", 5) == (me, ("acct", 5, FENCE))
    assert call(me, "acct", 5) == (me, ("acct", 5, FENCE))
    assert call(kind.classmethod, "acct", 5) == (kind, ("acct", 5, FENCE))
    assert call(me.staticmethod, "acct", 5) == ("acct", 5, FENCE)
    # A persistent job store hands back the plain function, with the instance as its first argument.
    assert call(kind.method, me, "acct", 5) == (me, ("acct", 5, FENCE))


@pytest.mark.parametrize("function", SIGNATURES, ids=of_name)
def test_a_partial_is_handed_its_fence_in_its_own_place(function):
    """Its arguments stand before the caller's, and the fence where the function has it."""
    job = fenced(copied(function))
    assert call(functools.partial(job, "acct"), 5) == ("acct", 5, FENCE)
    assert call(functools.partial(functools.partial(job, "acct"), 5)) == ("acct", 5, FENCE)
    if function is not positional_only_first and function is not before_args:
        assert call(functools.partial(job, amount=5), "acct") == ("acct", 5, FENCE)


@pytest.mark.parametrize("function", SIGNATURES, ids=of_name)
def test_a_labelled_partial_is_handed_its_fence_too(function):
    """A label may be put on the partial where the function itself is somebody else's."""
    if function is first or function is positional_only_first:
        job = fenced(functools.partial(copied(function)))
        assert call(job, "acct", 5) == ("acct", 5, FENCE)
    else:
        job = fenced(functools.partial(copied(function), "acct"))
        assert call(job, 5) == ("acct", 5, FENCE)
        assert call(functools.partial(job, 5)) == ("acct", 5, FENCE)


def passing_on(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def passing_on_plainly(function):
    """As many decorators do it: nothing is copied but the reference to what is wrapped."""

    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    wrapper.__wrapped__ = function
    return wrapper


@pytest.mark.parametrize("function", SIGNATURES, ids=of_name)
def test_a_wrapper_passes_on_what_the_wrapped_function_is_handed(function):
    """The label may stand above the other decorator, or below one that uses `functools.wraps`."""
    for job in (
        fenced(passing_on(copied(function))),
        fenced(passing_on(passing_on(copied(function)))),
        fenced(passing_on_plainly(copied(function))),
        passing_on(fenced(copied(function))),
        passing_on(passing_on(fenced(copied(function)))),
        fenced(passing_on(fenced(copied(function)))),
        fenced(functools.lru_cache(copied(function))),
    ):
        assert call(job, "acct", 5) == ("acct", 5, FENCE)


def filling_in(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function("session", *args, **kwargs)

    return wrapper


def test_a_wrapper_may_add_arguments_of_its_own():
    """Then the caller's arguments are passed on as they are, and the fence by name."""

    @fenced
    @filling_in
    def job(session, account, amount=0, *, fence: Fence):
        return session, account, amount, fence

    assert call(job, "acct", 5) == ("session", "acct", 5, FENCE)
    assert call(job, "acct") == ("session", "acct", 0, FENCE)


def test_a_wrapper_that_adds_arguments_never_puts_the_fence_in_another_place():
    """Where the caller's positions cannot be counted, the call fails: better no run than a wrong one."""

    @fenced
    @filling_in
    def job(session, fence: Fence, account, amount):
        return session, fence, account, amount

    with pytest.raises(TypeError):
        call(job, "acct", 5)
    assert call(job, account="acct", amount=5) == ("session", FENCE, "acct", 5)


def test_a_wrapper_that_shows_a_signature_of_its_own_is_called_by_it():
    """Below such a decorator the label leaves alone what the decorator fills in, be it the fence itself."""

    def with_session(function):
        wrapper = filling_in(function)
        parameters = inspect.signature(function).parameters.values()
        wrapper.__signature__ = inspect.Signature([each for each in parameters if each.name != "session"])
        return wrapper

    def with_fence(function):
        def wrapper(account, amount):
            return function(account, "its own", amount)

        functools.update_wrapper(wrapper, function)
        wrapper.__signature__ = inspect.signature(shown)
        return wrapper

    def shown(account, amount):
        pass

    @with_session
    @fenced
    def job(session, account, amount=0, *, fence: Fence):
        return session, account, amount, fence

    assert call(job, "acct", 5) == ("session", "acct", 5, FENCE)
    assert call(with_fence(fenced(copied(middle))), "acct", 5) == ("acct", 5, "its own")


def test_a_coroutine_function_is_handed_its_fence():
    """Calling it gives the coroutine, with everything in place."""

    class Worker:
        @fenced
        async def __call__(self, account, fence: Fence, amount):
            return account, amount, fence

    for job in (fenced(copied(coroutine)), functools.partial(fenced(copied(coroutine))), Worker()):
        assert asyncio.run(call(job, "acct", 5)) == ("acct", 5, FENCE)


def test_one_job_may_be_handed_everything_at_once():
    """Token, execution ID and fence, each in its own place."""

    @fenced
    def job(fencing_token: int, account, execution_id: str, amount, *, fence):
        return account, amount, fencing_token, execution_id, fence

    assert call(job, "acct", 5) == ("acct", 5, 42, ID, FENCE)
    assert call(job, "acct", 5, execution_id="mine") == ("acct", 5, 42, "mine", FENCE)


def test_a_partial_that_gives_the_fence_is_the_caller():
    """What stands in a partial's keywords wins, and the call's own keywords win over that."""
    job = functools.partial(fenced(copied(middle)), fence="mine")
    assert call(job, "acct", 5) == ("acct", 5, "mine")
    assert call(job, "acct", 5, fence="the call's") == ("acct", 5, "the call's")


# --- undecorated functions --------------------------------------------------------------------------------------------


def undecorated(account, fence=None, amount=0, *, fencing_token=0, execution_id=""):
    return account, fence, amount, fencing_token, execution_id


def test_an_undecorated_function_is_handed_what_it_has_a_default_for():
    """Without a label too, and seen through partials, objects and wrappers."""

    class Worker:
        def __call__(self, *args, **kwargs):
            return undecorated(*args, **kwargs)

    Worker.__call__ = functools.wraps(lambda self, account, fence=None, *, fencing_token=0, execution_id="": None)(
        Worker.__call__
    )
    expected = ("acct", FENCE, 0, 42, ID)
    for job in (undecorated, functools.partial(undecorated), passing_on(undecorated), passing_on_plainly(undecorated)):
        assert call(job, "acct") == expected
        assert call(job, account="acct") == expected
    assert call(functools.partial(undecorated, "acct")) == expected
    assert call(Worker(), "acct") == expected


def test_positional_arguments_of_an_undecorated_function_stay_where_they_are():
    """Nothing was hidden from the caller, so what stands in the fence's place was meant for it."""
    assert call(undecorated, "acct", "mine", 5) == ("acct", "mine", 5, 42, ID)
    for job in (passing_on(undecorated), unfenced(passing_on(undecorated))):
        assert call(job, "acct", "mine", 5) == ("acct", "mine", 5, 42, ID)
        assert call(job, "acct", "mine") == ("acct", "mine", 0, 42, ID)


def test_a_default_before_a_positional_only_fence_is_kept():
    """The fence can be reached only past it."""

    def job(amount=7, fence=None, /):
        return amount, fence

    assert call(job) == (7, FENCE)
    assert call(fenced(job)) == (7, FENCE)


def test_a_function_that_declares_nothing_is_called_as_given():
    """Also where it takes any keywords, and where it tells no signature at all."""

    def anything(*args, **kwargs):
        return args, kwargs

    assert call(anything, 1, a=2) == ((1,), {"a": 2})
    assert call(fenced(anything), 1, a=2) == ((1,), {"a": 2})
    assert call(max, 1, 2) == 2
    assert call(dict, a=1) == {"a": 1}


def test_an_error_in_the_arguments_is_pythons_own():
    """A job store may hold arguments for an older signature: the message names the function and what is wrong."""
    for args, said in (((), "missing 1 required positional argument: 'amount'"), ((1, 2, 3), "takes 3 positional")):
        target, positional, named = bind(fenced(copied(middle)), ("acct", *args), {}, FENCE)
        with pytest.raises(TypeError, match=rf"middle\(\) {said}"):
            target(*positional, **named)


def test_binding_changes_nothing_that_belongs_to_the_job():
    """The next run of the same job starts from the same arguments."""
    args, kwargs = ["acct"], {"amount": 5}
    bind(fenced(copied(middle)), args, kwargs, FENCE)
    assert (args, kwargs) == (["acct"], {"amount": 5})


# --- unfenced runs ----------------------------------------------------------------------------------------------------


def test_an_unfenced_run_gets_the_functions_own_defaults():
    """The caller's arguments arrive as in a fenced run, with the default in the fence's place."""

    @unfenced
    @fenced
    def job(account, fence=None, amount=0, *rest):
        return account, fence, amount, rest

    assert call_unfenced(job, "acct", 5, 6) == ("acct", None, 5, (6,))
    assert call_unfenced(undecorated, "acct") == ("acct", None, 0, 0, "")


def test_an_unfenced_run_does_not_pretend_to_have_a_fence():
    """A function that cannot do without says so, and what to write."""
    for function in (middle, keyword_only, first):
        with pytest.raises(ConfigError, match=rf"{function.__name__} needs fence.* default \(fence=None\), or fence"):
            bind(fenced(copied(function)), ("acct", 5), {}, None)
        assert call_unfenced(fenced(copied(function)), "acct", 5, fence="mine") == ("acct", 5, "mine")


# --- what APScheduler stores ------------------------------------------------------------------------------------------


class Account:
    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return self.name == other.name

    __hash__ = None

    @fenced
    def settle(self, fence: Fence, amount):
        return self.name, fence, amount


@pytest.mark.parametrize("persistent", [False, True])
def test_a_bound_method_out_of_a_job_store_is_handed_its_fence(persistent, tmp_path):
    """A persistent store gives back the plain function with the instance among the arguments."""
    engine = create_engine(f"sqlite:///{tmp_path}/jobs.db")
    scheduler = BackgroundScheduler()
    scheduler.add_jobstore(SQLAlchemyJobStore(engine=engine) if persistent else MemoryJobStore())
    scheduler.start(paused=True)
    scheduler.add_job(Account("acct").settle, "interval", hours=1, args=[5], id="settle")
    stored = scheduler.get_job("settle")
    scheduler.shutdown()
    engine.dispose()  # APScheduler's thread looks into the store once more while it is being shut down
    assert inspect.ismethod(stored.func) != persistent
    target, args, kwargs = bind(stored.func, stored.args, stored.kwargs, FENCE)
    assert target(*args, **kwargs) == ("acct", FENCE, 5)


# --- any signature at all ---------------------------------------------------------------------------------------------

KINDS = [
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
]


@st.composite
def signatures(draw):
    """A valid signature of the user's parameters with handed ones anywhere among them."""
    names = draw(st.permutations(["a", "b", "c", "fence", "fencing_token", "execution_id"]))
    chosen = names[: draw(st.integers(min_value=0, max_value=6))]
    kinds = sorted(draw(st.sampled_from(KINDS)) for _ in chosen)
    parameters, optional = [], False
    for name, kind in zip(chosen, kinds, strict=True):
        optional = draw(st.booleans()) or (optional and kind is not inspect.Parameter.KEYWORD_ONLY)
        parameters.append(inspect.Parameter(name, kind, default=name.upper() if optional else inspect.Parameter.empty))
    if draw(st.booleans()):
        parameters.append(inspect.Parameter("rest", inspect.Parameter.VAR_POSITIONAL))
    if draw(st.booleans()):
        parameters.append(inspect.Parameter("more", inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(sorted(parameters, key=lambda each: each.kind))


def function_of(signature):
    """A real function of this signature; it returns its arguments by name."""
    inside = {}
    exec(f"def job{signature}: return locals()", {}, inside)
    return inside["job"]


HANDED = {"fence": FENCE, "fencing_token": 42, "execution_id": ID}


@settings(deadline=None)  # a busy machine is no failure
@given(signatures(), st.data())
def test_every_call_that_add_job_accepts_arrives_whole(signature, data):
    """Whatever the signature: the caller's arguments arrive as `add_job` counted them, and the rest is handed."""
    job = fenced(function_of(signature))
    shown = inspect.signature(job)
    by_position, by_name, expected = [], {}, {}
    contiguous = True
    for name, each in shown.parameters.items():
        if each.kind is inspect.Parameter.VAR_POSITIONAL:
            extra = data.draw(st.lists(st.integers(), max_size=2)) if contiguous else []
            by_position += extra
            expected[name] = tuple(extra)
        elif each.kind is inspect.Parameter.VAR_KEYWORD:
            expected[name] = data.draw(st.dictionaries(st.sampled_from(["x", "y"]), st.integers()))
            by_name |= expected[name]
        else:
            given_by = ["position"] if contiguous and each.kind is not inspect.Parameter.KEYWORD_ONLY else []
            given_by += ["name"] if each.kind is not inspect.Parameter.POSITIONAL_ONLY else []
            given_by += ["nothing"] if each.default is not inspect.Parameter.empty else []
            if not given_by:  # a positional-only one without a default, after one that was left out: no such signature
                return
            how = data.draw(st.sampled_from(given_by))
            contiguous = contiguous and how == "position"
            if how == "position":
                by_position.append(name)
            elif how == "name":
                by_name[name] = name
            expected[name] = name if how != "nothing" else HANDED.get(name, each.default)
    assert call(job, *by_position, **by_name) == expected


# --- annotations ------------------------------------------------------------------------------------------------------


class Elsewhere:
    """Somebody else's class of the same name."""

    Fence = type("Fence", (), {"__module__": "garden"})


@pytest.mark.parametrize(
    "annotation",
    [
        *(Fence, "Fence", "apscheduler_fence.Fence", "'Fence'", "Fence | None", "None|Fence", "Optional[Fence]"),
        *("typing.Optional['Fence']", "Union[Fence, None]", Fence | None, Optional[Fence], Union[None, Fence]),  # noqa: UP007, UP045
        *(Optional["Fence"], ForwardRef("Fence"), ForwardRef("Fence | None")),
    ],
    ids=str,
)
def test_an_annotation_says_fence(annotation):
    """As a class, as text, as a forward reference, and each of them or None."""
    assert annotates_fence(annotation)


@pytest.mark.parametrize(
    "annotation",
    [
        *(
            inspect.Parameter.empty,
            None,
            type(None),
            "",
            "None",
            int,
            "int",
            FakeFence,
            "FakeFence",
            "Fences",
            "Fence.x",
        ),
        *(list[Fence], List[Fence], "list[Fence]", "dict[str, Fence]", "type[Fence]", "Literal['Fence']"),  # noqa: UP006
        *(Fence | int, "Fence | int", Elsewhere.Fence, Elsewhere.Fence | None, 7, "Callable[[Fence], None]"),
    ],
    ids=str,
)
def test_an_annotation_says_something_else(annotation):
    """A container of fences, a choice between types, or another class of that name."""
    assert not annotates_fence(annotation)


def test_an_annotation_that_only_the_type_checker_can_follow_is_understood():
    """Names under TYPE_CHECKING are read as text: nothing is imported for them."""

    def job(account, fence: Imported, mine: fence_module.Fence):  # noqa: F821
        return account, fence, mine

    assert call(fenced(job), "acct") == ("acct", FENCE, FENCE)


# --- the current fence ------------------------------------------------------------------------------------------------


def test_outside_of_a_run_there_is_no_current_fence_and_the_message_tells_how_to_test():
    """What the message says to write works as it stands."""
    with pytest.raises(FenceError, match="no fenced job is running here") as refused:
        current_fence()
    written = re.search(r"`with (.*): \.\.\.`", str(refused.value)).group(1)
    with eval(written, {"apscheduler_fence": apscheduler_fence}) as fence:
        assert current_fence() is fence


def test_the_current_fence_is_the_innermost_and_ends_with_its_block():
    """A run within a run has its own; afterwards, also after an error, the outer one is back."""

    def failing(fence):
        with entered(fence):
            assert current_fence() is fence
            raise ZeroDivisionError

    outer = fake_fence(token=1)
    with entered(outer) as given:
        assert given is current_fence() is outer
        with pytest.raises(ZeroDivisionError):
            failing(fake_fence(token=2))
        assert current_fence() is outer
    with pytest.raises(FenceError):
        current_fence()


def test_the_current_fence_reaches_tasks_and_threads_of_the_run():
    """`asyncio.to_thread`, and tasks started inside, carry it on."""

    async def job():
        with entered(FENCE):
            task = asyncio.create_task(asyncio.to_thread(current_fence))
            return current_fence(), await task, await asyncio.to_thread(current_fence)

    assert asyncio.run(job()) == (FENCE, FENCE, FENCE)


def test_the_current_fence_does_not_leak_into_other_tasks():
    """Runs that take turns on one event loop each see their own."""

    async def job(fence, turns):
        with entered(fence):
            for _ in range(turns):
                await asyncio.sleep(0)
                assert current_fence() is fence
        with pytest.raises(FenceError):
            current_fence()

    async def both():
        await asyncio.gather(job(fake_fence(token=1), 3), job(fake_fence(token=2), 5))
        with pytest.raises(FenceError):
            current_fence()

    asyncio.run(both())


def test_the_current_fence_does_not_leak_into_a_pools_thread():
    """The thread that ran a job has no fence for the next piece of work, nor has a plain new thread."""

    def job():
        with entered(FENCE):
            return current_fence()

    def nothing():
        with pytest.raises(FenceError):
            current_fence()
        return True

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(job).result() is FENCE
        assert pool.submit(nothing).result()
    with entered(FENCE):
        heard = []
        thread = threading.Thread(target=lambda: heard.append(nothing()))
        thread.start()
        thread.join()
        assert heard == [True]


# --- the lease behind it ----------------------------------------------------------------------------------------------


class Clock:
    """A host's clocks, set by the test."""

    def __init__(self):
        self.now = Instant(100.0, 200.0, 1.7e9)

    def __call__(self):
        return self.now

    def advance(self, monotonic, boottime=None, wall=None):
        self.now = Instant(
            self.now.monotonic + monotonic,
            self.now.boottime + (monotonic if boottime is None else boottime),
            self.now.wall + (monotonic if wall is None else wall),
        )


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def hold(clock):
    slot = Slot("settle", "2026-09-02T10:00:00Z", 0, 0)
    grant = Grant("settle", "settle", slot.name, 42, "host:1:nonce", 1)
    return Hold(grant, slot, Policy(lock_at_most=timedelta(seconds=30)), since=clock(), began=clock(), clock=clock)


@pytest.fixture
def fence(hold):
    return Fence(42, ID, "settle", "settle", "2026-09-02T10:00:00Z", datetime(2026, 9, 2, 10, tzinfo=UTC), 1, hold)


def test_a_fence_is_trusted_until_just_before_its_lease_ends(fence, clock):
    """What remains shrinks with the clock, and at the margin `check` begins to raise."""
    assert fence.remaining() == pytest.approx(29.85)
    clock.advance(29.8)
    assert fence.remaining() == pytest.approx(0.05)
    assert fence.check() is None
    assert not fence.lost
    clock.advance(0.06)
    assert fence.remaining() == 0
    with pytest.raises(LeaseLost, match=rf"{ID} \(token 42\) can no longer be trusted") as lost:
        fence.check()
    assert (lost.value.execution_id, lost.value.token) == (ID, 42)


@pytest.mark.parametrize("ask", [Fence.remaining, lambda fence: fence.lost], ids=["remaining", "lost"])
def test_a_lease_that_was_seen_lost_stays_lost(fence, hold, clock, ask):
    """No renewal and no clock that is set back gives trust again, whichever way the job asked."""
    clock.advance(31)
    ask(fence)
    hold.since = clock()
    clock.advance(-31)
    assert (fence.lost, fence.remaining()) == (True, 0)


def test_a_renewal_extends_trust(fence, hold, clock):
    """Counted from before the renewal was sent."""
    clock.advance(20)
    hold.since = clock()
    clock.advance(20)
    assert fence.remaining() == pytest.approx(9.85)


def test_a_suspended_host_has_lost_its_lease(fence, clock):
    """The monotonic clock stood still, and the others did not."""
    clock.advance(0.1, boottime=3600, wall=3600)
    assert fence.lost


def test_a_wall_clock_that_is_set_back_gives_no_trust(fence, clock):
    """The other clocks outvote it."""
    clock.advance(31, wall=-3600)
    assert fence.lost


def test_a_fence_without_a_lease_is_not_trusted():
    """One that was made by hand has nothing to rely on."""
    assert Fence(1, ID, "settle", "settle", "x", datetime(2026, 9, 2, tzinfo=UTC)).lost


def test_a_fence_cannot_be_changed(fence):
    """Neither token nor ID can be mistaken for another run's."""
    with pytest.raises(FrozenInstanceError):
        fence.token = 43
    assert "host:1:nonce" not in repr(fence)
    assert "token=42" in repr(fence)


# --- keys and headers -------------------------------------------------------------------------------------------------


def with_id(execution_id):
    return replace(FENCE, execution_id=execution_id)


def test_a_key_names_the_execution_and_the_operation():
    """Readable, and the same on every attempt."""
    assert FENCE.key() == ID
    assert FENCE.key("charge") == f"{ID}:charge"
    assert replace(FENCE, token=43, attempt=2).key("charge") == FENCE.key("charge")


def test_a_key_can_stand_in_any_header():
    """What is not plain visible ASCII is percent-encoded: line breaks, quotes and spaces too."""
    key = with_id("Zürich 1/2026-09-02T10:00:00Z").key('a"\\\r\nX-Evil: 1')
    assert key == "Z%C3%BCrich%201/2026-09-02T10:00:00Z:a%22%5C%0D%0AX-Evil%3A%201"


NAMES = st.text(min_size=1, max_size=300)
ANY_OPERATION = st.text(st.characters(), max_size=300)


@settings(deadline=None)
@given(NAMES, ANY_OPERATION)
@example("job", "\ud800")
@example("ж" * 191, "ж" * 191)
def test_a_key_is_short_plain_ascii(job, operation):
    """At most 255 characters without quotes, backslashes, spaces or controls, from any names."""
    assert re.fullmatch(r"[!#-\[\]-~]{1,255}", with_id(f"{job}/2026-09-02T10:00:00Z").key(operation))


SLOTS = st.sampled_from(["2026-09-02T10:00:00Z", "2026-09-02T10:00:00.250Z", "manual/x", "manual/x%3Ay", "manual/a"])
TRICKY = st.text(alphabet="a:/%|~Z", max_size=4)


@settings(deadline=None)
@given(st.lists(st.tuples(TRICKY, SLOTS, TRICKY), min_size=2, max_size=2, unique=True))
@example(
    [("a", "2026-09-02T10:00:00Z", "b/2026-09-02T10:00:00Z"), ("a/2026-09-02T10:00:00Z:b", "2026-09-02T10:00:00Z", "")]
)
@example([("a", "2026-09-02T10:00:00Z", "b/manual/x"), ("a/2026-09-02T10:00:00Z:b", "manual/x", "")])
def test_different_operations_have_different_keys(runs):
    """No choice of names makes one operation pass for another."""
    ids = [(f"{job}/{slot}", operation) for job, slot, operation in runs]
    if ids[0] != ids[1]:
        one, two = (with_id(execution_id).key(operation) for execution_id, operation in ids)
        assert one != two


def test_long_names_that_differ_at_the_end_have_different_keys():
    """A key that is cut carries a digest of the whole, and cannot be written as a short one."""
    long = "x" * 300
    keys = {FENCE.key(long), FENCE.key(long + "1"), FENCE.key(long + "2")}
    assert {len(key) for key in keys} == {KEY_LIMIT}
    assert len(keys) == 3
    cut = FENCE.key(long)
    assert FENCE.key(cut.removeprefix(f"{ID}:")) != cut


def test_a_key_of_exactly_the_limit_is_not_cut():
    """255 characters are what common APIs accept."""
    fits = "x" * (KEY_LIMIT - len(ID) - 1)
    assert FENCE.key(fits) == f"{ID}:{fits}"
    assert "|" in FENCE.key(fits + "x")


def test_headers_are_a_quoted_key_and_a_token():
    """`Idempotency-Key` is a structured-field string; the token is a plain integer."""
    assert FENCE.headers("charge") == {"Idempotency-Key": f'"{ID}:charge"', "Fencing-Token": "42"}
    assert FENCE.headers()["Idempotency-Key"] == f'"{ID}"'


# --- for users' own tests ---------------------------------------------------------------------------------------------


def test_a_fake_fence_needs_neither_scheduler_nor_store():
    """It has sensible values, a trusted lease, and can be handed to a job as it is."""
    fence = fake_fence()
    assert isinstance(fence, Fence)
    assert (fence.token, fence.execution_id, fence.job, fence.attempt) == (1, "job/2026-01-01T00:00:00Z", "job", 1)
    assert fence.slot == "2026-01-01T00:00:00Z"
    assert fence.lease == "job"
    assert fence.scheduled_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert 29 < fence.remaining() < 30
    assert middle("acct", fence, 5) == ("acct", 5, fence)


def test_a_fake_fence_is_what_the_test_says():
    """Every value can be chosen; times are shown in UTC, and options may be written as in `@fenced`."""
    summer = datetime(2026, 9, 2, 12, tzinfo=timezone(timedelta(hours=2)))
    fence = fake_fence(token=7, job="settle", scheduled_at=summer, attempt=3, lock_at_most="5s", lease="shared")
    assert (fence.token, fence.execution_id, fence.attempt, fence.lease) == (7, ID, 3, "shared")
    assert fence.scheduled_at.utcoffset() == timedelta(0)
    assert 4 < fence.remaining() < 5


def test_a_fake_fence_can_be_lost():
    """From the start, or in the middle of the job under test."""
    assert fake_fence(lost=True).lost
    fence = fake_fence()
    fence.check()
    fence.lose()
    with pytest.raises(LeaseLost):
        fence.check()
    assert fence.lost


def test_a_fake_fence_is_current_inside_its_block():
    """It may be entered again inside, and afterwards."""
    fence = fake_fence()
    for _ in range(2):
        with fence as entered_fence:
            with fence:
                assert current_fence() is fence
            assert current_fence() is entered_fence is fence
        with pytest.raises(FenceError):
            current_fence()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"scheduled_at": datetime(2026, 1, 1)}, r"scheduled_at=.* needs a time zone"),  # noqa: DTZ001
        ({"lock_at_mots": "5s"}, r"fake_fence: unknown option lock_at_mots \(did you mean lock_at_most\?\)"),
        ({"lock_at_most": "never"}, "fake_fence: lock_at_most='never' is not a duration"),
        ({"job": ""}, "job must not be empty"),
    ],
)
def test_a_fake_fence_says_what_is_wrong(given, said):
    """A mistake in a test is told as one in the configuration would be."""
    with pytest.raises(ConfigError, match=said):
        fake_fence(**given)
