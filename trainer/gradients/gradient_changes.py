"""A watch for gradients that a script changes between backward and step, where the mean over
trainers is taken after that.

[Note: clipping before the mean]  ``clip_grad_norm_`` acts on what ``p.grad`` holds: in sync mode
this trainer's own gradient.  The mean of clipped gradients is not the clipped mean, which one
process would apply.  The clipping stays where it is, and one warning in a job says so.  After each
accumulation a hook notes which tensor a gradient is, and its version; a step compares.  At the
first steps, and at every 1,000th, elements are compared as well: writes through ``.data`` move no
version, and a clipping that only reads the norm moves versions and no element.  Where versions have
moved but no element, elements are compared at every step.  A power of two that multiplies all is no
change: GradScaler unscales by one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pserver.onlookers import onlooker
from trainer.gradients.step import compares, elements_of
from transpiler.plan.plan import Plan

if TYPE_CHECKING:
    from trainer.communicator.tables import Tables

log = logging.getLogger(__name__)

Noted = tuple[int, int]  # a gradient's identity and version


class GradientChanges:
    """Detects a gradient that is changed between backward and step, and warns once.

    Autograd's threads run its hooks; the script's thread calls the rest.

    Args:
        parameters: by name.
        trainers: the job's number of trainers.
    """

    def __init__(self, parameters: Mapping[str, Tensor], trainers: int) -> None:
        self._parameters, self._trainers, self._steps = dict(parameters), trainers, 0
        self._noted: dict[str, Noted] = {}
        self._elements: dict[str, Tensor] = {}
        self._compares = True  # whether this step compares elements
        self._touched = False  # whether versions have moved, but no element
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, name))  # type: ignore[no-untyped-call]  # torch's own
            for name, parameter in parameters.items()
            if parameter.requires_grad
        ]

    @onlooker("the watch for clipping", end=lambda watch: watch.close())
    def _note(self, name: str, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            self._noted[name] = id(gradient), gradient._version
            if self._compares:
                self._elements[name] = elements_of(gradient).clone()

    @onlooker("the watch for clipping", end=lambda watch: watch.close())
    def check(self) -> None:
        """Warns if a gradient is not as backward left it; called before gradients are sent."""
        changed = [name for name, noted in self._noted.items() if self._changed(name, noted)]
        self._noted.clear()
        self._elements.clear()
        self._steps += 1
        self._compares = self._touched or compares(self._steps + 1)
        if changed:
            log.warning(
                "step %d: the gradient of %r was changed between backward and step: that acts on "
                "each trainer's own gradient, before the mean over %d trainers. To clip as one "
                "process does, pass grad_clip=ClipGradByGlobalNorm(...) or ClipGradByValue(...) to "
                "fleet.distributed_optimizer",
                *(self._steps, min(changed, key=list(self._parameters).index), self._trainers),
            )
            self.close()

    def _changed(self, name: str, noted: Noted) -> bool:
        gradient = self._parameters[name].grad
        if gradient is None:
            return False  # the batch was left out
        moved = (id(gradient), gradient._version) != noted
        if not moved and not self._compares:
            return False
        if self._compares and not _differ(self._elements[name], elements_of(gradient)):
            self._touched |= moved
            return False
        return not moved or bool(gradient.any())  # zeros are what zero_grad leaves of such a batch

    def close(self) -> None:
        """Removes the hooks; nothing is detected any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._noted.clear()
        self._elements.clear()


def changes_of(
    plan: Plan,
    trainer: int,
    parameters: Mapping[str, Tensor],
    tables: Tables | None,
    lanes: Collection[int],
) -> GradientChanges | None:
    """The watch of this trainer for those of its gradients that are averaged with other trainers'.

    Args:
        parameters: the optimizer's parameters, by name.
        tables: the job's tables.
        lanes: the optimizer's lanes.

    Returns:
        None if there are no such gradients, and on every trainer but the first: one warning is
            enough.
    """
    if plan.trainers == 1 or trainer != 0:
        return None
    merging = {
        index
        for index, lane in enumerate(plan.lanes)
        if index in lanes and lane.kind.waits_for_all and not lane.kind.steps_on_trainer
    }
    names = {each.name for each in plan.placements if each.lane in merging} | set(plan.averaged)
    watched = {name: parameter for name, parameter in parameters.items() if name in names}
    if tables is not None:
        watched |= {
            table.name: tables.embedding(table.name).proxy
            for table in plan.tables
            if table.lane in merging
        }
    return GradientChanges(watched, plan.trainers) if watched else None


def _differ(before: Tensor, now: Tensor) -> bool:
    """Whether elements differ otherwise than by one power of two that multiplies all of them."""
    before, now = (_finite(each) for each in (before, now))
    largest = before.abs().argmax() if before.numel() else None
    if largest is None or not before[largest]:
        return bool(now.any())
    factor = now[largest] / before[largest]
    return float(torch.frexp(factor).mantissa) != 0.5 or not torch.equal(before * factor, now)


def _finite(values: torch.Tensor) -> torch.Tensor:
    wide = values.cpu().to(torch.promote_types(values.dtype, torch.float64))
    return wide.where(wide.isfinite(), 0.0)
