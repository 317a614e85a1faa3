"""What losses are given beside scores: labels, checked."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def traced(tensor: Tensor) -> bool:
    """Whether ``capture`` is tracing: the tensor has a shape, and no values to look at."""
    return isinstance(tensor, FakeTensor)


def label_column(whose: str, label: Tensor, count: int) -> Tensor:
    """Labels as int64 [count, true], of a label [count] or [count, true].

    Raises:
        TypeError: they are no tensor of whole numbers.
        ValueError: the shape is another one.
    """
    if not isinstance(label, Tensor):
        raise TypeError(f"{whose}: label: expected a tensor, got {type(label).__name__}")
    if label.is_floating_point() or label.is_complex():
        raise TypeError(f"{whose}: label: expected whole numbers, got {label.dtype}")
    if label.dim() not in (1, 2) or label.shape[0] != count:
        raise ValueError(
            f"{whose}: label: expected [{count}] or [{count}, 1], got {list(label.shape)}"
        )
    return label.long().unsqueeze(1) if label.dim() == 1 else label.long()


def single_label(whose: str, label: Tensor, count: int) -> Tensor:
    """Labels as int64 [count], of a label [count] or [count, 1]; raises as :func:`label_column`."""
    column = label_column(whose, label, count)
    if column.shape[1] != 1:
        raise ValueError(
            f"{whose}: label: expected [{count}] or [{count}, 1], got {list(label.shape)}"
        )
    return column.squeeze(1)


def check_labels(whose: str, label: Tensor, classes: int) -> None:
    """Nothing while ``capture`` is tracing: labels have no values then.

    Raises:
        ValueError: a label is not in 0 to ``classes`` - 1.
    """
    if traced(label) or not label.numel():
        return
    low, high = int(label.min()), int(label.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"{whose}: label: expected 0 to {classes - 1}, got {low if low < 0 else high}"
        )


def check_matrix(whose: str, name: str, tensor: Tensor) -> None:
    """Raises:
    ValueError: it has not two dimensions.
    """
    if tensor.dim() != 2:
        raise ValueError(f"{whose}: {name}: expected two dimensions, got {list(tensor.shape)}")


def check_same_shape(whose: str, **tensors: Tensor) -> None:
    """Raises:
    ValueError: their shapes differ.
    """
    first, *others = (tensor.shape for tensor in tensors.values())
    if any(shape != first for shape in others):
        got = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{whose}: expected tensors of one shape, got {got}")
