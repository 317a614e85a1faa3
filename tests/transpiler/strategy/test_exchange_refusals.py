"""How gradients travel among trainers: where a switch of a strategy cannot act, the reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.collectives import strategy_of
from transpiler.strategy.refusals import refusals


@pytest.mark.parametrize(
    ("kind", "switches", "reasons"),
    [
        (
            "hybrid",
            {"nccl_comm_num": 2},
            ["divides a model among its trainers.*FSDP2 has its own groups"],
        ),
        ("hybrid", {"fuse_all_reduce_ops": False}, ["FSDP2 reduces the gradients of a unit"]),
        ("hybrid", {"use_hierarchical_allreduce": True}, ["reduces within shards first"]),
        ("hybrid", {"fp16_allreduce": True}, []),
        ("program", {"sync_nccl_allreduce": True}, ["program with parameter servers.*one sum"]),
        ("servers", {"fp16_allreduce": True}, ["makes the mode async.*compression"]),
        ("servers", {"find_unused_parameters": True}, ["acts only in a job without servers"]),
        ("collective_program", {"find_unused_parameters": True}, ["acts only in a job without"]),
        (
            "collective",
            {"hierarchical_allreduce_inter_nranks": 2},
            ["has no effect with use_hierarchical_allreduce=False: switch it on"],
        ),
        (
            "collective",
            {"fuse_all_reduce_ops": False, "fuse_grad_size_in_num": 3, "fuse_grad_size_in_MB": 2},
            [
                "fuse_grad_size_in_MB: has no effect with fuse_all_reduce_ops=False",
                "fuse_grad_size_in_num: has no effect with fuse_all_reduce_ops=False",
            ],
        ),
    ],
)
def test_the_reason_is_told(kind: str, switches: dict[str, Any], reasons: list[str]) -> None:
    """One sentence for each switch that cannot act, none for those that do."""
    found = refusals(strategy_of(**switches), kind)
    named = [each for each in found if any(f"strategy.{name}: " in each for name in switches)]

    assert len(set(named)) >= len(reasons) and bool(named) == bool(reasons)
    for reason in reasons:
        assert any(_has(each, reason) for each in named), (reason, named)


def _has(sentence: str, reason: str) -> bool:
    parts = reason.split(".*")
    return all(part in sentence for part in parts)
