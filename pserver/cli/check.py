"""``pserver check``: what of PaddlePaddle a script uses, and what to write for it here.

A script is read as a syntax tree, and nothing of it runs.  :class:`_Reader` follows its imports,
and the assignments of objects that it makes, so that ``opt.clear_grad()`` is known as a method of
an optimizer; the answers are those of ``transpiler/names``, which errors and the page have, too.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TextIO

import pserver
from pserver import own_packages
from transpiler.names import names as index
from transpiler.names.names import Name

PAGE = "docs/coming_from/fluid.md"
NO_ENTRY = f"The index has no entry: {PAGE} has the words of both."
THEIRS = "paddle"
OURS = ("pserver", *own_packages.PACKAGES)
# begin the path of an object, or a class, that the script makes: "object.Optimizer:paddle"
OBJECT, CLASS = "object", "class"
# what a call returns, where that is not an object of the class that is called
RETURNED = {
    "clone": "Program",
    "create_dataset": "InMemoryDataset",
    "default_main_program": "Program",
    "default_startup_program": "Program",
    "distributed_model": "Layer",
    "distributed_optimizer": "Optimizer",
    "from_generator": "DataLoader",
    "get_pserver_program": "Program",
    "get_startup_program": "Program",
    "get_trainer_program": "Program",
    "to_tensor": "Tensor",
    "to_variable": "Tensor",
}
MADE = {
    "DatasetFactory": "DatasetBase",
    "Layer": "Layer",
    "Module": "Layer",
}  # an object of a class by this name
MADE_IN = {
    "lr": "LRScheduler",
    "metric": "Metric",
    "nn": "Layer",
    "optim": "Optimizer",
    "optimizer": "Optimizer",
}
DEFAULTS = ("bias_attr", "use_softmax")  # arguments that are True, or as if, unless given
# owners whose methods are known by their names alone, without these, which others have as well
KNOWN = ("Optimizer", "Tensor", "Layer", "DataParallel")
ELSEWHERE = {"astype", "full_name"}  # of numpy, of protobuf
COMMON = {"backward", "cast", "gradient", "numpy", "set_value"}
ARRAYS = "numpy"  # what is made of its names is no tensor
# the sections of what static programs become, by the call that divides them among processes; and
# how such a script leaves its job, with the calls that do
WITH = {
    "distributed_optimizer": "static with fleet",
    "DistributeTranspiler": "static with a transpiler",
}
LAST = {
    "distributed_optimizer": ("fleet.finish()", {"finish", "stop_worker"}),
    "DistributeTranspiler": ("executor.close()", {"close"}),
}
COLLECTIVE = "without servers"  # the section of scripts that ask for such a job
BECOMES = {
    "static with fleet": "a loop over batches",
    "static with a transpiler": "pserver.capture of a step",
}
# whose names they have
PROGRAMS = ("static", "fluid", "layers", "clip", "fleet", "Executor", "Optimizer")
STATIC = {"data", "Program", "program_guard", "default_startup_program", "enable_static"}
IMPORTED = re.compile(r"\b(trainer|transpiler)\.([A-Za-z_]\w*)")


# ---- what is found ----


@dataclass(frozen=True, order=True)
class Use:
    """A name of PaddlePaddle in a script.

    Attributes:
        line: in the script, from 1.
        used: the name, as the script has it.
        write: what to write instead, which may be the same; empty where there is no counterpart.
        note: what differs, or the reason.
    """

    line: int
    used: str
    write: str = ""
    note: str = ""

    @property
    def stays(self) -> bool:
        """Whether it is written as it is."""
        return self.write == self.used

    def __str__(self) -> str:
        """The line of a report, without its file."""
        said = f"write {self.write}" if self.write else "has no counterpart"
        if self.stays or self.note == NO_ENTRY:
            said = "stays" if self.write else "is not known"
        return f"{self.line}: {self.used}: {said}" + (f". {self.note}" if self.note else "")


@dataclass(frozen=True)
class Checked:
    """A script that was read.

    Attributes:
        script: its path, as given.
        uses: by line.
        hidden: files beside it that hide a package of ours, each with what follows.
        change: whether there is anything to change.
        static: whether it builds a static program.
        section: of the index, with what that becomes; "" where it may be several.
        collective: whether it asks for a job without servers.
        last: the call by which it leaves its job, where it has none; else "".
    """

    script: str
    uses: list[Use] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    change: bool = False
    static: bool = False
    section: str = ""
    collective: bool = False
    last: str = ""


# ---- the index ----


def _answer(path: str) -> Name | None:
    """The entry of a dotted path: that of the innermost module or class that has the name."""
    *modules, name = path.split(".")
    for owner in reversed(modules):
        if (found := index.member(owner, name)) is not None:
            return found
    return index.entry_of(name)


def _ours(text: str) -> str:
    """An answer whose names of ours are imported from ``pserver``, where it has them."""

    def imported(found: re.Match[str]) -> str:
        return f"pserver.{found[2]}" if found[2] in pserver.__all__ else found[0]

    return IMPORTED.sub(imported, text).replace("pserver.fleet.", "fleet.")


def _said(line: int, used: str, path: str, entry: Name | None) -> Use:
    """The replacement of a path of theirs."""
    if entry is None:
        module, _, name = path.removeprefix(f"{THEIRS}.").rpartition(".")
        if module in ("", "nn", "nn.functional"):
            write = ".".join(each for each in ("torch", module, name) if each)
            return Use(line, used, write, "The index has no entry: torch has most by their names.")
        return Use(line, used, "", NO_ENTRY)
    note = entry.note
    if entry.kind == "recipe":
        note = f"{note} All lines: docs/index_of_names.md#{entry.name.lower()}.".strip()
    return Use(line, used, _ours(entry.write), _ours(note))


@functools.cache
def _exports(module: str) -> frozenset[str]:
    """The public names of a module of ours, which is not imported."""
    place = own_packages.place_of(module)
    if place is None:
        return frozenset()
    for node in ast.parse(place.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return frozenset()


# ---- reading ----


class _Reader(ast.NodeVisitor):
    """Finds the uses in one script.

    Args:
        bound: what its names stand for; an earlier reading has found those that are bound below
            their use.
        sections: of the index, whose answers go before others, as that reading has found.

    Attributes:
        bound: by name, or by "self.name", a path: of a module, "paddle.nn"; of a name in it; or of
            an object of the script's, "object.Optimizer:paddle", with the root of its maker.
        imports: the packages that the script imports.
        uses: what was found.
        static: whether the script builds a static program.
        collective: whether it asks for a job without servers.
        calls: the names of what it calls.
    """

    def __init__(
        self, bound: dict[str, str], imports: Iterable[str] = (), sections: Sequence[str] = ()
    ) -> None:
        self._sections = sections
        self.bound, self.imports, self.uses = bound, set(imports), set[Use]()
        self._modules = set[str]()  # names that stand for a whole module
        self._stays = set[tuple[str, str]]()  # said once
        self.static, self.collective, self.calls = False, False, set[str]()

    # imports

    def visit_Import(self, node: ast.Import) -> None:  # noqa: N802
        for alias in node.names:
            root = alias.name.partition(".")[0]
            self.imports.add(root)
            name, path = alias.asname or root, alias.name if alias.asname else root
            self.bound[name] = path
            self._modules.add(name)
            if root == THEIRS:
                self._import(node, f"import {ast.unparse(alias)}", alias.name, alias.asname)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:  # noqa: N802
        module = node.module or ""
        root = module.partition(".")[0]
        if node.level or root not in (THEIRS, *OURS, "torch"):
            return
        self.imports.add(root)
        for alias in node.names:
            path = f"{module}.{alias.name}" if alias.name != "*" else module
            self.bound[alias.asname or alias.name] = path
            if root == THEIRS:
                statement = f"from {module} import {ast.unparse(alias)}"
                if self._import(node, statement, path, alias.asname):
                    self._modules.add(alias.asname or alias.name)
                else:
                    self._add(node, statement, path)
            elif root in OURS:
                self._of_ours(node, f"from {module} import {alias.name}", path)

    def _import(self, node: ast.stmt, statement: str, path: str, name: str | None) -> bool:
        """Adds the statement for a module of theirs; False where the path is no module."""
        module = "fleet" if path.endswith(".fleet") else path
        entry = self._first(module) or index.member("import", module)
        if entry is None and isinstance(node, ast.Import):
            entry = index.member("import", ".".join(path.split(".")[:2]))
        if entry is None:
            return False
        write = entry.write
        if write.startswith("import torch.") or module == "fleet" != name:
            write += f" as {name}" if name else ""
        self.uses.add(Use(node.lineno, statement, write, entry.note))
        return True

    # names and attributes

    def visit_Attribute(self, node: ast.Attribute) -> None:  # noqa: N802
        path = self._path(node)
        if path is None:
            if (entry := self._known(node.attr)) is not None:
                used = Use(node.lineno, ast.unparse(node), _ours(entry.write), _ours(entry.note))
                self.uses.add(used)
        elif path.startswith(f"{OBJECT}."):
            if path.count(".") > 1:  # no object itself
                self._of_object(node, path)
        elif self._theirs(path):
            covered = isinstance(node.value, ast.Name) and node.value.id in self._modules
            self._add(node, ast.unparse(node), path, covered)
        elif path.partition(".")[0] in OURS:
            self._of_ours(node, ast.unparse(node), path)
        inner = node.value
        while isinstance(inner, ast.Attribute):
            inner = inner.value
        if path is None or not isinstance(inner, ast.Name):
            self.visit(inner)

    def visit_Name(self, node: ast.Name) -> None:  # noqa: N802
        path = self.bound.get(node.id, "")
        if isinstance(node.ctx, ast.Load) and self._theirs(path) and node.id not in self._modules:
            entry = _answer(path)
            # the line of its import says the same
            if entry is None or entry.note or not entry.write.endswith(f".{node.id}"):
                self._add(node, node.id, path)

    def visit_Call(self, node: ast.Call) -> None:  # noqa: N802
        self.generic_visit(node)
        path = self._path(node.func) or ""
        name = path.rpartition(".")[2]
        self.calls.add(name)
        if not self._theirs(path) and not path.startswith(f"{OBJECT}."):
            return
        of = (name, (self._made(node) or "").partition(".")[2].partition(":")[0])
        for each in node.keywords:
            if each.arg == "is_collective" and name == "init":
                self.collective = ast.unparse(each.value) == "True"
            keys = [f"{owner}.{each.arg}" for owner in of]
            found = (self._first(key) or index.member("arguments", key) for key in keys)
            entry = next(filter(None, found), None)
            usual = isinstance(each.value, ast.Constant) and (
                bool(each.value.value) == (each.arg in DEFAULTS)
            )
            if entry is not None and not (entry.write and usual):
                used = f"{ast.unparse(node.func)}({each.arg}=...)"
                self.uses.add(Use(each.lineno, used, _ours(entry.write), _ours(entry.note)))

    def visit_Constant(self, node: ast.Constant) -> None:  # noqa: N802
        if isinstance(node.value, str):
            entry = index.member("environment", node.value)
            if entry is not None:
                self.uses.add(Use(node.lineno, node.value, entry.write, entry.note))

    def _known(self, name: str) -> Name | None:
        """The entry of a method that only their classes have, of an object that is not known.  In a
        script of ours it must be in none of torch's or numpy's, either.
        """
        found = [each for owner in KNOWN if (each := index.member(owner, name)) is not None]
        theirs = THEIRS in self.imports
        common = COMMON - ({"numpy"} if theirs else set())
        if not found or name in common or found[0].same:
            return None
        if theirs or ({*OURS} & self.imports and not any(each.same for each in found)):
            if name in ELSEWHERE and not theirs:
                return None
            return self._of_program(found[0].owner, name) or found[0]
        return None

    def _theirs(self, path: str) -> bool:
        return path.partition(".")[0] == THEIRS

    def _add(self, node: ast.expr | ast.stmt, used: str, path: str, covered: bool = False) -> None:
        """Adds a use of theirs, unless the line of the module's import covers it."""
        *_, module, name = path.split(".")
        entry = self._of_program(module, name) or _answer(path)
        self.static |= name in STATIC
        if covered and entry is not None and not entry.note and _same(entry, path):
            return
        self.uses.add(_said(node.lineno, used, path, entry))

    def _of_program(self, owner: str, name: str) -> Name | None:
        """The entry of what builds or runs a program that is known to become something else."""
        return self._first(name) if owner in PROGRAMS else None

    def _first(self, name: str) -> Name | None:
        """The entry of a name in a section for this kind of script."""
        found = (index.member(section, name) for section in self._sections)
        return next(filter(None, found), None)

    @property
    def section(self) -> str:
        """The section of what a static program becomes; "" where it may be several."""
        found = (section for name, section in WITH.items() if name in self.calls)
        return next(found, "") if self.static else ""

    @property
    def sections(self) -> list[str]:
        """The sections for this kind of script."""
        return [self.section] * bool(self.section) + [COLLECTIVE] * self.collective

    @property
    def last(self) -> str:
        """The call by which the script leaves its job, where it has none; else ""."""
        if self.collective:
            return ""
        found = (last for name, (last, calls) in LAST.items() if name in self.calls)
        ends = set().union(*(calls for _, calls in LAST.values()))
        return "" if self.calls & ends else next(found, "")

    def _of_object(self, node: ast.Attribute, path: str) -> None:
        """Adds a method, or a field, that the classes of theirs have and ours lack."""
        _, owner, name = path.split(".")
        owner, _, made = owner.partition(":")
        entry = self._of_program(owner, name) or index.member(owner, name)
        if entry is None or (entry.same and not (entry.note and made == THEIRS)):
            return
        used = ast.unparse(node)
        if len(used) > 60:  # a chain of calls
            used = f"{owner}.{name}"
        if entry.same and (owner, name) in self._stays:
            return
        self._stays.add((owner, name))
        write = used if entry.same else _ours(entry.write)
        self.uses.add(Use(node.end_lineno or node.lineno, used, write, entry.note))

    def _of_ours(self, node: ast.expr | ast.stmt, used: str, path: str) -> None:
        """Adds a name of theirs that a script takes from a package of ours."""
        module, _, name = path.rpartition(".")
        if module == "pserver" and name in pserver.__all__:
            return
        module = "trainer.fleet" if module.endswith(".fleet") else module
        module = own_packages.public.real(module) or module
        package, _, last = module.rpartition(".")
        known, missing = _exports(module), own_packages.place_of(module) is None
        if missing and last in _exports(package):  # a class
            return
        if name not in known and (known or missing):
            entry = _answer(path)
            if entry is not None and own_packages.place_of(f"{module}.{name}") is None:
                self.uses.add(_said(node.lineno, used, path, entry))

    # what names stand for

    def _path(self, node: ast.expr) -> str | None:
        """The path of an expression; None if it is not known."""
        if isinstance(node, ast.Name):
            return self.bound.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._path(node.value)
            if base is None or base.count(".") > 1 and base.startswith(f"{OBJECT}."):
                return self.bound.get(ast.unparse(node))
            return self.bound.get(ast.unparse(node), f"{base}.{node.attr}")
        if isinstance(node, ast.Call):
            return self._made(node)
        parts = (
            self._path(each) for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)
        )
        return next((each for each in parts if each and each.startswith(ARRAYS)), None)

    def _made(self, node: ast.Call) -> str | None:
        """The object that a call makes."""
        path = self._path(node.func)
        if path is None:
            return None
        root, *modules, name = path.split(".")
        if root == ARRAYS:
            return path
        if root == OBJECT:
            made = modules[0].partition(":")[2] if modules else ""
            return f"{OBJECT}.{RETURNED[name]}:{made}" if modules and name in RETURNED else None
        if root == CLASS:
            return None if modules else f"{OBJECT}.{name}"
        owner = RETURNED.get(name) or MADE.get(name)
        if (
            owner is None
            and name[:1].isupper()
            and (name in index.members() or name in index.BASES)
        ):
            owner = name
        if owner is None and modules and name[:1].isupper():
            owner = next((MADE_IN[each] for each in reversed(modules) if each in MADE_IN), None)
        return None if owner is None else f"{OBJECT}.{owner}:{root}"

    def visit_Assign(self, node: ast.Assign) -> None:  # noqa: N802
        self.generic_visit(node)
        for target in node.targets:
            self._bind(target, node.value)
            if isinstance(target, ast.Attribute) and isinstance(node.value, ast.Dict):
                self._keys(target.attr, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:  # noqa: N802
        self.generic_visit(node)
        if node.value is not None:
            self._bind(node.target, node.value)

    def visit_withitem(self, node: ast.withitem) -> None:
        self.generic_visit(node)
        if node.optional_vars is not None:
            self._bind(node.optional_vars, node.context_expr)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, other in zip(target.elts, value.elts, strict=False):
                self._bind(one, other)
        elif isinstance(target, ast.Name | ast.Attribute):
            name, path = ast.unparse(target), self._path(value)
            if path is not None:
                self.bound[name] = path
            elif isinstance(value, ast.Call):
                self.bound.pop(name, None)

    def _keys(self, config: str, values: ast.Dict) -> None:
        """Adds the keys of a strategy's settings that ours lack."""
        for key in values.keys:
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                entry = index.member(config, key.value)
                if entry is not None and config in index.members()["DistributedStrategy"]:
                    used = f"{config}[{key.value!r}]"
                    self.uses.add(Use(key.lineno, used, entry.write, entry.note))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:  # noqa: N802
        kept = self.bound.get("self")
        self.bound.pop("self", None)
        for base in node.bases:
            made = self._made(ast.Call(base, [], []))
            if made is not None:
                self.bound["self"] = made
                self.bound[node.name] = made.replace(OBJECT, CLASS, 1)
        self.generic_visit(node)
        self.bound.pop("self", None)
        if kept is not None:
            self.bound["self"] = kept


def _same(entry: Name, path: str) -> bool:
    """Whether the line of the module's import covers a name of it."""
    module, _, name = path.rpartition(".")
    if entry.same and not entry.write.startswith(OURS):  # torch's, or those of an object
        return True
    found = index.member("import", module)
    words = found.write.split() if found is not None else []
    return bool(words) and words[0] == "import" and entry.write == f"{words[1]}.{name}"


def _hidden(script: Path, imports: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Files beside a script that hide our packages; and whether it matters to this script."""
    for name in OURS:
        # the folder of the file itself, not of a link to it, is the one that Python looks in
        place = own_packages.hiding(script.resolve().parent, name)
        if place is None:
            continue
        shown = f"{name}/" if place.name == "__init__.py" else place.name
        if name == "pserver":
            yield f"{shown} beside it hides our package: rename it", True
        else:
            said = f"{shown} beside it hides our package of that name"
            yield f"{said}: write from pserver import ..., which it does not hide", name in imports


def check(script: str) -> Checked:
    """Reads a script.

    Example::

        for use in check("train.py").uses:
            print(use)

    Raises:
        OSError: it cannot be read.
        ValueError: it is no Python 3; the message has the line.
    """
    try:
        with tokenize.open(script) as file:
            tree = ast.parse(file.read(), filename=script)
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise ValueError(f"{script}{line}: no Python 3: {error.msg}") from None
    except ValueError as error:  # a byte that is no text
        raise ValueError(f"{script}: no Python 3: {error}") from None
    first = _Reader({})
    first.visit(tree)
    reader = _Reader(first.bound, first.imports, first.sections)
    reader.visit(tree)
    uses = sorted(reader.uses)
    hidden = list(_hidden(Path(script), reader.imports))
    change = not all(use.stays for use in uses) or any(matters for _, matters in hidden)
    said = [said for said, _ in hidden]
    found = Checked(script, uses, said, change, reader.static, reader.section)
    return replace(found, collective=reader.collective, last=reader.last)


# ---- output ----


def show(scripts: Sequence[str], file: TextIO, as_json: bool = False) -> int:
    """Writes a line for each use; returns 1 where a script has something to change, else 0.

    Raises:
        OSError: a script cannot be read.
        ValueError: one is no Python 3.
    """
    found = [check(script) for script in scripts]  # all, before the first line
    for each in found:
        if as_json:
            print(json.dumps(asdict(each)), file=file)
            continue
        for use in each.uses:
            print(f"{each.script}:{use}", file=file)
        for hidden in each.hidden:
            print(f"{each.script}: {hidden}", file=file)
        print(f"{each.script}: {_summary(each)}", file=file)
    return int(any(each.change for each in found))


def _summary(each: Checked) -> str:
    """The last line about a script."""
    if not each.uses:
        return "nothing of PaddlePaddle is left"
    change = {use.line for use in each.uses if not use.stays}
    stay = {use.line for use in each.uses} - change
    lines = f"{len(change)} line{'s' if len(change) > 1 else ''}"
    said = f"{lines} to change" if change else "nothing to change"
    if stay:
        said += f", {len(stay)} stay{'s' if len(stay) == 1 else ''}"
    if each.static:
        way = BECOMES.get(each.section) or ", or ".join(BECOMES.values())
        said += f"; a static program becomes a torch.nn.Module and {way}: {PAGE} has such a script "
        said += "before and after"
    if each.last:
        said += f". Its last line is {each.last}"
    kind = "--nccl2" if each.collective else "--servers 2"
    return f"{said}. Then: pserver launch {kind} --trainers 2 {Path(each.script).name}"
