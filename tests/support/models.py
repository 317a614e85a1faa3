"""The eight models of the capture suite: a module, its step, its optimizer and its batches,
each.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Case = tuple[
    nn.Module, Callable, Callable[[nn.Module], torch.optim.Optimizer], Callable[[int], Batch]
]


def classify(model, x, y):
    return F.cross_entropy(model(x), y)


def rows(*features: int, classes: int = 3) -> Callable[[int], Batch]:
    return lambda size: (torch.randn(size, *features), torch.randint(0, classes, (size,)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def fully_connected() -> Case:
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)), classify, sgd, rows(6)


def convolution() -> Case:
    layers = [
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(36, 3),
    ]
    return nn.Sequential(*layers), classify, adam, rows(1, 8, 8)


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.RNNBase] = nn.LSTM, **options) -> None:
        super().__init__()
        self.recurrent = layer(4, 8, batch_first=True, **options)
        self.out = nn.Linear(8 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(x)[0][:, -1])


def lstm() -> Case:
    return Recurrent(num_layers=2, dropout=0.2), classify, adam, rows(5, 4)


def gpt2() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=37, n_positions=12)
    model = transformers.GPT2LMHeadModel(config).train()

    def step(model, ids):
        return model(input_ids=ids, labels=ids).loss

    return model, step, adam, lambda size: (torch.randint(0, 37, (size, 9)),)


def bert() -> Case:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_size=16,
        intermediate_size=32,
        vocab_size=41,
    )
    model = transformers.BertForSequenceClassification(config).train()

    def step(model, ids, mask, labels):
        return model(input_ids=ids, attention_mask=mask, labels=labels).loss

    def batch(size: int) -> Batch:
        lengths = torch.randint(3, 8, (size, 1))
        return (
            torch.randint(0, 41, (size, 8)),
            (torch.arange(8) < lengths).long(),
            torch.randint(0, 2, (size,)),
        )

    return model, step, adam, batch


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 8, padding_idx=0)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 19, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embedding(ids))))


def tied() -> Case:
    def step(model, ids, following):
        return F.cross_entropy(model(ids).flatten(0, 1), following.flatten())

    return (
        Tied(),
        step,
        sgd,
        lambda size: (torch.randint(0, 19, (size, 6)), torch.randint(0, 19, (size, 6))),
    )


class Mixed(nn.Module):
    """A frozen stem, a float32 part and a bfloat16 head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8).requires_grad_(False)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(self.stem(x))).to(torch.bfloat16)).float()


def frozen() -> Case:
    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": model.head.parameters(), "lr": 0.05},
            {"params": model.body.parameters(), "weight_decay": 0.1},
        ]
        return torch.optim.Adam(groups, lr=0.01)

    return Mixed(), classify, optimizer, rows(6)


def several_inputs() -> Case:
    model = nn.ModuleDict(
        {"dense": nn.Linear(4, 8), "table": nn.Embedding(11, 8), "out": nn.Linear(8, 3)}
    )

    def step(model, dense, ids, weight, y):
        logits = model["out"](torch.relu(model["dense"](dense) + model["table"](ids)))
        losses = F.cross_entropy(logits, y, reduction="none", label_smoothing=0.1) * weight
        return {
            "logits": logits,
            "loss": losses.sum() / y.shape[0],
            "hits": (logits.argmax(1) == y).sum(),
        }

    def batch(size: int) -> Batch:
        return (
            torch.randn(size, 4),
            torch.randint(0, 11, (size,)),
            torch.rand(size),
            torch.randint(0, 3, (size,)),
        )

    return model, step, adam, batch


EIGHT = [fully_connected, convolution, lstm, gpt2, bert, tied, frozen, several_inputs]
