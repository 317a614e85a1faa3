"""References in docstrings name members that exist."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.support.sources import MODULES, relative, tree

REFERENCE = re.compile(r":(?:meth|attr):`~?([\w.]+)`")
LISTED = re.compile(r"(?m)^Attributes:\n((?:    .*\n?|\n)+)")
ATTRIBUTE = re.compile(r"(?m)^    ([a-z_][\w, ]*?):(?: |$)")
PLAIN_BASES = {"Protocol", "Generic", "NamedTuple", "Enum", "object"}


def own_members(of: ast.ClassDef) -> set[str]:
    """The names that a class's body and its methods define."""
    found = set()
    for node in of.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {x.id for each in targets for x in ast.walk(each) if isinstance(x, ast.Name)}
    for node in ast.walk(of):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


class Classes:
    """All classes of the packages, by name."""

    def __init__(self) -> None:
        self.files: list[tuple[str, ast.ClassDef]] = []
        self._by_name = defaultdict[str, list[ast.ClassDef]](list)
        for path in MODULES:
            for node in ast.walk(tree(path)):
                if isinstance(node, ast.ClassDef):
                    self.files.append((relative(path), node))
                    self._by_name[node.name].append(node)

    def members(self, of: ast.ClassDef, below: tuple[str, ...] = ()) -> set[str] | None:
        """The members of a class and its bases; None where a base is another package's."""
        found = own_members(of)
        for base in of.bases:
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            if name in PLAIN_BASES or name in below:
                continue
            if name not in self._by_name:
                return None
            for each in self._by_name[name]:
                inherited = self.members(each, (*below, name))
                if inherited is None:
                    return None
                found |= inherited
        return found

    def has(self, name: str, member: str) -> bool:
        """Whether a class of that name may have such a member."""
        every = [self.members(each) for each in self._by_name[name]]
        return not every or any(each is None or member in each for each in every)


def wrong(classes: Classes, file: str, of: ast.ClassDef) -> Iterator[str]:
    """The references in a class's docstrings, and its listed attributes, that name nothing."""
    members = classes.members(of)
    nodes = [each for each in ast.walk(of) if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    texts = [ast.get_docstring(node) or "" for node in nodes]
    for reference in REFERENCE.findall("\n".join(texts)):
        owner, _, name = reference.rpartition(".")
        owner = owner.rpartition(".")[2]
        missing = not classes.has(owner, name) if owner else members and name not in members
        if missing:
            yield f"{file}: {of.name}: {reference}"
    listed = LISTED.search(ast.get_docstring(of) or "")
    for names in ATTRIBUTE.findall(listed[1]) if listed and members is not None else ():
        for name in names.split(", "):
            if name not in members:
                yield f"{file}: {of.name}: attribute {name}"


def test_references_and_listed_attributes_name_members_of_their_class() -> None:
    """A rename that leaves a docstring behind shows here."""
    classes = Classes()
    assert [each for file, of in classes.files for each in wrong(classes, file, of)] == []
