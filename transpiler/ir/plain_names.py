"""The names of a model's parts, without those of wrappers around it or around its parts.

[Note: wrappers]  ``torch.compile``, torch's data parallel models and its averaged ones hold a
module, and put a part before its names: ``_orig_mod.fc.weight``, ``module.fc.weight``.  The model
computes the same, so a checkpoint, an export, a pattern and a table have the names of the wrapped
module, at any depth.  A wrapper is known by its type: a module of a user may well be named
``module``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

T = TypeVar("T")
Name = Callable[[str], str]

_HOLDERS = (nn.DataParallel, DistributedDataParallel, AveragedModel)  # by the name "module"
_OWN = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # of wrappers alone


def plain_name(model: nn.Module) -> Name:
    """A function from any name of the model (of a module, a tensor, or a key of its
    ``state_dict()``) to its plain name.

    Example:
        >>> plain_name(nn.Sequential(nn.DataParallel(nn.Linear(2, 1))))("0.module.weight")
        '0.weight'
    """
    plain = dict[str, str]()
    wrapped = False
    held: dict[str, str | None] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        above, _, child = path.rpartition(".")
        if not path:
            plain[path] = path
        elif held[above] == child:
            plain[path], wrapped = plain[above], True
        else:
            plain[path] = _below(plain[above], child)
        held[path] = _held(module)

    def of(name: str) -> str:
        path, rest = name, ""
        while path not in plain:
            path, _, last = path.rpartition(".")
            rest = _below(last, rest)
        return _below(plain[path], rest)

    return of if wrapped else str


def named_modules(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """As ``model.named_modules()``, by plain names, and without the wrappers."""
    name = plain_name(model)
    for path, module in model.named_modules(remove_duplicate=remove_duplicate):
        if _held(module) is None:
            yield name(path), module


def named_parameters(
    model: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """As ``model.named_parameters()``, by plain names."""
    name = plain_name(model)
    for path, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield name(path), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """As ``model.named_buffers()``, by plain names."""
    name = plain_name(model)
    for path, buffer in model.named_buffers():
        yield name(path), buffer


def _held(module: nn.Module) -> str | None:
    """The name by which a wrapper holds its module; None: the module is not a wrapper."""
    if isinstance(module, _HOLDERS):
        return "module"
    return next((name for name in _OWN if name in module._modules), None)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
