"""Parameters and variables that a script makes itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from trainer import Constant, Scope, create_global_var, create_parameter, scope_guard
from transpiler import L2Decay, ParamAttr, parameter_groups


def test_a_parameter_begins_as_its_attribute_says() -> None:
    """Then as the default says, then with Xavier's values, a bias with 0."""
    torch.manual_seed(0)
    drawn = create_parameter([30, 10])
    limit = (6 / 40) ** 0.5

    assert isinstance(drawn, nn.Parameter) and drawn.requires_grad
    assert 0.9 * limit < float(drawn.detach().abs().max()) <= limit
    assert create_parameter([2], is_bias=True).tolist() == [0.0, 0.0]
    assert create_parameter([2], default_initializer=Constant(3)).tolist() == [3.0, 3.0]
    both = create_parameter([1], attr=ParamAttr(initializer=nn.init.ones_), default_initializer=max)
    assert both.tolist() == [1.0]
    assert create_parameter([], "float64").dtype is torch.float64
    assert not create_parameter([1], attr=ParamAttr(trainable=False)).requires_grad


def test_a_parameters_attribute_makes_its_group() -> None:
    """A pattern of the call comes first."""
    model = nn.Linear(2, 1)
    slow = ParamAttr(learning_rate=0.5, regularizer=L2Decay(0.1))
    model.weight = create_parameter([1, 2], attr=slow)
    (first, second) = parameter_groups(model, learning_rate=1.0)

    assert (first["params"], first["lr"], first["weight_decay"]) == ([model.weight], 0.5, 0.1)
    assert second == {"params": [model.bias], "lr": 1.0}
    (only,) = parameter_groups(model, [ParamAttr("*")], learning_rate=1.0)
    assert only["lr"] == 1.0


def test_a_named_parameter_is_in_the_scope() -> None:
    """Under its name, or that of its attribute; it is the parameter itself."""
    scope = Scope()
    with scope_guard(scope):
        one = create_parameter([2], name="one", attr=ParamAttr("other"))
        create_parameter([2], attr=ParamAttr("two"))
        create_parameter([2])
    scope.find_var("one").set([1, 2])

    assert scope.names() == ["one", "two"]
    assert one.tolist() == [1.0, 2.0]


def test_a_global_variable_has_one_value() -> None:
    """And is the tensor that the scope gives."""
    scope = Scope()
    with scope_guard(scope):
        counter = create_global_var([2, 1], 7, torch.int64, name="counter")
    counter += 1

    assert scope.find_var("counter").get_tensor().tolist() == [[8], [8]]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"shape": 3}, TypeError, "shape: expected a list of sizes, got 3"),
        ({"shape": "3"}, TypeError, "shape: expected a list of sizes, got '3'"),
        ({"shape": [None, 3]}, TypeError, "shape: expected whole numbers, got None"),
        ({"shape": [-1, 3]}, ValueError, "shape: expected sizes of 1 or more, got -1"),
        ({"dtype": "float"}, ValueError, "dtype: expected one of .*float32.*, got 'float'"),
        ({"dtype": 3}, TypeError, "dtype: expected a dtype or its name, got 3"),
        ({"name": 3}, TypeError, "name: expected text, got 3"),
        ({"name": ""}, ValueError, "name: expected one that holds no '@', got ''"),
    ],
)
def test_wrong_arguments_are_errors(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Of either call."""
    with scope_guard(Scope()):
        with pytest.raises(error, match=f"create_parameter: {message}"):
            create_parameter(**{"shape": [1], **given})
        with pytest.raises(error, match=f"create_global_var: {message}"):
            create_global_var(**{"shape": [1], "dtype": "int64", "name": "x", **given}, value=1)


def test_what_only_one_call_takes_is_checked() -> None:
    """Parameters are trained, so they are no whole numbers; variables stay in their scope."""
    wrong: Any = {"attr": "x"}
    with pytest.raises(ValueError, match="dtype: expected a floating-point one, got 'int64'"):
        create_parameter([1], "int64")
    with pytest.raises(TypeError, match="attr: expected a ParamAttr or None, got 'x'"):
        create_parameter([1], **wrong)
    with pytest.raises(TypeError, match="default_initializer: expected Constant"):
        create_parameter([1], default_initializer=1)  # type: ignore[arg-type]  # refused
    with pytest.raises(TypeError, match="value: expected a number, got '1'"):
        create_global_var([1], "1", "int64", name="x")  # type: ignore[arg-type]  # refused
    with pytest.raises(ValueError, match="persistable: expected True"):
        create_global_var([1], 1, "int64", False, name="x")
