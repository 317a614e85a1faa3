"""Batch norm over the batches of all trainers.

A model's nn.BatchNorm1d, 2d and 3d are replaced when it is registered; each replacement shares its
original's parameters, buffers and hooks, and is an instance of its class.  Until the optimizer is
distributed, after the job, in ``eval()`` mode, and in a copy of the model it acts as the original.

torch's own SyncBatchNorm takes no tensors in main memory, and only torch's default process group.
This one needs only a sum over trainers, so that it also works in jobs with servers.

[Note: sums of a batch norm]  A forward sums the number of values of a channel, their sum and the
sum of their squares, so that trainers with larger batches count for more.  In 32 bits the variance
would be lost where the mean is large.  So each trainer computes its own mean and variance, and the
sums are made of those, and travel, as 64 bits.  Backward sums what torch's does: the gradient, and
its product with the normalized values.  Gradients of weight and bias stay a trainer's own, as those
of all parameters do until they are averaged.

[Note: who is in which batch norm]  Trainers make these sums in the same order.  If one of them has
called a model once more than another, the sums of two layers would mix.  So every sum begins with
the number of its layer and direction, and its square: where the numbers differ, the squares reveal
it, and all trainers in the sum raise.  For that all vectors of a job are of one length.  Sums on a
GPU are not compared: reading them would wait for its whole stream.  Where the other trainer is in
no batch norm at all, but waits elsewhere, a deadline ends the wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from pserver.errors import JobFailed
from transpiler.plan.plan import Plan
from transpiler.strategy.strategy import DistributedStrategy

# the sum over trainers of a vector of float64, with the longest wait in seconds
Total = Callable[[Tensor, float], Tensor]


class Sums:
    """The sums over trainers of one layer.

    Args:
        total: sums a vector over the trainers.
        size: the number of trainers.
        layer: its number among the job's.
        width: of a vector, at least 2 for each channel and 1.
        name: of the layer, for messages.
        seconds: the longest wait.
    """

    def __init__(
        self, total: Total, size: int, layer: int, width: int, name: str, seconds: float
    ) -> None:
        self._total, self._size, self._layer = total, size, layer
        self._width, self._name, self._seconds = width, name, seconds

    def __call__(self, vector: Tensor, backward: bool) -> Tensor:
        """The sum of a vector of float64.  See [Note: who is in which batch norm].

        Raises:
            JobFailed: another trainer is in another layer; not on a GPU.
            TimedOut: it does not arrive.
            PServerError: another trainer was lost.
        """
        number = 2.0 * self._layer + backward + 1
        sent = vector.new_zeros(self._width + 2)
        sent[0], sent[1], sent[2 : 2 + len(vector)] = number, number**2, vector
        found = self._total(sent, self._seconds)
        # on a GPU this would wait for all that the stream has to do
        if not found.is_cuda and found[:2].tolist() != [
            number * self._size,
            number**2 * self._size,
        ]:
            raise JobFailed(
                f"sync_batch_norm: this trainer is in the {'backward' if backward else 'forward'} "
                f"of {self._name!r}, and another one is in another batch norm: all trainers call "
                "the model equally often, in train() mode"
            )
        return found[2 : 2 + len(vector)]


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the batches of all trainers; one of the classes below replaces each of
    torch's.

    Attributes:
        sums: over the trainers; None: it normalizes over this trainer's batch.
    """

    sums: Sums | None = None

    def forward(self, input: Tensor) -> Tensor:
        """The normalized input, of any dtype that torch's takes.

        In ``train()`` mode every trainer calls it, with gradients or without.

        Raises:
            ValueError: a channel has one value over all trainers.
            PServerError: another trainer was lost, or is in another layer (not on a GPU).
        """
        if self.sums is None or not self.training:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]  # torch's own
        result, mean, variance, count = _Normalization.apply(  # type: ignore[no-untyped-call]  # torch's own
            input, self.weight, self.bias, self.eps, self.sums
        )
        if self.track_running_stats:
            self._track(mean, variance * (count / (count - 1)))
        return result  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.num_batches_tracked is None:
            return
        assert self.running_mean is not None and self.running_var is not None, "they are tracked"
        self.num_batches_tracked.add_(1)
        factor = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), factor)
        self.running_var.lerp_(variance.to(self.running_var), factor)

    def __getstate__(self) -> dict[str, Any]:
        """The state without sums: a copy, or a file, is a model of its own."""
        return {key: value for key, value in self.__dict__.items() if key != "sums"}


class SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    """Batch norm of (batch, channel) or (batch, channel, length)."""


class SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    """Batch norm of (batch, channel, height, width)."""


class SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    """Batch norm of (batch, channel, depth, height, width)."""


_OURS: dict[type[nn.Module], type[SyncBatchNorm]] = {
    nn.BatchNorm1d: SyncBatchNorm1d,
    nn.BatchNorm2d: SyncBatchNorm2d,
    nn.BatchNorm3d: SyncBatchNorm3d,
}


class _Normalization(torch.autograd.Function):
    """The normalization; see [Note: sums of a batch norm]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, sums: Sums
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The result, and the mean, variance and number of values of each channel."""
        wide = x if x.dtype == torch.float64 else x.float()
        own = x.numel() / x.shape[1]
        if own:
            variance, mean = torch.var_mean(wide, _others(x), correction=0)
        else:  # an empty batch counts nothing
            variance = mean = wide.new_zeros(x.shape[1])
        mean, variance = mean.double(), variance.double()
        parts = [mean.new_tensor([own]), own * mean, own * (variance + mean.square())]
        count, *whole = torch.split(sums(torch.cat(parts), False), [1, len(mean), len(mean)])
        if not count.is_cuda and float(count) <= 1:
            raise ValueError(
                "Expected more than 1 value per channel when training, got input size "
                f"{list(x.shape)}, and none on other trainers"
            )
        mean = whole[0] / count
        variance = (whole[1] / count - mean.square()).clamp_(min=0)
        scale = (variance + eps).rsqrt()
        normal = (wide - _column(mean, wide)) * _column(scale, wide)
        result = normal if weight is None else normal * _column(weight, wide)
        result = result if bias is None else result + _column(bias, wide)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.sums = sums
        ctx.mark_non_differentiable(mean, variance, count)
        return result.to(x.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """The gradients of the input, of weight and of bias."""
        x, weight, mean, scale, count = ctx.saved_tensors
        wide = x if x.dtype == torch.float64 else x.float()
        incoming = gradient.to(wide.dtype)
        normal = (wide - _column(mean, wide)) * _column(scale, wide)
        of_bias = incoming.sum(_others(x))
        of_weight = (incoming * normal).sum(_others(x))
        of_input = None
        if ctx.needs_input_grad[0]:
            both = ctx.sums(torch.cat([of_bias, of_weight]).double(), True) / count
            means = [_column(each, wide) for each in both.split(len(mean))]
            factor = scale if weight is None else scale * weight.double()
            of_input = (incoming - means[0] - normal * means[1]) * _column(factor, wide)
            of_input = of_input.to(x.dtype)
        given = [weight is not None and ctx.needs_input_grad[1], ctx.needs_input_grad[2]]
        of_weight = of_weight.to(weight.dtype) if given[0] else None
        return of_input, of_weight, of_bias if given[1] else None, None, None


def _others(x: Tensor) -> list[int]:
    """All dimensions except the channels'."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _column(channels: Tensor, x: Tensor) -> Tensor:
    """One value a channel, as a factor or summand of ``x``."""
    return channels.to(x.dtype).view(1, -1, *[1] * (x.dim() - 2))


# ---- replacement and connection ----


def synchronised(model: nn.Module, strategy: DistributedStrategy) -> nn.Module:
    """Replaces a model's batch norms by ones that :func:`connect_batch_norms` connects.  Returns
    the model; for a bare batch norm its replacement.

    Raises:
        ValueError: a module is of a subclass of torch's batch norm, which may have a forward of its
            own.
    """
    made: dict[nn.Module, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
            continue
        if isinstance(module, _BatchNorm) and type(module) not in _OURS:
            raise ValueError(
                f"strategy.sync_batch_norm: expected nn.BatchNorm1d, 2d or 3d, got {name!r}, a "
                f"{type(module).__name__}, which may have a forward of its own"
            )
        if type(module) in _OURS:
            made[module] = _OURS[type(module)].__new__(_OURS[type(module)])
            made[module].__dict__.update(module.__dict__)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child in made:
                parent._modules[name] = made[child]
    return made.get(model, model)


def check_batch_norms(models: Iterable[nn.Module], strategy: DistributedStrategy | None) -> None:
    """Checks that there is a batch norm, where a strategy asks for synchronized ones.

    Raises:
        ValueError: no model has a batch norm.
    """
    if strategy is not None and strategy.sync_batch_norm:
        if not any(isinstance(each, SyncBatchNorm) for model in models for each in model.modules()):
            raise ValueError(
                "strategy.sync_batch_norm: expected an nn.BatchNorm1d, 2d or 3d in a registered "
                "model, got none; leave it at its default"
            )


def connect_batch_norms(
    models: Iterable[nn.Module], total: Total | None, size: int, seconds: float = math.inf
) -> bool:
    """Connects the batch norms of a job's models, or disconnects them; returns whether there are
    any.

    Args:
        total: sums a vector over the trainers; None: each normalizes by itself.
        size: the number of trainers.
        seconds: the longest wait for them.
    """
    layers = {
        module: name
        for model in models
        for name, module in model.named_modules()
        if isinstance(module, SyncBatchNorm)
    }
    width = 2 * max((each.num_features for each in layers), default=0) + 1
    for number, (layer, name) in enumerate(layers.items()):
        layer.sums = None
        if total is not None and size > 1:
            layer.sums = Sums(total, size, number, width, name, seconds)
    return bool(layers)


def check_steps_together(models: Iterable[nn.Module], plan: Plan) -> None:
    """Checks that trainers whose batch norms are summed take their steps together.

    Raises:
        ValueError: they do not.
    """
    together = plan.averaged or any(lane.kind.merges_gradients for lane in plan.lanes)
    if connect_batch_norms(models, None, 1) and not together:
        modes = ", ".join(dict.fromkeys(lane.mode for lane in plan.lanes))
        raise ValueError(
            "strategy.sync_batch_norm: expected trainers that step together, in mode sync or "
            f"collective, got mode {modes}; leave it at its default"
        )
