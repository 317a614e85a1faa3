"""The ranks in each direction that a strategy asks for, and what contradicts it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from transpiler import DistributedStrategy
from transpiler.strategy.parallel_degrees import REST, degrees_of
from transpiler.strategy.refusals import check


def strategy_of(**values: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    for name, value in values.items():
        setattr(strategy, name, value)
    return strategy


ONE = {"dp": 1, "pp": 1, "sharding": 1, "sep": 1, "mp": 1}


@pytest.mark.parametrize(
    ("values", "degrees"),
    [
        ({}, {"dp": REST}),
        ({"sharding": True}, {"sharding": REST}),
        (
            {"sharding": True, "sharding_configs": {"sharding_degree": 8, "dp_degree": 2}},
            {"sharding": 8, "dp": 2},
        ),
        ({"sharding": True, "hybrid_configs": {"dp_degree": 2}}, {"sharding": REST, "dp": 2}),
        ({"sharding": True, "sharding_configs": {"sharding_degree": 4}}, {"sharding": 4, "dp": -1}),
        ({"sharding": True, "sharding_configs": {"sharding_degree": 1}}, {"dp": REST}),
        ({"sharding": True, "hybrid_configs": {"sharding_degree": 1}}, {"dp": REST}),
        ({"sharding": True, "hybrid_configs": {"dp_degree": -1}}, {"sharding": REST}),
        ({"sharding": True, "sharding_configs": {"mp_degree": 2}}, {"sharding": REST, "mp": 2}),
        (
            {
                "sharding": True,
                "pipeline": True,
                "sharding_configs": {"pp_degree": 2, "sharding_degree": 2},
                "hybrid_configs": {"pp_degree": 2},
            },
            {"pp": 2, "sharding": 2, "dp": REST},
        ),
        (
            {"tensor_parallel": True, "tensor_parallel_configs": {"tensor_parallel_degree": 4}},
            {"mp": 4, "dp": REST},
        ),
    ],
)
def test_every_place_that_names_a_degree_counts(
    values: dict[str, Any], degrees: dict[str, int]
) -> None:
    """Each switch's dictionary is as good as hybrid_configs; what is left goes to shards with
    sharding=True, otherwise to replicas.
    """
    strategy = strategy_of(**values)

    assert degrees_of(strategy) == ONE | degrees
    check(strategy, "hybrid")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {
                "sharding": True,
                "sharding_configs": {"mp_degree": 2},
                "hybrid_configs": {"mp_degree": 4},
            },
            "strategy.hybrid_configs.mp_degree=4 and strategy.sharding_configs.mp_degree=2: "
            "expected one mp degree, got two",
        ),
        (
            {
                "tensor_parallel": True,
                "tensor_parallel_configs": {"tensor_parallel_degree": 2},
                "hybrid_configs": {"mp_degree": 4},
            },
            "hybrid_configs.mp_degree=4 and strategy.tensor_parallel_configs.tensor_parallel_degree"
            "=2: expected one",
        ),
        (
            {"sharding_configs": {"segment_broadcast_MB": 4}, "hybrid_configs": {"mp_degree": 2}},
            "strategy.sharding_configs.segment_broadcast_MB: has no effect without sharding=True",
        ),
        (
            {
                "tensor_parallel_configs": {"tensor_init_seed": 4},
                "hybrid_configs": {"mp_degree": 2},
            },
            "tensor_parallel_configs.tensor_init_seed: has no effect without tensor_parallel=True",
        ),
        ({"pipeline": True}, "expected a pp_degree above 1, .* set hybrid_configs"),
        ({"tensor_parallel": True}, "expected a tensor_parallel_degree above 1"),
        (
            {"pipeline_configs": {"schedule_mode": "F-then-B"}, "sharding": True},
            "strategy.pipeline_configs: has an effect with a pp_degree above 1 only",
        ),
        (
            {"sharding": True, "sharding_configs": {"pp_degree": 2}},
            "sharding_configs.pp_degree: has no effect without pipeline=True",
        ),
        (
            {
                "sharding": True,
                "sharding_configs": {"sharding_segment_strategy": "segment_anchors"},
            },
            "expected segment_anchors, the names of the modules that begin a segment, got none",
        ),
        (
            {"sharding": True, "sharding_configs": {"segment_anchors": ["head"]}},
            "segment_anchors: has no effect with sharding_segment_strategy='segment_broadcast_MB'",
        ),
        (
            {
                "sharding": True,
                "sharding_configs": {"gradient_merge_acc_step": 2},
                "hybrid_configs": {"pp_degree": 2},
            },
            r"acc_step=2: a pipeline merges .* set pipeline_configs\['accumulate_steps'\]",
        ),
        (
            {
                "sharding": True,
                "gradient_merge": True,
                "sharding_configs": {"gradient_merge_acc_step": 2},
            },
            "strategy.sharding_configs.gradient_merge_acc_step=2 and strategy.gradient_merge: both",
        ),
        (
            {
                "sharding": True,
                "fp16_allreduce": True,
                "sharding_configs": {"pp_allreduce_in_optimize": True},
            },
            "pp_allreduce_in_optimize and strategy.fp16_allreduce: the update reduces",
        ),
        (
            {"sharding": True, "sharding_configs": {"optimize_cast": True}},
            r"optimize_cast: no job reads it .* 16-bit themselves \(model.bfloat16",
        ),
    ],
)
def test_what_has_no_effect_or_contradicts_is_named(values: dict[str, Any], words: str) -> None:
    """The error names the settings, and what to write."""
    with pytest.raises(ValueError, match=words):
        check(strategy_of(**values), "hybrid")


def test_all_contradictions_are_named_at_once() -> None:
    """One error has a sentence for each."""
    strategy = strategy_of(
        sharding=True, pipeline=True, sharding_configs={"segment_anchors": ["head"]}
    )
    with pytest.raises(ValueError) as raised:
        check(strategy, "hybrid")

    sentences = re.split("; (?=strategy)", str(raised.value))
    assert len(sentences) == 2 and all(each.startswith("strategy.") for each in sentences)
