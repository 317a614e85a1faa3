"""The types of the modules that have the parameters, as a strategy's patterns spell them."""

from __future__ import annotations

import re

from torch import nn

from transpiler.ir.plain_names import named_modules


def snake_case(name: str) -> str:
    """The name of a class in snake case: "BatchNorm2d" is "batch_norm2d"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def module_types(model: nn.Module, prefix: str = "") -> dict[str, str]:
    """The type, in snake case, of the module that has each parameter.

    Args:
        prefix: put before all names.

    Returns:
        By the parameter's name in the model.
    """
    return {
        f"{prefix}{path}.{name}" if path else f"{prefix}{name}": snake_case(type(module).__name__)
        for path, module in named_modules(model)
        for name, _ in module.named_parameters(recurse=False)
    }
