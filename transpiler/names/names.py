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
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files

from transpiler.names.other_words import WORDS

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
    """A name of the original, and what to write for it here.

    Attributes:
        name: as the original has it.
        kind: a key of KINDS: whose it is.
        write: what to write here; empty where the name is declined.
        call: an expression whose captured value a test compares with its eager one.
        snippet: the statements of a test.
        note: what differs from the original; of a declined name the reason.
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
        """What a user of the original is told who has written this name."""
        if self.kind == "declined":
            return f"{self.name} is not here: {self.note}"
        said = f"for {self.name} write {self.write}" + (f". {self.note}" if self.note else "")
        where = f"docs/index_of_names.md#{self.name.lower()} has all lines"
        return f"{said.removesuffix('.')}; {where}" if self.kind == "recipe" else said


def tables() -> dict[str, list[Name]]:
    """The entries of each table, in the order in which they stand there."""
    found = {}
    for file in sorted(files("transpiler.names").iterdir(), key=lambda file: file.name):
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
        >>> from transpiler.names.index import names
        >>> names()["abs"].write
        'torch.abs'
    """
    every = {entry.name: entry for entries in tables().values() for entry in entries}
    return {name: every[name] for name in sorted(every, key=lambda name: (name.lower(), name))}


def suggestion(name: str, known: Iterable[str] = ()) -> str:
    """What to write for a name that is not there.

    Args:
        name: what a user has written.
        known: the names that are there.

    Returns:
        What the index says of the name, or else names like it; empty where there is none.

    Example:
        >>> from transpiler.names.index import suggestion
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
