"""2:4 sparsity in training (``strategy.asp``), and the layers that are excluded from it.

[Note: zeros that stay]  A weight is masked once, when the model is registered, and its gradient in
every backward.  Servers and other ranks need no more.  An element whose value and gradient are 0
has states of 0, and every rule of the table then leaves it at 0: decay and momentum scale it, and a
quotient has the numerator 0.  The same holds for means over trainers, for clipping and for the
changes of k steps.  An optimizer for which it does not hold (Muon mixes the elements of a matrix)
is refused after two steps on a small weight.

The mask follows the values: where values arrive that do not fit it, such as trainer 0's or a
checkpoint's, it is made anew.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from transpiler.ir import two_of_four
from transpiler.ir.two_of_four import mask_of, sparse_weights
from transpiler.strategy.strategy import DistributedStrategy

log = logging.getLogger(__name__)


def set_excluded_layers(model: nn.Module, names: Sequence[str]) -> None:
    """Leaves layers of a model dense.  Call it before ``fleet.distributed_model``, or ``capture``.

    Args:
        names: of modules as ``model.named_modules()`` has them, or patterns ("head.*"); the modules
            within one are excluded with it.

    Raises:
        TypeError: there is no model, or no list of names.
        ValueError: a name is none of the model's, or its weights are masked already.

    Example::

        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        asp.set_excluded_layers(model, ["1"])
    """
    if isinstance(model, nn.Module) and any(map(is_masked, model.parameters())):
        raise ValueError(
            "asp.set_excluded_layers: the model's weights are masked already: call it before "
            "fleet.distributed_model"
        )
    two_of_four.exclude(model, names)


def reset_excluded_layers(model: nn.Module) -> None:
    """Removes all exclusions of a model's layers.

    Example::

        model = nn.Linear(8, 2)
        asp.reset_excluded_layers(model)
    """
    two_of_four.include(model)


class _Masked:
    """Masks the gradients of one weight.  Autograd's threads call it, one backward at a time.

    Args:
        weight: whose values are masked already.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        self._weight = weight
        self._mask = mask_of(weight)

    def __call__(self, gradient: Tensor) -> Tensor:
        """The gradient, 0 where the weight is to stay 0."""
        with torch.no_grad():
            weight = self._weight.detach()
            if self._mask.device != weight.device or bool(weight[~self._mask].any()):
                self._mask = mask_of(weight)
            return gradient * self._mask


def masked(model: nn.Module, strategy: DistributedStrategy) -> nn.Module:
    """Masks a model's weights, and from now on their gradients.

    Raises:
        ValueError: it has no weight that fits.
    """
    names = sparse_weights(model)
    if not names:
        raise ValueError(
            "strategy.asp: expected a linear or convolution layer that trains, is not excluded and "
            "has a number of inputs divisible by 4, got a model with none"
        )
    for name in names:
        weight = model.get_parameter(name)
        with torch.no_grad():
            weight.mul_(mask_of(weight))
        weight.register_hook(_Masked(weight))  # type: ignore[no-untyped-call]  # torch's own
    log.info("strategy.asp: 2 of 4 weights stay in %s", ", ".join(names))
    return model


def is_masked(parameter: Tensor) -> bool:
    """Whether a strategy has masked this weight."""
    hooks = parameter._backward_hooks or {}
    return any(isinstance(hook, _Masked) for hook in hooks.values())


def check_keeps_zeros(optimizer: torch.optim.Optimizer) -> None:
    """Checks that an optimizer leaves masked elements at 0.

    Raises:
        ValueError: it changes them, or cannot step a single weight.
    """
    accepted = inspect.signature(type(optimizer)).parameters.values()
    keywords = {each.name for each in accepted}
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted)
    for group in optimizer.param_groups:
        options = {key: group[key] for key in optimizer.defaults if anything or key in keywords}
        weight, gradient = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
        mask = mask_of(weight)
        weight.mul_(mask)
        try:
            made = type(optimizer)([weight], **options)
            for scale in (1.0, 0.5):
                weight.grad = gradient * mask * scale
                made.step()
        except Exception as error:
            raise ValueError(
                "strategy.asp: expected an optimizer that can be tried on a weight of its own, "
                f"made of its class and options, and stepped without a closure, got "
                f"{type(optimizer).__name__}: {error}"
            ) from error
        if weight[~mask].any():
            raise ValueError(
                f"strategy.asp: expected an optimizer that leaves an element at 0 whose gradient "
                f"is 0, got {type(optimizer).__name__}, which moves it: masks would not hold"
            )
