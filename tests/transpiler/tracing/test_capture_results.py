"""What capture takes and returns: arguments, roles, ops, names, default programs."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.captures import line_of, same, schedule
from tests.support.models import classify, convolution, frozen, rows, sgd
from tests.support.unusual_models import one_gradient_for_two
from trainer import Executor
from transpiler import (
    ClipGradByGlobalNorm,
    capture,
    default_main_program,
    default_startup_program,
    name,
    name_scope,
    program_guard,
)
from transpiler.ir.graph import Role


def test_arguments_that_do_not_fit_raise():
    """Foreign parameters, a foreign scheduler, a wrong example and a step without loss are each
    refused in plain words.
    """
    model, stranger = nn.Linear(6, 3), nn.Linear(2, 2)
    batch = rows(6)(4)
    both = torch.optim.SGD([*model.parameters(), *stranger.parameters()], lr=0.1)
    with pytest.raises(
        ValueError, match="parameter 2 of the optimizer's group 0, of shape \\(2, 2\\)"
    ):
        capture(model, classify, both, batch)
    with pytest.raises(ValueError, match="scheduler of the optimizer"):
        capture(model, classify, sgd(model), batch, scheduler=schedule(sgd(model)))
    with pytest.raises(ValueError, match="parameters \\(x, y\\), got 1 tensors"):
        capture(model, classify, sgd(model), batch[:1])
    with pytest.raises(TypeError, match="tuple of tensors"):
        capture(model, classify, sgd(model), batch[0])
    with pytest.raises(ValueError, match="scalar loss.*\\(4, 3\\)"):
        capture(model, lambda m, x, y: m(x), sgd(model), batch)
    with pytest.raises(ValueError, match="key 'loss'"):
        capture(model, lambda m, x, y: {"l": m(x).mean()}, sgd(model), batch)
    with pytest.raises(ValueError, match="depends on a trainable parameter"):
        capture(model, lambda m, x, y: x.mean(), sgd(model), batch)
    with pytest.raises(TypeError, match="ClipGradBy"):
        capture(model, classify, sgd(model), batch, grad_clip=1.0)
    with pytest.raises(ValueError, match="LBFGS"):
        capture(model, classify, torch.optim.LBFGS(model.parameters()), batch)


def test_capture_changes_nothing():
    """Module, gradients, optimizer and random generators are after capture as they were before."""
    model, step, make_optimizer, batch = convolution()
    optimizer, example = make_optimizer(model), batch(4)
    step(model, *example).backward()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    grads = [(parameter.grad, parameter.grad.clone()) for parameter in model.parameters()]
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    fed = [tensor.clone() for tensor in example]
    capture(model, step, optimizer, example)
    assert not same(before, model.state_dict())
    assert all(
        p.grad is grad and torch.equal(grad, copied)
        for p, (grad, copied) in zip(model.parameters(), grads, strict=True)
    )
    assert torch.equal(torch_state, torch.get_rng_state()) and python_state == random.getstate()
    assert not optimizer.state and all(torch.equal(a, b) for a, b in zip(example, fed, strict=True))


def test_roles_and_ops_of_a_program():
    """Trained parameters, frozen ones, inputs, gradients and states carry their roles; updates
    follow the optimizer's order.
    """
    model, step, make_optimizer, batch = frozen()
    program, startup = capture(
        model, step, make_optimizer(model), batch(4), grad_clip=ClipGradByGlobalNorm(1.0)
    )
    roles = {variable.name: variable.role for variable in program.main.variables.values()}
    assert roles["stem.weight"] is Role.BUFFER and roles["head.weight"] is Role.PARAMETER
    assert (
        roles["x"] is Role.INPUT
        and roles["loss"] is Role.OUTPUT
        and "stem.weight@GRAD" not in roles
    )
    assert roles["head.weight@GRAD"] is Role.GRADIENT and roles["head.weight@exp_avg"] is Role.STATE
    updates = [op for op in program.main.ops if op.type == "adam"]
    assert [op.outputs[0] for op in updates] == [
        "head.weight",
        "head.bias",
        "body.weight",
        "body.bias",
    ]
    assert [op.arguments["group"] for op in updates] == [0, 0, 1, 1]
    assert [op.arguments["lr"] for op in updates] == [0.05, 0.05, 0.01, 0.01]
    types = [op.type for op in program.main.ops]
    assert types.index("global_norm_scale") < types.index("scale_by") < types.index("adam")
    assert {op.type for op in startup.main.ops} == {"init"}
    assert program.main.variables["x"].shape == ("batch", 6) and program.main.variables[
        "y"
    ].shape == ("batch",)


def test_parameters_without_gradient_and_outside_the_optimizer_are_not_updated():
    """A parameter that no loss reaches gets no op; one that no group holds is a buffer to the
    program.
    """
    model = nn.ModuleDict(
        {"used": nn.Linear(6, 3), "unused": nn.Linear(2, 2), "outside": nn.Linear(6, 3)}
    )
    optimizer = torch.optim.SGD(
        [*model["used"].parameters(), *model["unused"].parameters()], lr=0.1
    )
    program, _ = capture(
        model, lambda m, x: (m["used"](x) * m["outside"](x)).mean(), optimizer, (torch.randn(4, 6),)
    )
    assert [op.outputs[0] for op in program.main.ops if op.type == "sgd"] == [
        "used.weight",
        "used.bias",
    ]
    assert program.main.variables["outside.weight"].role is Role.BUFFER
    assert (
        "unused.weight@GRAD" not in program.main.variables
        and "outside.weight@GRAD" not in program.main.variables
    )


def test_equal_gradients_have_two_names():
    """Two parameters with one gradient tensor: the second name is given by an assign op."""
    model, step, make_optimizer, batch = one_gradient_for_two()
    program, _ = capture(model, step, make_optimizer(model), batch(4))
    assert {"a@GRAD", "b@GRAD"} <= set(program.main.variables)
    assert any(op.type == "assign" and op.outputs[0].endswith("@GRAD") for op in program.main.ops)


def test_named_tensors_can_be_fetched():
    """name() inside a step makes a tensor fetchable, under its scopes; outside capture it returns
    the tensor as it is.
    """

    def step(model, x, y):
        with name_scope("block1"):
            hidden = name(torch.relu(model[0](x)), "hidden")
        return F.cross_entropy(name(model[1](hidden), "logits"), y)

    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    program, _ = capture(model, step, sgd(model), rows(6)(4))
    x, y = rows(6)(7)
    expected = torch.relu(model[0](x))
    logits = model[1](expected)
    with Executor() as executor:
        fetched = executor.run(program, feed=(x, y), fetch_list=["block1/hidden", "logits"])
    assert torch.equal(fetched[0], expected) and torch.equal(fetched[1], logits)
    tensor = torch.ones(1)
    assert name(tensor, "anything") is tensor

    def twice(model, x, y):
        return F.cross_entropy(name(model(name(x + 1, "same")), "same"), y)

    linear = nn.Linear(6, 3)
    with pytest.raises(ValueError, match="'same' is already given"):
        capture(linear, twice, sgd(linear), rows(6)(4))


def test_default_programs_are_those_of_the_last_capture_or_guard():
    """capture sets the default programs; program_guard scopes them, whatever is captured inside."""
    model = nn.Linear(6, 3)
    first = capture(model, classify, sgd(model), rows(6)(4))
    assert (
        default_main_program(),
        default_startup_program(),
    ) == first and default_main_program() is first[0]
    second = capture(model, classify, sgd(model), rows(6)(4))
    with program_guard(*first):
        assert default_main_program() is first[0] and default_startup_program() is first[1]
        capture(model, classify, sgd(model), rows(6)(4))
    assert default_main_program() is second[0]


def test_two_captures_of_one_script_are_the_same_program():
    """The same module, step and example give the same fingerprint, op for op; another learning rate
    another one.
    """

    def build(lr: float):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.1), nn.Linear(5, 3))
        return capture(model, classify, torch.optim.SGD(model.parameters(), lr=lr), rows(6)(4))[0]

    assert build(0.1).fingerprint() == build(0.1).fingerprint() != build(0.2).fingerprint()


def test_ops_know_the_line_of_the_step():
    """Ops of the forward pass, and those of the backward pass that belong to them, carry the user's
    line.
    """
    model = nn.Linear(6, 3)
    program, _ = capture(model, classify, sgd(model), rows(6)(4))
    lines = {op.type: op.location for op in program.main.ops}
    expected = line_of(classify, "return")
    assert (
        lines["aten.addmm"]
        == lines["aten.nll_loss_forward"]
        == lines["aten.nll_loss_backward"]
        == expected
    )


def test_steps_behind_a_star_have_numbered_inputs():
    """A step(model, *batch) names its inputs input_0, input_1."""
    model = nn.Linear(6, 3)
    program, _ = capture(
        model, lambda m, *batch: F.cross_entropy(m(batch[0]), batch[1]), sgd(model), rows(6)(4)
    )
    assert [variable.name for variable in program.main.variables_of(Role.INPUT)] == [
        "input_0",
        "input_1",
    ]
