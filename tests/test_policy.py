"""What a user may write about a job, how it is read, and how long a lease is trusted."""

from __future__ import annotations

import contextlib
import functools
import inspect
import pickle
from datetime import datetime, timedelta, timezone

import pytest
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.util import check_callable_args
from hypothesis import given, settings
from hypothesis import strategies as st

from apscheduler_fence import Fence, fenced, unfenced
from apscheduler_fence.errors import ConfigError
from apscheduler_fence.policy import (
    OPTIONS,
    Instant,
    Policy,
    elapsed,
    in_micros,
    instant,
    is_handed,
    label_of,
    parse_duration,
    parse_flag,
    parse_options,
    resolve,
    trusted_for,
)

SECOND = timedelta(seconds=1)
LONGEST = timedelta(days=366)

# --- durations --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (timedelta(minutes=9), 540),
        (30, 30),
        (0.25, 0.25),
        ("30", 30),
        ("0.25", 0.25),
        ("500ms", 0.5),
        ("30s", 30),
        ("9m", 540),
        ("2h", 7200),
        ("1d", 86400),
        ("1w", 604800),
        ("1h30m", 5400),
        ("1h 30m", 5400),
        ("1 h 30 m", 5400),
        (" 30 s ", 30),
        ("1.5H", 5400),
        ("PT9M", 540),
        ("pt0.5s", 0.5),
        ("P1DT1H", 90000),
        ("P2W", 1209600),
        ("PT1H30M5S", 5405),
    ],
)
def test_a_duration_may_be_written_in_every_usual_form(written, meant):
    """A timedelta, seconds, short text and ISO 8601 mean the same."""
    assert parse_duration(written, "lock_at_most") == timedelta(seconds=meant)


@pytest.mark.parametrize(
    "written",
    [
        *(float("nan"), float("inf"), float("-inf"), 1e300, 10**400, True, False, None, [], b"30s", 3j),
        *("", "   ", "nan", "inf", "soon", "30 sec", "1 0s", "30s later", "s", "5x", "1.s", "9" * 400 + "s"),
        *("P", "PT", "P1DT", "P1Y", "P1M", "PT1D", "1h-5m", "\N{ARABIC-INDIC DIGIT THREE}s"),
    ],
)
def test_what_is_no_duration_is_refused_with_examples(written):
    """The message names the option and shows forms that work."""
    with pytest.raises(ConfigError, match=r"^lock_at_most=.* give a timedelta, seconds, or text such as '30s'"):
        parse_duration(written, "lock_at_most")


@settings(deadline=None)  # a busy machine is no failure
@given(st.integers(min_value=0, max_value=in_micros(LONGEST) // 1000))
def test_milliseconds_survive_being_written_as_text(ms):
    """No form loses a millisecond within the range that any option allows."""
    duration = timedelta(milliseconds=ms)
    seconds, rest = divmod(ms, 1000)
    for written in (duration, ms / 1000, f"{ms}ms", f"{seconds}s{rest}ms", f"PT{seconds}.{rest:03}S"):
        assert parse_duration(written, "x") == duration


@settings(deadline=None)
@given(st.one_of(st.text(), st.floats(), st.integers(), st.text(alphabet="PTWDHMSwdhms0123456789. ")))
def test_whatever_is_given_is_a_duration_or_a_config_error(value):
    """No other exception gets out of the reading of a duration."""
    with contextlib.suppress(ConfigError):
        assert isinstance(parse_duration(value, "x"), timedelta)


def test_a_duration_in_microseconds_is_exact():
    """The store's unit loses nothing of the longest duration that is allowed."""
    assert in_micros(LONGEST - timedelta(microseconds=1)) == 366 * 86_400_000_000 - 1


# --- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("true", "false"), [(True, False), ("true", "false"), ("Yes", "No"), (" on ", "off"), (1, 0)])
def test_a_flag_may_be_text(true, false):
    """What an ini file holds is as good as a bool."""
    assert (parse_flag(true, "renew"), parse_flag(false, "renew")) == (True, False)


@pytest.mark.parametrize("value", ["", "maybe", 2, None, 0.5, []])
def test_what_is_no_flag_is_refused_with_examples(value):
    """The message names the option and what to write."""
    with pytest.raises(ConfigError, match=r"^renew=.* neither true nor false: give a bool, or text such as 'true'"):
        parse_flag(value, "renew")


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("lock_at_most", "100ms"), ("lock_at_most", LONGEST), ("lock_at_least", 0), ("lock_at_least", LONGEST)),
        *(("max_runtime", "100ms"), ("max_runtime", LONGEST), ("max_runtime", None), ("max_runtime", "none")),
        *(("name", "a" * 191), ("name", None), ("name", ""), ("lease", "a" * 191), ("lease", None), ("slot", None)),
        *(("slot", "1ms"), ("slot", "1h"), ("slot", timedelta(hours=1)), ("slot", lambda at: at), ("renew", "no")),
        *(("once_per_slot", "0"), ("slot", LONGEST)),
    ],
)
def test_the_last_allowed_value_is_allowed(option, value):
    """Each option takes what lies on its bounds, and none where there is one."""
    assert set(parse_options({option: value}, "here")) == {option}


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("lock_at_most", "99ms", "'100ms' to '366d' are allowed"),
        ("lock_at_most", -1, "'100ms' to '366d' are allowed"),
        ("lock_at_most", "367d", "'100ms' to '366d' are allowed"),
        ("lock_at_most", None, "give a timedelta"),
        ("lock_at_least", timedelta(microseconds=-1), "'0s' to '366d' are allowed"),
        ("lock_at_least", timedelta.max, "'0s' to '366d' are allowed"),
        ("max_runtime", 0, "'100ms' to '366d' are allowed"),
        ("max_runtime", True, "give a timedelta"),
        ("renew", "perhaps", "give a bool"),
        ("once_per_slot", None, "give a bool"),
        ("slot", 0, "function from the scheduled time"),
        ("slot", "hourly", "function from the scheduled time"),
        ("name", "a" * 192, "191 are allowed"),
        ("name", "a\nb", "control characters"),
        ("name", " a", "whitespace"),
        ("name", 7, "must be a string"),
        ("lease", "a" * 192, "191 are allowed"),
        ("lease", "a\x00", "control characters"),
    ],
)
def test_a_wrong_value_is_refused_where_it_was_written(option, value, allowed):
    """The message names the place, the option and what is allowed instead (a name too long would never be claimed)."""
    with pytest.raises(ConfigError) as refused:
        fenced(**{option: value})
    assert str(refused.value).startswith(f"@fenced: {option}")
    assert allowed in str(refused.value)


def test_a_slot_rule_that_would_have_to_be_awaited_is_refused():
    """A coroutine function cannot say which slot a time belongs to."""

    async def rule(at):
        return at

    with pytest.raises(ConfigError, match=r"slot=.* is a coroutine function"):
        fenced(slot=rule)


@pytest.mark.parametrize(
    ("written", "guess"),
    [
        ("lock_at_mots", "lock_at_most"),
        ("lockAtMostFor", "lock_at_most"),
        ("lock-at-least", "lock_at_least"),
        ("max_run_time", "max_runtime"),
        ("once_per_slots", "once_per_slot"),
    ],
)
def test_an_unknown_option_is_answered_with_the_one_that_was_meant(written, guess):
    """A slip, and ShedLock's own spelling, lead to the right name."""
    with pytest.raises(ConfigError, match=rf"^@fenced: unknown option {written} \(did you mean {guess}\?\)"):
        fenced(**{written: "1s"})


def test_an_unknown_option_is_answered_with_all_there_are():
    """Where nothing is similar, the list helps."""
    with pytest.raises(ConfigError, match="unknown option colour; there are " + ", ".join(OPTIONS)):
        parse_options({"colour": "red"}, "executor")


def test_an_option_whose_name_is_no_text_is_unknown():
    """A mapping from a configuration file may have any keys."""
    with pytest.raises(ConfigError, match=r"policies\['j'\]: unknown option 1"):
        parse_options({1: "x"}, "policies['j']")


def test_options_are_brought_into_one_form():
    """After parsing nothing is text that was not meant as text."""
    text = {"name": "n", "lock_at_most": "9m", "lock_at_least": "0", "renew": "off", "once_per_slot": "true",
            "max_runtime": "PT1H", "slot": "1h", "lease": "shared"}  # fmt: skip
    assert resolve(parse_options(text, "ini")) == Policy(
        "n", timedelta(minutes=9), timedelta(0), False, timedelta(hours=1), True, timedelta(hours=1), "shared"
    )


# --- layers -----------------------------------------------------------------------------------------------------------


def test_without_any_options_the_built_in_policy_holds():
    """A lease of 30 s that is renewed, no spacing, once per slot."""
    assert resolve() == Policy(None, timedelta(seconds=30), timedelta(0), True, None, True, None, None)


def test_an_option_that_was_not_given_does_not_override():
    """Built-in, then executor, then what the label gives, then `policies`: each only where it says something."""

    @fenced(lock_at_least="2s", max_runtime="2h")
    def job():
        pass

    executor = parse_options({"lock_at_most": "1s", "lock_at_least": "1s", "max_runtime": "1h"}, "executor")
    policies = parse_options({"max_runtime": None}, "policies")
    assert resolve(executor, label_of(job).options, policies) == Policy(
        lock_at_most=SECOND, lock_at_least=2 * SECOND, max_runtime=None
    )


# --- labels -----------------------------------------------------------------------------------------------------------


def plain(account, *, fence: Fence):
    return account, fence


async def awaited(account, *, fence: Fence):
    return account, fence


class Worker:
    @fenced(name="method")
    def method(self, account, *, fence: Fence):
        return self, account, fence

    @classmethod
    @fenced(name="classmethod below")
    def classmethod_below(cls, account, *, fence: Fence):
        return cls, account, fence

    @fenced(name="classmethod above")
    @classmethod
    def classmethod_above(cls, account, *, fence: Fence):
        return cls, account, fence

    @staticmethod
    @fenced(name="staticmethod below")
    def staticmethod_below(account, *, fence: Fence):
        return account, fence

    @fenced(name="staticmethod above")
    @staticmethod
    def staticmethod_above(account, *, fence: Fence):
        return account, fence


class Callable:
    @fenced(name="__call__")
    def __call__(self, account, *, fence: Fence):
        return account, fence


def wrapping(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@fenced(name="above")
@wrapping
def above(account, *, fence: Fence):
    return account, fence


@wrapping
@fenced(name="below")
def below(account, *, fence: Fence):
    return account, fence


@fenced
def bare(account, *, fence: Fence):
    return account, fence


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (Worker().method, "method"),
        (Worker.method, "method"),
        (Worker.classmethod_below, "classmethod below"),
        (Worker().classmethod_above, "classmethod above"),
        (Worker.staticmethod_below, "staticmethod below"),
        (Worker().staticmethod_above, "staticmethod above"),
        (Callable(), "__call__"),
        (functools.partial(below, "acct"), "below"),
        (functools.partial(functools.partial(Worker().method), "acct"), "method"),
        (above, "above"),
        (below, "below"),
        (fenced(name="on a partial")(functools.partial(plain, "acct")), "on a partial"),
        (fenced(name="on an object")(Callable()), "on an object"),
        (functools.partial(fenced(name="inner")(functools.partial(plain)), "acct"), "inner"),
    ],
    ids=str,
)
def test_a_label_is_seen_on_everything_that_can_be_a_job(function, name):
    """Methods, partials, objects and wrapped functions carry options like plain functions."""
    assert label_of(function).options == {"name": name}


def test_what_nobody_decorated_has_no_label():
    """Neither functions, nor classes, nor objects, nor builtins."""
    for function in (plain, Worker, print, len, Worker().__init__, functools.partial(plain), lambda: None):
        assert label_of(function) is None


def test_an_attribute_of_that_name_that_is_no_label_is_none():
    """Objects that answer to every name are not mistaken for labelled ones."""

    class Mocking:
        def __getattr__(self, name):
            return name

        @fenced(name="its own")
        def __call__(self):
            pass

    assert label_of(Mocking()).options == {"name": "its own"}


@pytest.mark.parametrize("decorator", [fenced, fenced(lock_at_most="9m"), unfenced])
def test_the_very_same_function_comes_back(decorator):
    """A label wraps nothing, so references, pickles and identity are kept."""

    def function(account, fence: Fence):
        return account, fence

    assert decorator(function) is function
    assert not hasattr(function, "__wrapped__")
    assert function("acct", "mine") == ("acct", "mine")


def test_a_labelled_function_is_pickled_by_reference():
    """A process pool's child finds the function, and with it the label, by name."""
    for function in (bare, above, below, Worker.method, Worker.staticmethod_above):
        assert pickle.loads(pickle.dumps(function)) is function
    assert b"Label" not in pickle.dumps(bare)


def test_a_labelled_object_can_be_pickled():
    """A partial or an object takes its label along into a process pool's child."""
    for function in (fenced(name="on a partial")(functools.partial(plain)), fenced(name="on an object")(Callable())):
        there = pickle.loads(pickle.dumps(function))
        assert label_of(there) == label_of(function)


def test_a_coroutine_function_stays_one():
    """Executors tell by inspection what is to be awaited."""
    labelled = fenced(lock_at_most="1s")(awaited)
    assert inspect.iscoroutinefunction(labelled)
    assert inspect.iscoroutinefunction(functools.partial(labelled, "acct"))


def test_labels_on_one_function_add_up():
    """The outer one overrides only what it gives itself, and the function's own signature is still known."""

    @fenced(lock_at_most="5s", lock_at_least="1s")
    @fenced(lock_at_most="1s", name="inner")
    def job(account, fence, amount):
        return account, fence, amount

    label = label_of(job)
    assert label.options == {"name": "inner", "lock_at_most": 5 * SECOND, "lock_at_least": SECOND}
    assert list(label.signature.parameters) == ["account", "fence", "amount"]


def test_the_outer_of_fenced_and_unfenced_holds():
    """One decorator takes back the other, and the hidden parameters stay known."""

    @unfenced
    @fenced(name="a")
    def each_node(account, fence=None, amount=0):
        return account, fence, amount

    @fenced(name="b")
    @unfenced
    def once():
        pass

    assert label_of(each_node).options is None
    assert list(label_of(each_node).signature.parameters) == ["account", "fence", "amount"]
    assert label_of(once).options == {"name": "b"}


def test_a_label_on_a_wrapper_does_not_reach_what_it_wraps():
    """The inner function, scheduled by itself, keeps its own options."""

    @fenced(name="inner")
    def inner():
        pass

    outer = fenced(name="outer")(wrapping(inner))
    assert (label_of(inner).options["name"], label_of(outer).options["name"]) == ("inner", "outer")


def test_a_function_without_handed_parameters_keeps_its_signature():
    """Nothing is set where there is nothing to hide."""

    @fenced
    def job(account, amount=0):
        return account, amount

    assert not hasattr(job, "__signature__")
    assert label_of(job).signature is None


class Slotted:
    __slots__ = ()

    def __call__(self):
        pass


@pytest.mark.parametrize("decorator", [fenced, fenced(name="x"), unfenced])
@pytest.mark.parametrize("function", [print, len, min, [].append, Worker().method, Slotted()], ids=str)
def test_what_cannot_carry_a_label_is_refused_with_the_way_out(decorator, function):
    """Builtins, bound methods and slotted objects have no place for options, but `policies` has."""
    with pytest.raises(ConfigError, match=r"cannot carry options: .* policies=\{\"job id\": \{\.\.\.\}\}"):
        decorator(function)


@pytest.mark.parametrize("decorator", [fenced, fenced(name="x"), unfenced])
@pytest.mark.parametrize("kind", [Worker, dict])
def test_a_class_is_refused_with_the_way_out(decorator, kind):
    """A label on a class would be inherited by its instances, which are jobs of their own."""
    with pytest.raises(ConfigError, match=f"{kind.__name__} is a class: decorate the method"):
        decorator(kind)


@pytest.mark.parametrize("value", ["9m", 30, {"lock_at_most": "9m"}])
def test_options_are_given_by_name(value):
    """The commonest slip is answered with the right form."""
    with pytest.raises(ConfigError, match=r'takes options by name, as in @fenced\(lock_at_most="9m"\)'):
        fenced(value)


@pytest.mark.parametrize("decorator", [fenced(name="x"), unfenced])
def test_what_is_not_callable_is_no_job(decorator):
    """A property, or the decorator's brackets in the wrong place."""
    with pytest.raises(ConfigError, match=r"labels functions, and .* is none"):
        decorator(property(plain))


# --- what is handed ---------------------------------------------------------------------------------------------------


def parameter(name, annotation):
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation)


EMPTY = inspect.Parameter.empty


@pytest.mark.parametrize(
    ("name", "annotation"),
    [
        *(("fence", EMPTY), ("fence", "Fence"), ("fence", "F"), ("fence", "Any"), ("fence", "object")),
        *(("fencing_token", EMPTY), ("fencing_token", int), ("fencing_token", "int | None")),
        *(("execution_id", EMPTY), ("execution_id", str), ("execution_id", "Optional[str]")),
        *(("execution_id", str | None), ("mine", Fence), ("mine", Fence | None), ("mine", "None | Fence")),
    ],
)
def test_a_parameter_is_handed_by_its_annotation_or_its_name(name, annotation):
    """A name alone is enough, as long as the annotation does not say otherwise."""
    assert is_handed(parameter(name, annotation))


@pytest.mark.parametrize(
    ("name", "annotation"),
    [
        *(("fence", str), ("fence", "list[str]"), ("fencing_token", str), ("fencing_token", "str | None")),
        *(("execution_id", int), ("execution_id", "int"), ("mine", EMPTY), ("mine", int), ("mine", "list[Fence]")),
    ],
)
def test_a_parameter_of_another_type_is_the_users_own(name, annotation):
    """A job that calls its own text `fence` is not handed an object in its place."""
    assert not is_handed(parameter(name, annotation))


def test_a_catch_all_is_never_handed():
    """`*fence` and `**execution_id` take what the caller gives."""

    @fenced
    def job(*fence, **execution_id):
        return fence, execution_id

    assert label_of(job).signature is None


# --- what add_job checks ----------------------------------------------------------------------------------------------


def first(fence: Fence, account, amount=0):
    pass


def middle(account, fence: Fence, amount):
    pass


def last(account, amount, fence: Fence):
    pass


def keyword_only(account, amount, *, fence: Fence):
    pass


def positional_only(account, fence: Fence, amount, /):
    pass


def before_args(account, fence: Fence, *args):
    pass


def with_kwargs(account, amount, fence: Fence, **kwargs):
    pass


def several(fence, account, fencing_token: int, amount, *, execution_id: str):
    pass


async def coroutine(account, fence: Fence, amount):
    pass


EVERYWHERE = [
    first, middle, last, keyword_only, positional_only, before_args, with_kwargs, several, coroutine,
]  # fmt: skip


@pytest.mark.parametrize("function", EVERYWHERE, ids=lambda function: function.__name__)
def test_add_job_does_not_ask_for_what_the_executor_hands(function):
    """APScheduler's own check passes without the parameter, and still finds what is really missing or too much."""
    job = fenced(function)
    scheduler = BackgroundScheduler()
    scheduler.add_job(job, args=["acct", 5])
    scheduler.start(paused=True)
    scheduler.add_job(job, args=["acct", 5])
    scheduler.shutdown()
    check_callable_args(job, ["acct", 5], {"fence": None})
    with pytest.raises(ValueError, match="account"):
        check_callable_args(job, [], {})
    if function not in (before_args, with_kwargs):
        with pytest.raises(ValueError, match="longer than the target callable"):
            check_callable_args(job, ["acct", 5, 6, 7], {})
        with pytest.raises(ValueError, match="colour"):
            check_callable_args(job, ["acct", 5], {"colour": "red"})


@pytest.mark.parametrize(
    "job",
    [
        bare,
        above,
        below,
        Worker().method,
        Worker.classmethod_above,
        Worker.classmethod_below,
        Worker.staticmethod_above,
        Worker.staticmethod_below,
        Callable(),
        functools.partial(bare),
        fenced(functools.partial(plain)),
    ],
    ids=str,
)
def test_add_job_takes_every_kind_of_job(job):
    """However the function is packed, its argument is asked for and its fence is not."""
    BackgroundScheduler().add_job(job, args=["acct"])


def test_a_wrapper_that_adds_arguments_is_checked_as_without_the_label():
    """Above such a decorator, `@fenced` does not make `add_job` ask for what the decorator fills in."""

    def with_session(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            return function("session", *args, **kwargs)

        return wrapper

    @fenced
    @with_session
    def job(session, account, *, fence: Fence):
        return session, account, fence

    BackgroundScheduler().add_job(job, args=["acct"])


# --- trust ------------------------------------------------------------------------------------------------------------

START = Instant(monotonic=1000.0, boottime=5000.0, wall=1.7e9)


def later(monotonic, boottime, wall):
    return Instant(START.monotonic + monotonic, START.boottime + boottime, START.wall + wall)


@pytest.mark.parametrize(
    ("until", "expected"),
    [
        (later(3, 3, 3), 3),
        (later(3, 3, -3600), 3),  # the wall clock was set back
        (later(3, 63, 63), 63),  # suspended for a minute
        (later(3, 63, -3600), 63),  # both
        (later(3, 3, 63), 63),  # a snapshot was restored, or the wall clock was set forward
        (later(3, 3, 2.9), 3),
        (later(0, 0, 0), 0),
    ],
)
def test_time_passes_by_the_clock_that_has_advanced_most(until, expected):
    """A clock that stands still or goes back adds no trust."""
    assert elapsed(START, until) == pytest.approx(expected)


@settings(deadline=None)
@given(*[st.floats(min_value=0, max_value=1e6)] * 3)
def test_time_never_passes_more_slowly_than_any_clock_says(monotonic, boottime, wall):
    """The answer may be too long, which only shortens trust, but never too short."""
    until = later(monotonic, boottime, wall)
    assert elapsed(START, until) >= until.monotonic - START.monotonic


def test_an_instant_is_read_from_all_three_clocks():
    """Two moments in a row do not go back on the clocks that cannot be set."""
    one, two = instant(), instant()
    assert two.monotonic >= one.monotonic
    assert two.boottime >= one.boottime
    assert abs(one.wall - datetime.now(timezone.utc).timestamp()) < 60


@pytest.mark.parametrize(
    ("lock_at_most", "trusted"),
    [
        (timedelta(milliseconds=100), 0.098),  # 0.5 % would be half a millisecond
        (timedelta(milliseconds=400), 0.398),  # where the two meet
        (timedelta(seconds=30), 29.85),
        (LONGEST, 366 * 86400 * 0.995),
    ],
)
def test_a_lease_is_trusted_for_less_than_it_lasts(lock_at_most, trusted):
    """By 0.5 %, and by 2 ms at least, so that the holder stops before the store frees the lease."""
    assert trusted_for(lock_at_most) == pytest.approx(trusted)


@settings(deadline=None)
@given(st.timedeltas(min_value=timedelta(milliseconds=100), max_value=LONGEST))
def test_trust_is_positive_and_ends_before_the_lease(lock_at_most):
    """That holds for everything that `lock_at_most` may be."""
    assert 0 < trusted_for(lock_at_most) <= lock_at_most.total_seconds() - 0.002
