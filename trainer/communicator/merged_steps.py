"""Closed steps of an async lane that leave in one message."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pserver.client.channel import Hparams
from pserver.leases.table import EpochRange
from pserver.table.gradient import RowGradient
from pserver.transport.arrays import Assignment
from trainer.communicator.device_copy import PendingCopy, is_on_gpu
from trainer.communicator.parameter_slices import ParameterSlices
from trainer.communicator.pending_assignments import Departure
from trainer.communicator.request_pipeline import Buffers, Tensors
from transpiler.plan.plan import Lane


@dataclass(slots=True)
class MergedSteps:
    """One or more closed steps of one trainer, which leave in one message.

    Attributes:
        gradients: by slice; those that the sending thread cuts, by variable.
        tables: gradients of rows, by table.
        hparams: of the last step.
        steps: how many.
        assignments: what the script has written before them, by slice.
        departure: of the message that carries those; None: there are none.
        alone: no later step joins.
        owned: whether the gradients are copies, in buffers of the lane.
        copies: from a GPU, that may not have been made yet.
        leases: the positions of epochs that they have consumed.
    """

    gradients: Tensors
    tables: dict[str, RowGradient]
    hparams: Hparams
    steps: int = 1
    assignments: Mapping[str, Assignment] = field(default_factory=dict)
    departure: Departure | None = None
    alone: bool = False
    owned: bool = False
    copies: list[PendingCopy] = field(default_factory=list)
    leases: tuple[EpochRange, ...] = ()

    def copy(self, slices: ParameterSlices, buffers: Buffers) -> None:
        """Copies the gradients: the script may write to its own as soon as the step is closed."""
        self.owned = True
        for name, gradient in self.gradients.items():
            self.gradients[name] = buffers.take(name)
            if is_on_gpu(gradient):
                way = slices.device_copy(gradient)
                self.copies.append(way.to_host(gradient, self.gradients[name]))
            else:
                self.gradients[name].copy_(gradient)
        slices.join()

    def takes(self, later: MergedSteps, lane: Lane) -> bool:
        """Whether one more step may leave in this message.  One that assigns comes behind it."""
        return self.steps < lane.max_merge_var_num and not (self.alone or later.assignments)

    def wait_for_copies(self) -> None:
        """Waits until the gradients can be read."""
        for copy in self.copies:
            copy.synchronize()
        self.copies.clear()

    def add(self, later: MergedSteps, buffers: Buffers) -> None:
        """Adds one more step's gradients; from here on its hyper-parameters count."""
        self.wait_for_copies()
        for name, gradient in later.gradients.items():
            if name in self.gradients:
                self.gradients[name].add_(gradient.to("cpu"))
            else:
                self.gradients[name] = buffers.take(name).copy_(gradient)
        for name, of_table in later.tables.items():
            self.tables[name] = (
                self.tables[name].add_(of_table) if name in self.tables else of_table
            )
        self.hparams = later.hparams
        self.steps += later.steps
        self.leases += later.leases

    def merge(self, rule: str) -> None:
        """Makes the sum over the steps their mean, if the rule is "mean"."""
        if rule == "mean" and self.steps > 1:
            for gradient in self.gradients.values():
                gradient.mul_(1.0 / self.steps)
            for of_table in self.tables.values():
                of_table.mul_(1.0 / self.steps)
