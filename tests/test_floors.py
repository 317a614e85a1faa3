"""The oldest versions of what the packages need: each has one, and the pins are no older."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.support.floors import PROJECT, floors, requirements

PIN = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)


def test_every_requirement_has_a_floor_and_the_pins_are_no_older() -> None:
    """The pins of README's commands lie within the ranges that pyproject.toml permits."""
    text = PROJECT.with_name("constraints.txt").read_text(encoding="utf-8")
    pins = {canonicalize_name(name): Version(at) for name, at in PIN.findall(text)}
    found = floors(requirements())

    assert {"torch", "numpy", "grpcio", "protobuf", "pyarrow"} <= set(found)
    assert [name for name, floor in found.items() if pins[canonicalize_name(name)] < floor] == []


def test_the_highest_of_several_floors_counts() -> None:
    """A package that two lists name; a further bound changes nothing."""
    needed = map(Requirement, ("one>=1.9", "one>=1.10,<2", "two>=3"))

    assert floors(needed) == {"one": Version("1.10"), "two": Version("3")}


@pytest.mark.parametrize("line", ["one", "one<2", "one==1.2", "one>=1.2,<1.0"])
def test_a_requirement_without_a_floor_is_refused(line: str) -> None:
    """Its oldest version would be unknown."""
    with pytest.raises(ValueError, match=r"expected one lower bound .*, got one"):
        floors([Requirement(line)])
