"""Programs of trainers without servers: what the passes put in, what is refused, and the invariants that
hold.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import nn

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
from transpiler.formats.plan_text import plan_text
from transpiler.ir.graph import Argument, Op, Ref, Role
from transpiler.plan.comm_rings import heads, row_length, row_of
from transpiler.plan.plan import Collective
from transpiler.program import Program
from transpiler.tracing.default_programs import default_main_program, default_trainer_program
from transpiler.verify import collective as collective_invariants
from transpiler.verify.untrusted_program import check_server_program
from transpiler.verify.verify import IllegalProgram, invariants_of, verify

TWO, FOUR = "h:1,h:2", "a:1,a:2,b:1,b:2"
GRAD: dict[str, Any] = {"mode": "collective", "collective_mode": "grad_allreduce"}
LOCAL: dict[str, Any] = {"mode": "collective", "collective_mode": "local_sgd"}
Single = tuple[Program, Program]


class Net(nn.Module):
    """Two layers, running statistics and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


def step(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.out(F.relu(model.norm(model.fc(x)))) * model.frozen, y)


def captured(clip: Any = None) -> Single:
    torch.manual_seed(0)
    model = Net()
    with program_guard(Program(()), Program(())):
        batch = (torch.randn(4, 6), torch.randint(0, 3, (4,)))
        return capture(
            model, step, torch.optim.SGD(model.parameters(), lr=0.1), batch, grad_clip=clip
        )


@pytest.fixture(scope="module")
def single() -> Single:
    """One capture for all tests: nothing here may change it."""
    return captured()


def transpiled(
    single: Single, trainers: str = TWO, trainer_id: int = 0, **settings: Any
) -> DistributeTranspiler:
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**settings))
    transpiler.transpile(trainer_id, single[0], trainers=trainers, startup_program=single[1])
    return transpiler


def pair(single: Single, trainers: str = TWO, trainer_id: int = 0, **settings: Any) -> Single:
    transpiler = transpiled(single, trainers, trainer_id, **settings)
    return transpiler.get_trainer_program(), transpiler.get_startup_program()


def types(program: Program) -> list[str]:
    return [op.type for op in program.main.ops]


def of_type(program: Program, *names: str) -> list[Op]:
    return [op for op in program.main.ops if op.type in names]


def trained(single: Single) -> list[str]:
    return [op.outputs[0] for op in of_type(single[0], "sgd")]


# ---- what the passes put in ----


@pytest.mark.slow
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


@pytest.mark.slow
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


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"trainers": 2}, TypeError, "trainers: expected the trainers' endpoints.*got 2"),
        ({"trainers": "h:1,h:1"}, ValueError, "trainers: expected different endpoints"),
        ({"trainers": "h"}, ValueError, "trainers: expected HOST:PORT"),
        ({"trainer_id": -1}, ValueError, "trainer_id: expected 0 to 1, got -1"),
        ({"trainer_id": 2}, ValueError, "trainer_id: expected 0 to 1, got 2"),
        ({"pservers": "s:1"}, ValueError, "pservers='s:1' has no effect with mode='nccl2'"),
        ({"sync_mode": False}, ValueError, "sync_mode=False contradicts mode='nccl2'"),
        (
            {"current_endpoint": "h:2"},
            ValueError,
            "current_endpoint: expected that of trainer 0 in trainers, h:1, got 'h:2'",
        ),
    ],
)
def test_arguments_that_make_no_sense_without_servers(
    single: Single, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    """transpile refuses them by name."""
    given = {"trainer_id": 0, "program": single[0], "trainers": TWO, **arguments}
    with pytest.raises(error, match=message):
        DistributeTranspiler(DistributeTranspilerConfig(mode="nccl2")).transpile(**given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "collective"}, "collective_mode=None: expected 'grad_allreduce' or 'local_sgd'"),
        (
            {"mode": "nccl2", "collective_mode": "local_sgd"},
            "collective_mode='local_sgd' has no effect with mode='nccl2'",
        ),
        (
            {"mode": "nccl2", "slice_var_up": False},
            "slice_var_up=False has no effect with mode='nccl2'",
        ),
        ({"mode": "nccl2", "geo_sgd_mode": True}, "geo_sgd_mode=True has no effect"),
        ({**GRAD, "min_block_size": 4}, "min_block_size=4 has no effect with mode='collective'"),
        ({**GRAD, "sync_mode": False}, "sync_mode=False contradicts mode='collective'"),
        (
            {**GRAD, "hierarchical_allreduce_inter_nranks": 2},
            "has no effect with use_hierarchical_allreduce=False",
        ),
        (
            {**GRAD, "use_hierarchical_allreduce": True},
            "expected from 2 to less than the number of trainers",
        ),
    ],
)
def test_fields_without_effect_in_the_mode(
    single: Single, settings: dict[str, Any], message: str
) -> None:
    """transpile refuses them by name."""
    with pytest.raises(ValueError, match=message):
        transpiled(single, **settings)


def test_there_is_no_program_of_a_server(single: Single) -> None:
    """Asking for one says that the mode has no servers; a server refuses a trainer's program,
    whatever it holds.
    """
    transpiler = transpiled(single, **GRAD)
    for ask in (
        transpiler.get_pserver_program,
        transpiler.get_pserver_programs,
        transpiler.get_startup_program,
    ):
        with pytest.raises(ValueError, match="got mode='grad_allreduce', which has no server"):
            ask("h:1")
    for program in pair(single, **GRAD):
        assert program.deployment is not None
        posing = replace(
            program, deployment=replace(program.deployment, trainer_id=None, server_index=0)
        )
        with pytest.raises(
            ValueError, match="expected one of a job with servers, got mode grad_allreduce"
        ):
            check_server_program(posing)


def test_a_program_without_the_losss_gradient_is_refused(single: Single) -> None:
    """Where backward does not begin with ones for the loss there is nothing to scale, and transpile
    says so.
    """
    main = single[0].main
    ops = [op for op in main.ops if op.type != "aten.ones_like"]
    full = Op(
        "aten.full",
        {"size": (), "fill_value": 1.0},
        next(op.outputs for op in main.ops if op.type == "aten.ones_like"),
    )
    place = next(index for index, op in enumerate(main.ops) if op.type == "aten.ones_like")
    odd = single[0].with_blocks(replace(main, ops=(*ops[:place], full, *ops[place:])))
    with pytest.raises(ValueError, match="backward begins with aten.ones_like"):
        transpiled((odd, single[1]), **GRAD)


# ---- how they look and travel ----

KINDS: dict[str, dict[str, Any]] = {
    "nccl2": {"mode": "nccl2", "nccl_comm_num": 2},
    "grad_allreduce": GRAD,
    "local_sgd": {
        **LOCAL,
        "use_hierarchical_allreduce": True,
        "hierarchical_allreduce_inter_nranks": 2,
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_programs_travel_whole_and_are_the_same_everywhere(
    single: Single, kind: str, tmp_path: Path
) -> None:
    """Messages and files give the same program back; all trainers' programs have one fingerprint,
    at any address, and other modes have others; what wait_port says is recorded.
    """
    for number, program in enumerate(pair(single, FOUR, **KINDS[kind])):
        assert Program.from_proto(program.to_proto()) == program
        program.save(tmp_path / f"{number}")
        assert Program.load(tmp_path / f"{number}") == program
        assert (
            pair(single, "x:9,x:8,y:7,y:6", 3, **KINDS[kind])[number].fingerprint()
            == program.fingerprint()
        )
        assert (
            len(
                {
                    pair(single, FOUR, **settings)[number].fingerprint()
                    for settings in KINDS.values()
                }
            )
            == 3
        )
    main = transpiled(single, FOUR, **KINDS[kind]).get_trainer_program(wait_port=False)
    assert main.deployment is not None and not main.deployment.wait_port


def test_programs_are_readable(single: Single) -> None:
    """The text says who runs it and what each ring does, in one line each."""
    main, startup = (str(program) for program in pair(single, FOUR, 1, nccl_comm_num=2, **GRAD))
    assert main.startswith("trainer 1 of 4, grad_allreduce, 2 rings\n")
    for line in (
        "= c_allreduce_sum(out.bias@GRAD, ring 0, bucket 0)",
        "c_sync_comm_stream(",
        "= scale(ones_like, 0.25)",
    ):
        assert line in main
    for line in (
        "= gen_nccl_id(a:1, a:2, b:1, b:2)",
        "c_comm_init(NCCLID_1, ring 1, 4 trainers)",
        "ring 0, from trainer 0)",
    ):
        assert line in startup
    rows = str(pair(single, FOUR, **KINDS["local_sgd"])[0])
    assert rows.startswith("trainer 0 of 4, local_sgd, 1 ring, in rows of 2\n")


def test_pictures_show_the_rings(single: Single, tmp_path: Path) -> None:
    """Each ring is a line, each start an arrow to it and each wait one back; an nccl2 program has
    neither.
    """
    main, startup = pair(single, FOUR, nccl_comm_num=2, **GRAD)
    for program in (main, startup, pair(single, mode="nccl2")[0]):
        program.draw(tmp_path / "x.svg")
        root = ElementTree.parse(tmp_path / "x.svg").getroot()
        lines = root.findall(".//{*}line[@class='life']")
        arrows = [
            path for path in root.findall(".//{*}path[@marker-end]") if "H" in path.attrib["d"]
        ]
        moves = len(of_type(program, "c_allreduce_sum", "c_broadcast", "c_sync_comm_stream"))
        assert (len(lines), len(arrows)) == ((2, moves) if moves else (0, 0))


def test_the_plan_says_what_a_trainer_holds(single: Single) -> None:
    """Bytes of parameters, states and sums of each trainer, and every variable's update."""
    main, _ = pair(single, FOUR, **GRAD)
    assert main.deployment is not None
    lines = plan_text(main.deployment.plan).splitlines()
    trained_bytes = 4 * (6 * 4 + 4 + 4 + 4 + 4 * 3 + 3)
    held = 4 * (3 + 4 + 4) + 8  # the frozen parameter and the running statistics
    assert lines[0] == "grad_allreduce: 4 trainers, no servers"
    assert "fc.weight                 float32[4, 6]  sgd" in lines
    found = re.split(" {2,}", lines[-1])
    assert found == [
        "4 trainers",
        f"{trained_bytes + held} B",
        "0 B",
        f"{trained_bytes} B",
        f"{2 * trained_bytes + held} B",
    ]


# ---- invariants ----


def edited(program: Program, change: Callable[[list[Op]], None]) -> Program:
    ops = list(program.main.ops)
    change(ops)
    return program.with_blocks(replace(program.main, ops=tuple(ops)))


def where(ops: list[Op], kind: str, last: bool = False) -> int:
    found = [index for index, op in enumerate(ops) if op.type == kind]
    return found[-1 if last else 0]


def drop(kind: str, last: bool = False) -> Callable[[list[Op]], None]:
    def change(ops: list[Op]) -> None:
        del ops[where(ops, kind, last)]

    return change


def alter(kind: str, **arguments: Argument) -> Callable[[list[Op]], None]:
    def change(ops: list[Op]) -> None:
        index = where(ops, kind)
        ops[index] = replace(ops[index], arguments={**ops[index].arguments, **arguments})

    return change


def twice(kind: str) -> Callable[[list[Op]], None]:
    return lambda ops: ops.insert(where(ops, kind) + 1, ops[where(ops, kind)])


def early_wait(ops: list[Op]) -> None:
    """The wait after its first reader."""
    index = where(ops, "c_sync_comm_stream")
    ops.insert(index + 1, ops.pop(index))


def changed_in_flight(ops: list[Op]) -> None:
    index = where(ops, "c_allreduce_sum")
    name = ops[index].outputs[0]
    ops.insert(index + 1, Op("scale", {"x": Ref("loss"), "scale": 1.0}, (name,)))


BREAKS: list[tuple[str, int, Callable[[list[Op]], None], str]] = [
    (
        "nccl2",
        0,
        lambda ops: ops.append(
            Op("c_broadcast", {"x": Ref("fc.bias"), "root": 0, "ring_id": 0}, ("fc.bias",))
        ),
        "shares_nothing",
    ),
    ("nccl2", 0, drop("sgd"), "updated_once"),
    ("local_sgd", 0, twice("sgd"), "updated_once"),
    ("grad_allreduce", 0, drop("scale"), "loss_gradient_scaled"),
    ("grad_allreduce", 0, alter("scale", scale=1.0), "loss_gradient_scaled"),
    ("grad_allreduce", 0, twice("scale"), "loss_gradient_scaled"),
    ("grad_allreduce", 0, drop("c_allreduce_sum"), "summed_exactly_once"),
    ("grad_allreduce", 0, twice("c_allreduce_sum"), "summed_exactly_once"),
    ("grad_allreduce", 0, alter("c_allreduce_sum", x=Ref("loss")), "summed_exactly_once"),
    ("grad_allreduce", 0, changed_in_flight, "summed_exactly_once"),
    ("local_sgd", 0, drop("scale"), "averaged_exactly_once"),
    ("local_sgd", 0, alter("scale", scale=1.0), "averaged_exactly_once"),
    ("local_sgd", 0, alter("c_allreduce_sum", x=Ref("loss")), "averaged_exactly_once"),
    ("grad_allreduce", 0, alter("c_allreduce_sum", bucket=7), "buckets_in_bounds"),
    ("grad_allreduce", 0, alter("c_allreduce_sum", ring_id=1), "buckets_in_bounds"),
    ("grad_allreduce", 0, drop("c_sync_comm_stream"), "awaited_before_use"),
    ("grad_allreduce", 0, early_wait, "awaited_before_use"),
    ("grad_allreduce", 0, twice("c_sync_comm_stream"), "awaited_before_use"),
    ("grad_allreduce", 0, alter("c_sync_comm_stream", ring_id=1), "awaited_before_use"),
    ("grad_allreduce", 1, drop("gen_nccl_id"), "ids_generated_once"),
    ("nccl2", 1, twice("gen_nccl_id"), "ids_generated_once"),
    ("nccl2", 1, alter("gen_nccl_id", endpoints=("h:1",)), "ids_generated_once"),
    ("nccl2", 1, lambda ops: ops.append(ops.pop(0)), "ids_generated_once"),
    ("grad_allreduce", 1, drop("c_comm_init"), "rings_initialized_once"),
    ("grad_allreduce", 1, alter("c_comm_init", nranks=3), "rings_initialized_once"),
    ("grad_allreduce", 1, twice("c_broadcast"), "parameters_broadcast"),
    ("grad_allreduce", 1, alter("c_broadcast", root=1), "parameters_broadcast"),
]


@pytest.mark.parametrize(("kind", "number", "change", "invariant"), BREAKS)
def test_a_broken_law_is_named(
    single: Single, kind: str, number: int, change: Callable[[list[Op]], None], invariant: str
) -> None:
    """verify refuses the program, and the message begins with where it is and ends in the invariant."""
    program = pair(single, FOUR, **KINDS[kind])[number]
    assert program.deployment is not None
    plan = program.deployment.plan
    broken = edited(program, change)
    verify(program, plan)
    sentence = " ".join(
        (inspect.getdoc(getattr(collective_invariants, invariant)) or "").split("\n\n")[0].split()
    ).rstrip(".")
    violations = list(getattr(collective_invariants, invariant)(broken, plan))
    assert violations and all(violation.why for violation in violations)
    with pytest.raises(IllegalProgram) as caught:
        verify(broken, plan)
    if not any(
        list(other(broken, plan)) for other in invariants_of(broken) if other.__name__ != invariant
    ):
        assert caught.value.invariant == sentence


def test_every_law_has_a_program_that_breaks_it() -> None:
    """No invariant stands untested."""
    invariants = {
        name
        for name, invariant in vars(collective_invariants).items()
        if inspect.isgeneratorfunction(invariant)
    }
    assert invariants == {invariant for *_, invariant in BREAKS}


def test_a_bucket_that_is_too_full_breaks_the_law(single: Single) -> None:
    """Bytes and dtypes of a bucket are held against the plan, not only its number."""
    main = pair(single, FOUR, **GRAD)[0]
    assert main.deployment is not None and main.deployment.plan.collective is not None
    plan = replace(
        main.deployment.plan, collective=replace(main.deployment.plan.collective, bucket_bytes=8)
    )
    violations = list(collective_invariants.buckets_in_bounds(main, plan))
    assert "expected 8 bytes a bucket at most" in violations[0].why
