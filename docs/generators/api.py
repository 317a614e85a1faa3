"""docs/reference/*.md of the Python interface: what each module offers, which nothing imports here.

In the site mkdocstrings puts an object's signature and docstring where a page says ``::: name``,
in a comment; on a code host the table's link leads to where they stand.
"""

from __future__ import annotations

import re
from pathlib import Path

from griffe import Alias, GriffeLoader, Object

ROOT = Path(__file__).parent.parent.parent
MODULES = {
    "trainer": "How one process takes part in a job; [pserver](pserver.md) gives these names, too.",
    "trainer.fleet": "The calls that turn a script into one trainer of a job.\n"
    "[Quick start](../quickstart.md) shows them at work.",
    "trainer.nn": "Losses and layers; [a page](../nn.md) says how they are used.",
    "trainer.nn.functional": "The functions of [trainer.nn](trainer.nn.md).",
    "trainer.metrics": "Metrics over all trainers; [evaluation](../evaluation.md) has examples.",
    "trainer.lr": "Schedulers that torch lacks; [a page](../learning_rates.md) has examples.",
    "trainer.row_optimizers": "Rules that update rows of tables.\n"
    "[Embeddings](../embeddings.md#update-rules) says how a table gets one.",
    "transpiler": "Programs, and what splits them; [programs](../programs.md) has examples.",
    "trainer.lightning": "Lightning trains in a job; [a page](../lightning.md) says how.",
    "trainer.huggingface": "transformers trains in a job; [a page](../transformers.md) says how.",
    "pserver": "What scripts import, also beside a `trainer.py` of their own: the names of\n"
    "[trainer](trainer.md) and of [transpiler](transpiler.md), and a server in a process of one's\n"
    "own.",
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
    loader = GriffeLoader(search_paths=[ROOT])
    for package in sorted({module.partition(".")[0] for module in MODULES}):
        loader.load(package)
    found = loader.modules_collection
    return {f"reference/{each}.md": page(each, found[each], MODULES[each]) for each in MODULES}


def page(module: str, found: Object | Alias, about: str) -> str:
    """The page of one module: what is in its ``__all__``, otherwise what it defines."""
    defined = {name: each for name, each in found.members.items() if not each.is_alias}
    public = [name for name, each in defined.items() if each.is_public and each.has_docstring]
    names = [str(name) for name in found.exports or public]
    names.sort(key=lambda name: (name.lower(), name))
    rows = "".join(row(name, found[name]) for name in names)
    own = [name for name in names if f"{module}.{name}" not in MODULES]
    if module == "pserver":  # the others' names stand on their pages
        own = [name for name in own if target_of(found[name]).path.startswith("pserver.")]
    objects = "\n".join(f"<!-- ::: {module}.{name} -->\n" for name in own)
    return PAGE.format(module=module, about=about, rows=rows, objects=objects)


def target_of(found: Object | Alias) -> Object:
    """The definition behind an imported name; of a stub below ``pserver`` the module itself."""
    target = found.final_target if isinstance(found, Alias) else found
    if str(target.filepath).endswith(".pyi"):
        return target.modules_collection[f"trainer.{target.name}"]
    return target


def row(name: str, found: Object | Alias) -> str:
    """The line of one name in a page's table."""
    target = target_of(found)
    path = Path(str(target.filepath)).relative_to(ROOT).as_posix()
    return f"| `{name}` | {first_sentence(target)} | [{path}](../../{path}) |\n"


def first_sentence(found: Object) -> str:
    """That of an object's docstring, without its period, for a cell of a table."""
    docstring = found.docstring.value if found.docstring is not None else ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split("\n"))
    text = ROLE.sub(r"`\1`", paragraph).replace("``", "`").replace("|", "\\|")
    sentence = SENTENCE.match(text)
    return sentence[1] if sentence else text
