"""A setting: one key that a user may assign, and the kinds of values that keys take.

The tables of settings are lane_settings.py (jobs with servers), the tables of transpiler/strategy
(everything else in a strategy) and distribute_config.py.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

Checker = Callable[[str, Any], Any]  # (the key's full name, the assigned value) -> the kept value
LARGEST = 2**31 - 1  # of a whole number without another bound


class UnknownField(AttributeError, ValueError):
    """A name that a configuration does not have.

    It is an AttributeError, as Python raises for a missing attribute, and a ValueError, as all
    mistakes of a user are.
    """


@dataclass(frozen=True, slots=True)
class Kind:
    """The values that a setting takes.

    Attributes:
        type: the type in words, for documentation: "whole number".
        range: the allowed values of this type in words; "" where all of them are.
        check: returns the value to keep; raises TypeError for another type, ValueError for a value
            out of range.
    """

    type: str
    range: str
    check: Checker


@dataclass(frozen=True, slots=True)
class Setting:
    """One key: a row of a table of settings.

    Attributes:
        key: what a user writes: "k_steps".
        default: what a key is that nobody assigns.
        kind: the values that it takes.
        sentence: what it does, for documentation.
        modes: names of the modes that read it: update modes of a job with servers, or modes of a
            :class:`DistributeTranspilerConfig`.  Elsewhere another value than the default raises.
        jobs: kinds of jobs that read it besides: "collective" and "hybrid" in eager scripts;
            "program" and "collective_program" of transpiled programs, with servers and without.
            Programs read the keys of lanes by ``modes`` alone.
        idle_jobs: kinds of jobs that take any value of it, and in which it does nothing.
        lane: the field of a :class:`~transpiler.plan.plan.Lane` that it becomes; "" for none.
        early: it acts before there is an optimizer, and so belongs into ``fleet.init``'s strategy.
        absent: what a key that nobody assigns does, in words, where that is not what the default
            says: the default asks for something, too, where it is assigned.
    """

    key: str
    default: Any
    kind: Kind
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
    """A value as a message may have it."""
    return "***" if name.startswith(SECRET) else repr(value)


def refuse_type(name: str, words: str, value: Any) -> NoReturn:
    """Raises the TypeError for a value of another type."""
    got = f"{_quoted(name, value)} ({type(value).__name__})"
    raise TypeError(f"{name}: expected {words}, got {got}")


def refuse_range(name: str, words: str, value: Any) -> NoReturn:
    """Raises the ValueError for a value of the right type that is out of range."""
    raise ValueError(f"{name}: expected {words}, got {_quoted(name, value)}")


def refuse_name(owner: str, name: object, known: Collection[str]) -> NoReturn:
    """Raises the error for a name that does not exist, with the closest ones that do."""
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
        TypeError: it is something else, which Python would take for one of the two.
    """
    if not isinstance(value, bool | np.bool_):
        refuse_type(name, "True or False", value)
    return bool(value)


def whole_number(what: str, value: object, least: int, below: int | None = None) -> int:
    """The value of an argument that is a whole number, from ``least`` to below ``below``.

    Raises:
        TypeError: it is none.
        ValueError: it is out of range.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{what}: expected a whole number, got {value!r} ({type(value).__name__})")
    if value < least or (below is not None and value >= below):
        expected = f"{least} or more" if below is None else f"{least} to {below - 1}"
        raise ValueError(f"{what}: expected {expected}, got {value}")
    return value


# ---- kinds ----


def flag() -> Kind:
    """True or False."""
    return Kind("bool", "", check_flag)


def _is_int(value: Any) -> bool:
    """Whether it is a whole number, of Python's or numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def count(least: int = 1, most: float = LARGEST, none: int | None = None) -> Kind:
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

    return Kind("int", span, check)


def number(valid: Callable[[float], bool], span: str) -> Kind:
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

    return Kind("float", span.removeprefix("of "), check)


def above(bound: float = 0.0) -> Kind:
    """A number above a bound."""
    return number(lambda value: value > bound, f"above {bound:g}")


def at_least(least: float = 0.0) -> Kind:
    """A number of a bound or more."""
    return number(lambda value: value >= least, f"of {least:g} or more")


def text(*choices: str) -> Kind:
    """A text; one of the choices where there are any."""
    span = "one of " + ", ".join(map(repr, choices)) if choices else ""
    words = span or "a text"

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            refuse_type(name, words, value)
        if not value.isascii() and value.encode(errors="ignore").decode() != value:
            refuse_range(name, "a text without surrogates", value)
        return value if not choices or value in choices else refuse_range(name, words, value)

    return Kind("str", span, check)


def list_of(item: Kind, least: int = 0) -> Kind:
    """A list, or tuple, of values of one kind; it is kept as a tuple.  None is an empty one."""

    def check(name: str, value: Any) -> tuple[Any, ...]:
        if value is None and least == 0:
            value = ()
        if not isinstance(value, list | tuple):
            refuse_type(name, "a list", value)
        if len(value) < least:
            refuse_range(name, f"a list of {least} or more", value)
        return tuple(item.check(f"{name}[{index}]", entry) for index, entry in enumerate(value))

    return Kind(f"list of {item.type}", item.range, check)


def optional(kind: Kind) -> Kind:
    """A value of a kind, or None."""
    return Kind(
        f"{kind.type} or None",
        kind.range,
        lambda name, value: None if value is None else kind.check(name, value),
    )


def permutation(*parts: str) -> Kind:
    """A list that has each of these names once."""
    span = f"each of {', '.join(parts)} once"

    def check(name: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list | tuple):
            refuse_type(name, "a list", value)
        if sorted(map(str, value)) != sorted(parts):
            refuse_range(name, span, value)
        return tuple(value)

    return Kind("list of str", span, check)


def dict_of(settings: Table, words: str) -> Kind:
    """A dict whose keys are settings; keys that it lacks have their defaults."""

    def check(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            refuse_type(name, words, value)
        defaults = {key: setting.default for key, setting in settings.items()}
        return {**defaults, **check_keys(name, settings, {}, value)}

    return Kind("dict", f"keys {', '.join(settings)}", check)


def dict_from_patterns(item: Kind, words: str) -> Kind:
    """A dict from patterns of names to values of one kind."""

    def check(name: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            refuse_type(name, words, value)
        pattern = text()
        return {
            pattern.check(f"{name}: pattern", key): item.check(f"{name}[{key!r}]", entry)
            for key, entry in value.items()
        }

    return Kind(f"dict from patterns to {item.type}", item.range, check)
