"""2:4 sparsity: the weights that are made sparse, and the mask of a weight.

Of every four weights in a row of inputs the two of the largest magnitude stay (Mishra et al.,
"Accelerating Sparse Deep Neural Networks", arXiv 2104.08378).
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from weakref import WeakSet

import torch
from torch import Tensor, nn

from transpiler.ir.plain_names import named_modules

GROUP, KEPT = 4, 2
_FITTING = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)  # whose weights' dimension 1 is of inputs

_excluded: WeakSet[nn.Module] = WeakSet()


def mask_of(weight: Tensor) -> Tensor:
    """The mask of a weight: True for the two largest magnitudes of every four along dimension 1,
    the first ones among equals.

    Args:
        weight: with two or more dimensions, of which dimension 1 is divisible by 4.
    """
    last = weight.detach().movedim(1, -1)
    groups = last.abs().reshape(-1, GROUP)
    kept = groups.argsort(dim=1, descending=True, stable=True)[:, :KEPT]
    mask = torch.zeros_like(groups, dtype=torch.bool).scatter_(1, kept, True)
    return mask.reshape(last.shape).movedim(-1, 1).contiguous()


def sparse_weights(model: nn.Module) -> list[str]:
    """The names of the weights that are made sparse: trained ones of linear and convolution layers
    that are not excluded, whose number of inputs (of a group) is divisible by 4.
    """
    return [
        f"{path}.weight" if path else "weight"
        for path, module in model.named_modules()
        if isinstance(module, _FITTING)
        and module not in _excluded
        and isinstance(module._parameters.get("weight"), nn.Parameter)
        and module.weight.requires_grad
        and module.weight.shape[1] % GROUP == 0
    ]


def exclude(model: nn.Module, patterns: Sequence[str]) -> None:
    """Leaves the modules of a model whose names match a pattern dense.

    Raises:
        TypeError: an argument has another type.
        ValueError: a pattern matches no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(patterns, str) or not all(isinstance(each, str) for each in patterns):
        raise TypeError(f"expected a list of names of the model's layers, got {patterns!r}")
    modules = dict(named_modules(model))
    for pattern in patterns:
        found = [name for name in modules if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(
                f"expected names of the model's layers, or patterns of them, got {pattern!r}"
            )
        for name in found:
            _excluded.update(modules[name].modules())


def include(model: nn.Module) -> None:
    """Undoes :func:`exclude` for all modules of a model."""
    for module in model.modules():
        _excluded.discard(module)
