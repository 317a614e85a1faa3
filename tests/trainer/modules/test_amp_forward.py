"""``strategy.amp`` in a model's forward: which op runs in which dtype, and whose gradients are
true.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.amp_jobs import Dtypes, amp_model, amp_strategy, dtypes
from trainer import DistributedEmbedding, fleet
from transpiler.precision.mixed_forward import mixed, plain, recompute_contexts

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
X = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """Two layers, a softmax, a batch norm, a scale."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.one, self.norm, self.two = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.two(self.norm(torch.tanh(self.one(x * self.scale)))), 1)


class Guarded(Net):
    """The first layer is guarded."""

    def forward(self, x: Tensor) -> Tensor:
        with fleet.fp16_guard():
            x = torch.tanh(self.one(x))
        return F.softmax(self.two(self.norm(x)), 1)


@pytest.mark.observes("amp", "amp_configs.use_pure_bf16", "amp_configs.use_pure_fp16")
def test_ops_run_in_16_bits_and_outputs_are_float32() -> None:
    """Layers in float16; with the pure keys the product with a parameter as well, and in bfloat16;
    names, parameters and statistics stay as they are.
    """
    for configs, linear, product in (
        ({}, HALF, FULL),
        ({"use_pure_fp16": True, "use_fp16_guard": False}, HALF, HALF),
        ({"use_pure_bf16": True}, BRAIN, BRAIN),
    ):
        net = Net()
        names = list(net.state_dict())
        model = amp_model(net, **configs)
        seen = dtypes(model, X)

        assert seen["addmm"] == {linear} and seen["mul"] == {product}, configs
        assert model is net and model(X).dtype == FULL and list(model.state_dict()) == names
        assert {value.dtype for value in model.state_dict().values()} == {FULL, torch.int64}
        assert model.norm.num_batches_tracked == 2 and model.norm.running_mean.any()
        plain(model)
        assert dtypes(model, X)["addmm"] == {FULL}


@pytest.mark.observes("amp_configs.use_pure_fp16", "amp_configs.use_pure_bf16")
def test_pure_modes_give_modules_16_bit_weights() -> None:
    """A hook inside the forward sees them; the optimizer's parameters stay float32."""
    seen: list[torch.dtype] = []
    for configs in ({}, {"use_pure_bf16": True}):
        model = amp_model(Net(), **configs)
        model.one.register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
        model(X).sum().backward()
        assert model.one.weight.dtype == model.one.weight.grad.dtype == FULL
    assert seen == [FULL, BRAIN]


@pytest.mark.observes("amp_configs.custom_white_list", "amp_configs.custom_black_list")
def test_listed_ops_run_in_16_and_in_32_bits() -> None:
    """As functions, as methods, by the original's names, and inside functions of torch."""
    model = amp_model(Net(), custom_white_list=["elementwise_mul"], custom_black_list=["fc"])
    seen = dtypes(model, X)
    assert seen["mul"] == {HALF} and seen["addmm"] == {FULL}

    torch.manual_seed(0)
    attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    usual = dtypes(amp_model(copy.deepcopy(attention)), torch.randn(2, 3, 8))
    kept = amp_model(attention, custom_black_list=["layer_norm", "linear", "gelu", "relu"])
    listed = dtypes(kept, torch.randn(2, 3, 8))
    assert HALF in usual["addmm"] and listed["addmm"] == {FULL}
    assert listed["native_layer_norm"] == {FULL}


@pytest.mark.observes("amp_configs.custom_black_list")
def test_a_listed_op_inside_a_function_of_torch_is_found() -> None:
    """Attention's own projections, and the softmax under ``F.gumbel_softmax``."""

    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gumbel_softmax(x @ x.T)

    assert dtypes(amp_model(Inside()), X)["softmax"] == {HALF}
    assert dtypes(amp_model(Inside(), custom_black_list=["softmax"]), X)["softmax"] == {FULL}


@pytest.mark.parametrize(
    "configs", [{"custom_white_list": ["conv2d"]}, {"custom_black_varnames": ["0.bias"]}], ids=str
)
def test_functions_that_ask_for_themselves_are_called(configs: dict[str, Any]) -> None:
    """As those of max pooling do, which choose between two others."""
    pools = nn.MaxPool2d(2), nn.AdaptiveMaxPool2d(4), nn.FractionalMaxPool2d(2, output_size=2)
    model = mixed(nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *pools), amp_strategy(**configs))
    seen: list[torch.dtype] = []
    model[0].register_forward_hook(lambda *args: seen.append(args[2].dtype))
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 4, 2, 2)
    assert seen == [torch.float32 if "0.bias" in str(configs) else torch.float16]


@pytest.mark.observes("amp_configs.custom_black_varnames")
def test_ops_of_named_variables_run_in_32_bits() -> None:
    """Those of the other layers stay in 16; a name that is not there raises, with close ones."""
    seen: list[torch.dtype] = []
    for configs in ({}, {"use_pure_bf16": True}):
        model = amp_model(Net(), custom_black_varnames=["one.weight"], **configs)
        for layer in (model.one, model.two):
            layer.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
        model(X)
    assert seen == [FULL, HALF, FULL, BRAIN]
    with pytest.raises(ValueError, match=r"got 'one.weigth'; the model has one.weight"):
        amp_model(Net(), custom_black_varnames=["one.weigth"])


@pytest.mark.observes("amp_configs.use_fp16_guard")
def test_only_what_is_guarded_runs_in_float16() -> None:
    """Without the guard's key everything does; a forward without guards raises, and says what to
    write.
    """
    model = amp_model(Guarded(), use_pure_fp16=True)
    seen: list[tuple[torch.dtype, torch.dtype]] = []

    def see(layer: Any, args: Any, output: Tensor) -> None:
        seen.append((layer.weight.dtype, output.dtype))

    for layer in (model.one, model.two):
        layer.register_forward_hook(see)
    model(X).sum().backward()
    assert seen == [(HALF, HALF), (FULL, FULL)]
    amp_model(model, use_pure_fp16=True, use_fp16_guard=False)(X)
    assert seen[2:] == [(HALF, HALF), (HALF, HALF)]
    with pytest.raises(ValueError, match="set use_fp16_guard to False"):
        amp_model(Net(), use_pure_fp16=True)(X)
    with fleet.fp16_guard():
        assert Guarded()(X).dtype == FULL  # a plain model


# ---- gradients ----


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_gradients_are_never_seen_scaled() -> None:
    """Two backward passes, a penalty outside of the model and one on a submodule's weight: as with
    autocast and no scale, within what float16 rounds.
    """

    def losses(model: Any, forward: Any) -> Tensor:
        return sum(
            (
                forward(X).square().sum(),
                forward(2 * X).sum() * 3,
                model.one.weight.square().sum() * 100,
            ),
            torch.zeros(()),
        )

    one, other = amp_model(Net().eval(), init_loss_scaling=64), Net().eval()

    def autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", HALF):
            return other(x).float()

    found, expected = gradients(one, losses(one, one)), gradients(other, losses(other, autocast))
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-2, atol=1e-2 * float(theirs.abs().max()))


def test_small_gradients_survive() -> None:
    """1e-7 of a gradient is zero in float16 without a scale."""
    model, bare = amp_model(nn.Linear(6, 3)), nn.Linear(6, 3)
    (model(X) * 1e-8).sum().backward()
    with torch.autocast("cpu", HALF):
        (bare(X) * 1e-8).sum().backward()
    assert model.weight.grad.abs().min() > 0 and bare.weight.grad.abs().max() == 0


def test_gradients_of_inputs_are_true_too() -> None:
    """As a generator gets them through its critic, both with a scale of their own."""
    critic, generator = (
        amp_model(nn.Linear(3, 1), init_loss_scaling=8.0),
        amp_model(nn.Linear(6, 3)),
    )
    critic(generator(X)).sum().backward()
    expected = critic.weight.detach().expand(4, 3).T @ X
    assert torch.allclose(generator.weight.grad, expected, rtol=2e-3, atol=1e-3)


def test_rows_of_tables_get_true_gradients() -> None:
    """Their parameter is a proxy."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = DistributedEmbedding(4), nn.Linear(4, 2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.table(ids))

    model = amp_model(Words())
    with Dtypes() as seen:
        model(torch.tensor([1, 2])).sum().backward()
    assert seen.of["addmm"] == {HALF}
    expected = model.head.weight.detach().sum(0).expand(2, 4)
    assert torch.allclose(model.table.proxy.pending_rows(), expected, rtol=2e-3, atol=1e-3)


@dataclasses.dataclass
class Output:
    """Of a model."""

    logits: Tensor
    hidden: list[Tensor]


class Several(nn.Module):
    """A recurrent net with shared weights, whose outputs are in a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 5)
        self.again = self.head

    def forward(self, x: Tensor) -> Output:
        found, last = self.rnn(x.unsqueeze(0))
        return Output(self.again(self.head(found)), [last])


def test_outputs_may_be_nested_and_weights_shared() -> None:
    """Recurrent nets keep lists of their weights; all gradients are true."""
    torch.manual_seed(1)
    one = Several()
    other = copy.deepcopy(one)
    amp_model(one, init_loss_scaling=64)

    def loss(model: Any) -> Tensor:
        output = model(X)
        return output.logits.float().sum() + output.hidden[0].float().sum()

    assert one(X).logits.dtype == FULL
    for mine, theirs in zip(gradients(one, loss(one)), gradients(other, loss(other)), strict=True):
        assert torch.allclose(mine, theirs, rtol=2e-2, atol=2e-2 * float(theirs.abs().max()))


def test_a_loss_that_a_module_keeps_has_true_gradients() -> None:
    """An auxiliary loss, or a state that the next forward goes on with."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body, self.state = nn.Linear(6, 6), torch.zeros(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            self.state = self.body(x + self.state)
            return self.state * 2

    one, other = amp_model(Keeps()), Keeps()
    for model in (one, other):
        (model(X).mean() + model(X).mean() + model.state.float().square().mean()).backward()
    expected = other.body.weight.grad
    assert one.state.dtype == FULL
    assert torch.allclose(one.body.weight.grad, expected, rtol=1e-2, atol=1e-2)


def test_a_parameter_past_the_modules_attributes_is_found() -> None:
    """Its gradient would be scaled; so would that of outputs nobody can look into."""

    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(6))
            self.hidden = [self.w]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.hidden[0]

    class Opaque(Net):
        def forward(self, x: Tensor) -> Any:
            return torch.distributions.Categorical(super().forward(x))

    with pytest.raises(RuntimeError, match="attributes of its modules, got 'w' in another way"):
        amp_model(Past())(X)
    with pytest.raises(TypeError, match="got Categorical among them"):
        amp_model(Opaque())(X)


@pytest.mark.parametrize(
    "configs",
    [
        {},
        {"use_pure_bf16": True},
        {"use_pure_fp16": True},
        {"custom_black_list": ["linear"]},
        {"custom_black_varnames": ["one.weight"]},
    ],
)
def test_a_recomputed_part_sees_the_same_dtypes(configs: dict[str, Any]) -> None:
    """With ``recompute_contexts`` gradients are those of a forward that keeps everything."""

    class Recomputed(Guarded):
        def forward(self, x: Tensor) -> Tensor:
            with fleet.fp16_guard():
                options: Any = {"use_reentrant": False, "context_fn": recompute_contexts}
                x = checkpoint(lambda x: torch.tanh(self.one(x)).square(), x, **options)
            return F.softmax(self.two(self.norm(x)), 1)

    class Kept(Guarded):
        def forward(self, x: Tensor) -> Tensor:
            with fleet.fp16_guard():
                x = torch.tanh(self.one(x)).square()
            return F.softmax(self.two(self.norm(x)), 1)

    scale = {} if "use_pure_bf16" in configs else {"init_loss_scaling": 64.0}
    found = []
    for kind in (Recomputed, Kept):
        model = amp_model(kind(), **configs, **scale)
        model(X).square().sum().backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == 6 and all(map(torch.equal, *found))


def test_the_model_is_as_before_after_an_error() -> None:
    """Its parameters are its own again, and autocast is off."""
    model = amp_model(Net())
    before = list(model.parameters())
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert all(mine is theirs for mine, theirs in zip(model.parameters(), before, strict=True))
    assert not torch.is_autocast_enabled("cpu")


def test_a_copy_of_the_model_is_a_model_of_its_own() -> None:
    """An average of the weights runs in 16 bits as well, with its own parameters; the signature is
    the model's.
    """
    model = amp_model(Net())
    average = copy.deepcopy(model)
    average(X).sum().backward()
    assert model.one.weight.grad is None and average.one.weight.grad is not None
    assert list(inspect.signature(model.forward).parameters) == ["x"]


def test_a_model_is_plain_after_the_job() -> None:
    """``fleet.finish`` takes the change back; a second registration makes it once."""
    fleet.init(strategy=amp_strategy())
    model = fleet.distributed_model(fleet.distributed_model(nn.Linear(6, 2)))
    assert dtypes(model, X)["addmm"] == {HALF}
    fleet.finish()
    assert dtypes(model, X)["addmm"] == {FULL}
