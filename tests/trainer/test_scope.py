"""Scopes: tensors by name, and two copies of a program's values side by side."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer import (
    DistributedEmbedding,
    Executor,
    Scope,
    create_global_var,
    global_scope,
    scope_guard,
)
from trainer.compat.scope import PROCESS_SCOPE
from transpiler import DistributeTranspiler, Program, capture


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def step(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, generator=generator) for _ in range(count)]


def captured(model: nn.Module) -> tuple[Program, Program]:
    return capture(model, step, adam(model), (batches(1)[0],))


def trained(model: nn.Module, steps: int) -> dict[str, Tensor]:
    """What plain torch trains."""
    optimizer = adam(model)
    for x in batches(steps):
        optimizer.zero_grad()
        step(model, x).backward()
        optimizer.step()
    return {name: each.detach() for name, each in model.state_dict().items()}


def values(scope: Scope) -> dict[str, Tensor]:
    return {name: scope.find_var(name).get_tensor() for name in scope.names()}


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def test_the_global_scope_finds_the_modules_tensors() -> None:
    """What an Executor trains is read by name, and what is set there is what it goes on from."""
    model, other = net(), net()
    main, startup = captured(model)
    with Executor() as executor:
        executor.run(startup)
        weight = global_scope().find_var("0.weight")
        executor.run(main, (batches(1)[0],))
        trained(other, 1)

        assert torch.equal(weight.get_tensor(), other[0].weight)
        weight.set([[1, 2, 3]] * 4)
        (seen,) = executor.run(main.clone(for_test=True), (batches(1)[0],), ["0.weight"])

    assert seen.tolist() == model[0].weight.tolist() == [[1.0, 2.0, 3.0]] * 4


def test_the_global_scope_keeps_no_module_alive() -> None:
    """A name goes with the tensor that it stands for."""
    model: Any = nn.Linear(3, 1)
    model.register_parameter("only_here", nn.Parameter(torch.zeros(1)))
    main, startup = captured(model)
    with Executor() as executor:
        executor.run(startup)
        assert "only_here" in global_scope()
    known = weakref.ref(model)
    del model, main, startup, executor
    captured(net())  # which is the default program now
    gc.collect()

    assert known() is None
    assert "only_here" not in global_scope()


def test_two_copies_of_a_program_train_side_by_side() -> None:
    """Each has its own values, buffers and optimizer state, and equals plain torch to the bit; the
    module stays as it was.
    """
    model = net()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    main, startup = captured(model)
    scopes = [Scope(), Scope()]
    with Executor() as executor:
        for scope in scopes:
            with scope_guard(scope):
                executor.run(startup)
        for index, x in enumerate(batches(4)):
            for scope, steps in zip(scopes, (4, 2), strict=True):
                if index < steps:
                    with scope_guard(scope):
                        executor.run(main, (x,))

    assert_equal(values(scopes[0]), trained(net(), 4))
    assert_equal(values(scopes[1]), trained(net(), 2))
    assert_equal(dict(model.state_dict()), before)


def test_a_startup_program_begins_again() -> None:
    """Run once more, it gives a scope the module's values of that time, without optimizer state."""
    model = net()
    main, startup = captured(model)
    scope = Scope()
    with Executor() as executor, scope_guard(scope):
        for steps in (3, 1):
            executor.run(startup)
            for x in batches(steps):
                executor.run(main, (x,))

    assert_equal(values(scope), trained(net(), 1))


def test_a_scopes_program_is_evaluated_and_saved(tmp_path: Path) -> None:
    """Over the values of the scope, which the programs of one capture share; a checkpoint too."""
    model = net()
    main, startup = captured(model)
    scope, (x,) = Scope(), batches(1)
    with Executor() as executor, scope_guard(scope):
        executor.run(startup)
        executor.run(main, (x,))
        (there,) = executor.run(main.clone(for_test=True), (x,), ["loss"])
        scope.program(main).save(tmp_path / "program")
        executor.save(str(tmp_path / "checkpoint"), main)
        held = {name: value.clone() for name, value in values(scope).items()}
        executor.run(main, (x,))
        assert not torch.equal(values(scope)["0.weight"], held["0.weight"])
        executor.load(str(tmp_path / "checkpoint"), main)
        assert_equal(values(scope), held)
    other = net()
    loaded = Program.load(tmp_path / "program").storage
    trained(other, 1)

    assert torch.equal(there, step(other.eval(), x))
    assert loaded is not None
    assert torch.equal(loaded.tensors["0.weight"], other[0].weight)
    assert global_scope().program(main) is main


def test_a_program_without_values_takes_those_of_the_scope() -> None:
    """It trains the variables that the script has made, in each scope its own."""
    model = nn.Linear(3, 1, bias=False)
    main, _ = capture(model, step, torch.optim.SGD(model.parameters(), 0.1), (batches(1)[0],))
    bare, scopes = Program.from_proto(main.to_proto()), [Scope(), Scope()]
    with Executor() as executor:
        for scope, value in zip(scopes, (1.0, 2.0), strict=True):
            with scope_guard(scope):
                create_global_var([1, 3], value, "float32", name="weight")
                executor.run(bare, (torch.ones(5, 3),))
        with pytest.raises(ValueError, match="holds no value for 'weight'; run its startup"):
            executor.run(bare, (torch.ones(5, 3),))
        with scope_guard(Scope()):
            create_global_var([3, 1], 1.0, "float32", name="weight")
            with pytest.raises(ValueError, match=r"'weight': expected float32\[1, 3\], got .*3, 1"):
                executor.run(bare, (torch.ones(5, 3),))
    found = [scope.find_var("weight").get_tensor() for scope in scopes]

    assert found[0].allclose(torch.tensor(0.4)) and found[1].allclose(torch.tensor(0.8))


def test_a_server_begins_with_the_values_of_its_scope() -> None:
    """Its startup program binds them there, and nowhere else."""
    model = nn.Linear(3, 1)
    main, startup = capture(model, step, torch.optim.SGD(model.parameters(), 0.1), batches(1))
    transpiler, scope = DistributeTranspiler(), Scope()
    transpiler.transpile(0, main, "127.0.0.1:1", 1, startup_program=startup)
    serves, begins = transpiler.get_pserver_programs("127.0.0.1:1")
    with Executor() as executor:
        with scope_guard(scope):
            executor.run(begins)
        with pytest.raises(ValueError, match="the server holds no value for 'weight'"):
            executor.run(serves)

    assert_equal(values(scope), dict(model.state_dict()))


def test_a_scope_guard_is_its_threads() -> None:
    """Another thread goes on in the global scope; guards nest."""
    outer, inner = Scope(), Scope()
    with ThreadPoolExecutor(1) as pool, scope_guard(outer):
        with scope_guard(inner):
            assert global_scope() is inner
            assert pool.submit(global_scope).result() is PROCESS_SCOPE
        assert global_scope() is outer
    assert global_scope() is PROCESS_SCOPE


def test_the_global_scope_inside_a_guard_is_the_guards() -> None:
    """What a script puts there, and what programs hold there, is found and set in it."""
    model = net()
    main, startup = captured(model)
    scope, before = Scope(), {name: each.clone() for name, each in model.state_dict().items()}
    with Executor() as executor, scope_guard(scope):
        create_global_var([2], 0.5, "float32", name="data")
        executor.run(startup)
        global_scope().find_var("0.weight").set([[1, 2, 3]] * 4)
        (seen,) = executor.run(main.clone(for_test=True), (batches(1)[0],), ["0.weight"])
        assert global_scope().find_var("data").get_tensor().tolist() == [0.5, 0.5]

    assert seen.tolist() == [[1.0, 2.0, 3.0]] * 4
    assert scope.find_var("data").get_tensor().tolist() == [0.5, 0.5]
    assert_equal(dict(model.state_dict()), before)
    assert "data" not in global_scope()


def test_what_a_scope_cannot_hold_is_refused() -> None:
    """Rows of tables are their module's, a trainer's values its job's; without a startup program
    there are none.
    """
    main, startup = captured(net())
    table = DistributedEmbedding(1, num_embeddings=3)
    looks, begins = capture(table, step, adam(table), (torch.tensor([1, 2]),))
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, main, "127.0.0.1:1", 1, startup_program=startup)
    with Executor() as executor, scope_guard(Scope()):
        with pytest.raises(ValueError, match="run its startup program in this scope first"):
            executor.run(main, (batches(1)[0],))
        with pytest.raises(ValueError, match="expected the global scope for a program with table"):
            executor.run(begins)
        with pytest.raises(ValueError, match="expected the global scope for a program with table"):
            executor.run(looks, (torch.tensor([1]),))
        with pytest.raises(ValueError, match="expected the global scope for a trainer's program"):
            executor.run(transpiler.get_trainer_program(), (batches(1)[0],))
    with pytest.raises(TypeError, match="scope_guard: expected a Scope, got dict"), scope_guard({}):  # type: ignore[arg-type]  # refused
        pass


def test_unknown_names_and_wrong_values_are_errors() -> None:
    """The message names what is close, or what was expected."""
    scope = Scope()
    with pytest.raises(ValueError, match="no variable 'x'; close names: none"):
        scope.find_var("x")
    with scope_guard(scope):
        create_global_var([2], 1, "int64", name="counter")
        with pytest.raises(ValueError, match="name: 'counter' is a variable of this scope already"):
            create_global_var([2], 1, "int64", name="counter")
    variable = scope.find_var("counter")
    with pytest.raises(ValueError, match="no variable 'count'; close names: counter"):
        scope.find_var("count")
    with pytest.raises(TypeError, match="find_var: expected a name, got 3"):
        scope.find_var(3)  # type: ignore[arg-type]  # refused
    with pytest.raises(ValueError, match=r"'counter': expected the shape \[2\], got \[3\]"):
        variable.set([1, 2, 3])
    with pytest.raises(TypeError, match="'counter': expected a tensor, got 'one'"):
        variable.set("one")
    variable.set(torch.tensor([4.0, 5.0]))

    assert scope.find_var("counter").get_tensor().tolist() == [4, 5]
