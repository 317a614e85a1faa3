"""The oldest versions that pyproject.toml permits, as a file of constraints for pip::

python -m tests.support.floors > build/lowest/floors.txt
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
TOOLS = ("dev", "docs")  # extras of the checkout: no user's environment has them


def requirements(project: Path = PROJECT) -> Iterator[Requirement]:
    """The distribution's requirements under this Python, with every extra that users install."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    extras = table["optional-dependencies"]
    lists = [table["dependencies"], *(extras[name] for name in extras if name not in TOOLS)]
    for requirement in (Requirement(line) for each in lists for line in each):
        own = requirement.name == table["name"]  # an extra by another name, whose list is here, too
        if not own and (requirement.marker is None or requirement.marker.evaluate()):
            yield requirement


def floors(needed: Iterable[Requirement]) -> dict[str, Version]:
    """By package, the oldest version that all of its requirements permit.

    Raises:
        ValueError: a requirement has no floor, or permits no version from its floor on.
    """
    found: dict[str, Version] = {}
    for requirement in needed:
        least = [each.version for each in requirement.specifier if each.operator == ">="]
        if len(least) != 1 or not requirement.specifier.contains(least[0]):
            raise ValueError(
                f"pyproject.toml: expected one lower bound that is permitted, "
                f"as in {requirement.name}>=1.2, got {requirement}"
            )
        version = Version(least[0])
        found[requirement.name] = max(version, found.get(requirement.name, version))
    return found


if __name__ == "__main__":
    for name, version in sorted(floors(requirements()).items()):
        print(f"{name}=={version}")
