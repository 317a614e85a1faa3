"""Models divided in hybrid directions whose ranks see the same samples: tensors, stages,
sequences.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.divided_models import MODELS, SAMPLES, STEPS, evaluated, loss_of
from tests.support.hybrid_nets import strategy_of
from trainer import (
    hybrid_mesh,
    hybrid_optimizer,
    hybrid_parallel,
    hybrid_state_dict,
    split_sequence,
)
from trainer.hybrid import Pipeline

BY_TENSORS: dict[str, dict[str, Any]] = {
    "fully_connected": {"0": "colwise", "2": "rowwise"},
    "tied": {"body": "colwise_rep"},
    "frozen": {"body": "colwise_rep"},
    "several_inputs": {"dense": "colwise_rep", "table": "colwise_rep"},
    "transformer_layer": {"linear1": "colwise", "linear2": "rowwise"},
    "encoder_layer": {"layer.linear1": "colwise", "layer.linear2": "rowwise"},
    "encoder": {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"},
    "one_attention": {"out": "rowwise_rep"},
    "attention_to_others": {"out": "rowwise_rep"},
    "linear_by_function": {"down": "rowwise_rep"},
    "read_far_below": {"out": "rowwise_rep"},
    "tied_by_reading": {"body": "colwise_rep"},
    "called_twice": {"body": "colwise_rep"},
    "lstm": {"out": "rowwise_rep"},
}
BY_STAGES: dict[str, tuple[str, ...]] = {
    "fully_connected": ("2",),
    "convolution": ("6",),
    "lstm": ("out",),
    "one_attention": ("out",),
    "encoder_layer": ("out",),
    "encoder": ("out",),
    "linear_by_function": ("down",),
    "attention_to_others": ("out",),
    "called_twice": ("out",),
    "embedding_bag": ("1",),
    "frozen": ("head",),
}


BY_SEQUENCES = ("transformer_layer", "encoder_layer", "encoder")


def without_chance(model: nn.Module) -> None:
    """Parts draw other random numbers than a whole batch, and have other statistics."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.LSTM | nn.GRU | nn.MultiheadAttention):
            setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", 0.0)
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def train_by_tensors(name: str) -> None:
    """Tensor parallel."""
    strategy = strategy_of(dp=1, mp=dist.get_world_size())
    torch.manual_seed(0)
    model, step, _, draw = MODELS[name]()
    without_chance(model)
    data = [draw(SAMPLES) for _ in range(STEPS + 1)]
    alone = copy.deepcopy(model)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    model = hybrid_parallel(model, strategy, tensor_plan=BY_TENSORS[name])
    optimizer = hybrid_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for number, batch in enumerate(data[:STEPS]):
        losses = []
        for each, one in ((alone, plain), (model, optimizer)):
            torch.manual_seed(number)
            loss = loss_of(step(each, *batch))
            loss.backward()
            one.step()
            one.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    _same(evaluated(model, step, data[STEPS]), evaluated(alone, step, data[STEPS]), model, alone)


def _same(found: Tensor, expected: Tensor, model: nn.Module, alone: nn.Module) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    whole = hybrid_state_dict(model)
    for name, value in alone.named_parameters():
        torch.testing.assert_close(
            whole[name], value.detach(), rtol=0, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )


def train_by_stages(name: str) -> None:
    """A pipeline of two stages, each with its micro batches."""
    strategy = strategy_of(dp=1, pp=dist.get_world_size())
    torch.manual_seed(0)
    model, _, _, draw = MODELS[name]()
    without_chance(model)
    data = [draw(SAMPLES) for _ in range(STEPS)]
    alone = copy.deepcopy(model)
    divided = hybrid_parallel(
        model, strategy, stages=list(BY_STAGES[name]), loss_fn=F.cross_entropy
    )
    assert isinstance(divided, Pipeline)
    optimizer = hybrid_optimizer(torch.optim.SGD(divided.parameters(), lr=0.1), divided)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for x, y in data:
        expected = F.cross_entropy(alone(x), y)
        expected.backward()
        loss = divided.forward_backward(x, target=y)
        for one in (plain, optimizer):
            one.step()
            one.zero_grad()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    x, y = data[0]
    _same(divided.evaluate(x, target=y), F.cross_entropy(alone(x), y).detach(), divided, alone)


def train_by_sequences(name: str) -> None:
    """Each rank has half of every sequence; the loss is a mean over tokens."""
    strategy = strategy_of(dp=1, sep=dist.get_world_size())
    mesh = hybrid_mesh(strategy)
    torch.manual_seed(0)
    whole, _, _, _ = MODELS[name]()
    model: nn.Module = next(m for m in whole.modules() if isinstance(m, ATTENDING))
    without_chance(model)
    alone = copy.deepcopy(model)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    model = hybrid_parallel(model, strategy)
    optimizer = hybrid_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(STEPS):
        x, y = torch.randn(SAMPLES, 6, 8), torch.randn(SAMPLES, 6, 8)
        for each, one, inputs, target in (
            (alone, plain, x, y),
            (model, optimizer, split_sequence(x, mesh), split_sequence(y, mesh)),
        ):
            F.mse_loss(each(inputs), target).backward()
            one.step()
            one.zero_grad()
    model.eval()
    with torch.no_grad():
        found = model(split_sequence(x, mesh))
    _same(found, split_sequence(alone.eval()(x).detach(), mesh), model, alone)


ATTENDING = nn.TransformerEncoderLayer | nn.TransformerEncoder


def weights_are_refused() -> None:
    """An attention that gives its weights has seen a part of the sequence."""
    model = hybrid_parallel(
        nn.MultiheadAttention(8, 2, batch_first=True),
        strategy_of(dp=1, sep=dist.get_world_size()),
    )
    x = torch.randn(SAMPLES, 3, 8)
    with pytest.raises(ValueError, match="call it with need_weights=False"):
        model(x, x, x)


DIRECTIONS = {
    "mp": (train_by_tensors, BY_TENSORS),
    "pp": (train_by_stages, BY_STAGES),
    "sep": (train_by_sequences, BY_SEQUENCES),
}
