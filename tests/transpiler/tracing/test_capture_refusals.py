"""What cannot be captured says so, and where."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.captures import line_of
from tests.support.models import classify, rows, sgd
from tests.support.unusual_models import bare
from transpiler import capture, data

HERE = Path(__file__).name


def data_dependent_branch(model, x, y):
    loss = F.cross_entropy(model(x), y)
    if loss > 1:  # the line
        loss = loss * 2
    return loss


def data_dependent_number(model, x, y):
    loss = F.cross_entropy(model(x), y)
    return loss * loss.item()  # the line


def data_dependent_size(model, x, y):
    picked = x[y > 0]  # the line
    return model(picked).mean()


def branch_on_batch_size(model, x, y):
    loss = F.cross_entropy(model(x), y)
    if x.shape[0] > 16:  # the line
        loss = loss * 2
    return loss


def branch_on_one_row(model, x, y):
    loss = F.cross_entropy(model(x), y)
    if x.shape[0] == 1:  # the line
        loss = loss * 2
    return loss


def branch_on_remainder(model, x, y):
    return F.cross_entropy(model(x), y) * (2 if x.shape[0] % 100 == 0 else 1)  # the line


def loop_over_rows(model, x, y):
    indices = range(x.shape[0])  # the line
    return sum(F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for i in indices)


def plain_length(model, x, y):
    return F.cross_entropy(model(x), y, reduction="sum") / len(x)  # the line


REFUSED = [
    data_dependent_branch,
    data_dependent_number,
    data_dependent_size,
    branch_on_batch_size,
    branch_on_one_row,
]
REFUSED += [branch_on_remainder, loop_over_rows, plain_length]


@pytest.mark.parametrize("step", REFUSED, ids=lambda step: step.__name__)
def test_what_depends_on_data_or_size_names_its_line(step):
    """Control flow and sizes that depend on data, branches on the batch size: a ValueError that
    names the line of the step.
    """
    model = nn.Linear(6, 3)
    with pytest.raises(ValueError, match="cannot capture|must stay free") as caught:
        capture(model, step, sgd(model), rows(6)(8))
    assert str(caught.value).startswith(line_of(step, "# the line"))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(x)[0][-1])


def test_time_in_dimension_0_leaves_the_batch_fixed():
    """In a sequence-first layout dimension 0 is time, which is free; then the targets cannot be: a
    ValueError that names the line and the input.  With the free sizes named it is captured.
    """
    model = TimeFirst()
    with pytest.raises(ValueError, match="dimension 0 of the input 'y'") as caught:
        capture(model, classify, sgd(model), (torch.randn(5, 2, 4), torch.randint(0, 3, (2,))))
    assert str(caught.value).startswith(line_of(classify, "cross_entropy"))
    specs = (data("x", ["time", "rows", 4]), data("y", ["rows"], "int64"))
    program, _ = capture(model, classify, sgd(model), specs)
    assert program.var("x").shape == ("time", "rows", 4)


def test_checkpointing_with_dropout_is_refused():
    """Checkpointing draws its dropout mask twice in a captured graph: the rehearsal finds it and
    names the first variable.
    """
    from torch.utils.checkpoint import checkpoint

    body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    model = bare(
        lambda s, x: s.out(checkpoint(s.body, x, use_reentrant=False)),
        body=body,
        out=nn.Linear(6, 3),
    )
    with pytest.raises(ValueError, match=r"body.0.weight@GRAD differs .* checkpointing"):
        capture(model, classify, sgd(model), rows(6)(8))


def test_state_outside_tensors_is_refused():
    """A counter in Python, a draw from Python's random, a tensor that nobody registered: each is
    refused, naming it.
    """

    def counting(self, x):
        self.calls += 1
        return self.out(x) * self.calls

    drifting = torch.zeros(3)

    def unregistered(model, x, y):
        return F.cross_entropy(model(x) * drifting.add_(1), y)

    def drawing(model, x, y):
        return F.cross_entropy(model(x), y) * random.choice([1.0, 2.0])

    counter = bare(counting, out=nn.Linear(6, 3), calls=0)
    with pytest.raises(ValueError, match="attribute calls at every call"):
        capture(counter, classify, sgd(counter), rows(6)(4))
    assert counter.calls == 0
    model = nn.Linear(6, 3)
    with pytest.raises(ValueError, match=rf"{HERE}:\d+: .*register it as a buffer"):
        capture(model, unregistered, sgd(model), rows(6)(4))
    with pytest.raises(ValueError, match="draws from random"):
        capture(model, drawing, sgd(model), rows(6)(4))


def test_a_hook_that_changes_gradients_is_refused():
    """A hook on a parameter changes what eager training applies; the rehearsal names the gradient
    that differs.
    """
    model = nn.Linear(6, 3)
    model.weight.register_hook(lambda grad: grad * 2)
    with pytest.raises(ValueError, match="weight@GRAD differs"):
        capture(model, classify, sgd(model), rows(6)(4))


def test_errors_of_the_step_itself_stay_what_they_are():
    """A step that fails eagerly fails in capture with the same exception."""
    model = nn.Linear(6, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        capture(model, classify, sgd(model), rows(5)(4))
