"""From one captured program to a trainer's and the servers' programs, op by op."""

import subprocess
import sys
from typing import Any

import pytest

from tests.support.distributed import ONE, THREE, TWO, Single, plan_in, transpiled, types
from transpiler.distribute import plan_parameters, pserver_program
from transpiler.ir.graph import Ref, Role
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment


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
            for name, endpoint in zip(op.inputs, op.arguments["endpoints"], strict=True):
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
