"""Models whose forward reads parameters of modules that it does not call, or calls them in unusual
numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import Case, Recurrent, adam, classify, rows, sgd


def of(forward, **members) -> nn.Module:
    """A module of one input, made of a function and its parts."""

    class Of(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for key, part in members.items():
                setattr(self, key, part)

        def forward(self, x):
            return forward(self, x)

    return Of()


def one_attention() -> Case:
    """``nn.MultiheadAttention`` reads its out_proj's weight."""

    def forward(self, x):
        return self.out(self.attention(x, x, x)[0].mean(1))

    parts = {"attention": nn.MultiheadAttention(8, 2, batch_first=True), "out": nn.Linear(8, 3)}
    return of(forward, **parts), classify, adam, rows(5, 8)


def attention_to_others() -> Case:
    """Keys and values of other widths: three weights in the place of one."""

    def forward(self, x):
        return self.out(self.attention(x[..., :8], x[..., 8:12], x[..., 12:])[0].mean(1))

    attention = nn.MultiheadAttention(8, 2, kdim=4, vdim=6, batch_first=True, add_bias_kv=True)
    return of(forward, attention=attention, out=nn.Linear(8, 3)), classify, sgd, rows(5, 18)


def encoder_layer() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = of(lambda s, x: s.out(s.layer(x).mean(1)), layer=layer, out=nn.Linear(8, 3))
    return model, classify, sgd, rows(5, 8)


def encoder() -> Case:
    """Two layers; an evaluation reads the first one's from outside of it."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2)
    model = of(lambda s, x: s.out(s.layers(x).mean(1)), layers=layers, out=nn.Linear(8, 3))
    return model, classify, sgd, rows(5, 8)


def linear_by_function() -> Case:
    def forward(self, x):
        return self.down(torch.tanh(F.linear(x, self.up.weight, self.up.bias)))

    return of(forward, up=nn.Linear(6, 16), down=nn.Linear(16, 3)), classify, sgd, rows(6)


def read_far_below() -> Case:
    """Of a module in a module, three times in one forward."""

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(F.linear(x, self.block[0].weight))
        return self.out(x)

    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    return of(forward, block=block, out=nn.Linear(6, 3)), classify, sgd, rows(6)


def tied_by_reading() -> Case:
    """The embedding's weight is the output layer's, and the embedding is called too."""

    def forward(self, ids):
        return F.linear(torch.tanh(self.body(self.embedding(ids))), self.embedding.weight)

    def step(model, ids, following):
        return F.cross_entropy(model(ids).flatten(0, 1), following.flatten())

    model = of(forward, embedding=nn.Embedding(19, 8), body=nn.Linear(8, 8))
    return (
        model,
        step,
        sgd,
        lambda size: (torch.randint(0, 19, (size, 6)), torch.randint(0, 19, (size, 6))),
    )


def penalty() -> Case:
    """The forward adds norms of weights, which are called too: by name, and all of them."""

    def forward(self, x):
        norms = self.up.weight.abs().sum() + sum(p.square().sum() for p in self.parameters())
        return self.down(torch.tanh(self.up(x))) + 0.1 * norms

    def step(model, x, y):
        return F.mse_loss(model(x)[:, 0], y.float())

    return of(forward, up=nn.Linear(6, 8), down=nn.Linear(8, 3)), step, sgd, rows(6)


def called_twice() -> Case:
    model = of(
        lambda s, x: s.out(torch.tanh(s.body(torch.tanh(s.body(x))))),
        body=nn.Linear(6, 6),
        out=nn.Linear(6, 3),
    )
    return model, classify, sgd, rows(6)


def never_called() -> Case:
    model = of(lambda s, x: s.out(x), spare=nn.Linear(6, 6), out=nn.Linear(6, 3))
    return model, classify, sgd, rows(6)


def read_in_checkpoint() -> Case:
    """Read again while backward runs; by both kinds of checkpoints."""

    def forward(self, x):
        up = checkpoint(lambda x: torch.tanh(F.linear(x, self.up.weight)), x, use_reentrant=False)
        low = checkpoint(lambda x: torch.tanh(F.linear(x, self.low.weight)), up, use_reentrant=True)
        return self.out(low)

    parts = {"up": nn.Linear(6, 8), "low": nn.Linear(8, 8), "out": nn.Linear(8, 3)}
    return of(forward, **parts), classify, sgd, rows(6)


def written_output() -> Case:
    """The output of a linear layer over three dimensions is a view, and is added to in place."""

    def forward(self, x):
        h = self.up(x)
        h += 1.0
        h = self.down(torch.tanh(h))
        h *= 2.0
        return h.mean(1)

    return of(forward, up=nn.Linear(6, 8), down=nn.Linear(8, 3)), classify, sgd, rows(5, 6)


def gru() -> Case:
    return Recurrent(nn.GRU, num_layers=2), classify, sgd, rows(5, 4)


def parts_called() -> Case:
    """The model is not called, its parts are, one of which reads its own part's weight."""
    inner = of(lambda s, x: F.linear(x, s.up.weight), up=nn.Linear(6, 8))
    model = nn.ModuleDict({"inner": inner, "out": nn.Linear(8, 3)})

    def step(model, x, y):
        return F.cross_entropy(model["out"](torch.tanh(model["inner"](x))), y)

    return model, step, adam, rows(6)


READING = [
    one_attention,
    attention_to_others,
    encoder_layer,
    encoder,
    linear_by_function,
    read_far_below,
    tied_by_reading,
    penalty,
    called_twice,
    never_called,
    read_in_checkpoint,
    written_output,
    gru,
    parts_called,
]
