"""Means of gradients over one group of trainers, before they are written to the parameters.

[Note: one layout]  Every trainer sums the same elements: first one number for each parameter
(whether it has a gradient) and one for an overflow, then all gradients in the plan's order, in
buckets, with zeros for missing ones.  So trainers whose steps differ cannot mix up their parts; a
parameter without a gradient on any trainer is skipped, and a step that overflows on one trainer is
skipped by all.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pserver.polling import poll
from trainer.collective.all_reduce import AllReduce, as_sent, trainers_in_a_row
from trainer.collective.buckets import MB
from trainer.collective.process_groups import ProcessGroups
from transpiler.strategy.exchange import GradientExchange

DENSE = "the dense all-reduce"  # in messages
LOOK_SECONDS = 0.002  # between two checks whether a GPU has a sum

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GradientMeans:
    """The result of one average.

    Attributes:
        parameters: those that may have gradients.
        counts: the number of trainers with a gradient, by parameter; the last element is the number
            of trainers with an overflow.
        means: by parameter; None: there is one trainer, and it has no gradient.
        trainers: the number of trainers in the mean.
    """

    parameters: Sequence[Tensor]
    counts: Sequence[float]
    means: Sequence[Tensor | None]
    trainers: int

    @property
    def overflow(self) -> bool:
        """Whether some trainer's step overflowed: no trainer takes the step."""
        return bool(self.counts[-1])

    def land(self) -> list[Tensor]:
        """Writes the means into ``.grad``.

        Returns:
            The parameters that some trainer has a gradient for.
        """
        found = list[Tensor]()
        for parameter, count, mean in zip(
            self.parameters, self.counts[:-1], self.means, strict=True
        ):
            if not count or mean is None:
                parameter.grad = None
                continue
            found.append(parameter)
            if parameter.grad is None:
                parameter.grad = mean.to(parameter.device, parameter.dtype, copy=True)
            elif parameter.grad is not mean:
                with torch.no_grad():
                    parameter.grad.copy_(mean)
        return found

    def plain(self) -> dict[str, Any]:
        """The means in a form that :func:`trainer.collective.object_bytes.to_bytes` can hold."""
        return {
            "counts": list(self.counts),
            "means": list(self.means),
            "trainers": self.trainers,
        }

    @classmethod
    def of(cls, plain: dict[str, Any], parameters: Sequence[Tensor]) -> GradientMeans:
        """The means from the form that :meth:`plain` gave on another trainer."""
        return cls(parameters, plain["counts"], plain["means"], plain["trainers"])


class GroupSums:
    """Sums over the trainers of one group.  Not thread-safe.

    Args:
        groups: of the trainers; None for one trainer.
        exchange: how gradients travel.
        strict: whether it is an error if the trainers do not divide into rows; otherwise sums have
            no rows then.

    Attributes:
        groups, exchange: as given.
        size: the number of trainers.

    Raises:
        ValueError: the trainers do not divide into rows.
        PServerError: one of them is gone.
    """

    def __init__(
        self, groups: ProcessGroups | None, exchange: GradientExchange, strict: bool = True
    ) -> None:
        self.groups, self.exchange = groups, exchange
        self.size = 1 if groups is None else groups.size
        self._over: dict[str, AllReduce] = {}  # by the kind of device
        self._inner = 0
        if groups is not None:
            try:
                self._inner = trainers_in_a_row(exchange, groups.peers, range(self.size))
            except ValueError as error:
                if strict:
                    raise
                log.warning("gradients travel without rows from here on: %s", error)

    def average(
        self,
        parameters: Sequence[Tensor],
        gradients: Mapping[Tensor, Tensor],
        overflow: bool,
        arrives: bool = False,
    ) -> GradientMeans:
        """The mean over all trainers.  See [Note: one layout].

        Args:
            parameters: in the same order everywhere.
            gradients: by parameter, for those that have one; they are not changed.
            arrives: whether to wait until the mean is complete on GPUs, too.

        Raises:
            PServerError: another trainer is gone.
        """
        has = [float(parameter in gradients) for parameter in parameters] + [float(overflow)]
        if self.groups is None:
            return GradientMeans(parameters, has, [gradients.get(p) for p in parameters], 1)
        with torch.no_grad():
            buckets = _buckets(parameters, self.exchange)
            parts = [[self._part(p, gradients.get(p)) for p in own] for own in buckets]
            ((counts,), *sums) = self.sums([[torch.tensor(has)], *parts])
            means = {
                parameter: total if self.exchange.dtype else total.div_(self.size)
                for own, totals in zip(buckets, sums, strict=True)
                for parameter, total in zip(own, totals, strict=True)
            }
        if arrives:
            for device in {p.device for p in parameters if p.device.type == "cuda"}:
                self._arrive(self.groups, device)
        in_order = [means[parameter] for parameter in parameters]
        return GradientMeans(parameters, counts.tolist(), in_order, self.size)

    def _arrive(self, groups: ProcessGroups, device: torch.device) -> None:
        """Waits for a GPU's sums, as long as no trainer is lost."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
        event.record(torch.cuda.current_stream(device))
        for _ in poll(log, lambda: f"waiting long for {DENSE}", math.inf, LOOK_SECONDS):
            if event.query():  # type: ignore[no-untyped-call]
                return
            groups.look(DENSE)

    def _part(self, parameter: Tensor, gradient: Tensor | None) -> Tensor:
        """This trainer's summand for a parameter.

        See [Note: float16 between trainers] for the division.
        """
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        elif self.exchange.dtype:
            gradient = gradient / self.size
        return as_sent(gradient, self.exchange)

    def sums(
        self,
        buckets: Sequence[Sequence[Tensor]],
        what: str = DENSE,
        seconds: float = math.inf,
    ) -> list[list[Tensor]]:
        """The sums over all trainers, of tensors of one dtype and device in each bucket; buckets
        take the rings in turn.

        Args:
            what: the operation, for messages.
            seconds: the longest wait.

        Raises:
            TimedOut: it was longer.
            PServerError: another trainer is gone.
        """
        begun = []
        for number, tensors in enumerate(buckets):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
            begun.append((flat, self._all_reduce(flat.device).begin(flat, number, what, seconds)))
        sums = []
        for tensors, (flat, arrived) in zip(buckets, begun, strict=True):
            arrived()
            parts = torch.split(flat, [tensor.numel() for tensor in tensors])
            sums.append([part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])
        return sums

    def _all_reduce(self, device: torch.device) -> AllReduce:
        """The sums of a kind of device.  All trainers ask in the same order."""
        assert self.groups is not None, "there are other trainers"
        if device.type not in self._over:
            self._over[device.type] = AllReduce(self.groups, self.exchange, device, self._inner)
        return self._over[device.type]

    def close(self) -> None:
        """Ends its threads, if it has some."""
        for over in self._over.values():
            over.close()


def _buckets(parameters: Sequence[Tensor], exchange: GradientExchange) -> list[list[Tensor]]:
    """Parameters of one dtype and device that travel together, in their order."""
    most = exchange.most or len(parameters)
    buckets: list[list[Tensor]] = []
    filling: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        kind = (parameter.device, parameter.dtype)
        own = filling.get(kind)
        if own is None or len(own) == most or _bytes(own, parameter) > exchange.size_mb * MB:
            own = filling[kind] = []
            buckets.append(own)
        own.append(parameter)
    return buckets


def _bytes(own: Sequence[Tensor], more: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*own, more))
