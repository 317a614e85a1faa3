"""One entry for each name of PaddlePaddle's API, from the tables (``*.toml``) in this folder.

An entry of a table::

    [[name]]
    name = "sequence_pool"                        as the original has it
    class = "ours"                                a key of KINDS
    write = "trainer.nn.functional.sequence_pool" a dotted name, or a few words of code
    call = "torch.abs(x)"                         of an op: what is captured, as a test
    snippet = "..."                               a test of it: statements that assert
    note = "..."                                  what differs; of a declined name the reason

The tests in ``tests/transpiler/names`` say what ``call`` and ``snippet`` can use, and that each
entry has what its class needs.
"""

from __future__ import annotations

import difflib
import functools
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from opcode import opmap
from types import FrameType

from transpiler.names.other_words import WORDS

# ---- index ----


LEAST_ALIKE = 0.8  # of two names: of four letters one other is another word

KINDS = {
    "ours": "this library has it",
    "torch": "torch has it by this name",
    "torch_other": "torch has it by another name",
    "recipe": "a few lines of torch",
    "declined": "not here",
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
    """

    name: str
    kind: str
    write: str = ""
    call: str = ""
    snippet: str = ""
    note: str = ""
    table: str = ""

    def __str__(self) -> str:
        """The advice to a user of the original who has written this name."""
        if self.kind == "declined":
            return f"{self.name} is not here: {self.note}"
        said = f"for {self.name} write {self.write}" + (f". {self.note}" if self.note else "")
        where = f"docs/index_of_names.md#{self.name.lower()} has all lines"
        return f"{said.removesuffix('.')}; {where}" if self.kind == "recipe" else said


def tables() -> dict[str, list[Name]]:
    """The entries of each table, in their order."""
    found = {}
    tables = files(__name__.removesuffix(".names"))
    for file in sorted(tables.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".toml"):
            entries = tomllib.loads(file.read_text(encoding="utf-8")).get("name", [])
            found[file.name] = [
                Name(kind=entry.pop("class"), table=file.name, **entry) for entry in entries
            ]
    return found


@functools.cache
def names() -> Mapping[str, Name]:
    """Every entry by its name, sorted without regard to case.

    Example:
        >>> from transpiler.names.names import names
        >>> names()["abs"].write
        'torch.abs'
    """
    every = {entry.name: entry for entries in tables().values() for entry in entries}
    return {name: every[name] for name in sorted(every, key=lambda name: (name.lower(), name))}


def suggestion(name: str, known: Iterable[str] = ()) -> str:
    """The advice for a name that does not exist.

    Args:
        name: the one that a user has written.
        known: the names that exist.

    Returns:
        The index's advice for the name, or else similar names; empty where there are none.

    Example:
        >>> from transpiler.names.names import suggestion
        >>> suggestion("abs")
        'for abs write torch.abs'
        >>> suggestion("Programm", ["Program", "capture"])
        'did you mean Program?'
    """
    index = names()
    if name in index:
        return str(index[name])
    if name in WORDS:
        return f"for {name} write {WORDS[name]}"
    ours = list(known)
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
        module: the one that lacks the name.
        wanted: the name; ``name`` is lost where an error is pickled.
        known: the names that the package has.
    """

    module: str = ""
    wanted: str = ""
    known: Iterable[str] = ()

    def __str__(self) -> str:
        """The missing name, and what to write instead."""
        submodule = f"{self.module}.{self.wanted}"
        if _is_module(submodule):
            said = f"import {submodule} first"
        else:
            said = _what_to_write(self.wanted, self.known)
        return f"{super().__str__()}: {said}" if said else super().__str__()


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
        said = _what_to_write(name, known)
        text = f"cannot import name {name!r} from {module!r}"
        return ImportError(f"{text}: {said}" if said else text, name=module)
    error = MissingName(f"module {module!r} has no attribute {name!r}", name=name)
    error.module, error.wanted, error.known = module, name, known
    return error


def _what_to_write(name: str, known: Iterable[str]) -> str:
    """The advice for a name: the package of ours that has it, or that of the index."""
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
