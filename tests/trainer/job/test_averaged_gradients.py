"""A collective job takes no step with gradients that nobody has averaged."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.parts_of_models import whole_and_part
from tests.support.standing_ranks import StandingRanks

pytestmark = pytest.mark.processes


@pytest.fixture
def ranks() -> Iterator[StandingRanks]:
    """Two processes of one group."""
    ranks = StandingRanks(2)
    yield ranks
    ranks.close()


def test_a_part_of_the_model_averages_nothing(ranks: StandingRanks) -> None:
    """A script that calls it by itself is told; nothing has changed by then.  Steps with the same
    gradients again, and without any, are as before.
    """
    ranks.run(whole_and_part)
