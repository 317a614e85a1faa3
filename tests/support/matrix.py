"""Matrices of tests: every combination of some axes, of which each run takes a diagonal and a check
takes all.

::

    @crossed("faults", what=POINTS, mode=MODES)
    def test_no_step_is_applied_twice_after(what: str, mode: str) -> None:
        ...

``make test`` runs the combinations of the diagonal, in which every value of every axis occurs;
``make check-faults`` runs all of them and writes docs/checks/faults.md, and those of
``process_faults`` beside it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest


def crossed(
    check: str,
    *,
    diagonal: bool = True,
    rows: Collection[tuple[Any, ...]] = (),
    **axes: Iterable[Any],
) -> pytest.MarkDecorator:
    """Parametrizes a test with every combination.

    Args:
        check: the name of the check that runs them all.
        diagonal: whether ``make test`` runs some too; False where other tests stand for them.
        rows: what ``make test`` runs in the diagonal's place, where a few stand for all.
        axes: by parameter, its values; a class or function shows as its name.
    """
    values = {name: list(axis) for name, axis in axes.items()}
    usual: Collection[tuple[int, ...]] = ()
    if rows:
        axis = list(values.values())
        usual = {tuple(map(list.index, axis, row)) for row in rows}
    elif diagonal:
        usual = _diagonal(check, {name: len(axis) for name, axis in values.items()})
    cases = []
    for place in itertools.product(*(range(len(axis)) for axis in values.values())):
        chosen = [axis[index] for axis, index in zip(values.values(), place, strict=True)]
        labels = dict(zip(values, map(_label, chosen), strict=True))
        marks = [pytest.mark.check(check, labels)]
        if place not in usual:
            marks.append(pytest.mark.matrix)
        cases.append(pytest.param(*chosen, id="-".join(labels.values()), marks=marks))
    return pytest.mark.parametrize(list(values), cases)


def _diagonal(check: str, lengths: Mapping[str, int]) -> set[tuple[int, ...]]:
    """As many places as the longest axis has; every value of every axis is in one."""
    longest = max(lengths.values())
    columns = []
    for name, length in lengths.items():
        column = [index % length for index in range(longest)]
        if length < longest:  # else two short axes would go in step
            random.Random(f"{check} {name}").shuffle(column)
        columns.append(column)
    return set(zip(*columns, strict=True))


def _label(value: Any) -> str:
    return str(getattr(value, "__name__", value))
