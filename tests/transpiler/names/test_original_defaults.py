"""What the index says to write for a name gives the value of the original with its own defaults.

The numbers that are expected come from the definition of each operator, in numpy.  A name whose
defaults are torch's own has no row: they were compared once, and what was found to differ is here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn

from tests.support.name_entries import inputs, scope
from transpiler.names.names import names

Array = NDArray[Any]
GIVEN = {name: tensor.numpy() for name, tensor in inputs().items()}
X, Y, P, AT, T, IMAGE, VOLUME = (
    GIVEN[name] for name in ("x", "y", "p", "i", "t", "image", "volume")
)


@dataclass(frozen=True)
class Row:
    """One default.

    Attributes:
        name: of the original.
        expected: by its definition.
        words: what the entry says to write, out of its note; "": all that is to be written.
        more: values of names in these words.
        run: of a module that the words make: the inputs.
    """

    name: str
    expected: Callable[[], Any]
    words: str = ""
    more: dict[str, Any] = field(default_factory=dict)
    run: str = ""


# ---- definitions ----


def means(array: Array, size: int, stride: int, pad: int = 0) -> Array:
    """The mean over the places of each window that are no padding, in all dimensions but two."""
    sides = array.shape[2:]
    counts = [(side + 2 * pad - size) // stride + 1 for side in sides]
    found = np.zeros((*array.shape[:2], *counts))
    for place in np.ndindex(*counts):
        window = tuple(
            slice(max(at * stride - pad, 0), min(at * stride - pad + size, side))
            for at, side in zip(place, sides, strict=True)
        )
        axes = tuple(range(2, array.ndim))
        found[(slice(None), slice(None), *place)] = array[(slice(None), slice(None), *window)].mean(
            axes
        )
    return found


def highest(array: Array, size: int) -> Array:
    """The maximum of windows that move by 1, which is fluid's pool_stride."""
    dims = array.ndim - 2
    windows = np.lib.stride_tricks.sliding_window_view(
        array, (size,) * dims, tuple(range(2, 2 + dims))
    )
    return windows.max(tuple(range(-dims, 0)))


def linear(array: Array, axis: int, new: int) -> Array:
    """Interpolated between corners that stay corners."""
    old = array.shape[axis]
    at = np.arange(new) * (old - 1) / (new - 1)
    low = np.minimum(at.astype(int), old - 2)
    part = (at - low).reshape([-1 if dim == axis else 1 for dim in range(array.ndim)])
    return array.take(low, axis) * (1 - part) + array.take(low + 1, axis) * part


def sampled(image: Array, grid: Array) -> Array:
    """Bilinear at places from -1, the first pixel's center, to 1, the last one's; 0 outside."""
    n, c, h, w = image.shape
    padded = np.pad(image, ((0, 0), (0, 0), (1, 2), (1, 2)))
    x = ((grid[..., 0] + 1) / 2 * (w - 1)).clip(-1, w)
    y = ((grid[..., 1] + 1) / 2 * (h - 1)).clip(-1, h)
    left, top = np.floor(x).astype(int), np.floor(y).astype(int)
    found = np.zeros((n, c, *grid.shape[1:3]))
    for number in range(n):
        for dy in (0, 1):
            for dx in (0, 1):
                part = np.abs(1 - dx - (x - left))[number] * np.abs(1 - dy - (y - top))[number]
                rows, columns = top[number] + dy + 1, left[number] + dx + 1
                found[number] += padded[number][:, rows, columns] * part
    return found


def softmax(array: Array, axis: int = -1) -> Array:
    raised = np.exp(array - array.max(axis, keepdims=True))
    return raised / raised.sum(axis, keepdims=True)


def log_softmax(array: Array) -> Array:
    return np.log(softmax(array))


def huber(delta: float) -> Array:
    apart = np.abs(X - Y)
    return np.where(apart <= delta, apart**2 / 2, delta * (apart - delta / 2))


def away_from_zero(array: Array) -> Array:
    return np.sign(array) * np.floor(np.abs(array) + 0.5)


def places(theta: Array, h: int, w: int) -> Array:
    """An affine grid whose corners are the centers of the pixels there."""
    x, y = np.meshgrid(np.linspace(-1, 1, w), np.linspace(-1, 1, h))
    return np.stack([x, y, np.ones_like(x)], -1) @ theta.transpose(0, 2, 1)[:, None]


GRID = torch.from_numpy(IMAGE[:, :2].transpose(0, 2, 3, 1).copy())
HALVES = torch.tensor([-2.5, -1.5, -0.5, -0.2, 0.5, 0.6, 1.5, 2.5])
LABEL = np.eye(4)[AT]
NEAREST = np.floor(np.arange(5) * 7 / 4 + 0.5).astype(int)
BOXES = torch.tensor([[0.0, 0, 223, 223], [0, 0, 222, 222], [5, 5, 20, 30], [0, 0, 900, 900]])


def levels() -> Array:
    sides = BOXES.numpy()[:, 2:] - BOXES.numpy()[:, :2] + 1
    return np.floor(4 + np.log2(np.sqrt(sides.prod(1)) / 224 + 1e-6)).clip(2, 5)


def rearranged(k: int) -> Array:
    """By fluid's loop over the numbers, each of which has its place."""
    image = np.arange(2 * 8 * 4 * 6.0).reshape(2, 8, 4, 6)
    n, c, h, w = image.shape
    less = c // (k * k)
    found = np.zeros((n, less, h * k, w * k))
    for b, channel, row, column in np.ndindex(*image.shape):
        offset, kept = divmod(channel, less)
        y, x = row * k + offset // k, column * k + offset % k
        found[b, kept, y, x] = image[b, channel, row, column]
    return found.reshape(n, c * k * k, h // k, w // k)


ROWS = [
    # pools
    Row("avg_pool1d", lambda: means(T, 3, 3), more={"size": 3}),
    Row("avg_pool2d", lambda: means(IMAGE, 3, 3), more={"size": 3}),
    Row("avg_pool3d", lambda: means(VOLUME, 2, 2), more={"size": 2}),
    Row("AvgPool1D", lambda: means(T, 3, 3), more={"size": 3}, run="t"),
    Row("AvgPool2D", lambda: means(IMAGE, 3, 3), more={"size": 3}, run="image"),
    Row("AvgPool3D", lambda: means(VOLUME, 2, 2), more={"size": 2}, run="volume"),
    Row("pool2d", lambda: highest(IMAGE, 3), more={"size": 3}),
    Row("pool3d", lambda: highest(VOLUME, 2), more={"size": 2}),
    Row(
        "pool2d",
        lambda: means(IMAGE, 3, 1),
        "avg_pool2d(image, size, 1, count_include_pad=False)",
        {"size": 3, "avg_pool2d": F.avg_pool2d},
    ),
    Row(
        "pool3d",
        lambda: means(VOLUME, 2, 1),
        "avg_pool3d(volume, size, 1, count_include_pad=False)",
        {"size": 2, "avg_pool3d": F.avg_pool3d},
    ),
    # images
    Row("grid_sample", lambda: sampled(IMAGE, GRID.numpy()), more={"grid": GRID}),
    Row("grid_sampler", lambda: sampled(IMAGE, GRID.numpy()), more={"grid": GRID}),
    Row(
        "affine_grid",
        lambda: places(T[:, :2, :3], 4, 5),
        more={"theta": torch.from_numpy(T[:, :2, :3].copy()), "sizes": [2, 3, 4, 5]},
    ),
    *(
        Row(name, lambda: linear(linear(IMAGE, 2, 15), 3, 12), more={"size": (15, 12)})
        for name in ("image_resize", "resize_bilinear")
    ),
    Row(
        "resize_trilinear",
        lambda: linear(linear(linear(VOLUME, 2, 7), 3, 5), 4, 6),
        more={"size": (7, 5, 6)},
    ),
    Row(
        "image_resize_short",
        lambda: linear(linear(IMAGE[:, :, :4], 2, 7), 3, 14),
        more={"image": torch.from_numpy(IMAGE[:, :, :4].copy()), "sizes": (4, 8), "short": 7},
    ),
    Row(
        "resize_nearest",
        lambda: IMAGE[:, :, NEAREST][..., NEAREST],
        more={"rows": torch.from_numpy(NEAREST), "columns": torch.from_numpy(NEAREST)},
    ),
    Row(
        "resize_nearest",
        lambda: NEAREST,
        "(torch.arange(height) * (image.shape[2] - 1) / (height - 1) + 0.5).long()",
        {"height": 5},
    ),
    Row(
        "Resize",
        lambda: IMAGE.reshape(2, 3, 4, 2, 4, 2).mean((3, 5)),
        more={"size": 4},
        run="image",
    ),
    Row(
        "space_to_depth",
        lambda: rearranged(2),
        more={
            "image": torch.arange(2 * 8 * 4 * 6.0).reshape(2, 8, 4, 6),
            "k": 2,
            "shape": (2, 32, 2, 3),
        },
    ),
    Row(
        "distribute_fpn_proposals",
        levels,
        more={
            "area": (BOXES[:, 2:] - BOXES[:, :2] + 1).prod(1),
            **{"refer_level": 4, "refer_scale": 224, "min_level": 2, "max_level": 5},
        },
    ),
    # activations
    Row("brelu", lambda: (20 * X).clip(0, 24), more={"x": 20 * torch.from_numpy(X)}),
    Row("hard_sigmoid", lambda: (0.2 * X + 0.5).clip(0, 1)),
    Row(
        "leaky_relu",
        lambda: np.where(X > 0, X, 0.02 * X),
        "torch.nn.functional.leaky_relu(x, 0.02)",
    ),
    Row("leaky_relu", lambda: np.where(X > 0, X, 0.01 * X), "torch.nn.functional.leaky_relu(x)"),
    Row("ThresholdedReLU", lambda: np.where(X > 1, X, 0), run="x"),
    Row("thresholded_relu", lambda: np.where(X > 1, X, 0), more={"threshold": 1.0}),
    Row("stanh", lambda: 1.7159 * np.tanh(0.67 * X), more={"scale_a": 0.67, "scale_b": 1.7159}),
    Row(
        "soft_relu",
        lambda: np.log(1 + np.exp((50 * X).clip(-40, 40))),
        more={"x": 50 * torch.from_numpy(X), "threshold": 40.0},
    ),
    *(Row(name, lambda: softmax(X)) for name in ("softmax",)),
    Row("Softmax", lambda: softmax(X), run="x"),
    Row("log_softmax", lambda: log_softmax(X)),
    Row("LogSoftmax", lambda: log_softmax(X), run="x"),
    Row(
        "dropout",
        lambda: X * 0.75,
        "torch.nn.functional.dropout(x, p, training) * (1 - p)",
        {"p": 0.25, "training": False},
    ),
    # losses
    Row("huber_loss", lambda: huber(0.5), more={"delta": 0.5}),
    Row("square_error_cost", lambda: (X - Y) ** 2),
    Row(
        "softmax_with_cross_entropy",
        lambda: -log_softmax(X)[np.arange(3), AT],
        more={"logits": torch.from_numpy(X), "label": torch.from_numpy(AT)},
    ),
    Row(
        "log_loss",
        lambda: -(LABEL * np.log(P + 1e-4) + (1 - LABEL) * np.log(1 - P + 1e-4)),
        more={"y": torch.from_numpy(LABEL), "e": 0.0001},
    ),
    Row(
        "dice_loss",
        lambda: (1 - 2 * (P * LABEL).sum(1) / ((P + LABEL).sum(1) + 1e-5)).mean(),
        more={"y": torch.from_numpy(LABEL), "epsilon": 0.00001},
    ),
    Row(
        "smooth_l1",
        lambda: np.where(np.abs(X - Y) < 1 / 4, (2 * (X - Y)) ** 2 / 2, np.abs(X - Y) - 1 / 8),
        more={"sigma": 2.0},
    ),
    Row(
        "label_smooth",
        lambda: 0.9 * LABEL + 0.1 / 4,
        more={
            "label": torch.from_numpy(LABEL),
            "epsilon": 0.1,
        },
    ),
    # numbers
    Row("round", lambda: away_from_zero(HALVES.numpy()), more={"x": HALVES}),
    Row(
        "l2_normalize",
        lambda: X * 1e-6 / np.sqrt(((X * 1e-6) ** 2).sum(1, keepdims=True) + 1e-12),
        more={"x": 1e-6 * torch.from_numpy(X), "axis": 1, "epsilon": 1e-12},
    ),
    *(
        Row(
            name,
            lambda: [-3, 2, -2],
            "torch.div(x, y, rounding_mode='trunc')",
            {"x": torch.tensor([-7, 5, -5]), "y": torch.tensor([2, 2, 2])},
        )
        for name in ("elementwise_div", "divide")
    ),
    Row("full", lambda: np.full((2, 3), 1, np.float32), more={"shape": (2, 3), "value": 1}),
    Row("one_hot", lambda: LABEL.astype(np.float32), more={"depth": 4}),
    Row("cross", lambda: np.cross(X, Y, axis=0)),
    Row("logsumexp", lambda: np.log(np.exp(X).sum()), "torch.logsumexp(x.flatten(), 0)"),
    Row(
        "embedding",
        lambda: np.where((AT == 3)[:, None], 0, GIVEN["m"][AT]),
        "torch.nn.functional.embedding(i, weight) * (i != padding_idx).unsqueeze(-1)",
        {"weight": torch.from_numpy(GIVEN["m"]), "padding_idx": 3},
    ),
    Row(
        "lrn",
        lambda: IMAGE / (1 + 1e-4 * squares(IMAGE, 5)) ** 0.75,
        more={"n": 5, "alpha": 1e-4, "beta": 0.75, "k": 1.0},
    ),
]


def squares(image: Array, n: int) -> Array:
    """The sum of squares over ``n`` channels around each."""
    padded = np.pad(image**2, ((0, 0), (n // 2, n // 2), (0, 0), (0, 0)))
    return sum(padded[:, at : at + image.shape[1]] for at in range(n))  # type: ignore[return-value]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name}-{bool(row.words):d}")
def test_what_is_to_be_written_gives_the_originals_value(row: Row) -> None:
    """The words stand in the entry, and their value is that of the definition; the dtype, too,
    where the definition has one that is not numpy's own.
    """
    entry = names()[row.name]
    words = row.words or entry.write
    text = f"{entry.write}. {entry.note}"
    assert words in text or words.removesuffix("(x)") in text
    found = eval(words, scope() | row.more)
    if row.run:
        assert isinstance(found, nn.Module)
        found = found(inputs()[row.run])
    expected = np.asarray(row.expected())

    assert tuple(found.shape) == expected.shape
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-5, atol=2e-6)
    if expected.dtype == np.float32 and not row.words:
        assert found.dtype is torch.float32


def test_a_dropout_of_fluid_keeps_its_numbers() -> None:
    """It drops while it trains, and divides nothing."""
    entry = names()["dropout"]
    words = "torch.nn.functional.dropout(x, p, training) * (1 - p)"
    assert words in entry.note
    torch.manual_seed(0)
    found = eval(words, scope() | {"p": 0.5, "training": True}).numpy()

    assert np.array_equal(found, np.where(found != 0, X, 0)) and 0 < (found == 0).sum() < X.size


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("GRU", nn.GRU),
        ("LSTM", nn.LSTM),
        ("SimpleRNN", nn.RNN),
        ("MultiHeadAttention", nn.MultiheadAttention),
        ("TransformerEncoderLayer", nn.TransformerEncoderLayer),
        ("TransformerDecoderLayer", nn.TransformerDecoderLayer),
    ],
)
def test_a_batch_comes_first(name: str, kind: type[nn.Module]) -> None:
    """As time_major=False, the original's default, has it."""
    sizes = {"input_size": 8, "hidden_size": 5, "embed_dim": 8, "num_heads": 2}
    made = eval(names()[name].write, scope() | sizes | {"d_model": 8, "nhead": 2})

    assert isinstance(made, kind)
    attention = getattr(made, "self_attn", made)
    assert attention.batch_first is True


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_an_instance_norm_has_its_weight_and_bias(dims: int) -> None:
    """1 and 0 at first, as the original's; with the epsilon of both, 0.00001."""
    made = eval(names()[f"InstanceNorm{dims}D"].write, scope() | {"channels": 3})

    assert made.weight.tolist() == [1, 1, 1] and made.bias.tolist() == [0, 0, 0]
    assert made.eps == 1e-5


def test_a_weight_norm_is_one_number() -> None:
    """dim=None is the original's default: the norm of the whole weight."""
    layer = nn.Linear(4, 3)
    whole = float(layer.weight.detach().norm())
    eval(names()["WeightNormParamAttr"].write, scope() | {"layer": layer})

    norm = layer.parametrizations.weight.original0
    assert norm.numel() == 1 and math.isclose(norm.item(), whole, rel_tol=1e-6)


# Defaults that both have: names whose entry has no row, by what would differ.
SHARED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "hardshrink": (lambda: nn.Hardshrink, {"lambd": 0.5}),
    "hard_shrink": (lambda: nn.Hardshrink, {"lambd": 0.5}),
    "softshrink": (lambda: nn.Softshrink, {"lambd": 0.5}),
    "hardtanh": (lambda: F.hardtanh, {"min_val": -1.0, "max_val": 1.0}),
    "elu": (lambda: F.elu, {"alpha": 1.0}),
    "gelu": (lambda: nn.GELU, {"approximate": "none"}),
    "softplus": (lambda: nn.Softplus, {"beta": 1.0, "threshold": 20.0}),
    "LeakyReLU": (lambda: nn.LeakyReLU, {"negative_slope": 0.01}),
    "ELU": (lambda: nn.ELU, {"alpha": 1.0}),
    "PReLU": (lambda: nn.PReLU, {"num_parameters": 1, "init": 0.25}),
    "Softshrink": (lambda: nn.Softshrink, {"lambd": 0.5}),
    "Hardshrink": (lambda: nn.Hardshrink, {"lambd": 0.5}),
    "layer_norm": (lambda: F.layer_norm, {"eps": 1e-5}),
    "LayerNorm": (lambda: nn.LayerNorm, {"eps": 1e-5}),
    "GroupNorm": (lambda: nn.GroupNorm, {"eps": 1e-5}),
    "batch_norm": (lambda: F.batch_norm, {"eps": 1e-5, "momentum": 0.1, "training": False}),
    "BatchNorm1D": (lambda: nn.BatchNorm1d, {"eps": 1e-5, "momentum": 0.1}),
    "BatchNorm2D": (lambda: nn.BatchNorm2d, {"eps": 1e-5, "momentum": 0.1}),
    "BatchNorm3D": (lambda: nn.BatchNorm3d, {"eps": 1e-5, "momentum": 0.1}),
    "instance_norm": (lambda: F.instance_norm, {"eps": 1e-5, "use_input_stats": True}),
    "local_response_norm": (
        lambda: F.local_response_norm,
        {"alpha": 1e-4, "beta": 0.75, "k": 1.0},
    ),
    "normalize": (lambda: F.normalize, {"p": 2.0, "dim": 1, "eps": 1e-12}),
    "cosine_similarity": (lambda: nn.CosineSimilarity, {"dim": 1, "eps": 1e-8}),
    "PairwiseDistance": (lambda: nn.PairwiseDistance, {"p": 2.0, "eps": 1e-6}),
    "Dropout": (lambda: nn.Dropout, {"p": 0.5}),
    "dropout2d": (lambda: F.dropout2d, {"p": 0.5, "training": True}),
    "dropout3d": (lambda: F.dropout3d, {"p": 0.5, "training": True}),
    "AlphaDropout": (lambda: nn.AlphaDropout, {"p": 0.5}),
    "binary_cross_entropy": (lambda: F.binary_cross_entropy, {"reduction": "mean"}),
    "binary_cross_entropy_with_logits": (
        lambda: F.binary_cross_entropy_with_logits,
        {"reduction": "mean"},
    ),
    "kl_div": (lambda: F.kl_div, {"reduction": "mean", "log_target": False}),
    "kldiv_loss": (lambda: F.kl_div, {"reduction": "mean", "log_target": False}),
    "l1_loss": (lambda: F.l1_loss, {"reduction": "mean"}),
    "mse_loss": (lambda: F.mse_loss, {"reduction": "mean"}),
    "nll_loss": (lambda: F.nll_loss, {"reduction": "mean", "ignore_index": -100}),
    "margin_ranking_loss": (lambda: F.margin_ranking_loss, {"margin": 0, "reduction": "mean"}),
    "smooth_l1_loss": (lambda: F.smooth_l1_loss, {"reduction": "mean", "beta": 1.0}),
    "CrossEntropyLoss": (lambda: nn.CrossEntropyLoss, {"ignore_index": -100, "reduction": "mean"}),
    "ctc_loss": (lambda: F.ctc_loss, {"blank": 0, "reduction": "mean"}),
    "interpolate": (lambda: F.interpolate, {"mode": "nearest", "align_corners": None}),
    "Upsample": (lambda: nn.Upsample, {"mode": "nearest", "align_corners": None}),
    "Flatten": (lambda: nn.Flatten, {"start_dim": 1, "end_dim": -1}),
    "MaxPool2D": (lambda: nn.MaxPool2d, {"padding": 0, "ceil_mode": False}),
    "Transformer": (
        lambda: nn.Transformer,
        {"d_model": 512, "nhead": 8, "dim_feedforward": 2048, "dropout": 0.1, "norm_first": False},
    ),
    "SpectralNorm": (
        lambda: nn.utils.parametrizations.spectral_norm,
        {"n_power_iterations": 1, "eps": 1e-12},
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_a_default_that_torch_shares_stays_so(name: str) -> None:
    """The original's value, in torch's own words; another version of torch could have another."""
    made, wanted = SHARED[name]
    target = made()
    found = inspect.signature(target.__init__ if inspect.isclass(target) else target).parameters

    written = names()[name].write.partition("(")[0].split(".")[-1]
    assert written.lower().replace("_", "") == target.__name__.lower().replace("_", "")
    assert {key: found[key].default for key in wanted} == wanted
