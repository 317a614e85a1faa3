"""docs/reference/*.md of the Python interface: what each module offers, from its ``__all__``.

mkdocstrings puts an object's signature and docstring where a page says ``::: name``.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent.parent
MODULES = {
    "trainer": "What scripts import, besides `trainer.fleet`.",
    "trainer.fleet": "The calls that turn a script into one trainer of a job.\n"
    "[Quick start](../quickstart.md) shows them at work.",
    "trainer.nn": "Losses and layers; [a page](../nn.md) says how they are used.",
    "trainer.nn.functional": "The functions of [trainer.nn](trainer.nn.md).",
    "trainer.metrics": "Metrics over all trainers; [evaluation](../evaluation.md) has examples.",
    "trainer.lr": "Schedulers that torch lacks; [a page](../learning_rates.md) has examples.",
    "trainer.row_optimizers": "Rules that update rows of tables.\n"
    "[Embeddings](../embeddings.md#update-rules) says how a table gets one.",
    "transpiler": "Programs, and what splits them; [programs](../programs.md) has examples.",
    "pserver": "A server in a process of one's own.",
    "pserver.ray": "A job on the nodes of a Ray cluster; [a page](../ray.md) says how it is used.",
}
PAGE = """# {module}

{about}

| name | | defined in |
|---|---|---|
{rows}
{objects}"""
ROLE = re.compile(r":\w+:`([^`]+)`")
SENTENCE = re.compile(r"(.+?)(?:\.  ?(?=[A-Z])|\.?$)")


def pages() -> dict[str, str]:
    """The text of each page, by its path below docs/."""
    return {f"reference/{module}.md": page(module, about) for module, about in MODULES.items()}


def page(module: str, about: str) -> str:
    """The page of one module."""
    found = importlib.import_module(module)
    names = sorted(found.__all__, key=lambda name: (name.lower(), name))
    rows = "".join(row(name, getattr(found, name)) for name in names)
    own = [name for name in names if f"{module}.{name}" not in MODULES]
    objects = "\n".join(f"::: {module}.{name}\n" for name in own)
    return PAGE.format(module=module, about=about, rows=rows, objects=objects)


def row(name: str, found: object) -> str:
    """The line of one name in a page's table."""
    path = source(found)
    return f"| `{name}` | {first_sentence(found)} | [{path}](../../{path}) |\n"


def first_sentence(found: object) -> str:
    """That of an object's docstring, without its period, for a cell of a table."""
    paragraph = " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split("\n"))
    text = ROLE.sub(r"`\1`", paragraph).replace("``", "`").replace("|", "\\|")
    sentence = SENTENCE.match(text)
    return sentence[1] if sentence else text


def source(found: object) -> str:
    """The file that defines an object, below the repository's root."""
    module = found if isinstance(found, ModuleType) else inspect.getmodule(found)
    assert module is not None and module.__file__ is not None
    return Path(module.__file__).resolve().relative_to(ROOT.resolve()).as_posix()
