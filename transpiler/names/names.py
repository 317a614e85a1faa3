"""One entry for each name of PaddlePaddle's API, from the tables (``*.toml``) in this folder.

A layer or a function, whose entry has a test of its own::

    [[name]]
    name = "sequence_pool"                        as the original has it
    class = "ours"                                a key of KINDS
    write = "trainer.nn.functional.sequence_pool" a dotted name, or a few words of code
    call = "torch.abs(x)"                         of an op: what is captured, as a test
    snippet = "..."                               a test of it: statements that assert
    note = "..."                                  what differs; of a declined name the reason

A name of a module or a class, in the section of its owner: the last word of the module's name, or
the class::

    [Optimizer]
    clear_grad = "optimizer.zero_grad()"          what to write
    state_dict = "optimizer.state_dict"           the same name here
    set_lr_scheduler = ["...", "A sentence."]     what to write, and what differs
    append_regularization_ops = ["", "Reason."]   there is no counterpart

In these sections ``fleet``, ``optimizer`` and the other roots of OBJECTS are what a script has, and
``pserver.X`` is imported by ``from pserver import X``.

The tests in ``tests/transpiler/names`` say what ``call`` and ``snippet`` can use, that each entry
has what its class needs, and that what is to be written exists.

This module imports the standard library alone, as ``pserver check`` does.
"""

from __future__ import annotations

import difflib
import functools
import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from opcode import opmap
from pathlib import Path
from types import FrameType
from typing import Any

# ---- index ----


LEAST_ALIKE = 0.8  # of two names: of four letters one other is another word

KINDS = {
    "ours": "this library has it",
    "torch": "torch has it by this name",
    "torch_other": "torch has it by another name",
    "recipe": "a few lines of torch",
    "declined": "not here",
}
# what a root of "write" stands for: the owner whose names it has
OBJECTS = {
    "DataParallel": "DataParallel",
    "dataset": "InMemoryDataset",
    "DistributeTranspiler": "DistributeTranspiler",
    "DistributeTranspilerConfig": "DistributeTranspilerConfig",
    "executor": "Executor",
    "fleet": "fleet",
    "loss": "Tensor",
    "metric": "Metric",
    "model": "Layer",
    "optimizer": "Optimizer",
    "program": "Program",
    "scheduler": "LRScheduler",
    "strategy": "DistributedStrategy",
    "tensor": "Tensor",
}
# an owner's names are also those of others
BASES = {
    "BuildStrategy": ("build_strategy",),
    "DataParallel": ("Layer",),
    "fluid": ("static",),
    "layers": ("static",),
    "metrics": ("metric",),
    "nn": ("clip",),
    "util": ("UtilBase",),
    "ExecutionStrategy": ("execution_strategy",),
    "InMemoryDataset": ("DatasetBase",),
    "MultiSlotStringDataGenerator": ("MultiSlotDataGenerator",),
    "QueueDataset": ("InMemoryDataset", "DatasetBase"),
    "UserDefinedRoleMaker": ("PaddleCloudRoleMaker",),
}


@dataclass(frozen=True)
class Name:
    """A name of the original, and its replacement here.

    Attributes:
        name: as the original has it.
        kind: a key of KINDS.
        write: the replacement; empty if the name is declined.
        call: an expression whose captured value a test compares with its eager one.
        snippet: the statements of a test.
        note: the difference from the original; for a declined name the reason.
        table: the file in this folder that has the entry.
        owner: the module's last word, or the class, that has the name; "": any module.
    """

    name: str
    kind: str
    write: str = ""
    call: str = ""
    snippet: str = ""
    note: str = ""
    table: str = ""
    owner: str = ""

    @property
    def same(self) -> bool:
        """Whether the same object here has the same name."""
        root, _, name = self.write.partition(".")
        owner = OBJECTS.get(root, "")
        return name == self.name and self.owner in (owner, *BASES.get(owner, ()))

    def __str__(self) -> str:
        """The advice to a user of the original who has written this name."""
        if self.kind == "declined":
            return f"{self.name} is not here: {self.note}"
        said = f"for {self.name} write {self.write}" + (f". {self.note}" if self.note else "")
        where = f"docs/index_of_names.md#{self.name.lower()} has all lines"
        return f"{said.removesuffix('.')}; {where}" if self.kind == "recipe" else said


@functools.cache
def _read() -> Mapping[str, Mapping[str, Any]]:
    """Each table as it is written, by its file."""
    folder = Path(__file__).parent
    return {
        path.name: tomllib.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.toml"))
    }


def tables() -> dict[str, list[Name]]:
    """The entries of layers and functions by table, in their order."""
    return {
        file: [
            Name(
                kind=entry["class"], table=file, **{k: v for k, v in entry.items() if k != "class"}
            )
            for entry in table["name"]
        ]
        for file, table in _read().items()
        if "name" in table
    }


@functools.cache
def names() -> Mapping[str, Name]:
    """Every layer and function by its name, sorted without regard to case.

    Example:
        >>> from transpiler.names.names import names
        >>> names()["abs"].write
        'torch.abs'
    """
    return {
        entry.name: entry
        for entry in _sorted(entry for entries in tables().values() for entry in entries)
    }


@functools.cache
def members() -> Mapping[str, Mapping[str, Name]]:
    """The names of each owner, in the order of the tables.

    Example:
        >>> from transpiler.names.names import members
        >>> members()["Optimizer"]["clear_grad"].write
        'optimizer.zero_grad()'
    """
    return {
        owner: {
            entry.name: entry
            for entry in _sorted(_member(owner, name, said, file) for name, said in section.items())
        }
        for file, table in _read().items()
        if "name" not in table
        for owner, section in table.items()
    }


def _tested(fields: Mapping[str, str], file: str) -> Name:
    others = {key: value for key, value in fields.items() if key != "class"}
    return Name(kind=fields["class"], table=file, **others)


def _sorted(entries: Iterable[Name]) -> list[Name]:
    return sorted(entries, key=lambda entry: (entry.name.lower(), entry.name))


def _member(owner: str, name: str, said: str | list[str], file: str) -> Name:
    write, note = (said, "") if isinstance(said, str) else said
    if not write:
        kind = "declined"
    elif re.match(r"torch\.[\w.]+", write):
        kind = "torch" if write.partition("(")[0].endswith(f".{name}") else "torch_other"
    elif re.match(r"(pserver|fleet|strategy|executor|program|dataset|D\w+)\.", write):
        kind = "ours"
    else:
        kind = "torch_other"
    return Name(name, kind, write, note=note, table=file, owner=owner)


def owners(owner: str) -> tuple[str, ...]:
    """The sections that have an owner's names: its own first."""
    return (owner, *BASES.get(owner, ()))


def member(owner: str, name: str) -> Name | None:
    """The entry of an owner's name; None if the owner has no such entry."""
    sections = (members().get(each, {}) for each in owners(owner))
    return next((section[name] for section in sections if name in section), None)


def entry_of(name: str, owner: str = "") -> Name | None:
    """The entry of a name: its owner's, that of any module, or the first one of another owner.

    Example:
        >>> from transpiler.names.names import entry_of
        >>> entry_of("split", "distributed").owner, entry_of("split").write
        ('distributed', 'torch.split')
    """
    found = member(owner, name) or names().get(name)
    elsewhere = (section[name] for section in members().values() if name in section)
    return found or next((entry for entry in elsewhere if not entry.same), None)


def suggestion(name: str, known: Iterable[str] = (), owner: str = "") -> str:
    """The advice for a name that does not exist.

    Args:
        name: the one that a user has written.
        known: the names that exist.
        owner: what lacks it: a class, or a module's last word.

    Returns:
        The index's advice for the name, or else similar names; empty where there are none.

    Example:
        >>> from transpiler.names.names import suggestion
        >>> suggestion("abs")
        'for abs write torch.abs'
        >>> suggestion("Programm", ["Program", "capture"])
        'did you mean Program?'
    """
    entry = entry_of(name, owner)
    if entry is not None:
        return str(entry)
    index, ours = names(), list(known)
    # of two that differ in capitals alone our own, and the first one of these
    folded = {each.lower(): each for each in (*index, *reversed(ours))}
    near = [name.lower()]
    if near[0] not in folded:
        near = difflib.get_close_matches(near[0], folded, n=2, cutoff=LEAST_ALIKE)
    said = [
        f"did you mean {found}?" if found in ours else str(index[found])
        for found in (folded[each] for each in near)
    ]
    return "; ".join([*(each.removesuffix(".") for each in said[:-1]), *said[-1:]])


# ---- missing name ----
#
# The error of a name that a package lacks: it says what to write.
#
# A package raises it where Python asks for a name that is not there::
#
#   def __getattr__(name):
#       raise missing(__name__, name, __all__)
#
# ``transpiler.fc`` is then an AttributeError and ``from transpiler import fc`` an ImportError, and
# both say what to write.


PACKAGES = (
    *("transpiler", "trainer", "trainer.fleet", "trainer.metrics", "trainer.lr"),
    *("trainer.nn", "trainer.nn.functional", "trainer.row_optimizers"),
)
_IMPORT_FROM = opmap["IMPORT_FROM"]


class MissingName(AttributeError):
    """A package has no such name.  The message says what to write instead.

    ``hasattr``, and the import of a submodule, ask for missing names and drop the error: so only
    the message reads the index.

    Attributes:
        module: what lacks the name: the module's ``__name__``.
        wanted: the name; ``name`` is lost where an error is pickled.
        known: the names that the package has.
    """

    module: str = ""
    wanted: str = ""
    known: Iterable[str] = ()

    def __str__(self) -> str:
        """The missing name, and what to write instead."""
        said = self.advice()
        return f"{super().__str__()}: {said}" if said else super().__str__()

    def advice(self) -> str:
        """The text to write instead; empty where there is nothing to say."""
        submodule = f"{self.module}.{self.wanted}"
        if _is_module(submodule):
            return f"import {submodule} first"
        return _what_to_write(self.wanted, self.known, self.module)


class MissingMember(MissingName):
    """An object has no such attribute; ``module`` is its owner in the tables: "Optimizer"."""

    def advice(self) -> str:
        """The entry of the owner's name, or nothing."""
        entry = member(self.module, self.wanted)
        return "" if entry is None else str(entry)


def missing_member(of: object, name: str, owner: str) -> AttributeError:
    """The error for a class's ``__getattr__`` to raise.

    Args:
        of: the object.
        name: the missing attribute.
        owner: the section of the tables with the original's names.

    Example:
        >>> from transpiler.names.names import missing_member
        >>> str(missing_member(object(), "clear_grad", "Optimizer"))
        "'object' object has no attribute 'clear_grad': for clear_grad write optimizer.zero_grad()"
    """
    text = f"{type(of).__name__!r} object has no attribute {name!r}"
    error = MissingMember(text, name=name, obj=of)
    error.module, error.wanted = owner, name
    return error


def missing(module: str, name: str, known: Iterable[str] = ()) -> AttributeError | ImportError:
    """The error for a module's ``__getattr__`` to raise, which must call this function directly.

    Python makes an ImportError of its own where ``from module import name`` finds no attribute,
    and drops the AttributeError with its message.  An ImportError stays as it is.

    Args:
        module: its ``__name__``.
        name: the missing one.
        known: the names that the module has.

    Returns:
        An ImportError where a statement imports the name, else an AttributeError.
    """
    # A submodule that is being imported is found after an AttributeError alone.
    if _imports(sys._getframe(1).f_back) and f"{module}.{name}" not in sys.modules:
        said = _what_to_write(name, known, module)
        text = f"cannot import name {name!r} from {module!r}"
        return ImportError(f"{text}: {said}" if said else text, name=module)
    error = MissingName(f"module {module!r} has no attribute {name!r}", name=name)
    error.module, error.wanted, error.known = module, name, known
    return error


def _what_to_write(name: str, known: Iterable[str], module: str) -> str:
    """The advice for a name of a module: the package of ours that has it, or that of the index."""
    owner = module.rpartition(".")[2]
    if member(owner, name) is not None:
        return suggestion(name, known, owner)
    # a module of the script's may hide our package
    found = getattr(sys.modules.get("pserver.own_packages"), "own", import_module)
    homes = (package for package in PACKAGES if name in found(package).__all__)
    home = "" if name in names() else next(homes, "")
    return f"write {home}.{name}" if home else suggestion(name, known)


def _imports(frame: FrameType | None) -> bool:
    """Whether a frame executes ``from ... import name`` right now."""
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM


def _is_module(name: str) -> bool:
    """Whether there is a module of this name, which may not have been imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # what it would lie in is no package
        return False
