"""Writes transpiler/strategy/fields.py: the fields of a strategy for type checkers, from the tables
of settings.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping

from transpiler.plan.settings import OUTER_OPTIMIZER, Setting, Table
from transpiler.strategy.strategy import ALIASES, CONFIGS, SWITCHES

WIDTH = 100
LONG = re.compile(r"Literal\[(?:[^],]+, ){4,}[^]]+\]")  # five choices or more
OBJECTS = ("execution_strategy", "build_strategy")  # which have a class of their own, too
# where type checkers see slots they refuse other names in an assignment: these are no slots
SLOTS = ("    if not TYPE_CHECKING:", "        __slots__ = ()", "    else:")
FIRST = '''\
"""The fields of a strategy, for type checkers: a misspelled switch or key is an error before a
script runs.  ``DistributedStrategy`` checks the same, and ranges, at each assignment.

``make reference`` writes this file from the tables of settings: see strategy.py.

A dictionary has two types: "ASyncConfigs" is assigned, and may lack keys; "ReadASyncConfigs" is
read, has all, and refuses assignments to its keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NotRequired, Protocol, TypedDict, TypeVar

if TYPE_CHECKING:
    from typing_extensions import ReadOnly

    Read = TypeVar("Read", covariant=True)
    Assigned = TypeVar("Assigned", contravariant=True)

    class Settings(Protocol[Read, Assigned]):
        """A field that is read as another type than it is assigned."""

        def __get__(self, strategy: object, kind: type[object] | None = None) -> Read: ...
        def __set__(self, strategy: object, values: Assigned) -> None: ...
'''


def name_of(owner: str) -> str:
    """The name of a dictionary's type: "a_sync_configs" -> "ASyncConfigs"."""
    found = "".join(word.capitalize() for word in owner.split("_"))
    return f"{found}Configs" if owner in OBJECTS else found


def _fields(settings: Iterable[Setting], indent: str) -> Iterator[str]:
    """The fields of a class, each with its sentence, as editors show it."""
    for setting in settings:
        yield f"{indent}{setting.key}: {_annotations(setting)[0]}"
        yield from _sentence(setting.sentence, indent)


def _annotations(setting: Setting) -> list[str]:
    """Those of a value that is assigned and of one that is read; a long choice by its name."""
    return [LONG.sub(setting.key.capitalize(), each) for each in setting.kind.annotations]


def _choices(settings: Iterable[Setting]) -> Iterator[str]:
    """Names for long choices."""
    for setting in settings:
        if found := LONG.search(setting.kind.annotations[0]):
            yield from ("", "", f"{setting.key.capitalize()} = {found[0]}")


def _sentence(sentence: str, indent: str) -> Iterator[str]:
    text = textwrap.fill(f'"""{sentence}', WIDTH - len(indent) - len('"""'))
    yield from textwrap.indent(f'{text}"""', indent).splitlines()


def _assigned(owner: str, settings: Table) -> Iterator[str]:
    """The type of a dictionary that is assigned."""
    yield from _choices(settings.values())
    yield from ("", "", f"class {name_of(owner)}(TypedDict, total=False):")
    yield from (f'    """The keys of ``{owner}``, as a script assigns them."""', "")
    yield from _fields(settings.values(), "    ")


def _dictionary(owner: str, settings: Table, aliases: Mapping[str, str]) -> Iterator[str]:
    """The two types of a dictionary: of one that is assigned, and of one that is read."""
    name = name_of(owner)
    yield from _assigned(owner, settings)
    for alias, key in aliases.items():
        yield f"    {alias}: {_annotations(settings[key])[0]}"
        yield from _sentence(f"Another spelling of ``{key}``.", "    ")
    yield from ("", "", "if TYPE_CHECKING:", "", f"    class Read{name}(TypedDict):")
    yield from (f'        """The keys of ``{owner}``, as a script reads them."""', "")
    for key, setting in settings.items():
        yield f"        {key}: ReadOnly[{_annotations(setting)[1]}]"
    for alias in aliases:  # so that {**strategy.a_sync_configs, "k_steps": 3} is one to assign
        yield f"        {alias}: NotRequired[ReadOnly[{_annotations(settings[aliases[alias]])[1]}]]"


def _object(owner: str, settings: Table) -> Iterator[str]:
    """The attributes of a class that is a dictionary, too; and either of them."""
    name = name_of(owner).removesuffix("Configs")
    yield from ("", "", f"class {name}Fields:")
    yield from (f'    """The attributes of ``{owner}`` as an object."""', "")
    yield from SLOTS
    yield from _fields(settings.values(), " " * 8)
    yield from ("", "", f"Any{name} = {name}Configs | {name}Fields")


def _strategy() -> Iterator[str]:
    yield from ("", "", "class StrategyFields:")
    yield from ('    """The switches and dictionaries of a ``DistributedStrategy``."""', "")
    yield from SLOTS
    yield from _fields(SWITCHES.values(), " " * 8)
    for owner in CONFIGS:
        name = name_of(owner)
        given = f"Any{name.removesuffix('Configs')}" if owner in OBJECTS else name
        yield f"        {owner}: Settings[Read{name}, {given}]"


def source() -> str:
    """The text of the file."""
    lines = list(_assigned("outer_optimizer", OUTER_OPTIMIZER))
    for owner, settings in CONFIGS.items():
        lines += _dictionary(owner, settings, ALIASES.get(owner, {}))
        if owner in OBJECTS:
            lines += _object(owner, settings)
    return FIRST + "\n".join([*lines, *_strategy()]) + "\n"


def pages() -> dict[str, str]:
    """The text of the file."""
    return {"../transpiler/strategy/fields.py": source()}
