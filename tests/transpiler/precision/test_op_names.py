"""Which op a name of the user's lists means."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from transpiler import DistributedStrategy
from transpiler.precision.ops import COUNTERPARTS, is_in_place, known_op, op_name, precision_of


def test_a_function_a_method_and_an_overload_are_one_op() -> None:
    """So are operators, and their exchanged forms."""
    softmaxes = (torch.softmax, F.softmax, torch.Tensor.softmax, torch.ops.aten._softmax.default)
    assert {op_name(each) for each in softmaxes} == {"softmax"}
    assert op_name(torch.Tensor.__rmatmul__) == op_name(torch.matmul) == "matmul"
    assert op_name(torch.Tensor.shape.__get__) == ""
    assert is_in_place(torch.Tensor.relu_) and not is_in_place(torch.Tensor.__matmul__)


def test_the_originals_names_have_counterparts() -> None:
    """Each of which torch knows."""
    for name, own in COUNTERPARTS.items():
        assert known_op("list", name) == known_op("list", own) == own


def test_an_unknown_op_is_refused_with_close_ones() -> None:
    """The message names the list."""
    strategy = DistributedStrategy()
    strategy.amp, strategy.amp_configs = True, {"custom_white_list": ["sofmax"]}
    with pytest.raises(ValueError, match=r"custom_white_list'\]: expected .* 'sofmax'.* softmax"):
        precision_of(strategy)


def test_an_op_in_both_lists_is_refused() -> None:
    """Also by the original's name for it."""
    strategy = DistributedStrategy()
    strategy.amp_configs = {"custom_white_list": ["fc"], "custom_black_list": ["linear"]}
    with pytest.raises(ValueError, match="linear: expected in custom_white_list or in"):
        precision_of(strategy)
