"""Gradient merge: the gradients of k steps of a script make one update.

The script is unchanged: it zeroes its gradients every step, so the sums are separate tensors.  In
the k-th step they are in ``p.grad`` for the time of the update, and the parts of a step (clip,
compress, send, average over trainers) act on them.

[Note: an overflow in a window]  GradScaler checks the gradients of one step, but the k steps of a
window make one update: an infinity in any of them cancels it.  Trainers must agree on that, and
they exchange nothing before the k-th step.  So the record of a scaler that finds an infinity
earlier is cleared, and the k-th step reports it to the scalers of all trainers: their scales stay
equal.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from pserver.table.gradient import RowGradient
from trainer.embedding.proxy import ProxyParameter, copied_together
from trainer.gradients.step import tell_scaler
from transpiler.strategy.strategy import DistributedStrategy

log = logging.getLogger(__name__)


class GradientMerge:
    """Sums of the gradients of some steps, by parameter.  The script's thread uses it.

    Args:
        names: of the parameters, for messages.
        k_steps: steps of the script that make one update.
        avg: whether the update takes the mean over these steps, not the sum.
        fused: whether all sums of a device and a dtype share one buffer.

    Attributes:
        steps: the number of steps since the last update.
        overflow: whether one of these steps overflowed.
        buffers: the buffers of the sums, with ``fused``; they are made at the first step.
    """

    def __init__(
        self, names: Mapping[Tensor, str], k_steps: int, avg: bool, fused: bool = False
    ) -> None:
        self._names, self._k_steps, self._avg, self._fused = names, k_steps, avg, fused
        self.steps, self.overflow = 0, False
        self.buffers: list[Tensor] = []
        self._parameters: list[Tensor] = []  # of the groups
        self._room: dict[Tensor, Tensor] = {}  # the memory of a parameter's sum
        self._sums: dict[Tensor, Tensor] = {}  # of this window
        self._rows: dict[ProxyParameter, RowGradient] = {}

    def add(self, optimizer: torch.optim.Optimizer, overflow: bool) -> bool:
        """Adds the gradients of a step to those of its window.

        Args:
            optimizer: the optimizer whose ``step()`` this is.
            overflow: whether the gradients are not finite: they are left out, and the window makes
                no update.

        Returns:
            Whether it is the last step of its window, which makes the update, in :meth:`lent`.

        Raises:
            ValueError: a gradient is sparse.
        """
        last = self._add_all(optimizer.param_groups, overflow)
        if last or overflow:  # see [Note: an overflow in a window]
            tell_scaler(optimizer, self.overflow and last)
        return last

    def _add_all(self, groups: Iterable[Mapping[str, Any]], overflow: bool) -> bool:
        """Adds the gradients, and tells whether the step is the last one of its window."""
        self._parameters = [p for group in groups for p in group["params"]]
        self.steps += 1
        self.overflow = self.overflow or overflow
        if self._fused and self.steps == 1 and not all(map(self._fits, self.parameters)):
            self._fuse()
        proxies = [p for p in self._parameters if isinstance(p, ProxyParameter)]
        with copied_together(() if self.overflow else proxies):
            for proxy in () if self.overflow else proxies:
                self._add_rows(proxy)
        for parameter in () if self.overflow else self._parameters:
            if not isinstance(parameter, ProxyParameter) and parameter.grad is not None:
                self._add(parameter, parameter.grad)
        return self.steps == self._k_steps

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        if gradient.is_sparse:
            raise ValueError(
                "gradient_merge: expected dense gradients, got a sparse one of "
                f"{self._names.get(parameter, 'a parameter')!r}; use a DistributedEmbedding"
            )
        if not self._fits(parameter):
            if self._fused:
                raise ValueError(
                    f"gradient_merge: {self._names.get(parameter, 'a parameter')!r} was added, or "
                    f"cast, within {self._k_steps} steps that make one update; do so after an "
                    "update"
                )
            self._room[parameter] = torch.empty_like(gradient)
            if parameter in self._sums:
                self._sums[parameter] = self._room[parameter].copy_(self._sums[parameter])
        if parameter in self._sums:
            self._sums[parameter].add_(gradient)
        else:
            self._sums[parameter] = self._room[parameter].copy_(gradient)

    def _fits(self, parameter: Tensor) -> bool:
        """Whether there is memory for the parameter's sum; it may have been cast since."""
        room = self._room.get(parameter)
        return room is not None and (room.dtype, room.device) == (parameter.dtype, parameter.device)

    def _add_rows(self, proxy: ProxyParameter) -> None:
        gradient = proxy.waiting()
        if gradient is not None:
            known = self._rows.get(proxy)
            self._rows[proxy] = gradient if known is None else known.add_(gradient)

    @property
    def parameters(self) -> list[Tensor]:
        """The trained parameters of the groups, in order, without the proxies of tables."""
        return [
            parameter
            for parameter in self._parameters
            if parameter.requires_grad and not isinstance(parameter, ProxyParameter)
        ]

    def _fuse(self) -> None:
        """Gives the sums of all parameters of a device and a dtype one buffer."""
        self.buffers.clear()
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for parameter in self.parameters:
            alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
        for (device, dtype), own in alike.items():
            sizes = [parameter.numel() for parameter in own]
            self.buffers.append(torch.zeros(sum(sizes), device=device, dtype=dtype))
            parts = torch.split(self.buffers[-1], sizes)
            self._room |= {p: part.view(p.shape) for p, part in zip(own, parts, strict=True)}

    def room_of(self, parameter: Tensor) -> Tensor:
        """The view of ``buffers`` for the parameter's sum; zeros if it has none."""
        return self._room[parameter]

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Puts the sum, or mean, of the window into ``p.grad`` in this context; then a new window
        begins.
        """
        own = [p for p in self._parameters if not isinstance(p, ProxyParameter)]
        before = [p.grad for p in own]
        share = 1.0 / self._k_steps if self._avg else 1.0
        with ExitStack() as rows:
            for parameter in own:
                parameter.grad = self._sums.get(parameter)
                if parameter.grad is not None and self._avg:
                    parameter.grad.div_(self._k_steps)
            for proxy, of_rows in self._rows.items():
                rows.enter_context(proxy.lend(of_rows.mul_(share)))
            try:
                yield
            finally:
                for parameter, gradient in zip(own, before, strict=True):
                    parameter.grad = gradient
                self.forget()

    def forget(self) -> None:
        """Begins a new window: the parameters of the sums have been updated, or replaced."""
        self.steps, self.overflow = 0, False
        self._sums.clear()
        self._rows.clear()
        for buffer in self.buffers:  # trainers sum the whole of it
            buffer.zero_()

    def end(self) -> None:
        """Warns of the steps that have made no update, if the script ends within a window."""
        if self.steps:
            log.warning(
                "gradient_merge: the last %d steps have made no update, for one takes %d: let the "
                "number of steps be a multiple of gradient_merge_configs['k_steps']",
                self.steps,
                self._k_steps,
            )
            self.forget()


def gradient_merge_of(
    strategy: DistributedStrategy | None, names: Mapping[Tensor, str]
) -> GradientMerge | None:
    """The gradient merge of an optimizer, as a strategy asks for it; None: every step makes an
    update.

    Args:
        names: of the parameters.

    Raises:
        ValueError: gradients are to be sent while backward runs.
    """
    if strategy is None or not strategy.gradient_merge:
        return None
    if strategy.a_sync_configs["overlap"]:
        raise ValueError(
            "overlap with gradient_merge: gradients cannot leave early where several steps make "
            "one update; leave one of the two off"
        )
    configs = strategy.gradient_merge_configs
    return GradientMerge(names, configs["k_steps"], configs["avg"], strategy.fuse_grad_merge)
