"""Recomputation: modules that keep only their inputs, and recompute their activations in backward.

It uses torch.utils.checkpoint: a module's activations are not kept between forward and backward,
and its forward runs again when backward needs them, with the same random state.  Buffers that a
forward changes, such as batch norm's statistics, are restored after the second one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from trainer.embedding.proxy import ProxyParameter
from transpiler.ir.close_names import close_names
from transpiler.ir.plain_names import named_modules
from transpiler.precision.mixed_forward import recompute_contexts
from transpiler.strategy.strategy import DistributedStrategy

log = logging.getLogger(__name__)


class Recomputed:
    """The recomputation of a module's forward.

    Args:
        name: of the module, for messages.
        offload: whether its inputs are kept in main memory.
        shape: that each of its inputs has; empty: any.
    """

    def __init__(self, name: str, offload: bool, shape: Sequence[int]) -> None:
        self._name, self._offload, self._shape = name, offload, tuple(shape)
        self._said = False

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Runs the module's own forward.

        Raises:
            ValueError: an input has another shape than ``checkpoint_shape``, or the module looks
                rows up.
        """
        if not torch.is_grad_enabled():
            return type(module).forward(module, *args, **kwargs)
        self._check(module, args)
        with self._kept():
            return checkpoint(
                MethodType(type(module).forward, module),
                *args,
                use_reentrant=False,
                context_fn=lambda: _contexts(module),
                **kwargs,
            )

    def _check(self, module: nn.Module, args: Sequence[Any]) -> None:
        if any(isinstance(parameter, ProxyParameter) for parameter in module.parameters()):
            raise ValueError(
                f"recompute: {self._name!r} looks up a DistributedEmbedding, whose rows may be "
                "others when backward computes it again; name modules behind the embedding"
            )
        tensors = [each for each in args if torch.is_tensor(each)]
        if self._offload and not self._said and all(each.device.type == "cpu" for each in tensors):
            self._said = True
            log.warning(
                "recompute_configs['enable_offload']: the inputs of %r are in main memory already, "
                "so nothing moves",
                self._name,
            )
        for tensor in tensors if self._shape else ():
            if tuple(tensor.shape) != self._shape:
                raise ValueError(
                    f"recompute_configs['checkpoint_shape']: expected {list(self._shape)}, got "
                    f"{list(tensor.shape)} for the input of {self._name!r}"
                )

    def _kept(self) -> AbstractContextManager[Any]:
        """The context that keeps the inputs until backward; the forward inside has own hooks."""
        return saved_tensors_hooks(to_host, from_host) if self._offload else nullcontext()


def to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """The device of an activation, and the activation in main memory: a copy, pinned if the device
    is a GPU, or itself if it is there already.
    """
    if tensor.device.type == "cpu":
        return tensor.device, tensor
    held = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return tensor.device, held.copy_(tensor)


def from_host(offloaded: tuple[torch.device, Tensor]) -> Tensor:
    """The activation on its former device."""
    device, held = offloaded
    return held.to(device, non_blocking=True)


def _contexts(
    module: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first forward, and of the one in backward, which has the dtypes of the
    first, and does not change buffers.
    """
    first, again = recompute_contexts()

    @contextmanager
    def second() -> Iterator[None]:
        with again, _buffers_put_back(module):
            yield

    return first, second()


@contextmanager
def _buffers_put_back(module: nn.Module) -> Iterator[None]:
    """Restores buffers after the block.

    Through ``data``, which autograd does not count as a change: the first forward saved them.
    """
    before = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in before:
            buffer.data.copy_(value)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a recomputed module, bound to it, so that a copy of the model gets its own."""
    how: Recomputed = module.__dict__["_recomputed"]
    return how(module, args, kwargs)


def recomputed(model: nn.Module, strategy: DistributedStrategy) -> nn.Module:
    """Makes the modules of ``recompute_configs["checkpoints"]`` recompute, in place.

    Raises:
        ValueError: there is no module of such a name.
    """
    configs = strategy.recompute_configs
    modules = dict(named_modules(model, remove_duplicate=False))
    for name in configs["checkpoints"]:
        if name not in modules or not name:
            near = close_names(name, [each for each in modules if each])
            raise ValueError(
                f"recompute_configs['checkpoints']: expected names of modules, got {name!r}; close "
                f"names: {near} (names of tensors act in programs, with transpile(strategy=...))"
            )
        module = modules[name]
        module.__dict__["_recomputed"] = Recomputed(
            name, configs["enable_offload"], configs["checkpoint_shape"]
        )
        module.__dict__["forward"] = MethodType(_forward, module)
    return model
