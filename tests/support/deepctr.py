"""DeepCTR-Torch's models, as its users make them, and data in the formats of its samples."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import nn


def _without_its_network_call() -> None:
    """On import the package asks the index for a newer version of itself: tests need no network."""
    versions = ModuleType("deepctr_torch.utils")
    versions.check_version = lambda version: None  # type: ignore[attr-defined]
    sys.modules.setdefault("deepctr_torch.utils", versions)


_without_its_network_call()
pytest.importorskip("deepctr_torch", reason="deepctr-torch is not installed")

from deepctr_torch.inputs import (  # noqa: E402  # once its call is out of the way
    DenseFeat,
    SparseFeat,
    VarLenSparseFeat,
    get_feature_names,
)
from deepctr_torch.models import DIN, DeepFM, xDeepFM  # noqa: E402

Columns = dict[str, np.ndarray]


class Case(NamedTuple):
    """A model and its data.

    Attributes:
        make: the model, by the factor of its l2 penalties on embeddings and linear parts; None:
            the package's defaults.
        inputs: by feature, [n] or [n, length].
        labels: float32 [n], 0 or 1.
    """

    make: Callable[[float | None], nn.Module]
    inputs: Columns
    labels: np.ndarray


def _criteo(rows: int = 96) -> tuple[list[Any], Columns, np.ndarray]:
    """As criteo_sample.txt after its script has encoded it: 26 categories as numbers from 0, 13
    counts scaled to 0 to 1, a label.
    """
    draw = np.random.default_rng(4)
    sizes = {f"C{number}": int(draw.integers(3, 40)) for number in range(1, 27)}
    inputs = {name: draw.integers(0, size, rows) for name, size in sizes.items()}
    dense = {f"I{number}": draw.random(rows).astype(np.float32) for number in range(1, 14)}
    columns = [
        *(SparseFeat(name, vocabulary_size=size, embedding_dim=4) for name, size in sizes.items()),
        *(DenseFeat(name, 1) for name in dense),
    ]
    labels = ((inputs["C1"] % 2) + dense["I1"] > 1).astype(np.float32)
    return columns, inputs | dense, labels


def _click(cls: Callable[..., nn.Module], **shape: Any) -> Case:
    columns, inputs, labels = _criteo()

    def make(l2: float | None) -> nn.Module:
        penalties = {} if l2 is None else {"l2_reg_linear": l2, "l2_reg_embedding": l2}
        return cls(columns, columns, dnn_hidden_units=(16, 8), **penalties, **shape)

    return Case(make, inputs, labels)


def deepfm() -> Case:
    """Its run_classification_criteo."""
    return _click(DeepFM)


def xdeepfm() -> Case:
    """The same data."""
    return _click(xDeepFM, cin_layer_size=(8, 4))


def din(rows: int = 96) -> Case:
    """Its run_din: a user, an item, what the user has clicked before, filled up with zeros."""
    draw = np.random.default_rng(5)
    lengths = draw.integers(1, 5, rows)
    sizes = {"user": 20, "gender": 2, "item_id": 13, "cate_id": 5}
    inputs = {name: draw.integers(1, size, rows) for name, size in sizes.items()}
    filled = np.arange(4) < lengths[:, None]
    for name in ("item_id", "cate_id"):
        inputs[f"hist_{name}"] = np.where(filled, draw.integers(1, sizes[name], (rows, 4)), 0)
    inputs["pay_score"] = draw.random(rows).astype(np.float32)
    inputs["seq_length"] = lengths
    columns = [
        *(SparseFeat(name, size, embedding_dim=4) for name, size in sizes.items()),
        DenseFeat("pay_score", 1),
        *(
            VarLenSparseFeat(
                SparseFeat(f"hist_{name}", sizes[name], embedding_dim=4, embedding_name=name),
                maxlen=4,
                length_name="seq_length",
            )
            for name in ("item_id", "cate_id")
        ),
    ]
    labels = (inputs["item_id"] % 2).astype(np.float32)

    def make(l2: float | None) -> nn.Module:
        penalties = {} if l2 is None else {"l2_reg_embedding": l2}
        model: nn.Module = DIN(
            columns, ["item_id", "cate_id"], dnn_hidden_units=(16, 8), **penalties
        )
        return model

    return Case(make, {name: inputs[name] for name in get_feature_names(columns)}, labels)


CASES: dict[str, Callable[[], Case]] = {"DeepFM": deepfm, "xDeepFM": xdeepfm, "DIN": din}
