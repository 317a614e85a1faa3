"""Programs of half-async, geo, DiLoCo and delay-compensated lanes, and of several in one job."""

import pytest

from tests.support.distributed import Single, captured, types
from transpiler.clip import ClipGradByGlobalNorm
from transpiler.distribute import plan_program, pserver_program, trainer_program
from transpiler.ir.graph import Op, Ref, Role
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment, Lane
from transpiler.plan.planner import LanePlan, uniform
from transpiler.program import Program
from transpiler.verify.untrusted import check_server_program


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
