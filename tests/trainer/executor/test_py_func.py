"""Python code as an op of a program: on trainers, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from trainer import Executor, export_program, save_inference_model
from transpiler import (
    DistributeTranspiler,
    Op,
    Program,
    append_backward,
    capture,
    py_func,
)
from transpiler.ir.graph import Ref
from transpiler.ir.ops import check
from transpiler.ir.python_functions import register
from transpiler.verify.pserver import only_server_ops
from transpiler.verify.untrusted import check_server_program


def cube(x: Tensor) -> Any:
    return np.power(x.numpy(), 3)


def cube_grad(x: Tensor, y: Tensor, dy: Tensor) -> Tensor:
    return dy * 3 * x * x


def peaks(x: Tensor, y: Tensor) -> tuple[Any, ...]:
    return x, y.numpy() > 0.5


def step(model: nn.Module, x: Tensor) -> Tensor:
    """A function with gradients, and two results of one without."""
    hidden = model(x)
    cubes = py_func(cube, hidden, out=hidden, backward_func=cube_grad)
    flags = torch.empty(cubes.shape, dtype=torch.bool)
    same, high = py_func(peaks, [hidden, cubes], out=[hidden, flags])
    return (cubes * high).sum() + (same * hidden).sum()


def forward(model: nn.Module, x: Tensor) -> Tensor:
    hidden = model(x)
    out: Tensor = py_func(cube, hidden, out=hidden)
    return out + hidden


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, generator=generator) for size in (4, 1, 7)]


def trained() -> nn.Module:
    """What eager code trains."""
    model = net()
    optimizer = sgd(model)
    for x in batches():
        optimizer.zero_grad()
        step(model, x).backward()
        optimizer.step()
    return model


def captured() -> tuple[nn.Module, Program, Program]:
    model = net()
    return model, *capture(model, step, sgd(model), (batches()[0],))


def assert_equal(mine: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_program_calls_python_code() -> None:
    """It prints the functions' names, and equals eager training to the bit at other sizes."""
    model, main, startup = captured()
    with Executor() as executor:
        executor.run(startup)
        for x in batches():
            executor.run(main, (x,))
        (loss,) = executor.run(main.clone(for_test=True), (batches()[0],), ["loss"])

    assert_equal(model, trained())
    assert torch.equal(loss, step(model, batches()[0]))
    assert "py_func_0    = py_func('cube', [addmm], [addmm])" in str(main)
    assert str(main).count("py_func('") == 3
    assert Program.from_proto(main.to_proto()) == main


def test_a_trainer_calls_it_and_a_server_does_not(servers: Callable[[int], str]) -> None:
    """A job with servers trains as one process does; the servers' programs have no such op."""
    model, main, startup = captured()
    transpiler, endpoints = DistributeTranspiler(), servers(1)
    transpiler.transpile(0, main, endpoints, 1, startup_program=startup)
    with Executor() as executor:
        executor.run(transpiler.get_startup_program())
        for x in batches():
            executor.run(transpiler.get_trainer_program(), (x,))
    served = transpiler.get_pserver_program(endpoints)

    assert_equal(model, trained())
    assert not [op for block in served.blocks for op in block.ops if op.type == "py_func"]


def test_a_server_refuses_it() -> None:
    """Both where programs are made and where they come from somebody else; it says why."""
    _, main, startup = captured()
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, main, "127.0.0.1:1", 1, startup_program=startup)
    served = transpiler.get_pserver_program("127.0.0.1:1")
    block = served.blocks[1]
    name = block.ops[0].inputs[0]
    call = Op("py_func", {"func": "cube", "x": (Ref(name),), "like": (Ref(name),)}, (name,))
    wrong = served.with_blocks(
        served.main, replace(block, ops=(call, *block.ops)), *served.blocks[2:]
    )
    assert wrong.deployment is not None
    (found,) = only_server_ops(wrong, wrong.deployment.plan)

    assert "servers do not run this op: it calls Python code" in found.why
    with pytest.raises(ValueError, match="a server: op 'py_func' of 'cube'.*calls Python code"):
        check_server_program(wrong)


def test_a_file_holds_no_code(tmp_path: Path) -> None:
    """Neither saving nor loading makes a program of a name alone; the line of the step is told."""
    _, main, _ = captured()
    model = net()
    asks, _ = capture(model, forward, example=(batches()[0],))
    message = r"op 'py_func' of 'cube' \(test_py_func\.py:\d+\): .* it calls Python code"
    with pytest.raises(ValueError, match=f"Program.save: {message}"):
        main.save(tmp_path / "program")
    with Executor() as executor, pytest.raises(ValueError, match=message):
        save_inference_model(tmp_path / "model", ["x"], ["output"], executor, asks)
    with pytest.raises(ValueError, match=f"export_program: {message}"):
        export_program(asks)

    assert list(tmp_path.iterdir()) == []


def test_another_process_does_not_know_the_function() -> None:
    """Its program has a name that stands for nothing there."""
    model = net()
    main, _ = capture(model, forward, example=(batches()[0],))
    ops = [
        replace(op, arguments={**op.arguments, "func": "elsewhere"}) if op.type == "py_func" else op
        for op in main.main.ops
    ]
    strange = main.with_blocks(replace(main.main, ops=tuple(ops)))
    with Executor() as executor, pytest.raises(ValueError, match="expected the function 'elsewh"):
        executor.run(strange, (batches()[0],))


def test_what_has_no_backward_gives_no_gradient() -> None:
    """What comes before such an op learns by other ways only, as eager."""
    model, plain = net(), net()
    main, _ = capture(model, lambda model, x: forward(model, x).sum(), sgd(model), (batches()[0],))
    with Executor() as executor:
        executor.run(main, (batches()[0],))
    optimizer = sgd(plain)
    forward(plain, batches()[0]).sum().backward()
    optimizer.step()

    assert_equal(model, plain)


def test_a_backward_part_is_added_where_gradients_are_ops() -> None:
    """A forward program with a backward function in Python is captured with an optimizer."""

    def differentiated(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model(x)
        out: Tensor = py_func(cube, hidden, out=hidden, backward_func=cube_grad)
        return out.sum()

    program, _ = capture(net(), differentiated, example=(batches()[0],))
    with pytest.raises(ValueError, match="calls PyFunc, whose backward is Python code"):
        append_backward(program, "output")


def test_functions_of_one_name_are_told_apart() -> None:
    """The second has a number; the same function has the same name again."""

    def made(number: int) -> Callable[..., Any]:
        def named(x: Tensor) -> Tensor:
            return x + number

        return named

    one, two = made(1), made(2)
    first = register(one)

    assert first.endswith("made.<locals>.named")
    assert [register(two), register(one), register(two)] == [f"{first}#2", first, f"{first}#2"]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (x, x), "expected 1 results, got 2"),
        (lambda x: x[0], r"result 0: expected torch.float32 \[4, 2\], got torch.float32 \[2\]"),
        (lambda x: x.double(), r"expected torch.float32 \[4, 2\], got torch.float64"),
        (lambda x: "x", "expected a tensor or an array, got str"),
    ],
)
def test_other_results_than_said_are_an_error(function: Any, message: str) -> None:
    """In eager code, and so in capture, which runs it."""
    x = torch.ones(4, 2)
    with pytest.raises(ValueError, match=f"py_func: .*{message}"):
        py_func(function, x, out=x)
    with pytest.raises(ValueError, match=f"py_func: .*{message}"):
        capture(nn.Identity(), lambda model, x: py_func(function, x, out=x), example=(x,))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"func": "cube"}, TypeError, "func: expected a function, got 'cube'"),
        ({"backward_func": 1}, TypeError, "backward_func: expected a function, got 1"),
        ({"x": 1}, TypeError, "x: expected a tensor or several, got 1"),
        ({"out": None}, TypeError, "out: expected a tensor or several, got None"),
        ({"x": []}, ValueError, "x: expected a tensor or several, got none"),
        ({"out": ()}, ValueError, "out: expected a tensor or several, got none"),
    ],
)
def test_wrong_arguments_are_errors(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The message names the argument."""
    x = torch.ones(1)
    with pytest.raises(error, match=f"py_func: {message}"):
        py_func(**{"func": cube, "x": x, "out": x, **given})


def test_an_op_has_a_result_for_each_of_like() -> None:
    """A program that comes as a message is checked."""
    like = (Ref("x"), Ref("x"))
    with pytest.raises(ValueError, match="argument 'like': expected 1, one a result, got 2"):
        check(Op("py_func", {"func": "cube", "x": (Ref("x"),), "like": like}, ("y",)))
