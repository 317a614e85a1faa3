"""Models x levels, and models x directions: divided over two ranks, each trains and evaluates as in
one process.

``make test`` takes each model once or more, ``make check-sharding`` every one at every level and in
every direction for which it has parts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.divided_directions import DIRECTIONS, weights_are_refused
from tests.support.divided_models import MODELS, train_at_level, train_in_direction
from tests.support.matrix import crossed
from tests.support.sharded_nets import LEVELS
from tests.support.standing_ranks import StandingRanks

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def ranks() -> Iterator[StandingRanks]:
    """Two."""
    standing = StandingRanks(2)
    yield standing
    standing.close()


@crossed("sharding", model=MODELS, level=LEVELS)
def test_every_model_trains_at_every_level_as_in_one_process(
    ranks: StandingRanks, model: str, level: str
) -> None:
    """Losses, an evaluation and every parameter, within 1e-5."""
    ranks.run(train_at_level, model, level)


@crossed("sharding", model=MODELS, direction=("dp", "sharding", "segments"))
def test_every_model_trains_in_the_directions_of_samples(
    ranks: StandingRanks, model: str, direction: str
) -> None:
    """Hybrid data parallel, and sharded, unit by unit or in one segment."""
    ranks.run(train_in_direction, model, direction)


@crossed("sharding", model=DIRECTIONS["mp"][1])
def test_models_train_with_tensors_cut(ranks: StandingRanks, model: str) -> None:
    """Tensor parallel, the models that have linear layers which are called."""
    ranks.run(DIRECTIONS["mp"][0], model)


@crossed("sharding", model=DIRECTIONS["pp"][1])
def test_models_train_in_stages(ranks: StandingRanks, model: str) -> None:
    """Pipelines of two stages, the models that torch.fx can trace."""
    ranks.run(DIRECTIONS["pp"][0], model)


@crossed("sharding", model=DIRECTIONS["sep"][1])
def test_models_train_with_sequences_cut(ranks: StandingRanks, model: str) -> None:
    """Sequence parallel, torch's own attention layers."""
    ranks.run(DIRECTIONS["sep"][0], model)


def test_attention_weights_of_a_part_of_a_sequence_are_refused(ranks: StandingRanks) -> None:
    """``need_weights`` computes attention without what sees whole sequences."""
    ranks.run(weights_are_refused)
