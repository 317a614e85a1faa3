"""The calls of a transpiler, what each switch does to its programs, and what stays as it is."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.support.distributed import (
    THREE,
    TWO,
    Single,
    captured,
    plan_in,
    programs_of,
    transpiled,
    types,
)
from transpiler import DistributeTranspiler, HashName, SizeBalanced, program_guard
from transpiler.clip import ClipGradByGlobalNorm
from transpiler.distribute import (
    plan_parameters,
    plan_program,
    pserver_program,
    pserver_startup,
)
from transpiler.ir.graph import Role, Storage
from transpiler.ir.ops import check
from transpiler.ir.rules import Rule
from transpiler.plan.placement import SliceSize
from transpiler.plan.plan import Deployment
from transpiler.verify.untrusted import check_server_program


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
