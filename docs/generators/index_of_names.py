"""Writes docs/index_of_names.md: PaddlePaddle's names, from the tables in ``transpiler/names``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import groupby

from transpiler.names.names import BASES, KINDS, Name, members, names

FIRST = """# Index of names

What a user of PaddlePaddle writes here: for {count} of its layers and functions, and
[below](#packages-and-classes) for {members} names of its packages for training, and methods, fields
and keys of its classes.
It has more: [metrics](evaluation.md) such as `auc`, [datasets](datasets.md), and
[losses and layers](nn.md) such as `nce` are on pages of their own.
Optimizers are those of torch.optim, and of the [rows of tables](embeddings.md#update-rules).
A script that imports such a name from `transpiler`, `trainer`, `trainer.nn`,
`trainer.nn.functional`, `trainer.metrics`, `trainer.lr` or `trainer.fleet` is told the same by the
ImportError.
So are scripts that ask an optimizer, a strategy, a program or a dataset of ours for a method or a
field of the original's.
[`pserver check`](command_line.md#pserver-check) reads a script, and lists its lines that have to
change, with these answers.

`make reference` writes this page from [their tables](../transpiler/names).
An entry also has what a test runs of it, in a program where it is an op, and compares with torch or
numpy.
A dotted name can be imported; anything else is code.
Arguments have the names and defaults of torch, unless the entry is ours.

{kinds}
{letters}
"""
RECIPES = """
## Recipes

The lines of each, as a test runs them, with a check of their values.
`x` and `y` are float32 [3, 4]; `p` is [3, 4] between 0.1 and 0.9; `m` is [4, 4], positive definite;
`v` is [4]; `i` is int64 [3] of 0 to 3; `b` is bool [3, 4]; `t` is [2, 3, 8], `image` [2, 3, 8, 8]
and `volume` [1, 2, 4, 4, 4].
`F` is torch.nn.functional; `captured(function, *inputs)` is what the program of a function gives.
"""
MEMBERS = """
## Packages and classes

By owner: the last word of the package's name, or the class.
In the answers `fleet`, `optimizer`, `model`, `program` and their like are what a script has, and
`pserver.X` is imported by `from pserver import X`.
[Arguments](#arguments) are those of functions, and of all layers, optimizers or loaders.
What builds and runs a static program has other answers where [fleet](#static-with-fleet) or a
[transpiler](#static-with-a-transpiler) is to train it, and tables have where a job is
[without servers](#without-servers).
"""
WORDS = {kind: kind.replace("torch_other", "torch, other name") for kind in KINDS}


def row(entry: Name) -> str:
    """An entry as a row of a table."""
    write = f"`{entry.write}`" if entry.write else ""
    kind = WORDS[entry.kind]
    if entry.kind == "recipe":
        kind = f"[{kind}](#{entry.name.lower()})"
    return f"| `{entry.name}` | {kind} | {write} | {entry.note} |\n"


def recipe(entry: Name) -> str:
    """The lines of a recipe."""
    return f"\n### {entry.name}\n\n```text\n{entry.snippet.strip()}\n```\n"


def section(owner: str, entries: Mapping[str, Name]) -> str:
    """The table of an owner."""
    bases = " and ".join(f"[{base}](#{base.lower()})" for base in BASES.get(owner, ()))
    also = f"Also what {bases} has.\n\n" if bases else ""
    rows = "".join(
        f"| `{entry.name}` | {'`' + entry.write + '`' if entry.write else 'declined'} "
        f"| {entry.note} |\n"
        for entry in entries.values()
    )
    return f"\n### {owner}\n\n{also}| name | write | |\n|---|---|---|\n{rows}"


def pages() -> dict[str, str]:
    """The text of the page."""
    every = list(names().values())
    counts = Counter(entry.kind for entry in every)
    kinds = "| class | names | |\n|---|---|---|\n" + "".join(
        f"| {WORDS[kind]} | {counts[kind]} | {meaning} |\n" for kind, meaning in KINDS.items()
    )
    sections = {
        letter: list(entries)
        for letter, entries in groupby(every, key=lambda entry: entry.name[0].upper())
    }
    letters = " ".join(f"[{letter}](#{letter.lower()})" for letter in sections)
    text = FIRST.format(
        count=len(every),
        kinds=kinds,
        letters=letters.replace(") [N", ")\n[N"),
        members=sum(map(len, members().values())),
    )
    for letter, entries in sections.items():
        text += f"\n## {letter}\n\n| name | class | write | |\n|---|---|---|---|\n"
        text += "".join(map(row, entries))
    text += MEMBERS + "".join(section(owner, found) for owner, found in members().items())
    recipes = "".join(recipe(entry) for entry in every if entry.kind == "recipe")
    return {"index_of_names.md": text + RECIPES + recipes}
