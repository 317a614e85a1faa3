"""A program together with the way in which an Executor runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.collective_trainers import (
    GRAD,
    NCCL2,
    Batch,
    Trainer,
    batches,
    fine,
    ports,
    together,
)
from trainer import CompiledProgram, Executor, Scope, cpu_places, scope_guard
from transpiler import DistributeTranspiler, Program


def single() -> Trainer:
    return Trainer([], 0, {})


def trained(trainer: Trainer, data: list[Batch], main: Any) -> list[Tensor]:
    """The parameters, when a trainer has run its startup program and then this."""
    with Executor() as executor:
        executor.run(trainer.startup)
        for batch in data:
            executor.run(main, batch, ["loss"])
            trainer.schedule.step()
        return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def assert_equal(mine: list[Tensor], theirs: list[Tensor]) -> None:
    assert all(map(torch.equal, mine, theirs))


def test_alone_it_is_the_program() -> None:
    """Also with data parallelism: there is nobody to share with."""
    data = [row[0] for row in batches(1)]
    wanted = trained(plain := single(), data, plain.main)
    for parallel in (False, True):
        trainer = single()
        compiled = CompiledProgram(trainer.main)
        if parallel:
            assert compiled.with_data_parallel("loss", places=cpu_places()) is compiled

        assert_equal(trained(trainer, data, compiled), wanted)


@pytest.mark.parametrize("settings", [NCCL2, GRAD], ids=["nccl2", "grad_allreduce"])
def test_trainers_average_gradients(settings: dict[str, Any]) -> None:
    """As ParallelExecutor does, from trainer 0's values: to the bit the same on both."""
    data = batches(2)
    mine, others = (  # made one after the other, for they draw from one generator
        [Trainer(endpoints, rank, settings) for rank in range(2)]
        for endpoints in (ports(2), ports(2))
    )

    def compiled(rank: int) -> list[Tensor]:
        main = CompiledProgram(mine[rank].main).with_data_parallel("loss")
        return trained(mine[rank], [row[rank] for row in data], main)

    def plain(rank: int) -> list[Tensor]:
        return others[rank].train([row[rank] for row in data], (2, rank))

    first, second = fine(together(2, compiled))
    wanted, _ = fine(together(2, plain))

    assert_equal(first, second)
    assert_equal(first, wanted)


def test_compute_is_compiled_for_this_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program runs beside as it is."""
    seen: list[Any] = []

    def compile(module: Any, **_: Any) -> Any:
        seen.append(module)
        return module

    monkeypatch.setattr(torch, "compile", compile)
    trainer, batch = single(), batches(1)[0][0]
    with Executor() as executor:
        executor.run(trainer.startup)
        executor.run(trainer.main, batch)
        assert not seen
        compiled = CompiledProgram(trainer.main, compile=True)
        (loss,) = executor.run(compiled, batch, ["loss"])
        assert seen
        count = len(seen)
        (after,) = executor.run(trainer.main, batch, ["loss"])

    assert len(seen) == count
    assert after < loss


def test_a_scope_holds_the_values_of_a_compiled_program() -> None:
    """As of any program."""
    trainer = single()
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    compiled = CompiledProgram(trainer.main).with_data_parallel()
    with Executor() as executor, scope_guard(Scope()):
        executor.run(trainer.startup)
        executor.run(compiled, batches(1)[0][0])

    assert_equal(before, list(trainer.model.parameters()))


def test_another_device_than_said_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Executor computes on one device, and the program says on which."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    compiled = CompiledProgram(single().main).with_data_parallel(places=["cuda:1"])
    with Executor("cpu") as executor:
        with pytest.raises(ValueError, match="expected an Executor on cuda:1.* got one on cpu"):
            executor.run(compiled, batches(1)[0][0])
        with pytest.raises(TypeError, match="expected a Program, got CompiledProgram"):
            executor.save("nowhere", compiled)  # type: ignore[arg-type]  # refused


def test_programs_of_one_module_share_their_values() -> None:
    """A clone for tests does; a program of another module is refused."""
    trainer, other = single(), single()
    compiled = CompiledProgram(trainer.main).with_data_parallel("loss")
    tests = CompiledProgram(trainer.main.clone(for_test=True))

    assert tests.with_data_parallel(share_vars_from=compiled) is tests
    with pytest.raises(ValueError, match="share_vars_from: expected a program over the same"):
        CompiledProgram(other.main).with_data_parallel(share_vars_from=compiled)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"loss_name": 3}, TypeError, "loss_name: expected text, got int"),
        ({"loss_name": "los"}, ValueError, "loss_name: .* got 'los'; close names: loss"),
        ({"build_strategy": 3}, TypeError, "build_strategy: expected BuildStrategy, got int"),
        ({"exec_strategy": 1}, TypeError, "execution_strategy: expected ExecutionStrategy, got"),
        ({"share_vars_from": "x"}, TypeError, "share_vars_from: expected a CompiledProgram"),
        ({"places": "cpu"}, TypeError, "places: expected a list of devices, got 'cpu'"),
        ({"places": ["cpu"] * 2}, ValueError, "places: expected one, got 2: a process computes on"),
        ({"places": ["cuda:99"]}, ValueError, "expected a device that exists, got 'cuda:99'"),
    ],
)
def test_wrong_arguments_are_errors(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The message names the argument, and the object can be told again."""
    compiled = CompiledProgram(single().main)
    with pytest.raises(error, match=message):
        compiled.with_data_parallel(**given)
    compiled.with_data_parallel()
    with pytest.raises(ValueError, match="expected to be called once"):
        compiled.with_data_parallel()


def test_what_cannot_be_compiled_is_refused() -> None:
    """Only programs, no server's, and data parallelism without servers."""
    trainer, transpiler = single(), DistributeTranspiler()
    transpiler.transpile(0, trainer.main, "127.0.0.1:1", 1, startup_program=trainer.startup)
    with pytest.raises(TypeError, match="CompiledProgram: expected a Program, got str"):
        CompiledProgram("main")  # type: ignore[arg-type]  # refused
    with pytest.raises(ValueError, match="expected a trainer's program, got a server's"):
        CompiledProgram(transpiler.get_pserver_program("127.0.0.1:1"))
    with pytest.raises(ValueError, match="without servers, got one of mode sync"):
        CompiledProgram(transpiler.get_trainer_program()).with_data_parallel()
    assert isinstance(CompiledProgram(trainer.main).program, Program)
