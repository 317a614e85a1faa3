"""Where the ops stand that average gradients among trainers, beside servers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from transpiler import (
    ClipGradByGlobalNorm,
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    Program,
    capture,
)
from transpiler.ir.ops import is_optimizer

OURS = frozenset(
    "send send_barrier recv fetch_barrier concat c_allreduce_avg c_sync_comm_stream scale_by "
    "gradient_merge".split()
)


@cache
def single(clip: bool) -> tuple[Program, Program]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_clip = ClipGradByGlobalNorm(1.0) if clip else None
    example = (torch.ones(2, 3),)
    return capture(model, lambda model, x: model(x).mean(), optimizer, example, grad_clip=grad_clip)


def ops(modes: dict[str, str], clip: bool = False, trainers: int = 3, **configs: Any) -> list[str]:
    """What a trainer does around its compute; an update with what it updates."""
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"modes": modes, **configs}
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(min_block_size=4))
    main, startup = single(clip)
    transpiler.transpile(0, main, "a:1,b:2", trainers, startup_program=startup, strategy=strategy)
    block = transpiler.get_trainer_program().main
    return [
        f"update {op.outputs[0]}" if is_optimizer(op.type) else op.type
        for op in block.ops
        if op.type in OURS or is_optimizer(op.type)
    ]


def tidy(found: list[str]) -> list[str]:
    """Without repetitions."""
    return [op for index, op in enumerate(found) if not index or op != found[index - 1]]


MEANS = ["c_allreduce_avg", "c_sync_comm_stream"]
AVERAGED = ["update 2.weight", "update 2.bias"]


def test_with_a_sync_lane_the_means_count_after_the_servers_answer() -> None:
    """They are made before the barrier; and so no trainer commits a step without having them."""
    found = ops({"0.*": "sync", "1.*": "sync", "*": "collective"})

    assert tidy(found) == [
        "send",
        MEANS[0],
        "send_barrier",
        "recv",
        "fetch_barrier",
        "concat",
        MEANS[1],
        *AVERAGED,
    ]


@pytest.mark.parametrize("mode", ["async", "half_async"])
def test_without_one_they_count_at_once(mode: str) -> None:
    """The updates stand before the barrier, or the receives, that end the step."""
    found = tidy(ops({"0.*": mode, "1.*": mode, "*": "collective"}))
    barrier = ["send_barrier"] if mode == "half_async" else []

    assert found == ["send", *MEANS, *AVERAGED, *barrier, "recv", "concat"]


def test_what_a_trainer_steps_by_itself_is_sent_before_the_barrier() -> None:
    """Beside a sync lane and a k-step lane; the means are there before either is closed."""
    found = tidy(ops({"0.*": "sync", "1.*": "geo", "*": "collective"}, k_steps=2))
    own = ["update 1.weight", "update 1.bias"]

    assert found == [
        "send",
        MEANS[0],
        *own,
        "send",
        "send_barrier",
        "recv",
        "fetch_barrier",
        "concat",
        MEANS[1],
        *AVERAGED,
    ]


def test_gradients_are_clipped_before_they_are_averaged() -> None:
    """Each trainer clips its own."""
    found = ops({"0.*": "sync", "1.*": "sync", "*": "collective"}, clip=True)

    assert found.count("scale_by") == 6
    assert max(i for i, op in enumerate(found) if op == "scale_by") < found.index(MEANS[0])


def test_no_number_of_trainers_is_in_the_program() -> None:
    """The divisor is how many are there when it runs."""
    modes = {"0.*": "sync", "1.*": "async", "*": "collective"}

    assert ops(modes, trainers=2) == ops(modes, trainers=5)
