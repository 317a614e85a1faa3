"""Programs of trainers without servers: what the passes put in."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.collectives import FOUR, GRAD, LOCAL, TWO, Single, captured, of_type, pair, types
from transpiler import (
    ClipGradByGlobalNorm,
    ClipGradByNorm,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    capture,
    program_guard,
)
from transpiler.collective import (
    broadcast_program,
    collective_program,
    deployment_of,
    parallel_program,
)
from transpiler.ir.graph import Argument, Role
from transpiler.plan.plan import Collective, heads, row_length, row_of
from transpiler.program import Program
from transpiler.tracing.default_programs import default_main_program, default_trainer_program


def trained(single: Single) -> list[str]:
    return [op.outputs[0] for op in of_type(single[0], "sgd")]


def test_nccl2_leaves_the_program_and_ends_startup_in_gen_nccl_id(single: Single) -> None:
    """The trainer program is the single-node one, and the startup program the single-node one with
    gen_nccl_id at its end.
    """
    main, startup = pair(single, trainer_id=1, mode="nccl2")
    assert main.blocks == single[0].blocks and main.storage is single[0].storage
    assert startup.main.ops[:-1] == single[1].main.ops
    last = startup.main.ops[-1]
    assert (last.type, last.outputs, last.inputs) == ("gen_nccl_id", ("NCCLID",), ())
    assert last.arguments == {
        "endpoints": ("h:1", "h:2"),
        "trainer_id": 1,
        "nccl_comm_num": 1,
        "use_hierarchical_allreduce": False,
        "hierarchical_allreduce_inter_nranks": 0,
    }
    assert (
        main.deployment is not None
        and main.deployment.endpoints == ("h:1", "h:2")
        and main.deployment.trainer_id == 1
    )


def test_rings_have_their_ids(single: Single) -> None:
    """nccl_comm_num rings have NCCLID, NCCLID_1, ...; hierarchical ones have an id within rows and
    one between rows as well.
    """
    assert pair(single, mode="nccl2", nccl_comm_num=3)[1].main.ops[-1].outputs == (
        "NCCLID",
        "NCCLID_1",
        "NCCLID_2",
    )
    settings = {
        "use_hierarchical_allreduce": True,
        "hierarchical_allreduce_inter_nranks": 2,
        "nccl_comm_num": 2,
    }
    last = pair(single, FOUR, mode="nccl2", **settings)[1].main.ops[-1]
    hierarchical = [
        f"Hierarchical_{kind}_NCCLID_{ring}" for ring in range(2) for kind in ("inter", "exter")
    ]
    assert list(last.outputs) == ["NCCLID", "NCCLID_1", *hierarchical]
    assert last.arguments["hierarchical_allreduce_inter_nranks"] == 2


def test_gradients_are_summed_where_they_are_final(single: Single) -> None:
    """The loss's gradient is scaled by 1 / trainers, every gradient is summed right after its last
    write, and all are waited for right before the updates; the rest is the single-node program in
    its order.
    """
    main, _ = pair(single, FOUR, **GRAD)
    ops = list(main.main.ops)
    added = ("scale", "c_allreduce_sum", "c_sync_comm_stream")
    assert [op for op in ops if op.type not in added] == list(single[0].main.ops)
    (scale,) = of_type(main, "scale")
    seed = ops[ops.index(scale) - 1]
    assert seed.type == "aten.ones_like" and seed.inputs == ("loss",)
    assert scale.outputs == seed.outputs and scale.arguments["scale"] == 0.25
    sums = of_type(main, "c_allreduce_sum")
    assert sorted(op.outputs[0] for op in sums) == sorted(
        f"{name}@GRAD" for name in trained(single)
    )
    for op in sums:
        before = ops[: ops.index(op)]
        while before[-1] in sums:
            before.pop()
        assert op.inputs == op.outputs and op.outputs[0] in before[-1].outputs
    first = types(main).index("sgd")
    assert types(main)[first - 1] == "c_sync_comm_stream" and sorted(
        ops[first - 1].inputs
    ) == sorted(s.outputs[0] for s in sums)
    assert "aten.mm" in types(main)[ops.index(sums[0]) :]  # backward goes on


@pytest.mark.parametrize(
    ("clip", "reader"),
    [(ClipGradByGlobalNorm(1.0), "global_norm_scale"), (ClipGradByNorm(1.0), "clip_by_norm")],
)
def test_what_clips_reads_the_mean(clip: Any, reader: str) -> None:
    """Clip ops stay where they are and read sums that have arrived."""
    main, _ = pair(captured(clip), **GRAD)
    kinds = types(main)
    assert kinds[kinds.index(reader) - 1] == "c_sync_comm_stream"
    clipped = {name for op in of_type(main, reader) for name in op.inputs}
    assert clipped == {op.outputs[0] for op in of_type(main, "c_allreduce_sum")}


def test_startup_hands_trainer_0s_values_on(single: Single) -> None:
    """After the values are bound and the ids drawn, every ring begins, and every value is broadcast
    and awaited.
    """
    _, startup = pair(single, nccl_comm_num=2, **GRAD)
    held = [variable.name for variable in startup.main.variables_of(Role.PARAMETER, Role.BUFFER)]
    count = len(held)
    expected = (
        ["init"] * count
        + ["gen_nccl_id"]
        + ["c_comm_init"] * 2
        + ["c_broadcast"] * count
        + ["c_sync_comm_stream"] * 2
    )
    assert types(startup) == expected
    assert sorted(op.outputs[0] for op in of_type(startup, "c_broadcast")) == sorted(held)
    assert [
        (op.arguments["ring_id"], op.arguments["nranks"]) for op in of_type(startup, "c_comm_init")
    ] == [(0, 2), (1, 2)]


def test_local_sgd_averages_the_parameters(single: Single) -> None:
    """After the single-node program every trained parameter is summed, awaited, and scaled by 1 /
    trainers.
    """
    main, startup = pair(single, **LOCAL)
    count = len(single[0].main.ops)
    names = trained(single)
    assert main.main.ops[:count] == single[0].main.ops
    assert types(main)[count:] == ["c_allreduce_sum"] * len(names) + [
        "c_sync_comm_stream",
        "scale",
    ] * len(names)
    assert {op.outputs[0]: op.arguments["scale"] for op in of_type(main, "scale")} == dict.fromkeys(
        names, 0.5
    )
    assert types(startup) == types(pair(single, **GRAD)[1])


def test_buckets_fill_by_size_and_take_rings_in_turn(single: Single) -> None:
    """Sums share a bucket while their bytes fit, a larger one has its own, and buckets go round the
    rings.
    """
    deployment = deployment_of(
        single[0], Collective("grad_allreduce", rings=2, bucket_bytes=64), ("h:1", "h:2"), 0
    )
    main = collective_program(single[0], deployment)
    size = {
        v.name: 4 * prod(map(int, v.shape))
        for v in main.main.variables.values()
        if v.role is Role.GRADIENT
    }
    buckets: dict[Argument, list[str]] = {}
    for op in of_type(main, "c_allreduce_sum"):
        buckets.setdefault(op.arguments["bucket"], []).append(op.outputs[0])
        assert op.arguments["ring_id"] == int(str(op.arguments["bucket"])) % 2
    sizes = [[size[name] for name in names] for names in buckets.values()]
    assert list(buckets) == [0, 1, 2] and sizes == [[12, 48], [16, 16, 16], [96]]
    assert all(sum(bucket) <= 64 or len(bucket) == 1 for bucket in sizes)


def test_a_gradient_that_backward_reads_gets_a_second_name() -> None:
    """Where one gradient is also what backward goes on with, the sum changes only the gradient."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.randn(4, 3)) for _ in range(3))

    def loss(model: Any, x: torch.Tensor) -> Any:
        return (torch.tanh(torch.tanh(model.a) + model.b) * model.c).sum() * x.sum()

    model = Sums()
    with program_guard(Program(()), Program(())):
        single = capture(
            model, loss, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(2, 3),)
        )
    main, _ = pair(single, **GRAD)
    # the case at hand
    assert any(
        set(op.inputs) & {"b@GRAD"} for op in single[0].main.ops if op.type.startswith("aten.")
    )
    (second,) = [op for op in of_type(main, "assign") if op.outputs == ("b@GRAD",)]
    assert second.inputs == ("b@GRAD@LOCAL",)
    assert not any("b@GRAD" in op.inputs for op in main.main.ops if op.type.startswith("aten."))


def test_parallel_executor_gets_the_sums_of_grad_allreduce(single: Single) -> None:
    """What is made of an nccl2 program for ParallelExecutor is the grad_allreduce program; one that
    shares stays as it is.
    """
    nccl2, averaged = pair(single, mode="nccl2")[0], pair(single, **GRAD)[0]
    assert parallel_program(nccl2).blocks == averaged.blocks
    assert parallel_program(averaged) is averaged
    assert types(broadcast_program(nccl2)) == types(pair(single, **GRAD)[1])


def test_one_trainer_works_in_every_mode(single: Single) -> None:
    """A world of one has the same programs, with scales of 1."""
    for settings in (GRAD, LOCAL, {"mode": "nccl2"}):
        main, startup = pair(single, "h:1", **settings)
        assert [op.arguments["scale"] for op in of_type(main, "scale")] == [1.0] * len(
            of_type(main, "scale")
        )
        assert "gen_nccl_id" in types(startup)


def test_the_default_program_has_a_trainer_program(single: Single) -> None:
    """transpile(program=None) notes what it made of the default main program, which itself stays as
    it is.
    """
    with program_guard(*single):
        assert default_trainer_program() is single[0]
        transpiler = DistributeTranspiler(DistributeTranspilerConfig(mode="nccl2"))
        for trainer in (0, 1):
            transpiler.transpile(trainer, trainers=TWO)
            deployment = default_trainer_program().deployment
            assert deployment is not None and deployment.trainer_id == trainer
        assert default_main_program() is single[0]


# ---- rows ----


def test_rows_and_heads() -> None:
    """Trainers in a row follow one another, and the first of each row talk to one another."""
    assert [row_of(rank, 2) for rank in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)] and heads(
        6, 2
    ) == (0, 2, 4)


@pytest.mark.parametrize(
    ("asked", "endpoints", "expected"),
    [
        (2, "a:1,b:1,c:1,d:1", 2),
        (0, FOUR, 2),
        (1, FOUR, 2),
        (
            3,
            "a:1,a:2,a:3,a:4",
            "expected a divisor of the number of trainers, got 4 trainers and 3",
        ),
        (4, "a:1,a:2,a:3,a:4", "expected from 2 to less than the number of trainers, 4, got 4"),
        (0, "a:1,a:2", "expected from 2 to less than the number of trainers, 2, got 2"),
        (0, "a:1,a:2,b:1", "on every host, got 2 on a, 1 on b"),
        (0, "a:1,b:1,a:2,b:2", "on every host, got 1 on a, 1 on b, 1 on a, 1 on b"),
    ],
)
def test_the_length_of_a_row(asked: int, endpoints: str, expected: int | str) -> None:
    """It is the number asked for, or that of each host; what does not divide the trainers evenly is
    refused with the numbers.
    """
    if isinstance(expected, int):
        assert row_length(asked, endpoints.split(",")) == expected
    else:
        with pytest.raises(ValueError, match=f"^hierarchical_allreduce_inter_nranks.*{expected}"):
            row_length(asked, endpoints.split(","))


def test_ops_without_some_of_their_results_are_none_of_a_sums() -> None:
    """A convolution whose input is not trained has a backward without a first result."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = (torch.randn(3, 4, 8, 8),)
    single = capture(model, lambda model, x: model(x).square().mean(), optimizer, batch)
    main, _ = pair(single, TWO, **GRAD)
    backward = of_type(main, "aten.convolution_backward")
    assert any("" in op.outputs for op in backward) and len(of_type(main, "c_allreduce_sum")) == 6
