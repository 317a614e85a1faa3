"""Every gradient that a step applies was averaged for this step, also where the script changes its
model in the middle; or the step raises and names the parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from tests.support.changed_models import (
    DIVIDED,
    KINDS,
    LEVELS,
    WAYS,
    check_divided,
    check_equal,
)
from tests.support.standing_ranks import StandingRanks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def ranks() -> Iterator[StandingRanks]:
    """Two processes of one group."""
    ranks = StandingRanks(2)
    yield ranks
    ranks.close()


def some(ways: Iterable[str], few: Iterable[tuple[str, str]]) -> list[Any]:
    """All kinds in all ways: the first way has every kind, and these are quick, too."""
    first, *_ = ways
    return [
        pytest.param(
            kind, way, marks=() if way == first or (kind, way) in few else pytest.mark.long
        )
        for kind in KINDS
        for way in ways
    ]


@pytest.mark.parametrize(
    "kind, way",
    some(
        WAYS,
        [
            *(("Injected", way) for way in ("unused", "rows", "localsgd")),
            *(("Double", way) for way in ("merge", "fused merge", "dgc")),
        ],
    ),
)
def test_a_changed_model_trains_as_plain_torch(ranks: StandingRanks, kind: str, way: str) -> None:
    """And both trainers have the same to the bit."""
    ranks.run(check_equal, kind, way)


@pytest.mark.parametrize(
    "kind, way",
    some(
        (*LEVELS, *DIVIDED),
        [("Unfrozen", "p_g_os"), ("Tied", "p_g_os"), ("Tied", "shards"), ("Double", "replicas")],
    ),
)
def test_a_divided_model_that_changes_trains_so_or_the_step_raises(
    ranks: StandingRanks, kind: str, way: str
) -> None:
    """With the name of a parameter, on both trainers."""
    ranks.run(check_divided, kind, way)
