"""``sharding``, ``pipeline`` and ``tensor_parallel`` of a strategy, and their keys: what each
changes in a job of two trainers, counted by what travels.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.divided_digits import (
    MOMENTUM,
    alone,
    assert_equal_to,
    begun,
    collectives,
    digits,
    mine,
    net,
    step,
    strategy_of,
)
from tests.support.many_ranks import on_ranks
from trainer import fleet
from trainer.hybrid import Pipeline
from trainer.job.job import present
from trainer.sharding.optimizer import keep_on_host

STAGES = {"stages": ["2"], "loss_fn": F.cross_entropy}
PLAN = {"0": "colwise", "2": "rowwise"}


def mesh() -> dict[str, int]:
    """The degrees above 1 of the job."""
    sizes = {name: present().mesh[name].size() for name in ("dp", "pp", "sharding", "sep", "mp")}  # type: ignore[attr-defined]
    return {name: size for name, size in sizes.items() if size > 1}


@pytest.mark.observes("sharding")
@on_ranks(2)
def test_sharding_alone_divides_everything_over_all_ranks(rank: int, scratch: Path) -> None:
    """Each rank holds half of the parameters and of the momentum, and training equals one
    process.
    """
    model, optimizer = begun(sharding=True)
    for batch in digits(5):
        step(model, optimizer, *mine(batch))
    assert mesh() == {"sharding": 2}
    assert_equal_to(model, alone(5))
    whole = sum(parameter.numel() for parameter in net().parameters())
    assert sum(p.to_local().numel() for p in model.parameters()) <= whole / 2 + 2
    moments = [state["momentum_buffer"].numel() for state in optimizer.state.values()]
    assert sum(moments) <= whole / 2 + 2
    fleet.finish()


@pytest.mark.observes("sharding_configs.sharding_degree", "sharding_configs.dp_degree")
@on_ranks(2)
def test_degrees_of_sharding_make_the_mesh(rank: int, scratch: Path) -> None:
    """A degree of 1 turns it off, replicas leave fewer shards, too many shards are refused."""
    fleet.finish()
    for configs, found in (
        ({"sharding_degree": 1}, {"dp": 2}),
        ({"sharding_degree": 2}, {"sharding": 2}),
        ({"dp_degree": 2}, {"dp": 2}),
    ):
        fleet.init(
            is_collective=True, strategy=strategy_of(sharding=True, sharding_configs=configs)
        )
        assert mesh() == found
        fleet.finish()
    for configs, words in (
        ({"sharding_degree": 3}, "sharding_degree 3: expected at most the number of ranks.* is 2"),
        ({"sharding_degree": 8}, "sharding_degree 8: expected at most the number of ranks.* is 2"),
        ({"sharding_degree": 8, "dp_degree": 2}, "sharding_degree 8: expected at most the number"),
        ({"dp_degree": 2, "sharding_degree": 2}, "product is the 2 ranks, got 4"),
        ({"pp_allreduce_in_optimize": True}, "has an effect with replicas only"),
    ):
        with pytest.raises(ValueError, match=words):
            fleet.init(
                is_collective=True, strategy=strategy_of(sharding=True, sharding_configs=configs)
            )


@pytest.mark.observes(
    "sharding_configs.segment_broadcast_MB",
    "sharding_configs.segment_anchors",
    "sharding_configs.sharding_segment_strategy",
)
@on_ranks(2)
def test_segments_are_gathered_together(rank: int, scratch: Path) -> None:
    """A forward makes one all-gather for each segment, by size or by anchors."""
    x, y = mine(digits(1)[0])
    by_anchors = {"sharding_segment_strategy": "segment_anchors"}
    for configs, segments in (
        ({}, 1),
        ({"segment_broadcast_MB": 5e-3}, 2),
        ({"segment_broadcast_MB": 1e-6}, 3),
        ({**by_anchors, "segment_anchors": ["2"]}, 2),
        ({**by_anchors, "segment_anchors": ["2.weight", "4"]}, 3),
    ):
        model, optimizer = begun(sharding=True, sharding_configs=configs)
        gathers = collectives(lambda model=model: model(x))
        assert sum(gathers.values()) == segments, (configs, gathers)
        step(model, optimizer, x, y)
        assert_equal_to(model, alone(1))
        fleet.finish()
    with pytest.raises(ValueError, match="'nobody': expected a module below the model"):
        begun(sharding=True, sharding_configs={**by_anchors, "segment_anchors": ["nobody"]})
    fleet.finish()


@pytest.mark.observes("sharding_configs.gradient_merge_acc_step")
@on_ranks(2)
def test_merged_steps_reduce_and_update_once(rank: int, scratch: Path) -> None:
    """Four steps reduce once and are one update, which equals that of the whole batch."""
    configs = {"gradient_merge_acc_step": 4, "segment_broadcast_MB": 1e-6}
    model, optimizer = begun(sharding=True, sharding_configs=configs)
    for batch in digits(3):
        before = [p.to_local().clone() for p in model.parameters()]
        reductions, changed = [], []
        for quarter in zip(*(tensor.chunk(4) for tensor in batch), strict=True):
            loss = F.cross_entropy(model(mine(quarter)[0]), mine(quarter)[1])
            found = collectives(loss.backward)
            reductions.append(sum(n for name, n in found.items() if "reduce_scatter" in name))
            optimizer.step()
            optimizer.zero_grad()
            now = [p.to_local() for p in model.parameters()]
            changed.append(any(map(lambda a, b: not torch.equal(a, b), before, now)))
        assert (reductions, changed) == ([0, 0, 0, 3], [False, False, False, True])
    assert_equal_to(model, alone(3))
    fleet.finish()


@pytest.mark.observes("sharding_configs.pp_allreduce_in_optimize")
@on_ranks(2)
def test_replicas_may_reduce_in_the_update(rank: int, scratch: Path) -> None:
    """Then backward reduces nothing, the step does, and training is the same."""
    for in_update in (False, True):
        configs = {"dp_degree": 2, "pp_allreduce_in_optimize": in_update}
        model, optimizer = begun(sharding=True, sharding_configs=configs)
        for batch in digits(3):
            x, y = mine(batch)
            backward = collectives(F.cross_entropy(model(x), y).backward)
            update = collectives(optimizer.step)
            optimizer.zero_grad()
            assert bool(backward) is not in_update and bool(update) is in_update
        assert_equal_to(model, alone(3))
        fleet.finish()


@on_ranks(2)
def test_replicas_merge_steps_that_the_update_reduces(rank: int, scratch: Path) -> None:
    """Gradients of whole replicas wait for the update, whoever calls zero_grad."""
    configs = {"dp_degree": 2, "pp_allreduce_in_optimize": True, "gradient_merge_acc_step": 2}
    model, optimizer = begun(sharding=True, sharding_configs=configs)
    for batch in digits(3):
        for half in zip(*(tensor.chunk(2) for tensor in batch), strict=True):
            model.zero_grad()
            F.cross_entropy(model(mine(half)[0]), mine(half)[1]).backward()
            optimizer.step()
    assert_equal_to(model, alone(3))
    fleet.finish()


@pytest.mark.observes("sharding_configs.optimize_offload")
@on_ranks(2)
def test_states_are_not_put_away_on_a_cpu(rank: int, scratch: Path) -> None:
    """They are in main memory already, and the error says so."""
    with pytest.raises(ValueError, match="optimize_offload: expected a model on a GPU, got one on"):
        begun(sharding=True, sharding_configs={"optimize_offload": True})
    fleet.finish()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_states_lie_in_main_memory_between_updates() -> None:
    """On a GPU they are pinned there after a step, and training is the same to the bit."""
    trained = []
    for away in (False, True):
        model = net().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        if away:
            keep_on_host(optimizer)
        for x, y in digits(3):
            step(model, optimizer, x.cuda(), y.cuda())
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        assert all(moment.is_cuda is not away for moment in moments)
        assert all(moment.is_pinned() is away for moment in moments)
        trained.append(list(model.parameters()))
    assert all(map(torch.equal, *trained))


# ---- the pages' own examples ----


@on_ranks(2)
def test_the_pages_examples_run_as_jobs(rank: int, scratch: Path) -> None:
    """As they are written, with the stages or the plan that a model needs, on the digits."""
    pipeline: dict[str, Any] = {"pipeline": True, "hybrid_configs": {"pp_degree": 2}}
    tensors = {"hybrid": {"tensor_plan": PLAN}}
    for values in (
        {"sharding": True},
        {
            "sharding": True,
            "sharding_configs": {
                "sharding_segment_strategy": "segment_broadcast_MB",
                "segment_broadcast_MB": 32,
                "sharding_degree": 2,  # the page's 8 and 2 are those of 16 trainers
                "dp_degree": 1,
                "gradient_merge_acc_step": 4,
            },
        },
        {**pipeline, "pipeline_configs": {"micro_batch": 12}, "hybrid": STAGES},
        {**pipeline, "pipeline_configs": {"micro_batch_size": 12}, "hybrid": STAGES},
        {
            "tensor_parallel": True,
            "tensor_parallel_configs": {"tensor_parallel_degree": 2, "tensor_init_seed": 123},
            **tensors,
        },
        {
            "hybrid_configs": {
                "dp_degree": 1,
                "mp_degree": 2,
                "pp_degree": 1,
                "order": ["dp", "pp", "sharding", "sep", "mp"],
            },
            **tensors,
        },
    ):
        model, optimizer = begun(rule=partial(torch.optim.Adam, lr=0.01), **values)
        losses = []
        for x, y in [(x[:24], y[:24]) for x, y in digits(12)] * 2:
            if isinstance(model, Pipeline):
                loss = model.forward_backward(x, target=y)
            else:
                loss = F.cross_entropy(model(x), y)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert sum(losses[-6:]) < 0.95 * sum(losses[:6]), (values, losses)
        fleet.finish()


# ---- pipelines ----


def stage_calls(pipeline: Any, x: torch.Tensor, y: torch.Tensor) -> str:
    """The order of a stage's forwards and backwards, of one batch: "FFBB"."""
    order: list[str] = []
    stage = pipeline.stage
    hooks = [
        stage.register_forward_hook(lambda *_: order.append("F")),
        next(stage.parameters()).register_post_accumulate_grad_hook(lambda _: order.append("B")),
    ]
    pipeline.forward_backward(x, target=y)
    for hook in hooks:
        hook.remove()
    return "".join(order)


@pytest.mark.observes(
    "pipeline",
    "pipeline_configs.schedule_mode",
    "pipeline_configs.accumulate_steps",
    "pipeline_configs.micro_batch_size",
    "sharding_configs.pp_degree",
    "hybrid_configs.pp_degree",
)
@on_ranks(2)
def test_a_pipeline_runs_micro_batches_in_its_schedules_order(rank: int, scratch: Path) -> None:
    """The number or the size of micro batches, and the order of their forwards and backwards, as
    hooks see them; training equals one process.
    """
    in_turn, first_forwards = ("FFBFBFBB", "FBFBFBFB")[rank], "FFFFBBBB"
    degree: dict[str, Any] = {"hybrid_configs": {"pp_degree": 2}}
    by_sharding: dict[str, Any] = {
        "sharding": True,
        "sharding_configs": {"pp_degree": 2, "sharding_degree": 1},
    }
    for values, configs, order in (
        (degree, {"micro_batch_size": 1}, ("FF" + "BF" * 30 + "BB", "FB" * 32)[rank]),
        (degree, {"micro_batch": 4}, in_turn),
        (degree, {"micro_batch_size": 8}, in_turn),
        (degree, {"micro_batch_size": 16}, ("FFBB", "FBFB")[rank]),
        (degree, {"accumulate_steps": 4, "schedule_mode": "F-then-B"}, first_forwards),
        (by_sharding, {"accumulate_steps": 4}, in_turn),
    ):
        model, optimizer = begun(pipeline=True, pipeline_configs=configs, hybrid=STAGES, **values)
        assert mesh() == {"pp": 2}
        orders = []
        for x, y in digits(3):
            orders.append(stage_calls(model, x, y))
            optimizer.step()
            optimizer.zero_grad()
        assert orders[1:] == [order, order], configs  # the first finds the stages' shapes, too
        assert_equal_to(model, alone(3))
        fleet.finish()
    for configs, words in (
        (
            {"accumulate_steps": 1, "micro_batch_size": 8},
            "accumulate_steps .*of at least pp_degree",
        ),
        ({"accumulate_steps": 4, "micro_batch_size": 1}, "4 micro batches of 1 samples, got 32"),
    ):
        with pytest.raises(ValueError, match=words):
            model, _ = begun(pipeline=True, pipeline_configs=configs, hybrid=STAGES, **degree)
            model.forward_backward(*digits(1)[0][:1], target=digits(1)[0][1])
        fleet.finish()
    with pytest.raises(ValueError, match="micro batches of 12 samples, got 32 samples"):
        model, _ = begun(
            pipeline=True, pipeline_configs={"micro_batch_size": 12}, hybrid=STAGES, **degree
        )
        model.forward_backward(*digits(1)[0][:1], target=digits(1)[0][1])
    fleet.finish()


# ---- tensors ----


@pytest.mark.observes(
    "tensor_parallel",
    "tensor_parallel_configs.tensor_parallel_degree",
    "tensor_parallel_configs.tensor_init_seed",
    "sharding_configs.mp_degree",
)
@on_ranks(2)
def test_split_layers_begin_with_the_seeds_values(rank: int, scratch: Path) -> None:
    """Each rank has half of a split layer; with a seed, of what one process draws after it, however
    the script drew.
    """
    for seed in (-1, 123):
        configs = {"tensor_parallel_degree": 2, "tensor_init_seed": seed}
        model, optimizer = begun(
            tensor_parallel=True, tensor_parallel_configs=configs, hybrid={"tensor_plan": PLAN}
        )
        assert mesh() == {"mp": 2} and model[0].weight.to_local().shape == (16, 64)
        reference = net()
        if seed >= 0:
            torch.manual_seed(seed)
            for index in (0, 2):
                drawn = reference[index]
                assert isinstance(drawn, nn.Linear)
                drawn.reset_parameters()
        assert_equal_to(model, reference)
        plain = MOMENTUM(reference.parameters())
        for x, y in digits(3):
            step(model, optimizer, x, y)
            step(reference, plain, x, y)
        assert_equal_to(model, reference)
        fleet.finish()
    begun(
        sharding=True,
        sharding_configs={"mp_degree": 2, "sharding_degree": 1},
        hybrid={"tensor_plan": PLAN},
    )
    assert mesh() == {"mp": 2}
    fleet.finish()
