"""From one captured program to a trainer's and the servers' programs."""

import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from transpiler import (
    DistributeTranspiler,
    DistributeTranspilerConfig,
    HashName,
    SizeBalanced,
    capture,
    program_guard,
)
from transpiler.clip import ClipGradByGlobalNorm, ClipGradByNorm, ClipGradByValue
from transpiler.distribute import (
    plan_parameters,
    plan_program,
    pserver_program,
    pserver_startup,
    trainer_program,
)
from transpiler.ir.graph import Block, Op, Ref, Role, Storage, Variable, freeze
from transpiler.ir.ops import check
from transpiler.ir.rules import RULES, Clip, Rule, rule_of, state_of
from transpiler.plan.lane_plan import LanePlan, uniform
from transpiler.plan.placement import SliceSize
from transpiler.plan.plan import Deployment, Lane, Plan
from transpiler.program import Program
from transpiler.verify.invariants import IllegalProgram
from transpiler.verify.untrusted_program import check_server_program

ONE, TWO, THREE = "h:1", "h:1,h:2", "h:1,h:2,h:3"


class Net(nn.Module):
    """A sliced weight, biases, running statistics, a frozen and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        result: Tensor = self.out(self.norm(self.fc(x))) * self.frozen
        return result


def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The training step."""
    return nn.functional.cross_entropy(model(x), y)


def captured(clip: Any = None, lr: float = 0.1) -> tuple[Program, Program, Net]:
    """Single-node programs: Adam with two groups, of which the second has no gradient."""
    torch.manual_seed(0)
    model = Net()
    used = [
        parameter
        for name, parameter in model.named_parameters()
        if name not in ("unused", "frozen")
    ]
    optimizer = torch.optim.Adam([{"params": used}, {"params": [model.unused], "lr": 0.5}], lr=lr)
    program, startup = capture(
        model, step, optimizer, (torch.randn(6, 8), torch.randint(0, 2, (6,))), grad_clip=clip
    )
    return program, startup, model


@pytest.fixture(scope="module")
def single() -> tuple[Program, Program, Net]:
    """One capture for all tests: nothing here may change it."""
    return captured()


Single = tuple[Program, Program, Net]


def transpiled(
    single: Single, pservers: str = TWO, trainers: int = 2, trainer_id: int = 0, **settings: Any
) -> DistributeTranspiler:
    """A transpiler that has transpiled, with small slices; ``sync_mode`` goes to transpile, the
    rest to the configuration.
    """
    sync_mode = settings.pop("sync_mode", None)
    transpiler = DistributeTranspiler(
        DistributeTranspilerConfig(**{"min_block_size": 6, **settings})
    )
    transpiler.transpile(trainer_id, single[0], pservers, trainers, sync_mode, single[1])
    return transpiler


def plan_in(program: Program) -> Plan:
    """The plan that a program carries."""
    assert program.deployment is not None
    return program.deployment.plan


def types(program: Program, block: int = 0) -> list[str]:
    """The op types of a block, without compute."""
    return [
        op.type for op in program.blocks[block].ops if not op.type.startswith(("aten.", "sym."))
    ]


def programs_of(transpiler: DistributeTranspiler, pservers: str = TWO) -> list[Program]:
    """Every program of the job."""
    pairs = [transpiler.get_pserver_programs(endpoint) for endpoint in pservers.split(",")]
    return [
        transpiler.get_trainer_program(),
        transpiler.get_startup_program(),
        *(p for pair in pairs for p in pair),
    ]


# ---- Kept ----


def test_trainer_program_sync(single: Single) -> None:
    """Each gradient is split if sliced, and sent; at the end barrier, receives, barrier, concats;
    no update is left.
    """
    program = transpiled(single).get_trainer_program()
    tail = types(program)
    sends = tail[: tail.index("send_barrier")]
    assert (
        sends.count("send") == 6 and sends.count("split") == 2 and set(sends) == {"send", "split"}
    )
    assert tail[len(sends) :] == [
        "send_barrier",
        *["recv"] * 6,
        "fetch_barrier",
        "concat",
        "concat",
    ]
    assert not program.main.variables_of(Role.STATE)
    compute = [op for op in single[0].main.ops if op.type.startswith(("aten.", "sym."))]
    assert [op for op in program.main.ops if op.type.startswith(("aten.", "sym."))] == compute


def test_each_send_stands_right_after_the_op_that_produces_its_gradient(single: Single) -> None:
    """Communication interleaves with the backward pass: nothing stands between a gradient and its
    split and send.
    """
    ops = transpiled(single).get_trainer_program().main.ops
    last: tuple[str, ...] = ()
    for before, op in zip(ops, ops[1:], strict=False):
        if before.type.startswith("aten."):
            last = before.outputs
        if op.type == "split":
            assert op.inputs[0] in last
        if op.type == "send":
            assert op.inputs == before.outputs if before.type == "split" else op.inputs[0] in last


def test_trainer_program_async_is_the_same_without_barriers(single: Single) -> None:
    """Async: the same ops in the same order, less the two barriers."""
    sync = transpiled(single).get_trainer_program()
    a_sync = transpiled(single, sync_mode=False).get_trainer_program()
    assert [op for op in sync.main.ops if not op.type.endswith("_barrier")] == list(a_sync.main.ops)


@pytest.mark.parametrize("sync_mode", [True, False])
def test_trainer_startup_program(single: Single, sync_mode: bool) -> None:
    """recv of every dense variable, updated or held; then fetch_barrier; then concat of the sliced
    ones; in every mode.
    """
    program = transpiled(single, sync_mode=sync_mode).get_startup_program()
    everything = [
        variable.name for variable in single[1].main.variables_of(Role.PARAMETER, Role.BUFFER)
    ]
    count = len(everything)
    assert types(program) == ["recv"] * count + ["fetch_barrier"] + ["concat"] * 2
    assert {str(op.arguments["param"]) for op in program.main.ops if op.type == "recv"} == set(
        everything
    )
    assert {"norm.running_mean", "norm.num_batches_tracked", "frozen", "unused"} <= set(everything)


def test_pserver_program_sync(single: Single) -> None:
    """Block 0 is definitions and one listen_and_serv; then sum, scale and the rule for each slice
    that lives there.
    """
    transpiler = transpiled(single)
    for endpoint in TWO.split(","):
        program = transpiler.get_pserver_program(endpoint)
        assert [op.type for op in program.main.ops] == ["listen_and_serv"]
        assert program.main.ops[0].arguments["optimize_blocks"] == tuple(
            range(1, len(program.blocks))
        )
        assert all(
            [op.type for op in block.ops] == ["sum", "scale", "adam"]
            for block in program.blocks[1:]
        )
    first = transpiler.get_pserver_program("h:1").blocks[1]
    assert first.ops[0].inputs == (
        "fc.weight@GRAD.block0.trainer_0",
        "fc.weight@GRAD.block0.trainer_1",
    )
    assert (
        first.ops[0].outputs
        == first.ops[1].inputs
        == first.ops[1].outputs
        == ("fc.weight@GRAD.block0",)
    )
    assert first.ops[1].arguments["scale"] == 0.5
    assert first.ops[2].outputs == ("fc.weight.block0",)
    assert set(first.ops[2].inputs) >= {
        "fc.weight@GRAD.block0",
        "fc.weight@exp_avg.block0",
        "fc.weight@step.block0",
    }


def test_pserver_program_async(single: Single) -> None:
    """Async: the rule alone, on the gradient as it comes, under its plain name."""
    program = transpiled(single, sync_mode=False).get_pserver_program("h:1")
    assert all([op.type for op in block.ops] == ["adam"] for block in program.blocks[1:])
    assert program.blocks[1].ops[0].arguments["grad"] == Ref("fc.weight@GRAD.block0")
    assert not [name for name in program.main.variables if "trainer_" in name]


def lanes_in(single: Single, lane: Lane, trainers: int = 2) -> tuple[Program, list[Program]]:
    """The trainer's program and the servers' of a job with one lane and two servers."""
    plan = plan_program(
        single[0], lanes=uniform(lane), trainers=trainers, servers=2, min_block_size=6
    )
    deployment = Deployment(plan, ("h:1", "h:2"), 0)
    servers = [pserver_program(deployment.of_server(index)) for index in range(2)]
    for program in servers:
        check_server_program(Program.from_proto(program.to_proto()))
    return trainer_program(single[0], deployment), servers


def test_half_async_programs(single: Single) -> None:
    """Async with one barrier of the trainer's own before the receives; the servers are those of
    async.
    """
    trainer, servers = lanes_in(single, Lane("half_async", max_merge_var_num=2))
    a_sync, alike = lanes_in(single, Lane("async"))
    at = types(trainer).index("send_barrier")
    assert (
        types(trainer)[at + 1] == "recv"
        and "send" not in types(trainer)[at:]
        and "fetch_barrier" not in types(trainer)
    )
    barrier = next(op for op in trainer.main.ops if op.type == "send_barrier")
    assert barrier.arguments["half_async"] is True
    assert [op for op in trainer.main.ops if op is not barrier] == list(a_sync.main.ops)
    assert [program.blocks[1:] for program in servers] == [program.blocks[1:] for program in alike]


def test_geo_programs(single: Single) -> None:
    """The optimizer ops stay on the trainer, one send of all changes is the last op; a server adds
    what arrives.
    """
    trainer, servers = lanes_in(single, Lane("geo", k_steps=7))
    assert list(trainer.main.ops[:-1]) == list(single[0].main.ops)
    assert trainer.main.variables == single[0].main.variables
    send = trainer.main.ops[-1]
    assert (send.type, send.arguments["mode"], send.arguments["k_steps"]) == ("send", "geo", 7)
    assert send.inputs == tuple(op.outputs[0] for op in single[0].main.ops if op.type == "adam")
    assert isinstance(send.arguments["delta"], tuple)
    assert send.arguments["delta"][:3] == (
        "fc.weight.block0.delta",
        "fc.weight.block1.delta",
        "fc.bias.delta",
    )
    assert send.arguments["sections"] == (24, 24, 6, 6, 6, 6, 6, 2)
    block = servers[0].blocks[1]
    assert block.ops == (
        Op(
            "sum",
            {"x": (Ref("fc.weight.block0"), Ref("fc.weight.block0.delta"))},
            ("fc.weight.block0",),
        ),
    )
    assert servers[0].main.variables["fc.weight.block0.delta"].role is Role.DELTA
    assert not any(program.main.variables_of(Role.STATE, Role.GRADIENT) for program in servers)


@pytest.mark.parametrize("trainers", [1, 2])
def test_diloco_programs(single: Single, trainers: int) -> None:
    """As geo on the trainer; a server takes the mean change, with the other sign, for the gradient
    of the outer rule.
    """
    outer = Rule(
        "momentum",
        {"lr": 0.7, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0},
        {"nesterov": True},
    )
    trainer, servers = lanes_in(single, Lane("diloco", k_steps=7, outer=outer), trainers)
    assert types(trainer)[-1] == "send" and trainer.main.ops[-1].arguments["mode"] == "diloco"
    merge, mean, update = servers[0].blocks[1].ops
    suffixes = [""] if trainers == 1 else [".trainer_0", ".trainer_1"]
    assert merge.inputs == tuple(f"fc.weight.block0.delta{suffix}" for suffix in suffixes)
    assert (merge.outputs, mean.inputs) == (("fc.weight.block0.delta",),) * 2
    assert (mean.arguments["scale"], mean.outputs) == (-1.0 / trainers, ("fc.weight@GRAD.block0",))
    assert (update.type, update.arguments["nesterov"], update.arguments["group"]) == (
        "momentum",
        True,
        2,
    )
    assert update.arguments["grad"] == Ref("fc.weight@GRAD.block0")
    states = [variable.name for variable in servers[0].main.variables_of(Role.STATE)]
    assert states and all("@momentum_buffer" in name for name in states)


def test_delay_compensation_programs(single: Single) -> None:
    """The gradient is compensated against what its trainer last received, before the rule; there is
    a backup for each trainer.
    """
    _, servers = lanes_in(single, Lane("async", dc_asgd=0.04), 3)
    compensate, update = servers[0].blocks[1].ops
    backups = tuple(f"fc.weight.block0.trainer_{trainer}_bak" for trainer in range(3))
    assert compensate.inputs == ("fc.weight@GRAD.block0", "fc.weight.block0", *backups)
    assert compensate.arguments["factor"] == 0.04
    assert update.arguments["grad"] == Ref(compensate.outputs[0])
    assert all(servers[0].main.variables[name].shape == (3, 8) for name in backups)


def test_a_job_of_several_lanes(single: Single) -> None:
    """Each gradient is sent in its lane's form, each slice updated by its lane's rule; one is sync,
    so there are barriers.
    """
    lanes = LanePlan(
        (
            ("fc.*", Lane("geo", k_steps=3)),
            ("norm.*", Lane("async", dc_asgd=0.5)),
            ("*", Lane("sync")),
        )
    )
    plan = plan_program(single[0], lanes=lanes, trainers=2, servers=1, min_block_size=6)
    deployment = Deployment(plan, ("h:1",), 0)
    trainer, server = (
        trainer_program(single[0], deployment),
        pserver_program(deployment.of_server(0)),
    )
    check_server_program(server)
    assert {op.outputs[0] for op in trainer.main.ops if op.type == "adam"} == {
        "fc.weight",
        "fc.bias",
    }
    assert {variable.of for variable in trainer.main.variables_of(Role.STATE)} == {
        "fc.weight",
        "fc.bias",
    }
    assert types(trainer)[-7:] == [
        "send",
        "send_barrier",
        "recv",
        "recv",
        "recv",
        "recv",
        "fetch_barrier",
    ]
    blocks = {
        block.ops[-1].outputs[0]: [op.type for op in block.ops] for block in server.blocks[1:]
    }
    assert blocks["fc.weight"] == ["sum"]
    assert blocks["norm.bias"] == ["dc_compensate", "adam"]
    assert blocks["out.weight"] == ["sum", "scale", "adam"]
    assert server.main.ops[0].arguments["mode"] == "mixed"
    assert (
        Program.from_proto(trainer.to_proto()) == trainer
        and Program.from_proto(server.to_proto()) == server
    )


def test_clipping_stays_on_trainers_where_a_lane_is_not_sync() -> None:
    """Only where every lane is sync do servers clip; in k-step lanes the trainer's own rule reads
    the clipped gradient.
    """
    source = captured(ClipGradByGlobalNorm(1.0))
    trainer, servers = lanes_in(source, Lane("geo", k_steps=3))
    assert types(trainer).count("scale_by") == 6 and "norm_scale" not in [
        op.type for op in servers[0].blocks[1].ops
    ]
    assert list(trainer.main.ops[:-1]) == list(source[0].main.ops)


@pytest.mark.parametrize(
    "settings", [{"half_async": True}, {"sync_mode": False}, {"completely_not_async": True}]
)
def test_runtime_split_send_recv(single: Single, settings: dict[str, Any]) -> None:
    """No split and no concat op: sends and receives of sliced parameters tell the sections; the
    plan and the servers stay.
    """
    cut, whole = (
        transpiled(single, **settings),
        transpiled(single, **settings, runtime_split_send_recv=True),
    )
    for program in (whole.get_trainer_program(), whole.get_startup_program()):
        assert not {"split", "concat"} & set(types(program))
        assert not [name for name in program.main.variables if ".block" in name]
    ops = whole.get_trainer_program().main.ops
    send = next(op for op in ops if op.type == "send" and op.inputs == ("fc.weight@GRAD",))
    assert (send.arguments["sections"], send.arguments["endpoints"]) == ((24, 24), ("h:1", "h:2"))
    recv = next(op for op in ops if op.type == "recv" and op.arguments["param"] == "fc.weight")
    assert (recv.outputs, recv.arguments["sections"]) == (("fc.weight",), (24, 24))
    assert plan_in(cut.get_trainer_program()) == plan_in(whole.get_trainer_program())
    assert cut.get_pserver_programs("h:1") == whole.get_pserver_programs("h:1")


def test_a_server_that_owns_nothing_has_one_empty_block() -> None:
    """More servers than slices: the others listen over one empty block, also where they hold
    variables that nobody updates.
    """
    plan = plan_parameters(
        [("w", (3,), "float32", 0), ("frozen", (2,), "float32", None)],
        [Rule("sgd", {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0})],
        mode="sync",
        trainers=1,
        servers=3,
    )
    for server, blocks in enumerate(([["sum", "scale", "sgd"]], [[]], [[]])):
        program = pserver_program(Deployment(plan, ("h:1", "h:2", "h:3"), None, server))
        assert [[op.type for op in block.ops] for block in program.blocks[1:]] == blocks
        assert program.main.ops[0].arguments["optimize_blocks"] == (1,)


def test_dispatch_goes_in_the_order_of_the_optimizer_ops_and_held_variables_come_last(
    single: Single,
) -> None:
    """RoundRobin has one cursor over the blocks of the updated parameters, then over those that are
    only held.
    """
    plan = plan_in(transpiled(single, THREE).get_trainer_program())
    updated = [op.outputs[0] for op in single[0].main.ops if op.type == "adam"]
    names = [placement.name for placement in plan.placements]
    assert names[: len(updated)] == updated
    assert {p.name for p in plan.placements if p.group is None} == set(names[len(updated) :])
    assert {"frozen", "unused"} <= set(names[len(updated) :])
    servers = [piece.server for placement in plan.placements for piece in placement.slices]
    assert servers == [index % 3 for index in range(len(servers))]


# ---- Done better ----


def test_sync_mode_false_on_a_default_configuration_is_async_on_both_sides(single: Single) -> None:
    """transpile's argument decides where it is given, for the trainer and for the servers."""
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, single[0], TWO, 2, sync_mode=False, startup_program=single[1])
    assert "send_barrier" not in types(transpiler.get_trainer_program())
    assert transpiler.get_pserver_program("h:1").main.ops[0].arguments["mode"] == "async"
    config = DistributeTranspilerConfig()
    config.sync_mode = False
    by_config = DistributeTranspiler(config)
    by_config.transpile(0, single[0], TWO, 2, startup_program=single[1])
    assert plan_in(by_config.get_trainer_program()).mode == "async"


@pytest.mark.parametrize("configured", [True, False])
def test_a_contradiction_between_configuration_and_argument_raises(
    single: Single, configured: bool
) -> None:
    """A sync_mode that was set in the configuration and another one given to transpile contradict;
    nothing is transpiled.
    """
    config = DistributeTranspilerConfig()
    config.sync_mode = configured
    transpiler = DistributeTranspiler(config)
    with pytest.raises(
        ValueError,
        match=f"sync_mode: the configuration says {configured} and transpile says {not configured}",
    ):
        transpiler.transpile(0, single[0], TWO, 2, not configured, single[1])
    with pytest.raises(ValueError, match="transpile to be called first"):
        transpiler.get_trainer_program()
    transpiler.transpile(0, single[0], TWO, 2, configured, single[1])


@pytest.mark.parametrize(("trainers", "pservers"), [(1, ONE), (1, THREE), (3, ONE)])
def test_one_trainer_and_one_server_agree_on_names(
    single: Single, trainers: int, pservers: str
) -> None:
    """What each trainer sends is what the servers wait for: the same names, plus the trainer's
    number if there are several.
    """
    transpiler = transpiled(single, pservers, trainers)
    endpoints = pservers.split(",")
    sent: dict[str, list[str]] = {endpoint: [] for endpoint in endpoints}
    for op in transpiler.get_trainer_program().main.ops:
        if op.type == "send":
            for name, endpoint in zip(op.inputs, op.arguments["endpoints"], strict=True):  # type: ignore[arg-type]
                sent[str(endpoint)].append(name)
    for endpoint in endpoints:
        program = transpiler.get_pserver_program(endpoint)
        awaited = {name for block in program.blocks[1:] for name in block.ops[0].inputs}
        suffixes = [""] if trainers == 1 else [f".trainer_{trainer}" for trainer in range(trainers)]
        assert awaited == {name + suffix for name in sent[endpoint] for suffix in suffixes}
        assert all(
            [op.type for op in block.ops] == ["sum", "scale", "adam"]
            for block in program.blocks[1:]
        )
        assert all(
            block.ops[1].arguments["scale"] == 1.0 / trainers for block in program.blocks[1:]
        )


@pytest.mark.parametrize("op_type", sorted(RULES))
def test_the_rule_that_was_asked_for_runs(op_type: str) -> None:
    """Every element-wise optimizer becomes its own op on the servers, with its numbers, flags and
    states, and is admitted.
    """
    extra = {"momentum": 0.9} if op_type == "momentum" else {}
    optimizer = RULES[op_type].cls([torch.zeros(4, 3)], lr=0.25, **extra)  # type: ignore[call-arg]
    rule = rule_of(optimizer, optimizer.param_groups[0])
    plan = plan_parameters(
        [("w", (4, 3), "float32", 0)], [rule], mode="sync", trainers=2, servers=2, min_block_size=1
    )
    program = pserver_program(Deployment(plan, ("h:1", "h:2"), None, 1))
    op = program.blocks[1].ops[-1]
    assert op.type == op_type and op.arguments["lr"] == 0.25
    assert {**op.arguments, **rule.hparams, **rule.flags} == op.arguments
    states = {key: Ref(f"w@{key}.block1") for key in state_of(rule)}
    assert {key: op.arguments[key] for key in states} == states
    shapes = {key: program.main.variables[f"w@{key}.block1"].shape for key in states}
    assert shapes == {key: (2, 3) if shaped else () for key, shaped in state_of(rule).items()}
    for block in program.blocks:
        for each in block.ops:
            check(each)
    check_server_program(program)


CLIPS = [
    (ClipGradByValue(0.5, -0.25), "clip", "clip"),
    (ClipGradByNorm(2.0), "clip_by_norm", "norm_scale"),
    (ClipGradByGlobalNorm(3.0), "scale_by", "norm_scale"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clip", "on_trainer", "on_server"), CLIPS, ids=["value", "norm", "global_norm"]
)
def test_clipping_is_the_servers_where_gradients_merge_and_the_trainers_elsewhere(
    clip: Any, on_trainer: str, on_server: str
) -> None:
    """Sync with several trainers: servers clip merged slices.

    One trainer, or async: the trainer clips before it sends.
    """
    single = captured(clip)
    merged = transpiled(single)
    assert set(types(merged.get_trainer_program())) & {on_trainer, "global_norm_scale"} == set()
    assert not [
        name
        for name in merged.get_trainer_program().main.variables
        if "CLIP" in name or "SCALE" in name
    ]
    block = merged.get_pserver_program("h:1").blocks[1]
    assert [op.type for op in block.ops] == ["sum", "scale", on_server, "adam"]
    assert block.ops[-1].arguments["grad"] == Ref("fc.weight@GRAD@CLIP.block0")
    if on_server == "clip":
        assert (block.ops[2].arguments["min"], block.ops[2].arguments["max"]) == (-0.25, 0.5)
    else:
        assert block.ops[2].arguments["by"] == (
            "fc.weight" if isinstance(clip, ClipGradByNorm) else ""
        )
    for trainers, sync_mode in ((1, True), (2, False)):
        own = transpiled(single, TWO, trainers, sync_mode=sync_mode)
        ops = own.get_trainer_program().main.ops
        assert on_trainer in types(own.get_trainer_program())
        clipped = {name for op in ops if op.type == on_trainer for name in op.outputs}
        whole = [op.inputs[0] for op in ops if op.type == "split"]
        whole += [op.inputs[0] for op in ops if op.type == "send" and len(op.inputs) == 1]
        assert set(whole) == clipped
        assert on_server not in [
            op.type for block in own.get_pserver_program("h:1").blocks for op in block.ops
        ]
    assert plan_in(merged.get_trainer_program()).clip == clip.to_clip()


def test_slices_start_from_the_modules_own_values(single: Single) -> None:
    """The servers' startup programs together hold the module's parameters and buffers, to the bit,
    as copies.
    """
    transpiler = transpiled(single, THREE)
    held: dict[str, Tensor] = {}
    for endpoint in THREE.split(","):
        startup = transpiler.get_startup_program(endpoint)
        assert startup.storage is not None
        assert {op.outputs[0] for op in startup.main.ops} == set(startup.storage.tensors)
        held.update(startup.storage.tensors)
    for name, value in single[2].state_dict().items():
        placement = plan_in(transpiler.get_trainer_program()).placement(name)
        assembled = torch.cat([held[piece.name].reshape(-1) for piece in placement.slices]).reshape(
            placement.shape
        )
        assert torch.equal(assembled, value)
        assert all(
            held[piece.name].untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
            for piece in placement.slices
        )


def test_a_loaded_optimizer_travels_with_a_servers_startup(single: Single) -> None:
    """The storage of a server's startup program names the user's optimizer, from which resumed
    states are cut.
    """
    startup = transpiled(single).get_startup_program("h:1")
    assert startup.storage is not None and single[0].storage is not None
    assert startup.storage.optimizer is single[0].storage.optimizer


# ---- Interface ----


def test_transpile_does_not_mutate_its_program(single: Single) -> None:
    """The given programs are what they were, and still single-node."""
    program, startup, model = captured()
    before = (
        program.fingerprint(),
        startup.fingerprint(),
        program.blocks,
        {k: v.clone() for k, v in model.state_dict().items()},
    )
    transpiler = transpiled((program, startup, model))
    programs_of(transpiler)
    assert before[:3] == (program.fingerprint(), startup.fingerprint(), program.blocks)
    assert program.deployment is None and startup.deployment is None
    assert all(torch.equal(value, before[3][key]) for key, value in model.state_dict().items())


def test_every_op_of_every_program_is_in_the_catalogue(single: Single) -> None:
    """All four kinds of program, sync and async, clipped and not, hold only ops that meet their
    schemas; servers admit theirs.
    """
    for source in (single, captured(ClipGradByGlobalNorm(1.0))):
        for sync_mode in (True, False):
            transpiler = transpiled(source, sync_mode=sync_mode)
            for program in programs_of(transpiler):
                for block in program.blocks:
                    for op in block.ops:
                        check(op)
            for endpoint in TWO.split(","):
                check_server_program(transpiler.get_pserver_program(endpoint))


@pytest.mark.slow
def test_all_processes_of_a_job_have_one_plan(single: Single) -> None:
    """Trainers and servers, each transpiling for itself, at whatever addresses, have the same plan
    and fingerprint.
    """
    again = captured()
    one, two = transpiled(single, trainer_id=0), transpiled(again, "a:7,b:8", trainer_id=1)
    assert plan_in(one.get_trainer_program()) == plan_in(two.get_trainer_program())
    fingerprints = {
        plan_in(p).fingerprint() for p in (*programs_of(one), *programs_of(two, "a:7,b:8"))
    }
    assert len(fingerprints) == 1
    assert one.get_trainer_program().fingerprint() == two.get_trainer_program().fingerprint()
    assert (
        one.get_pserver_program("h:1").fingerprint() == two.get_pserver_program("a:7").fingerprint()
    )
    other = transpiled(captured(lr=0.2))
    assert plan_in(other.get_trainer_program()).fingerprint() not in fingerprints


def test_an_eager_script_has_the_same_servers(single: Single) -> None:
    """plan_parameters over the module's parameters gives the programs that transpiling its graph
    gives.
    """
    program, _, _ = single
    plan = plan_program(program, mode="sync", trainers=2, servers=2, min_block_size=6)
    named = [(p.name, p.shape, p.dtype, p.group) for p in plan.placements]
    eager = plan_parameters(
        named, plan.groups, mode="sync", trainers=2, servers=2, min_block_size=6
    )
    assert eager == replace(plan, graph="") and plan.graph == program.fingerprint()
    for server in range(2):
        by_hand = pserver_program(Deployment(eager, ("h:1", "h:2"), None, server))
        assert by_hand.blocks == transpiled(single).get_pserver_program(f"h:{server + 1}").blocks


def test_defaults_are_the_captured_programs(single: Single) -> None:
    """transpile(trainer_id) takes the default programs, one trainer and one server."""
    with program_guard(single[0], single[1]):
        transpiler = DistributeTranspiler()
        transpiler.transpile(0)
    plan = plan_in(transpiler.get_trainer_program())
    assert (plan.mode, plan.trainers, plan.servers) == ("sync", 1, 1)
    assert (
        transpiler.get_pserver_program("127.0.0.1:6174").main.ops[0].arguments["endpoint"]
        == "127.0.0.1:6174"
    )


@pytest.mark.slow
def test_a_program_brings_its_own_startup(single: Single) -> None:
    """A main program given without its startup starts from its own model's values, whatever was
    captured since.
    """
    torch.manual_seed(0)
    first = captured()
    other = captured()
    with torch.no_grad():
        other[2].fc.weight.fill_(7.0)
    with program_guard(other[0], other[1]):
        transpiler = DistributeTranspiler()
        transpiler.transpile(0, first[0])
    startup = transpiler.get_startup_program("127.0.0.1:6174")
    assert startup.storage is not None and torch.equal(
        startup.storage.tensors["fc.weight"], first[2].fc.weight
    )
    mine = transpiler.get_startup_program().storage
    assert mine is not None and mine.tensors["fc.weight"] is first[2].fc.weight


def test_a_group_that_updates_nothing_keeps_its_place(single: Single) -> None:
    """The plan has a rule for every group of the optimizer, in its order, so that a step's rows
    match by index.
    """
    plan = plan_in(transpiled(single).get_trainer_program())
    assert [rule.hparams["lr"] for rule in plan.groups] == [0.1, 0.5]
    stripped = replace(single[0], storage=None)
    assert len(plan_program(stripped, mode="sync", trainers=1, servers=1).groups) == 1


class Last:
    """A user's own split method."""

    def __init__(self, servers: int) -> None:
        self.servers = servers

    def dispatch(self, pieces: Sequence[SliceSize]) -> list[int]:
        """Everything onto the last server."""
        return [self.servers - 1] * len(pieces)


@pytest.mark.parametrize("method", [HashName, SizeBalanced, Last])
def test_split_methods(single: Single, method: type[Last]) -> None:
    """Any split method of the interface decides who holds what, and all programs follow it."""
    transpiler = transpiled(single, THREE, split_method=method)
    plan = plan_in(transpiler.get_trainer_program())
    pieces = [
        SliceSize(s.name, (s.end - s.begin) * (8 if p.dtype == "int64" else 4))
        for p in plan.placements
        for s in p.slices
    ]
    assert [s.server for p in plan.placements for s in p.slices] == method(3).dispatch(pieces)
    for server, endpoint in enumerate(THREE.split(",")):
        defined = transpiler.get_pserver_program(endpoint).main.variables_of(
            Role.PARAMETER, Role.BUFFER
        )
        assert [v.name for v in defined] == [
            s.name for p in plan.placements for s in p.slices if s.server == server
        ]


def test_slice_var_up_off_sends_whole_gradients(single: Single) -> None:
    """Without slices there is no split and no concat."""
    transpiler = transpiled(single, slice_var_up=False)
    for program in programs_of(transpiler):
        assert not {"split", "concat"} & set(types(program))
        assert not [name for name in program.main.variables if ".block" in name]


def test_wait_port_is_recorded_in_the_program(single: Single) -> None:
    """The program says whether running it waits for the servers; False in either place means no."""
    transpiler = transpiled(single)
    for program, waits in (
        (transpiler.get_trainer_program(), True),
        (transpiler.get_trainer_program(wait_port=False), False),
        (transpiler.get_startup_program(), True),
        (transpiled(single, wait_port=False).get_trainer_program(), False),
        (transpiled(single, wait_port=False).get_startup_program(), False),
    ):
        assert program.deployment is not None and program.deployment.wait_port is waits


def test_startup_program_by_endpoint_by_program_or_of_the_trainer(single: Single) -> None:
    """get_startup_program is the trainer's without an endpoint, a server's with one or with its
    main program.
    """
    transpiler = transpiled(single)
    main, startup = transpiler.get_pserver_programs("h:2")
    assert main == transpiler.get_pserver_program("h:2")
    assert (
        startup
        == transpiler.get_startup_program("h:2")
        == transpiler.get_startup_program(pserver_program=main)
    )
    assert transpiler.get_startup_program("h:2", main) == startup
    assert transpiler.get_startup_program() == transpiler.get_startup_program(
        startup_program=single[1]
    )
    with pytest.raises(ValueError, match="expected the program of h:1, got that of h:2"):
        transpiler.get_startup_program("h:1", main)
    with pytest.raises(ValueError, match="expected a server's program"):
        transpiler.get_startup_program("h:1", transpiler.get_trainer_program())


def test_values_may_come_from_another_startup_program(single: Single) -> None:
    """A startup program given to get_startup_program brings its own values."""
    other = Program(single[1].blocks and tuple(single[1].blocks), None, single[1].storage)
    assert single[1].storage is not None
    doubled = Storage({name: value * 2 for name, value in single[1].storage.tensors.items()}, None)
    startup = transpiled(single).get_startup_program(
        "h:1", startup_program=replace(other, storage=doubled)
    )
    assert startup.storage is not None
    assert torch.equal(
        startup.storage.tensors["fc.weight.block0"], 2 * single[2].fc.weight.detach()[:3]
    )


def test_print_log_logs_the_plan(single: Single, caplog: pytest.LogCaptureFixture) -> None:
    """With print_log the plan is logged fact by fact, without it nothing is."""
    with caplog.at_level(logging.INFO, "transpiler"):
        transpiled(single)
        assert not caplog.records
        transpiled(single, print_log=True)
    assert "mode: sync" in caplog.messages
    assert any(
        "variable fc.weight:" in m and "fc.weight.block0[0:24] on server 0" in m
        for m in caplog.messages
    )


def test_empty_and_scalar_parameters_have_blocks_too() -> None:
    """A parameter without elements and one without dimensions are placed, updated and initialised
    as any other.
    """
    rule = Rule("momentum", {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0})
    named = [("empty", (0, 4), "float32", 0), ("scalar", (), "float64", 0)]
    plan = plan_parameters(named, [rule], mode="sync", trainers=1, servers=1)
    deployment = Deployment(plan, ("h:1",), None, 0)
    program = pserver_program(deployment)
    assert [block.ops[-1].outputs for block in program.blocks[1:]] == [("empty",), ("scalar",)]
    storage = Storage(
        {"empty": torch.zeros(0, 4), "scalar": torch.tensor(3.0, dtype=torch.float64)}, None
    )
    values = pserver_startup(deployment, storage).storage
    assert (
        values is not None
        and values.tensors["empty"].shape == (0, 4)
        and values.tensors["scalar"] == 3.0
    )


def test_values_that_do_not_fit_are_refused() -> None:
    """A missing value, and one of another shape, are named."""
    rule = Rule("sgd", {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0})
    plan = plan_parameters([("w", (4,), "float32", 0)], [rule], mode="async", trainers=1, servers=1)
    deployment = Deployment(plan, ("h:1",), None, 0)
    with pytest.raises(ValueError, match="expected a value for w"):
        pserver_startup(deployment, Storage({}, None))
    with pytest.raises(ValueError, match=r"w: expected a value of shape \[4\], got \[5\]"):
        pserver_startup(deployment, Storage({"w": torch.zeros(5)}, None))
    assert pserver_startup(deployment).storage is None
    for wrong in (
        Deployment(plan, ("h:1",), 0, None),
        Deployment(plan, ("h:1",), None, 1),
        Deployment(plan, (), None, 0),
    ):
        with pytest.raises(ValueError, match="expected"):
            pserver_program(wrong)


# ---- What the user may write wrongly ----


def test_calls_before_transpile_raise() -> None:
    """Asking for programs before transpile says what to call first."""
    transpiler = DistributeTranspiler()
    for call in (
        transpiler.get_trainer_program,
        lambda: transpiler.get_pserver_program("h:1"),
        lambda: transpiler.get_pserver_programs("h:1"),
        transpiler.get_startup_program,
    ):
        with pytest.raises(ValueError, match="expected transpile to be called first"):
            call()


def test_an_unknown_endpoint_lists_the_known_ones(single: Single) -> None:
    """A server that is none of the job's is named, and so are those that are."""
    with pytest.raises(ValueError, match="expected one of h:1, h:2, got 'h:3'"):
        transpiled(single).get_pserver_program("h:3")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"trainer_id": 2}, ValueError, "trainer_id: expected 0 to 1, got 2"),
        ({"trainer_id": -1}, ValueError, "trainer_id: expected 0 to 1, got -1"),
        ({"trainer_id": "0"}, TypeError, "trainer_id: expected a whole number"),
        ({"trainer_id": True}, TypeError, "trainer_id: expected a whole number"),
        ({"trainers": 0}, ValueError, "trainers: expected 1 or more, got 0"),
        ({"trainers": "h:1,h:2"}, TypeError, "trainers: expected a whole number"),
        ({"pservers": ""}, ValueError, "HOST:PORT"),
        ({"pservers": "h:1,"}, ValueError, "HOST:PORT"),
        ({"pservers": "h"}, ValueError, "HOST:PORT"),
        ({"pservers": "h:99999"}, ValueError, "HOST:PORT"),
        ({"pservers": ["h:1"]}, TypeError, "pservers: expected text"),
        ({"pservers": "h:1, h:1"}, ValueError, "h:1 twice"),
        ({"sync_mode": 1}, TypeError, "sync_mode: expected True, False or None"),
        ({"program": "main"}, TypeError, "program: expected a Program"),
        ({"startup_program": 3}, TypeError, "startup_program: expected a Program"),
        ({"current_endpoint": "nowhere"}, ValueError, "HOST:PORT"),
    ],
)
def test_arguments_of_transpile_are_checked(
    single: Single, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    """A wrong type or value raises, says what was expected and what came, and leaves nothing
    half-done.
    """
    transpiler = DistributeTranspiler()
    good = {
        "trainer_id": 0,
        "program": single[0],
        "pservers": TWO,
        "trainers": 2,
        "startup_program": single[1],
    }
    with pytest.raises(error, match=words):
        transpiler.transpile(**{**good, **arguments})
    with pytest.raises(ValueError, match="called first"):
        transpiler.get_trainer_program()


def test_programs_that_do_not_belong_together_raise(single: Single) -> None:
    """A startup program of another model, a transpiled program, and one that updates nothing are
    refused.
    """
    transpiler = DistributeTranspiler()
    with pytest.raises(
        ValueError,
        match="startup_program: expected the one that belongs to the main program, with fc.weight",
    ):
        transpiler.transpile(
            0, single[0], TWO, 2, startup_program=Program((Block(0, freeze({}), ()),))
        )
    with pytest.raises(
        ValueError, match="startup_program: expected a single-node .* got the op 'aten"
    ):
        transpiler.transpile(0, single[0], TWO, 2, startup_program=single[0])
    with pytest.raises(
        ValueError, match="startup_program: expected a single-node .* got the op 'recv'"
    ):
        transpiler.transpile(
            0, single[0], TWO, 2, startup_program=transpiled(single).get_startup_program()
        )
    with pytest.raises(ValueError, match="transpiled already"):
        transpiler.transpile(
            0, transpiled(single).get_trainer_program(), TWO, 2, startup_program=single[1]
        )
    with pytest.raises(ValueError, match="updates nothing"):
        transpiler.transpile(0, single[1], TWO, 2, startup_program=single[1])
    with pytest.raises(TypeError, match="config: expected a DistributeTranspilerConfig"):
        DistributeTranspiler({"min_block_size": 1})  # type: ignore[arg-type]


def test_a_gradient_without_producer_is_no_program(single: Single) -> None:
    """An optimizer op whose gradient no op produces is found by the invariants."""
    program = single[0]
    ops = [op for op in program.main.ops if "fc.bias@GRAD" not in op.outputs]
    broken = program.with_blocks(replace(program.main, ops=tuple(ops)))
    with pytest.raises(IllegalProgram, match="fc.bias@GRAD"):
        transpiled((broken, single[1], single[2]))


def test_two_ways_of_clipping_in_one_program_raise(single: Single) -> None:
    """A plan has one way of clipping: a program that clips some gradients, or two ways, is
    refused.
    """
    program = captured(ClipGradByValue(1.0))[0]
    at = next(i for i, op in enumerate(program.main.ops) if op.type == "clip")
    ops = list(program.main.ops)
    ops[at] = replace(ops[at], arguments={**ops[at].arguments, "max": 2.0})
    with pytest.raises(ValueError, match="expected one way of clipping"):
        plan_program(
            program.with_blocks(replace(program.main, ops=tuple(ops))),
            mode="sync",
            trainers=1,
            servers=1,
        )
    update = next(i for i, op in enumerate(program.main.ops) if op.type == "adam")
    ops = list(program.main.ops)
    raw = str(ops[update].inputs[1]).removesuffix("@CLIP")
    ops[update] = replace(ops[update], arguments={**ops[update].arguments, "grad": Ref(raw)})
    with pytest.raises(ValueError, match=f"{raw} unclipped"):
        plan_program(
            program.with_blocks(replace(program.main, ops=tuple(ops))),
            mode="sync",
            trainers=1,
            servers=1,
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"mode": "turbo"},
            "mode: expected one of sync, async, half_async, geo, diloco, got 'turbo'",
        ),
        ({"trainers": 0}, "trainers: expected 1 or more"),
        ({"servers": 0}, "servers: expected 1 or more"),
        ({"min_block_size": 0}, "at least 1"),
        ({"named": [("w", (4,), "float32", 1)]}, "w: expected a group from 0 to 0, got 1"),
        ({"rules": [Rule("lion", {})]}, "group 0: expected an optimizer op"),
        ({"named": [("w", (4,), "float32", 0), ("w", (4,), "float32", 0)]}, "w twice"),
    ],
)
def test_plan_parameters_checks_its_input(change: dict[str, Any], words: str) -> None:
    """A plan that nobody could follow is refused, naming what is wrong."""
    good: dict[str, Any] = {
        "named": [("w", (4,), "float32", 0)],
        "rules": [Rule("sgd", {"lr": 0.1})],
        "mode": "sync",
    }
    with pytest.raises(ValueError, match=words):
        plan_parameters(**{**good, "trainers": 1, "servers": 1, **change})


def test_rules_of_one_group_must_agree() -> None:
    """Two optimizer ops of one group with different numbers are refused."""
    variables = {n: Variable(n, (2,), "float32", Role.PARAMETER) for n in "ab"}
    variables |= {
        f"{n}@GRAD": Variable(f"{n}@GRAD", (2,), "float32", Role.GRADIENT, n) for n in "ab"
    }
    hparams = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
    ops = [Op("aten.neg", {"self": Ref(n)}, (f"{n}@GRAD",)) for n in "ab"]
    ops += [
        Op(
            "sgd",
            {"param": Ref(n), "grad": Ref(f"{n}@GRAD"), "group": 0, "lr": lr, **hparams},
            (n,),
        )
        for n, lr in (("a", 0.1), ("b", 0.2))
    ]
    program = Program((Block(0, freeze(variables), tuple(ops)),))
    with pytest.raises(ValueError, match="one update rule for group 0"):
        plan_program(program, mode="sync", trainers=1, servers=1)


# ---- The configuration ----

DEFAULTS = {
    "slice_var_up": True,
    "min_block_size": 8192,
    "mode": "pserver",
    "enable_dc_asgd": False,
    "print_log": False,
    "wait_port": True,
    "runtime_split_send_recv": False,
    "sync_mode": True,
    "half_async": False,
    "completely_not_async": False,
    "geo_sgd_mode": False,
    "geo_sgd_need_push_nums": 100,
    "nccl_comm_num": 1,
    "use_hierarchical_allreduce": False,
    "hierarchical_allreduce_inter_nranks": 0,
    "collective_mode": None,
}


def test_the_configuration_has_the_documented_defaults() -> None:
    """Every field of the contract is there, with its default."""
    config = DistributeTranspilerConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert config.split_method.__name__ == "RoundRobin"


@pytest.mark.parametrize("error", [AttributeError, ValueError])
def test_unknown_fields_raise_with_the_closest_name(error: type[Exception]) -> None:
    """A misspelt field raises at once, on writing and on reading, in the constructor too, and the
    right name is suggested.
    """
    config = DistributeTranspilerConfig()
    with pytest.raises(error, match="has no 'min_block_sise': did you mean min_block_size"):
        config.min_block_sise = 3  # type: ignore[attr-defined]
    with pytest.raises(error, match="did you mean sync_mode"):
        _ = config.sync_mod
    with pytest.raises(error, match="it has collective_mode, .*slice_var_up"):
        DistributeTranspilerConfig(qqq=1)
    assert vars(config) == {}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("slice_var_up", 1, TypeError),
        ("sync_mode", None, TypeError),
        ("min_block_size", 0, ValueError),
        ("min_block_size", 8192.0, TypeError),
        ("min_block_size", True, TypeError),
        ("split_method", "RoundRobin", TypeError),
        ("split_method", dict, ValueError),
        ("split_method", None, TypeError),
        ("mode", "turbo", ValueError),
        ("mode", None, TypeError),
        ("geo_sgd_need_push_nums", 0, ValueError),
        ("nccl_comm_num", 0, ValueError),
        ("hierarchical_allreduce_inter_nranks", -1, ValueError),
        ("collective_mode", "all", ValueError),
        ("wait_port", "yes", TypeError),
    ],
)
def test_bad_values_raise_and_name_the_field(
    name: str, value: object, error: type[Exception]
) -> None:
    """A wrong type is a TypeError, a value out of range a ValueError; the field keeps its value."""
    config = DistributeTranspilerConfig()
    before = getattr(config, name)
    with pytest.raises(error, match=f"^{name}: expected"):
        setattr(config, name, value)
    assert getattr(config, name) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nccl_comm_num", 2),
        ("use_hierarchical_allreduce", True),
        ("hierarchical_allreduce_inter_nranks", 2),
        ("collective_mode", "local_sgd"),
    ],
)
def test_a_switch_without_effect_raises_in_transpile(
    single: Single, name: str, value: object
) -> None:
    """What has no effect with servers may be written down, and is refused by transpile under its
    own name.
    """
    config = DistributeTranspilerConfig(**{name: value})
    with pytest.raises(ValueError, match=f"^{name}={value!r} has no effect with mode='pserver'"):
        DistributeTranspiler(config).transpile(0, single[0], TWO, 2, startup_program=single[1])
    setattr(config, name, DEFAULTS[name])
    DistributeTranspiler(config).transpile(0, single[0], TWO, 2, startup_program=single[1])


LANE_FIELDS: list[tuple[dict[str, Any], Lane]] = [
    ({}, Lane("sync")),
    ({"sync_mode": False}, Lane("async", "mean")),
    ({"half_async": True}, Lane("half_async")),
    ({"half_async": True, "sync_mode": False, "runtime_split_send_recv": True}, Lane("half_async")),
    ({"geo_sgd_mode": True}, Lane("geo", k_steps=100)),
    (
        {"geo_sgd_mode": True, "geo_sgd_need_push_nums": 7, "sync_mode": False},
        Lane("geo", k_steps=7),
    ),
    ({"enable_dc_asgd": True}, Lane("async", "mean", dc_asgd=1.0)),
    ({"completely_not_async": True}, Lane("sync")),
    (
        {
            "completely_not_async": True,
            "sync_mode": False,
            "half_async": True,
            "runtime_split_send_recv": True,
        },
        Lane("sync"),
    ),
]


@pytest.mark.parametrize(("settings", "lane"), LANE_FIELDS)
def test_the_mode_that_the_configuration_says(
    single: Single, settings: dict[str, Any], lane: Lane
) -> None:
    """The fields say one lane, in whatever order they are assigned, and it is the plan's on every
    side.
    """
    for order in (list(settings), list(reversed(settings))):
        config = DistributeTranspilerConfig(min_block_size=6)
        for name in order:
            setattr(config, name, settings[name])
        transpiler = DistributeTranspiler(config)
        transpiler.transpile(0, single[0], TWO, 2, startup_program=single[1])
        assert {plan_in(program).lanes for program in programs_of(transpiler)} == {(lane,)}


def test_completely_not_async_gives_the_servers_of_sync(single: Single) -> None:
    """Sync through the queues of half-async: what servers do, and so the result, is that of
    sync_mode=True.
    """
    settings = {"completely_not_async": True, "half_async": True, "sync_mode": None}
    ours, theirs = transpiled(single, **settings), transpiled(single, sync_mode=True)
    assert ours.get_pserver_programs("h:1") == theirs.get_pserver_programs("h:1")
    assert ours.get_trainer_program() == theirs.get_trainer_program()


COMBINATIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"geo_sgd_mode": True, "half_async": True}, "geo_sgd_mode", "half_async"),
    ({"geo_sgd_mode": True, "enable_dc_asgd": True}, "geo_sgd_mode", "enable_dc_asgd"),
    ({"geo_sgd_mode": True, "completely_not_async": True}, "geo_sgd_mode", "completely_not_async"),
    (
        {"geo_sgd_mode": True, "runtime_split_send_recv": True},
        "geo_sgd_mode",
        "runtime_split_send_recv",
    ),
    ({"half_async": True, "enable_dc_asgd": True}, "half_async", "enable_dc_asgd"),
    (
        {"completely_not_async": True, "enable_dc_asgd": True},
        "completely_not_async",
        "enable_dc_asgd",
    ),
    ({"half_async": True, "sync_mode": True}, "half_async", "sync_mode"),
    ({"geo_sgd_mode": True, "sync_mode": True}, "geo_sgd_mode", "sync_mode"),
    ({"enable_dc_asgd": True, "sync_mode": True}, "enable_dc_asgd", "sync_mode"),
    ({"runtime_split_send_recv": True, "sync_mode": True}, "runtime_split_send_recv", "sync_mode"),
    ({"runtime_split_send_recv": True}, "runtime_split_send_recv", "sync_mode"),
    ({"geo_sgd_need_push_nums": 10}, "geo_sgd_need_push_nums", "geo_sgd_mode"),
]


@pytest.mark.parametrize(("settings", "one", "other"), COMBINATIONS)
def test_fields_that_contradict_raise_in_transpile(
    single: Single, settings: dict[str, Any], one: str, other: str
) -> None:
    """Both are named, whichever was assigned first; assignment itself never raises for it."""
    for order in (list(settings), list(reversed(settings))):
        config = DistributeTranspilerConfig()
        for name in order:
            setattr(config, name, settings[name])
        with pytest.raises(ValueError) as raised:
            DistributeTranspiler(config).transpile(0, single[0], TWO, 2, startup_program=single[1])
        assert one in str(raised.value) and other in str(raised.value)


@pytest.mark.parametrize(
    "name", ["half_async", "geo_sgd_mode", "enable_dc_asgd", "runtime_split_send_recv"]
)
def test_an_asynchronous_field_contradicts_transpiles_sync_mode(single: Single, name: str) -> None:
    """sync_mode=True given to transpile counts as one in the configuration; False agrees with
    each.
    """
    with pytest.raises(ValueError, match=f"{name}=True contradicts sync_mode=True"):
        transpiled(single, sync_mode=True, **{name: True})
    assert (
        plan_in(transpiled(single, sync_mode=False, **{name: True}).get_trainer_program()).mode
        != "sync"
    )


@pytest.mark.processes
def test_the_transpiler_imports_no_network_threads_or_clock() -> None:
    """Importing the distribute room loads neither grpc nor this project's server and trainer
    packages.
    """
    code = (
        "import sys, transpiler.distribute;"
        "print([m for m in sys.modules if m.split('.')[0] in ('grpc', 'pyarrow', 'pserver', "
        "'trainer')])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert answer.stdout.strip() == "[]"


def test_clip_data_of_a_plan_is_that_of_the_program() -> None:
    """A global-norm clip is read from the program's ops, not from the optimizer or the user."""
    program = captured(ClipGradByGlobalNorm(3.0))[0]
    assert plan_program(program, mode="sync", trainers=2, servers=1).clip == Clip(
        "global_norm", 3.0
    )
