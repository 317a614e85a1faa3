"""What ``update`` takes: predictions, labels and weights of samples, checked, as flat tensors in
main memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def flat(name: str, values: Any) -> Tensor:
    """Numbers as one float64 vector.

    Raises:
        ValueError: one is nan.
        TypeError: they are no real numbers.
    """
    tensor = _tensor(name, values)
    check_numbers(name, tensor)
    return tensor.reshape(-1).cpu().to(torch.float64)


def check_numbers(name: str, tensor: Tensor) -> None:
    """Returns where nothing is nan.

    Raises:
        ValueError: something is.
    """
    if bool(tensor.isnan().any()):
        place = int(tensor.reshape(-1).isnan().nonzero()[0])
        raise ValueError(f"{name}: expected numbers, got nan at position {place}")


def flat_like(name: str, values: Any, other_name: str, other: Any) -> Tensor:
    """The same, of as many values as ``other`` has, in the same shape but for dimensions of 1.

    Raises:
        ValueError: one is nan, or the shapes differ.
        TypeError: they are no real numbers.
    """
    shape, expected = _tensor(name, values).shape, _tensor(other_name, other).shape
    if [n for n in shape if n != 1] != [n for n in expected if n != 1]:
        raise ValueError(
            f"{name}: expected the shape of {other_name}, {list(expected)}, got {list(shape)}"
        )
    return flat(name, values)


def weights_like(weights: Any, other_name: str, other: Any) -> Tensor:
    """One weight a sample; 1 where there are none.

    Raises:
        ValueError: one is below 0 or not finite, or the shapes differ.
    """
    if weights is None:
        return torch.ones(_tensor(other_name, other).numel(), dtype=torch.float64)
    vector = flat_like("weights", weights, other_name, other)
    if vector.numel() and not (bool((vector >= 0).all()) and bool(vector.isfinite().all())):
        raise ValueError(
            f"weights: expected numbers of 0 or more, got {float(vector.min()):g} to "
            f"{float(vector.max()):g}"
        )
    return vector


def classes_like(labels: Any, other_name: str, other: Any) -> Tensor:
    """Which samples are positive, from labels 0 and 1.

    Raises:
        ValueError: another label, or the shapes differ.
    """
    vector = flat_like("labels", labels, other_name, other)
    wrong = vector[(vector != 0) & (vector != 1)]
    if wrong.numel():
        raise ValueError(f"labels: expected 0 and 1, got {float(wrong[0]):g}")
    return vector == 1


def check_classes(name: str, labels: Any, classes: int) -> None:
    """Returns if every label is one of the classes.

    Raises:
        ValueError: one is not.
    """
    vector = flat(name, labels)
    wrong = vector[(vector < 0) | (vector >= classes) | (vector != vector.floor())]
    if wrong.numel():
        raise ValueError(
            f"{name}: expected classes from 0 to {classes - 1}, got {float(wrong[0]):g}"
        )


def probabilities(preds: Any) -> Tensor:
    """Predictions from 0 to 1, as one float64 vector.

    Raises:
        ValueError: one is outside, or nan.
    """
    vector = flat("preds", preds)
    wrong = vector[(vector < 0) | (vector > 1)]
    if wrong.numel():
        raise ValueError(
            f"preds: expected probabilities from 0 to 1, got {float(wrong[0]):g}: apply a sigmoid "
            "first"
        )
    return vector


def _tensor(name: str, values: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a tensor of numbers: {error}") from None
    if tensor.is_complex():
        raise TypeError(f"{name}: expected real numbers, got {tensor.dtype}")
    return tensor
