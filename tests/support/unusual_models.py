"""Models and steps with state, randomness, sizes or sharing of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import Case, Recurrent, adam, classify, rows, sgd


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
    def forward(self, x):
        return self.out(F.dropout(x.transpose(1, 2), 0.4, self.training).flatten(1))

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
