"""A setting: one key that a user may assign, and the kinds of values that keys take.

The tables of settings are settings.py (jobs with servers), the tables of transpiler/strategy
(everything else in a strategy) and distribute_config.py.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from transpiler.names.names import member
from transpiler.plan.modes import (
    ASYNC,
    COLLECTIVE,
    DILOCO,
    EVERY_MODE,
    GEO,
    HALF_ASYNC,
    MODES,
    SYNC,
    Mode,
)

# ---- setting ----


Checker = Callable[[str, Any], Any]  # (the key's full name, the assigned value) -> the kept value
LARGEST = 2**31 - 1  # of a whole number without another bound


class UnknownField(AttributeError, ValueError):
    """A name that a configuration does not have.

    It is an AttributeError, as Python raises for a missing attribute, and a ValueError, as all
    mistakes of a user are.
    """


@dataclass(frozen=True, slots=True)
class ValueKind:
    """The values that a setting takes.

    Attributes:
        type: the type in words, for documentation: "whole number".
        range: the allowed values of this type in words; "" where all of them are.
        check: returns the value to keep; raises TypeError for another type, ValueError for a value
            out of range.
        assigned: the annotation of a value that is assigned, for type checkers: the type where it
            is "".
        read: the annotation of a value that is read: that of an assigned one where it is "".
    """

    type: str
    range: str
    check: Checker
    assigned: str = ""
    read: str = ""

    @property
    def annotations(self) -> tuple[str, str]:
        """The annotations of a value that is assigned, and of one that is read."""
        assigned = self.assigned or self.type
        return assigned, self.read or assigned


@dataclass(frozen=True, slots=True)
class Setting:
    """One key: a row of a table of settings.

    Attributes:
        key: as a user writes it: "k_steps".
        default: the value of a key that is not assigned.
        kind: the values that it takes.
        sentence: a description for documentation.
        modes: names of the modes that read it: update modes of a job with servers, or modes of a
            :class:`DistributeTranspilerConfig`.  Elsewhere another value than the default raises.
        jobs: kinds of jobs that read it besides: "collective" and "hybrid" in eager scripts;
            "program" and "collective_program" of transpiled programs, with servers and without.
            Programs read the keys of lanes by ``modes`` alone.
        idle_jobs: kinds of jobs that accept any value of it and ignore it.
        lane: the field of a :class:`~transpiler.plan.plan.Lane` that it becomes; "" for none.
        early: it acts before there is an optimizer, and so belongs in ``fleet.init``'s strategy.
        absent: the effect of a key that is not assigned, in words, where it differs from that of
            the default when assigned.
    """

    key: str
    default: Any
    kind: ValueKind
    sentence: str = ""
    modes: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    lane: str = ""
    early: bool = False
    absent: str = ""
    idle_jobs: tuple[str, ...] = ()


Table = Mapping[str, Setting]
SECRET = "fs_client_param"  # has a password: no message quotes its values


def table(*settings: Setting) -> Table:
    """Settings by key, in this order."""
    return MappingProxyType({setting.key: setting for setting in settings})


def _quoted(name: str, value: Any) -> str:
    """A value for a message: without secrets."""
    return "***" if name.startswith(SECRET) else repr(value)


def refuse_type(name: str, words: str, value: Any) -> NoReturn:
    """Raises the TypeError for a value of another type."""
    got = f"{_quoted(name, value)} ({type(value).__name__})"
    raise TypeError(f"{name}: expected {words}, got {got}")


def refuse_range(name: str, words: str, value: Any) -> NoReturn:
    """Raises the ValueError for a value of the right type that is out of range."""
    raise ValueError(f"{name}: expected {words}, got {_quoted(name, value)}")


def refuse_name(owner: str, name: object, known: Collection[str]) -> NoReturn:
    """Raises the error for a name that does not exist: what to write for it where it is one of
    PaddlePaddle's, or the closest ones that do exist.
    """
    entry = member(owner, str(name))
    if entry is not None:
        raise UnknownField(f"{owner} has no {name!r}: {entry}")
    close = difflib.get_close_matches(str(name), known, 3)
    hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(sorted(known))}"
    raise UnknownField(f"{owner} has no {name!r}: {hint}")


def check_keys(
    owner: str, settings: Table, aliases: Mapping[str, str], values: Mapping[Any, Any]
) -> dict[str, Any]:
    """The checked values of a dict of settings, by their own names.

    Raises:
        ValueError: an unknown key, a value out of range, or two spellings of one key with different
            values.
        TypeError: a value of another type.
    """
    checked: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for key, value in values.items():
        name = aliases.get(key, key) if isinstance(key, str) else key
        if name not in settings:
            refuse_name(owner, key, [*settings, *aliases])
        kept = settings[name].kind.check(f"{owner}[{key!r}]", value)
        if name in checked and checked[name] != kept:
            raise ValueError(
                f"{owner}: {spelled[name]!r} and {key!r} mean one thing, and got "
                f"{checked[name]!r} and {kept!r}"
            )
        checked[name], spelled[name] = kept, key
    return checked


def check_flag(name: str, value: Any) -> bool:
    """The value of an argument that is True or False.

    Raises:
        TypeError: it is something else, even if Python would treat it as one of the two.
    """
    if not isinstance(value, bool | np.bool_):
        refuse_type(name, "True or False", value)
    return bool(value)


def whole_number(what: str, value: object, least: int, below: int | None = None) -> int:
    """The value of an argument that is a whole number, from ``least`` to below ``below``.

    Raises:
        TypeError: it is not a whole number.
        ValueError: it is out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what}: expected a whole number, got {value!r} ({type(value).__name__})")
    if value < least or (below is not None and value >= below):
        expected = f"{least} or more" if below is None else f"{least} to {below - 1}"
        raise ValueError(f"{what}: expected {expected}, got {value}")
    return value


# ---- kinds ----


def flag() -> ValueKind:
    """True or False."""
    return ValueKind("bool", "", check_flag)


def _is_int(value: Any) -> bool:
    """Whether it is a whole number, of Python or numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def count(least: int = 1, most: float = LARGEST, none: int | None = None) -> ValueKind:
    """A whole number from ``least`` to ``most``; ``none`` is one more, which means "not set"."""
    span = f"{least} or more" if most >= LARGEST else f"{least} to {most:g}"
    span += "" if none is None else f", or {none}"

    def check(name: str, value: Any) -> int:
        if not _is_int(value):
            refuse_type(name, "a whole number", value)
        if not least <= value <= most and value != none:
            words = f"{least} to {most:.0f}" if value > most else span
            refuse_range(name, f"a whole number of {words}", value)
        return int(value)

    return ValueKind("int", span, check)


def number(valid: Callable[[float], bool], span: str) -> ValueKind:
    """A finite number in a range; ``span`` is the range in words: "above 0"."""

    def check(name: str, value: Any) -> float:
        if not isinstance(value, Real) or isinstance(value, bool):
            refuse_type(name, f"a number {span}", value)
        try:
            checked = float(value)
        except OverflowError:
            refuse_range(name, f"a number {span}", value)
        if not math.isfinite(checked) or not valid(checked):
            refuse_range(name, f"a number {span}", value)
        return checked

    return ValueKind("float", span.removeprefix("of "), check)


def above(bound: float = 0.0) -> ValueKind:
    """A number above a bound."""
    return number(lambda value: value > bound, f"above {bound:g}")


def at_least(least: float = 0.0) -> ValueKind:
    """A number of a bound or more."""
    return number(lambda value: value >= least, f"of {least:g} or more")


def text(*choices: str) -> ValueKind:
    """A text; one of the choices where there are any."""
    span = "one of " + ", ".join(map(repr, choices)) if choices else ""
    words = span or "a text"

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            refuse_type(name, words, value)
        if not value.isascii() and value.encode(errors="ignore").decode() != value:
            refuse_range(name, "a text without surrogates", value)
        return value if not choices or value in choices else refuse_range(name, words, value)

    return ValueKind("str", span, check, one_of(*choices) if choices else "")


def one_of(*choices: str) -> str:
    """The annotation of a text that is one of the choices."""
    return f"Literal[{', '.join(json.dumps(choice) for choice in choices)}]"


def list_of(item: ValueKind, least: int = 0) -> ValueKind:
    """A list, or tuple, of values of one kind; it is kept as a tuple.  None is an empty one."""

    def check(name: str, value: Any) -> tuple[Any, ...]:
        if value is None and least == 0:
            value = ()
        if not isinstance(value, list | tuple):
            refuse_type(name, "a list", value)
        if len(value) < least:
            refuse_range(name, f"a list of {least} or more", value)
        return tuple(item.check(f"{name}[{index}]", entry) for index, entry in enumerate(value))

    assigned, read = item.annotations
    given = f"list[{assigned}] | tuple[{assigned}, ...]" + (" | None" if least == 0 else "")
    return ValueKind(f"list of {item.type}", item.range, check, given, f"list[{read}]")


def optional(kind: ValueKind) -> ValueKind:
    """A value of a kind, or None."""
    return ValueKind(
        f"{kind.type} or None",
        kind.range,
        lambda name, value: None if value is None else kind.check(name, value),
        *(f"{each} | None" for each in kind.annotations),
    )


def permutation(*parts: str) -> ValueKind:
    """A list that has each of these names once."""
    span = f"each of {', '.join(parts)} once"

    def check(name: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            refuse_type(name, "a list", value)
        if sorted(map(str, value)) != sorted(parts):
            refuse_range(name, span, value)
        return tuple(value)

    item = one_of(*parts)
    given = f"list[{item}] | tuple[{item}, ...]"
    return ValueKind("list of str", span, check, given, f"list[{item}]")


def dict_of(settings: Table, words: str, kind: str) -> ValueKind:
    """A dict whose keys are settings; keys that it lacks have their defaults.

    Args:
        settings: its keys.
        words: the dict in words, for messages.
        kind: the name of its type, for type checkers.
    """

    def check(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            refuse_type(name, words, value)
        defaults = {key: setting.default for key, setting in settings.items()}
        return {**defaults, **check_keys(name, settings, {}, value)}

    return ValueKind("dict", f"keys {', '.join(settings)}", check, kind)


def dict_from_patterns(item: ValueKind, words: str) -> ValueKind:
    """A dict from patterns of names to values of one kind."""

    def check(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            refuse_type(name, words, value)
        pattern = text()
        return {
            pattern.check(f"{name}: pattern", key): item.check(f"{name}[{key!r}]", entry)
            for key, entry in value.items()
        }

    assigned = f"Mapping[str, {item.annotations[0]}]"
    return ValueKind(f"dict from patterns to {item.type}", item.range, check, assigned)


# ---- lane settings ----
#
# The settings of a job with servers: ``a_sync``, and the keys of ``a_sync_configs``, one row a key.
#
# A new key is one row here, a line in protos/transpiler/strategy.proto, and the code that acts on
# it; a key that servers must know, or that is compared between processes, becomes a field of a lane
# as well (``lane=``), which is a line in plan.py and one in protos/transpiler/program.proto.


def _names(modes: Iterable[Mode]) -> tuple[str, ...]:
    return tuple(mode.name for mode in modes)


MOST_LOOK_AHEAD = 4  # batches: servers keep the rows that they have sent of each

EVERY = _names(EVERY_MODE)  # of a setting that every update mode reads
_QUEUE = _names(mode for mode in MODES.values() if mode.queues)
_K_STEPS = _names(mode for mode in MODES.values() if mode.steps_on_trainer)
_ASYNC = _names([ASYNC])

A_SYNC = Setting(
    "a_sync",
    True,
    flag(),
    "Servers do not wait for all trainers; ``a_sync_configs`` says more.  Without servers trainers "
    "step together, whatever it says.",
    EVERY,
    idle_jobs=("collective", "hybrid", "collective_program"),  # it is on in every new strategy
)

OUTER_OPTIMIZER = table(
    Setting("type", "sgd", text("sgd", "nesterov", "adam"), "The update rule."),
    Setting("lr", 1.0, above(), "The learning rate."),
    Setting(
        "momentum",
        0.0,
        number(lambda value: 0 <= value < 1, "of 0 or more and below 1"),
        'Of "sgd" and "nesterov".',
    ),
)

A_SYNC_CONFIGS = table(
    Setting(
        "k_steps",
        0,
        count(least=0),
        "Steps that a trainer takes by itself between two exchanges; 0: no k-step mode.",
        _K_STEPS,
        lane="k_steps",
    ),
    Setting(
        "max_merge_var_num",
        1,
        count(),
        "The most steps of a trainer that one message merges; in half_async mode the exact number.",
        _QUEUE,
        lane="max_merge_var_num",
    ),
    Setting(
        "send_queue_size",
        16,
        count(),
        "Steps (in geo mode messages) that may be on their way before a further one waits.",
        _names([ASYNC, GEO]),
        lane="send_queue_size",
    ),
    Setting(
        "row_invalidation",
        True,
        flag(),
        "Servers tell a trainer which rows others have changed, and it asks for those alone; "
        "otherwise it asks for every row once in a window.",
        _names([GEO]),
        lane="row_invalidation",
    ),
    Setting(
        "look_ahead",
        0,
        count(least=0, most=MOST_LOOK_AHEAD),
        "Batches whose rows of tables are looked up ahead, while the steps before them are taken; "
        "0: a forward looks up its own.",
        _names(mode for mode in MODES.values() if not mode.steps_on_trainer),
        lane="look_ahead",
    ),
    Setting(
        "independent_recv_thread",
        False,
        flag(),
        "A thread of its own fetches parameters; otherwise they come with the answer to a step.",
        _ASYNC,
        lane="independent_recv_thread",
    ),
    Setting(
        "min_send_grad_num_before_recv",
        1,
        count(),
        "Messages after which parameters are fetched again.",
        _ASYNC,
        lane="min_send_grad_num_before_recv",
    ),
    Setting(
        "thread_pool_size",
        1,
        count(),
        "The most servers that a message is on its way to at a time.",
        (*_QUEUE, GEO.name),
        lane="thread_pool_size",
    ),
    Setting(
        "send_wait_times",
        1,
        count(least=0),
        "How often, 10 ms each, the sending thread waits for a further step to merge.",
        _ASYNC,
        lane="send_wait_times",
    ),
    Setting(
        "soft_wait_ms",
        50,
        count(least=0),
        "Milliseconds for which a step waits for the answer to the one before, even where the "
        "queue has room; 0: a trainer runs ahead as far as the queue allows.",
        _ASYNC,
    ),
    Setting(
        "runtime_split_send_recv",
        False,
        flag(),
        "The sending thread cuts gradients into slices; otherwise ``step()`` does.",
        _QUEUE,
    ),
    Setting(
        "launch_barrier",
        True,
        flag(),
        "Trainers wait for servers that are not up yet for the start timeout, not only for the "
        "heartbeat timeout.",
        EVERY,
    ),
    Setting(
        "merge",
        "auto",
        text("auto", "sum", "mean"),
        'How the steps of a message are merged; "auto": by the sum under sgd and momentum, by the '
        "mean under other rules and in half_async mode.",
        _QUEUE,
        lane="merge",
    ),
    Setting(
        "half_async",
        False,
        flag(),
        "Chooses half_async mode: a trainer merges its own steps and waits for their result.",
        _names([HALF_ASYNC]),
    ),
    Setting(
        "staleness",
        None,
        optional(count(least=0)),
        "The most steps that a trainer may be ahead of the slowest; None: any; 0: sync mode.",
        _ASYNC,
        lane="staleness",
    ),
    Setting(
        "dc_asgd",
        0.0,
        at_least(),
        "The factor lambda of delay compensation; 0: none.",
        _ASYNC,
        lane="dc_asgd",
    ),
    Setting(
        "outer_optimizer",
        None,
        optional(
            dict_of(OUTER_OPTIMIZER, "a dict with type, lr and momentum, or None", "OuterOptimizer")
        ),
        "With ``k_steps`` it chooses diloco mode: the servers' update rule for the mean change.",
        _names([DILOCO]),
        lane="outer",
    ),
    Setting(
        "nonfinite",
        "auto",
        text("auto", "refuse", "apply", "stop"),
        "What servers do with a step that has a NaN or an infinity in it: refuse it, apply it, or "
        "stop the job.  auto: apply in sync mode, refuse in the others.",
        _names(MODES.values()),
        lane="nonfinite",
    ),
    Setting(
        "outlier_push",
        "off",
        text("off", "refuse", "apply", "stop"),
        "What servers do with a step of which a norm is far beyond its trainer's own history: "
        "refuse it, apply it and say so, or stop the job.  off: norms are not looked at.",
        _names(MODES.values()),
        lane="outlier_push",
    ),
    Setting(
        "outlier_factor",
        100.0,
        above(1.0),
        "How many times its history a norm must exceed to be an outlier.",
        _names(MODES.values()),
        lane="outlier_factor",
    ),
    Setting(
        "lost_trainer",
        "wait",
        text("wait", "go_on", "stop"),
        "What becomes of a job whose trainer is lost: the others wait for another process in its "
        "place, up to the start timeout, and then go on without it; they go on at once; or the job "
        "stops.",
        _names([SYNC, COLLECTIVE]),
        lane="lost_trainer",
    ),
    Setting(
        "buffers",
        "trainer0",
        text("trainer0", "mean", "own"),
        "Whose buffers (batch norm's running statistics) all trainers have: trainer 0's, which "
        "travel with its steps; the mean of the trainers'; each its own.",
        _names(MODES.values()),
        lane="buffers",
    ),
    Setting(
        "modes",
        MappingProxyType({}),
        dict_from_patterns(
            # "k_steps" and "k_step" mean geo, or with an outer_optimizer diloco
            text(*_names(EVERY_MODE), "k_steps", "k_step"),
            "a dict from patterns of parameter names to modes",
        ),
        "The mode of each parameter, by the first pattern that its name matches.",
        EVERY,
    ),
    Setting(
        "overlap",
        False,
        flag(),
        "Gradients leave while backward runs.  Where a second backward, clipping or a GradScaler "
        "changes them before ``step()``, they are sent again; writes through ``.data`` are "
        "looked for in the first steps.",
        _names(mode for mode in EVERY_MODE if not mode.steps_on_trainer),
    ),
    Setting(
        "embeddings",
        (),
        list_of(text()),
        "Patterns of names of embedding modules whose rows move to the servers.",
        EVERY,
        early=True,
    ),
)
LANE_SETTINGS = tuple(setting for setting in A_SYNC_CONFIGS.values() if setting.lane)
