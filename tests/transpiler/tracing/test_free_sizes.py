"""Which sizes of a step's inputs stay free is said, and holds at every size."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.captures import line_of
from tests.support.models import gpt2, sgd
from trainer import Executor
from transpiler import InputSpec, capture, data
from transpiler.ir.graph import Role


def shapes_of(program) -> dict[str, tuple[int | str, ...]]:
    return {variable.name: variable.shape for variable in program.main.variables_of(Role.INPUT)}


def average(model: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return model((x * mask.unsqueeze(2)).sum(1) / mask.sum(1, keepdim=True)).square().mean()


def test_a_language_model_trains_at_every_length():
    """Batch and length of GPT-2 stay free: loss and every gradient equal eager training to the bit,
    dropout included, at lengths that are not the example's.
    """
    torch.manual_seed(7)
    model, step, optimizer, batch = gpt2()
    spec = InputSpec([None, None], "int64")
    program, _ = capture(model, step, optimizer(model), batch(4), inputs=[spec])

    assert shapes_of(program) == {"ids": ("batch", "ids_1")}
    gradients = [v.name for v in program.main.variables_of(Role.GRADIENT) if v.of]
    with Executor() as executor:
        for size, length in ((2, 3), (5, 12), (1, 7)):
            fed, twin = torch.randint(0, 37, (size, length)), copy.deepcopy(model)
            torch.manual_seed(size)
            loss, *came = executor.run(program, feed=(fed,), fetch_list=["loss", *gradients])
            torch.manual_seed(size)
            expected = step(twin, fed)
            expected.backward()

            assert torch.equal(loss, expected.detach())
            for name, gradient in zip(gradients, came, strict=True):
                parameter = twin.get_parameter(name.removesuffix("@GRAD"))
                assert torch.equal(gradient, parameter.grad), (size, length, name)


def test_one_name_is_one_size():
    """A named size is the same in every input; another value is refused when it is fed."""
    model = nn.Linear(3, 2)
    specs = (data("x", ["rows", "time", 3]), data("mask", ["rows", "time"]))
    program, _ = capture(model, average, sgd(model), specs)

    assert shapes_of(program) == {"x": ("rows", "time", 3), "mask": ("rows", "time")}
    with Executor() as executor:
        (loss,) = executor.run(program, (torch.ones(2, 5, 3), torch.ones(2, 5)), ["loss"])
        assert torch.equal(loss, loss.clone())
        with pytest.raises(ValueError, match=r"time is 5 in the input 'x'"):
            executor.run(program, (torch.ones(2, 5, 3), torch.ones(2, 4)))


def test_what_is_said_to_be_fixed_is_fixed():
    """A whole number fixes a size, dimension 0 included."""
    model = nn.Linear(3, 2)
    program, _ = capture(model, lambda m, x: m(x), example=[InputSpec([4, None, 3], name="seen")])

    assert shapes_of(program) == {"seen": (4, "seen_1", 3)}
    with Executor() as executor:
        (output,) = executor.run(program, {"seen": torch.ones(4, 9, 3)}, ["output"])
        assert torch.equal(output, model(torch.ones(4, 9, 3)))
        with pytest.raises(ValueError, match=r"expected float32\[4, seen_1, 3\]"):
            executor.run(program, (torch.ones(5, 9, 3),))


def loop_over_time(model, x):
    state = x[:, 0]
    for index in range(x.shape[1]):  # the line
        state = torch.tanh(model(state + x[:, index]))
    return state.mean()


def branch_on_time(model, x):
    hidden = model(x).mean()
    return hidden * 2 if x.shape[1] > 100 else hidden  # the line


@pytest.mark.parametrize("step", [loop_over_time, branch_on_time], ids=lambda step: step.__name__)
def test_what_depends_on_a_free_size_names_its_line(step):
    """A loop over time and a branch on it are refused where time stays free, and name their line;
    the same steps are captured where it is fixed.
    """
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="cannot capture|dimension 1 .* must stay free") as caught:
        capture(model, step, sgd(model), [InputSpec([None, None, 3])])

    assert str(caught.value).startswith(line_of(step, "# the line"))
    program, _ = capture(model, step, sgd(model), [InputSpec([None, 5, 3])])
    assert shapes_of(program) == {"x": ("batch", 5, 3)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InputSpec("batch"), "expected a list, got str"),
        (lambda: InputSpec([1.5]), "expected whole numbers, names and None, got float"),
        (lambda: InputSpec([-2]), "expected sizes of 0 or more, or -1, got -2"),
        (lambda: InputSpec(["a b"]), "expected an identifier"),
        (lambda: InputSpec([2], "float31"), "dtype: expected one of"),
        (lambda: data("", [2]), "expected a text without '@', got ''"),
    ],
)
def test_a_specification_is_checked(make, message):
    """What no input can be is refused at once, with what was expected and what came."""
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_an_example_fits_what_is_said():
    """Another dtype, another fixed size, another number of specifications: each is refused."""
    model, example = nn.Linear(3, 2), (torch.ones(4, 5, 3),)

    def with_(*specs: InputSpec) -> None:
        capture(model, lambda m, x: m(x), None, example, inputs=specs)

    with pytest.raises(ValueError, match=r"'x': expected .* float64\[free, 5, 3\].*got float32"):
        with_(InputSpec([None, 5, 3], "float64"))
    with pytest.raises(ValueError, match=r"expected .* float32\[free, 6, 3\]"):
        with_(InputSpec([None, 6, 3]))
    with pytest.raises(ValueError, match="an InputSpec for each of 1 inputs, got 2"):
        with_(InputSpec([None, None, 3]), InputSpec([None]))


def test_a_forward_program_needs_no_loss_and_no_optimizer():
    """Any tensors are its outputs; it shares the module's storage, also after the module trains;
    the module's mode is the program's.
    """
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))

    def step(model, x):
        logits = model(x)
        return {"logits": logits, "best": logits.argmax(1)}

    program, startup = capture(model.eval(), step, example=(torch.randn(4, 3),))
    assert str(program).startswith("forward program")
    assert not program.main.variables_of(Role.GRADIENT, Role.STATE)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    with Executor() as executor:
        executor.run(startup)
        for rows in (1, 6):
            x = torch.randn(rows, 3)
            logits, best = executor.run(program, (x,), ["logits", "best"])
            assert torch.equal(logits, model(x)) and torch.equal(best, model(x).argmax(1))
    with pytest.raises(ValueError, match="scheduler: expected none where there is no optimizer"):
        scheduler = torch.optim.lr_scheduler.ConstantLR(sgd(model))
        capture(model, step, example=(torch.randn(4, 3),), scheduler=scheduler)
    with pytest.raises(TypeError, match="a tensor or a dict of tensors, got tuple"):
        capture(model, lambda m, x: (m(x), x), example=(torch.randn(4, 3),))


def test_a_training_step_still_returns_a_loss():
    """With an optimizer the step's scalar loss is required, as ever."""
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="expected a scalar loss"):
        capture(model, lambda m, x: F.relu(m(x)), sgd(model), (torch.ones(4, 3),))


RECURRENT = {
    "lstm": (nn.LSTM, {"num_layers": 2, "dropout": 0.3}),
    "gru": (nn.GRU, {"bidirectional": True}),
    "rnn": (nn.RNN, {"num_layers": 2, "batch_first": False}),
    "projected": (nn.LSTM, {"proj_size": 3, "num_layers": 2, "bidirectional": True}),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrent_layer_trains_at_every_length(kind: str):
    """One op runs the layer over all time steps: loss and gradients equal eager training to the
    bit, with oneDNN as it is by default, at lengths that are not the example's.
    """
    torch.manual_seed(5)
    layer, options = RECURRENT[kind]
    recurrent = layer(4, 6, **{"batch_first": True, **options})
    model = nn.ModuleDict({"layer": recurrent, "out": nn.LazyLinear(2)})

    def step(model, x, y):
        hidden, final = model["layer"](x)
        last = final[0] if isinstance(final, tuple) else final
        return F.mse_loss(model["out"](hidden).mean((0, 1)), y) + last.square().mean()

    step(model, torch.ones(2, 2, 4), torch.ones(2))
    specs = (InputSpec([None, None, 4]), InputSpec([2]))
    program, _ = capture(model, step, sgd(model), specs)
    types = [op.type for op in program.main.ops]
    assert types.count("recurrent") == types.count("recurrent_grad") in (1, 2)
    gradients = [v.name for v in program.main.variables_of(Role.GRADIENT)]
    with Executor() as executor:
        for shape in ((3, 2, 4), (5, 9, 4), (1, 1, 4)):
            fed, twin = (torch.randn(shape), torch.randn(2)), copy.deepcopy(model)
            torch.manual_seed(1)
            loss, *came = executor.run(program, fed, ["loss", *gradients])
            torch.manual_seed(1)
            expected = step(twin, *fed)
            expected.backward()
            assert torch.equal(loss, expected.detach()), shape
            for name, gradient in zip(gradients, came, strict=True):
                parameter = twin.get_parameter(name.removesuffix("@GRAD"))
                assert torch.equal(gradient, parameter.grad), (shape, name)
    fed = (torch.randn(4, 7, 4), torch.randn(2))
    with Executor() as executor, torch.no_grad():
        (loss,) = executor.run(program.clone(for_test=True), fed, ["loss"])
        assert torch.equal(loss, step(model.eval(), *fed))
