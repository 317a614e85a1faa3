"""Captured programs train exactly as the eager loop does; what cannot be captured says so, and
where.
"""

from __future__ import annotations

import copy
import inspect
import logging
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import (
    EIGHT,
    Batch,
    Case,
    Recurrent,
    adam,
    classify,
    convolution,
    frozen,
    rows,
    several_inputs,
    sgd,
    tied,
)
from trainer import Executor
from transpiler import (
    ClipGradByGlobalNorm,
    ClipGradByNorm,
    ClipGradByValue,
    capture,
    default_main_program,
    default_startup_program,
    name,
    name_scope,
    program_guard,
)
from transpiler.ir.graph import Role

HERE = Path(__file__).name
CLIPS = {
    "none": (None, lambda parameters: None),
    "value": (
        ClipGradByValue(0.01),
        lambda parameters: nn.utils.clip_grad_value_(parameters, 0.01),
    ),
    "norm": (
        ClipGradByNorm(0.05),
        lambda parameters: [nn.utils.clip_grad_norm_([p], 0.05) for p in parameters],
    ),
    "global_norm": (
        ClipGradByGlobalNorm(0.1),
        lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
    ),
}


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> list[str]:
    """The names of the tensors that differ."""
    assert left.keys() == right.keys()
    return [key for key in left if not torch.equal(left[key], right[key])]


def loss_of(result) -> Tensor:
    return (result["loss"] if isinstance(result, dict) else result).detach()


def train_both(
    case: Callable[[], Case], clip: str, sizes: list[int], steps: int = 5, example: int = 4
) -> None:
    """Trains a model by its program and its twin by the eager loop, and compares every bit after
    every step.
    """
    torch.manual_seed(7)
    model, step, make_optimizer, batch = case()
    twin = copy.deepcopy(model)
    optimizer, other = make_optimizer(model), make_optimizer(twin)
    scheduler, other_scheduler = schedule(optimizer), schedule(other)
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    grad_clip, clip_eagerly = CLIPS[clip]
    program, startup = capture(
        model, step, optimizer, batch(example), grad_clip=grad_clip, scheduler=scheduler
    )
    with Executor() as executor, torch.backends.mkldnn.flags(enabled=not recurrent):
        executor.run(startup)
        for index in range(steps):
            fed = batch(sizes[index % len(sizes)])
            torch.manual_seed(index)
            (loss,) = executor.run(program, feed=fed, fetch_list=["loss"])
            scheduler.step()
            torch.manual_seed(index)
            expected = step(twin, *fed)
            loss_of(expected)
            (expected["loss"] if isinstance(expected, dict) else expected).backward()
            clip_eagerly([p for p in twin.parameters() if p.grad is not None])
            other.step()
            other.zero_grad()
            other_scheduler.step()
            assert torch.equal(loss, loss_of(expected)), f"loss of step {index}"
            assert not same(model.state_dict(), twin.state_dict()), f"after step {index}"


@pytest.mark.slow
@pytest.mark.parametrize("case", EIGHT, ids=lambda case: case.__name__)
def test_eight_models_train_as_eager_code_does(case):
    """Each of the eight models, at two batch sizes that are not the example's, equals the eager
    loop to the bit over 5 steps.
    """
    clips = list(CLIPS)
    train_both(case, clips[(EIGHT.index(case) + 1) % 4], sizes=[6, 3])


@pytest.mark.slow
@pytest.mark.parametrize("clip", list(CLIPS))
@pytest.mark.parametrize(
    "case", [convolution, tied, frozen, several_inputs], ids=lambda case: case.__name__
)
def test_every_kind_of_clipping_equals_eager_clipping(case, clip):
    """Clipping by value, by each norm and by the global norm equals torch.nn.utils to the bit,
    bfloat16 groups included.
    """
    train_both(case, clip, sizes=[5, 2], steps=3)


# ---- unusual models ----


def bare(forward, **members) -> nn.Module:
    """A module made of a function and its members; tensors become buffers."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for key, value in members.items():
                self.register_buffer(key, value) if type(value) is Tensor else setattr(
                    self, key, value
                )

        def forward(self, *inputs):
            return forward(self, *inputs)

    return Bare()


def reassigned_buffer() -> Case:
    def forward(self, x):
        self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
        return self.out(x - self.mean)

    return bare(forward, out=nn.Linear(6, 3), mean=torch.zeros(6)), classify, sgd, rows(6)


def transformer_layer() -> Case:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return model, lambda m, x: m(x).square().mean(), adam, lambda n: (torch.randn(n, 5, 8),)


def attention() -> Case:
    def forward(self, x):
        q, k, v = self.project(x).view(x.shape[0], 5, 3, 2, 4).permute(2, 0, 3, 1, 4)
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(x.shape[0], -1)
        )

    return bare(forward, project=nn.Linear(8, 24), out=nn.Linear(40, 3)), classify, adam, rows(5, 8)


def embedding_bag() -> Case:
    model = nn.Sequential(nn.EmbeddingBag(23, 8), nn.Linear(8, 3))
    return (
        model,
        classify,
        adam,
        lambda n: (torch.randint(0, 23, (n, 4)), torch.randint(0, 3, (n,))),
    )


def einsum() -> Case:
    return (
        bare(lambda s, x: torch.einsum("bij,jk->bik", x, s.w.weight).sum(1), w=nn.Linear(3, 8)),
        classify,
        sgd,
        rows(4, 8),
    )


def spectral_norm() -> Case:
    return nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)), classify, sgd, rows(6)


def weight_norm() -> Case:
    return nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), classify, sgd, rows(6)


def sizes_in_python() -> Case:
    def step(model, x, y):
        logits = model(x.view(x.shape[0], -1)) + torch.arange(x.shape[0]).unsqueeze(1) / x.shape[0]
        kept = torch.where(logits > 0, logits, logits * 0.1).masked_fill(logits > 2, 0.0)
        return (
            F.cross_entropy(kept, y, ignore_index=-1, label_smoothing=0.1, reduction="sum")
            / x.shape[0]
        )

    return nn.Linear(6, 3), step, sgd, rows(2, 3)


def noise() -> Case:
    def step(model, x, y):
        return F.cross_entropy(model(x + 0.1 * torch.randn_like(x) + torch.rand(x.shape[0], 1)), y)

    return nn.Linear(6, 3), step, sgd, rows(6)


def dropout_on_a_transposed_tensor() -> Case:
    forward = lambda s, x: s.out(F.dropout(x.transpose(1, 2), 0.4, s.training).flatten(1))  # noqa: E731
    return bare(forward, out=nn.Linear(12, 3)), classify, sgd, rows(3, 4)


def moving_average() -> Case:
    def step(model, x, y):
        with torch.no_grad():
            for slow, fast in zip(model.slow.parameters(), model.fast.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return F.cross_entropy(model.fast(x), y) + F.mse_loss(model.fast(x), model.slow(x))

    return (
        bare(None, fast=nn.Linear(6, 3), slow=nn.Linear(6, 3).requires_grad_(False)),
        step,
        sgd,
        rows(6),
    )


def one_gradient_for_two() -> Case:
    model = bare(
        lambda s, x: s.a + s.b + x.mean(),
        a=nn.Parameter(torch.ones(3)),
        b=nn.Parameter(torch.ones(3)),
    )
    return model, lambda m, x: m(x).square().sum(), sgd, lambda n: (torch.randn(n, 2),)


def checkpointed() -> Case:
    from torch.utils.checkpoint import checkpoint

    model = bare(
        lambda s, x: s.out(checkpoint(s.body, x, use_reentrant=False)),
        body=nn.Linear(6, 6),
        out=nn.Linear(6, 3),
    )
    return model, classify, sgd, rows(6)


def autocast() -> Case:
    def step(model, x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
        return F.cross_entropy(logits.float(), y)

    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), step, adam, rows(6)


def bidirectional() -> Case:
    return Recurrent(num_layers=2, dropout=0.3, bidirectional=True), classify, sgd, rows(3, 4)


UNUSUAL = [
    reassigned_buffer,
    transformer_layer,
    attention,
    embedding_bag,
    einsum,
    spectral_norm,
    weight_norm,
    sizes_in_python,
]
UNUSUAL += [
    noise,
    dropout_on_a_transposed_tensor,
    moving_average,
    one_gradient_for_two,
    checkpointed,
    autocast,
    bidirectional,
]


@pytest.mark.slow
@pytest.mark.parametrize("case", UNUSUAL, ids=lambda case: case.__name__)
def test_unusual_steps_train_as_eager_code_does(case):
    """Steps with state, randomness, sizes or sharing of their own equal the eager loop to the bit,
    also on a batch of one row.
    """
    train_both(case, "none", sizes=[6, 3, 1], steps=3)


@pytest.mark.slow
def test_an_example_of_one_row_leaves_the_batch_free():
    """An example with a single row captures a program for any number of rows."""
    train_both(convolution, "none", sizes=[1, 5], steps=4, example=1)


@pytest.mark.slow
def test_a_gradient_that_is_all_rounding_does_not_forbid_capture():
    """That of the bias of attention's keys is 0 but for rounding, and differs with one row: capture
    goes on all the same.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(
        vocab_size=200,
        dim=32,
        n_layers=2,
        n_heads=2,
        hidden_dim=64,
        max_position_embeddings=16,
        num_labels=3,
    )

    def step(model, ids, mask, labels):
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    def batch(size: int) -> Batch:
        return (
            torch.randint(0, 200, (size, 12)),
            torch.ones(size, 12, dtype=torch.long),
            torch.randint(0, 3, (size,)),
        )

    def case() -> Case:
        return transformers.DistilBertForSequenceClassification(config).train(), step, adam, batch

    train_both(case, "none", sizes=[6, 8], steps=4)


@pytest.mark.slow
def test_convolutions_hold_where_torch_decides_by_batch_size():
    """torch takes another memory format for convolutions from 16 rows on; the program still equals
    the eager loop there.
    """
    train_both(convolution, "none", sizes=[16, 40], steps=2)


@pytest.mark.slow
def test_gru_equals_eager_within_rounding(caplog):
    """A GRU's gradients may differ by 1e-6 (relative); then capture says so once."""
    torch.manual_seed(0)
    model = Recurrent(nn.GRU)
    capture(model, classify, sgd(model), rows(5, 4)(4))
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) <= 1
    assert all("rounds differently" in record.message for record in warnings)


@pytest.mark.slow
def test_recurrent_capture_says_that_onednn_is_off(caplog):
    """Capturing a recurrent layer with oneDNN on logs one line that says so, and leaves oneDNN as
    it was.
    """
    caplog.set_level(logging.INFO)
    model = Recurrent()
    capture(model, classify, sgd(model), rows(5, 4)(4))
    assert sum("oneDNN off" in record.message for record in caplog.records) == 1
    assert torch.backends.mkldnn.enabled


# ---- what cannot be captured ----


def line_of(function: Callable, marker: str) -> str:
    """``"test_capture.py:123"``: where the marker stands in the function's source."""
    lines, first = inspect.getsourcelines(function)
    offset = next(index for index, line in enumerate(lines) if marker in line)
    return f"{Path(inspect.getfile(function)).name}:{first + offset}"


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


@pytest.mark.slow
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
        return self.out(self.recurrent(x)[0][-1])  # the line


@pytest.mark.slow
def test_time_in_dimension_0_names_its_line():
    """A sequence-first layout cannot keep dimension 0 free: a ValueError that names the model's
    line and the input.
    """
    model = TimeFirst()
    with pytest.raises(ValueError, match="dimension 0 of the input 'x'") as caught:
        capture(model, classify, sgd(model), (torch.randn(5, 2, 4), torch.randint(0, 3, (2,))))
    assert str(caught.value).startswith(line_of(TimeFirst, "# the line"))


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


# ---- arguments and results ----


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
