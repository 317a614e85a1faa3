"""Startup programs: whose values the servers and the trainers begin with."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.support.distributed import THREE, Single, captured, plan_in, transpiled, types
from transpiler import DistributeTranspiler, program_guard
from transpiler.distribute import plan_parameters, pserver_program, pserver_startup
from transpiler.ir.graph import Role, Storage
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Deployment
from transpiler.program import Program


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
