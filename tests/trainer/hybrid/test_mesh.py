"""Hybrid parallelism: the mesh, and every combination of directions against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pserver.errors import FingerprintMismatch
from tests.support.exchanges import recorded
from tests.support.hybrid_nets import PLAN, SYMBOLS, TIME, Net, batches, loss_of, strategy_of
from tests.support.many_ranks import on_ranks, summed
from trainer import fleet
from trainer.hybrid import (
    Pipeline,
    data_place,
    hybrid_load_state_dict,
    hybrid_mesh,
    hybrid_optimizer,
    hybrid_parallel,
    hybrid_state_dict,
    split_sequence,
)
from trainer.hybrid.mesh import directions, parameter_mesh
from transpiler import LAMB, ClipGradByGlobalNorm


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=1e-3)


def check_equal_to_one_process(
    rank: int, clip: Any = None, rule: Any = adamw, **degrees: int
) -> None:
    """Trains a model made parallel so, and one process's; parameters, loss and state must be equal
    within 1e-5.
    """
    strategy = strategy_of(**degrees)
    mesh = hybrid_mesh(strategy)
    alone, plain_losses, losses = Net(), [], []
    plain = rule(alone.parameters())
    options: dict[str, Any] = {"tensor_plan": PLAN} if degrees.get("mp", 1) > 1 else {}
    if degrees.get("pp", 1) > 1:
        options |= {"stages": ["blocks.1"], "loss_fn": loss_of}
    model = (
        hybrid_parallel(Net(seed=rank), strategy, **options)
        if rank
        else hybrid_parallel(Net(), strategy, **options)
    )
    optimizer = hybrid_optimizer(rule(model.parameters()), model, clip)
    place, parts = data_place(mesh)
    for x, positions, target in batches():
        loss = loss_of(alone(x, positions), target)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(alone.parameters(), clip.clip_norm)
        plain.step()
        plain.zero_grad()
        plain_losses.append(loss.item())
        mine = [
            split_sequence(tensor.chunk(parts)[place], mesh) for tensor in (x, positions, target)
        ]
        if isinstance(model, Pipeline):
            loss = model.forward_backward(*mine[:2], target=mine[2])
        else:
            loss = loss_of(model(*mine[:2]), mine[2])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(summed(loss.item()) / torch.distributed.get_world_size())
    assert losses == pytest.approx(plain_losses, abs=1e-5), (losses, plain_losses)
    whole = hybrid_state_dict(model)
    assert list(whole) == list(alone.state_dict())
    for name, theirs in alone.state_dict().items():
        torch.testing.assert_close(
            whole[name], theirs, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    held = optimizer.state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    expected = {name: plain.state[parameter] for name, parameter in alone.named_parameters()}
    for index, name in enumerate(names):
        torch.testing.assert_close(
            held[index]["exp_avg"], expected[name]["exp_avg"], rtol=0, atol=1e-5
        )


# ---- combinations ----


@pytest.mark.observes("hybrid_configs.dp_degree", "hybrid_configs.mp_degree")
@on_ranks(4)
def test_dp_by_mp(rank: int, scratch: Path) -> None:
    """Data and tensor parallel, 2 x 2."""
    check_equal_to_one_process(rank, dp=2, mp=2)


@on_ranks(4)
def test_dp_by_pp(rank: int, scratch: Path) -> None:
    """Data parallel pipelines of two stages, with the gradient of all stages clipped together."""
    check_equal_to_one_process(rank, dp=2, pp=2, clip=ClipGradByGlobalNorm(0.3))


@on_ranks(4)
def test_mp_by_pp(rank: int, scratch: Path) -> None:
    """Tensor parallel stages, with the gradient of all stages and parts clipped together."""
    check_equal_to_one_process(rank, dp=1, mp=2, pp=2, clip=ClipGradByGlobalNorm(0.3))


@pytest.mark.observes("hybrid_configs.sharding_degree")
@on_ranks(4)
def test_dp_by_sharding(rank: int, scratch: Path) -> None:
    """Two copies of a model sharded in two."""
    check_equal_to_one_process(rank, dp=2, sharding=2, clip=ClipGradByGlobalNorm(0.3))


@pytest.mark.observes("fp16_allreduce")
@on_ranks(4)
def test_gradients_travel_as_float16(rank: int, scratch: Path) -> None:
    """Within shards and between replicas; without a direction that they travel in it raises."""
    switched = strategy_of(dp=2, sharding=2)
    switched.fp16_allreduce = True
    dtypes: dict[bool, set[tuple[str, str, int]]] = {}
    for strategy in (strategy_of(dp=2, sharding=2), switched):
        model = hybrid_parallel(Net(), strategy)
        x, positions, target = batches()[0]
        with recorded() as found:
            loss_of(model(x, positions), target).backward()
        dtypes[strategy.fp16_allreduce] = {(name, d, len(ranks)) for name, _, d, ranks, _ in found}
    assert {d for _, d, _ in dtypes[False]} == {"float32"}
    assert dtypes[True] == {(name, "float16", size) for name, _, size in dtypes[False]}
    assert len(dtypes[True]) == 2  # the reduce-scatter of shards, the all-reduce of replicas
    tensors = strategy_of(mp=4)
    tensors.fp16_allreduce = True
    with pytest.raises(ValueError, match="no gradient travels"):
        hybrid_parallel(Net(), tensors, tensor_plan=PLAN)


@on_ranks(4)
def test_sharding_by_mp(rank: int, scratch: Path) -> None:
    """Tensors cut in two directions; norms are those of the whole ones, for LAMB too."""
    check_equal_to_one_process(rank, dp=1, sharding=2, mp=2, clip=ClipGradByGlobalNorm(0.3))
    check_equal_to_one_process(rank, dp=1, sharding=2, mp=2, rule=LAMB)


@on_ranks(4)
def test_replicas_reduce_in_the_update(rank: int, scratch: Path) -> None:
    """Replicas of pipelines, and of shards, which backward reduces; clipped together."""
    for other in ("pp", "sharding"):
        degrees = {"dp": 2, other: 2, "in_update": True}
        check_equal_to_one_process(rank, ClipGradByGlobalNorm(0.3), **degrees)


@pytest.mark.observes("hybrid_configs.sep_degree")
@on_ranks(4)
def test_sep_by_dp(rank: int, scratch: Path) -> None:
    """Sequences cut in two, attention over the whole of them."""
    check_equal_to_one_process(rank, dp=2, sep=2)


@pytest.mark.long  # eight processes: other tests have each pair of directions
@on_ranks(8)
def test_dp_by_mp_by_pp(rank: int, scratch: Path) -> None:
    """Three directions at once, on 8 ranks."""
    check_equal_to_one_process(rank, dp=2, mp=2, pp=2)


@on_ranks(4)
def test_fleet_makes_a_model_parallel(rank: int, scratch: Path) -> None:
    """fleet's calls do the same: trainers of one model get the same batches, export writes the
    whole, equal to one process.
    """
    strategy = strategy_of(mp=2)
    source = torch.Generator().manual_seed(1)
    text = torch.randint(0, SYMBOLS, (32, TIME + 1), generator=source)
    loader = DataLoader(TensorDataset(text), batch_size=8)
    fleet.init(is_collective=True, strategy=strategy)
    try:
        model = fleet.distributed_model(Net(), tensor_plan=PLAN)
        given = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = fleet.distributed_optimizer(given, grad_clip=ClipGradByGlobalNorm(0.3))
        alone = Net()
        plain = torch.optim.AdamW(alone.parameters(), lr=1e-3)
        steps = 0
        for (mine,) in fleet.shard(loader, seed=0):
            everybodys: list[Any] = [None] * 4
            torch.distributed.all_gather_object(everybodys, mine)
            assert torch.equal(everybodys[0], everybodys[1]) and not torch.equal(
                everybodys[0], everybodys[2]
            )
            for each, one, lines in (
                (model, optimizer, mine),
                (alone, plain, torch.cat([everybodys[0], everybodys[2]])),
            ):
                x, target = lines[:, :-1], lines[:, 1:]
                loss_of(each(x, torch.arange(TIME).expand(len(x), -1)), target).backward()
                if one is plain:
                    nn.utils.clip_grad_norm_(alone.parameters(), 0.3)
                one.step()
                one.zero_grad()
            steps += 1
        assert steps == 2 == optimizer.steps
        fleet.export(str(scratch / "whole.pt"))
        whole = torch.load(scratch / "whole.pt", weights_only=True)
        for name, theirs in alone.state_dict().items():
            torch.testing.assert_close(whole[name], theirs, rtol=0, atol=1e-5)
        with pytest.raises(
            ValueError, match="whole on every trainer, got one divided by hybrid_configs"
        ):
            fleet.save(str(scratch / "saved"))
    finally:
        fleet.finish()


@on_ranks(4)
def test_fleet_names_what_cannot_be_hybrid(rank: int, scratch: Path) -> None:
    """A plan without degrees, a switch without effect, degrees that are not the ranks."""
    fleet.init(is_collective=True)
    with pytest.raises(ValueError, match="tensor_plan: expected with hybrid_configs"):
        fleet.distributed_model(Net(), tensor_plan=PLAN)
    fleet.finish()
    other = strategy_of(mp=2)
    other.amp, other.fuse_grad_size_in_MB = True, 8
    with pytest.raises(ValueError, match="strategy.amp: acts only in .* and without hybrid"):
        fleet.init(is_collective=True, strategy=other)
    with pytest.raises(ValueError, match="fuse_grad_size_in_MB: acts only in .* without hybrid"):
        fleet.init(is_collective=True, strategy=other)
    with pytest.raises(ValueError, match="expected degrees whose product is the 4 ranks"):
        fleet.init(is_collective=True, strategy=strategy_of(dp=3, mp=2))
    with pytest.raises(
        ValueError, match="pipeline_configs: has an effect with a pp_degree above 1 only"
    ):
        fleet.init(is_collective=True, strategy=strategy_of(mp=2, micro=4))


# ---- the mesh ----


@pytest.mark.observes("hybrid_configs.order")
@on_ranks(4)
def test_the_mesh_has_the_directions_by_name_in_the_users_order(rank: int, scratch: Path) -> None:
    """The innermost direction has neighbouring ranks; a degree of -1 is what the others leave."""
    for order, neighbours in (
        (["dp", "pp", "sharding", "sep", "mp"], rank // 2 * 2),
        (["mp", "pp", "sharding", "sep", "dp"], rank % 2),
    ):
        mesh = hybrid_mesh(strategy_of(order, mp=2))
        assert mesh.mesh_dim_names == tuple(order) and mesh["dp"].size() == 2
        peers = torch.distributed.get_process_group_ranks(mesh["mp"].get_group())
        assert peers == [neighbours, neighbours + (1 if order[-1] == "mp" else 2)]
        own = parameter_mesh(directions(strategy_of(order, mp=2), 4))
        assert torch.distributed.get_process_group_ranks(own["mp"].get_group()) == peers


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        (
            {"dp": 2, "mp": 3},
            "expected degrees whose product is the 8 ranks, got 6: dp_degree 2, pp_degree 1",
        ),
        ({"mp": 3}, "product 3 does not divide the 8 ranks, so dp_degree cannot be inferred"),
    ],
)
def test_degrees_must_make_up_the_ranks(degrees: dict[str, int], words: str) -> None:
    """The message has the product, the number of ranks, and every degree."""
    with pytest.raises(ValueError, match=words):
        directions(strategy_of(**degrees), 8)


# ---- errors of a running job ----


@on_ranks(4)
def test_wrong_use_is_named_on_every_rank(rank: int, scratch: Path) -> None:
    """Options without effect, other models, batches and sequences that cannot be cut: an error
    before anybody waits.
    """
    with pytest.raises(
        ValueError,
        match="tensor_plan: expected one if and only if mp_degree is above 1, got mp_degree 2",
    ):
        hybrid_parallel(Net(), strategy_of(mp=2))
    with pytest.raises(ValueError, match="pp_degree above 1 only"):
        hybrid_parallel(Net(), strategy_of(), stages=["head"])
    with pytest.raises(ValueError, match="loss_fn: expected one with pp_degree 2"):
        hybrid_parallel(Net(), strategy_of(pp=2), stages=["head"])
    with pytest.raises(ValueError, match="at least pp_degree 2, got 1"):
        hybrid_parallel(Net(), strategy_of(pp=2, micro=1), stages=["head"], loss_fn=loss_of)
    with pytest.raises(FingerprintMismatch, match="got on trainer 2: blocks.2.*absent|blocks.2"):
        hybrid_parallel(Net(blocks=3 if rank == 2 else 2), strategy_of())
    mesh = hybrid_mesh(strategy_of(sep=2))
    with pytest.raises(ValueError, match="length 7 does not divide evenly by sep_degree 2"):
        split_sequence(torch.zeros(1, 7), mesh)
    model = hybrid_parallel(Net(), strategy_of(pp=2), stages=["head"], loss_fn=loss_of)
    assert isinstance(model, Pipeline)
    x, places, target = batches(1)[0]
    with pytest.raises(
        ValueError, match="x: expected a batch that 2 micro batches divide evenly, got 3 samples"
    ):
        model.forward_backward(x[:3], places[:3], target=target[:3])
    with pytest.raises(RuntimeError, match="call forward_backward"):
        model(x, places)
    with pytest.raises(ValueError, match="make it after hybrid_parallel"):
        hybrid_optimizer(torch.optim.SGD(Net().parameters()), model)
    with pytest.raises(ValueError, match="expected the one that hybrid_parallel returned"):
        hybrid_state_dict(Net())
    assert summed(1) == 4


@on_ranks(4)
def test_a_pipeline_evaluates_and_resumes(rank: int, scratch: Path) -> None:
    """evaluate gives the loss of the batch without touching gradients; a whole state_dict can be
    loaded into the stages.
    """
    model = hybrid_parallel(Net(), strategy_of(dp=2, pp=2), stages=["blocks.1"], loss_fn=loss_of)
    assert isinstance(model, Pipeline)
    x, places, target = batches(1)[0]
    assert model.evaluate(x, places, target=target).item() == pytest.approx(
        loss_of(Net()(x, places), target).item(), abs=1e-5
    )
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.evaluate(x[:4], places[:4], target=target[:4]).item() > 0  # another batch size
    other = Net(seed=7)
    hybrid_load_state_dict(model, other.state_dict())
    assert model.evaluate(x, places, target=target).item() == pytest.approx(
        loss_of(other(x, places), target).item(), abs=1e-5
    )


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: a world of one on NCCL has not run"
)
def test_a_world_of_one_on_a_gpu(tmp_path: Path) -> None:
    """The same calls with all degrees 1 on a GPU; communication between devices is not proven by
    one.
    """
    import torch.distributed as dist

    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        alone, strategy = Net().cuda(), strategy_of()
        model = hybrid_parallel(Net().cuda(), strategy)
        plain = torch.optim.AdamW(alone.parameters(), lr=1e-3)
        optimizer = hybrid_optimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-3), model, ClipGradByGlobalNorm(1e9)
        )
        for batch in batches():
            x, places, target = (tensor.cuda() for tensor in batch)
            for each, one in ((alone, plain), (model, optimizer)):
                loss_of(each(x, places), target).backward()
                one.step()
                one.zero_grad()
        for name, theirs in alone.state_dict().items():
            torch.testing.assert_close(hybrid_state_dict(model)[name], theirs, rtol=0, atol=1e-5)
    finally:
        dist.destroy_process_group()
