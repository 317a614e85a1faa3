"""What the trainers of a mixed job step by themselves, alike on all of them: values, and what their
optimizers keep of them.  A process that comes later gets it from another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trainer.optimizer import DistributedOptimizer
from transpiler.plan.plan import Plan


class AveragedValues:
    """Those of one trainer.

    Args:
        plan: of the job.
        optimizers: of the script.
    """

    def __init__(self, plan: Plan, optimizers: Sequence[DistributedOptimizer]) -> None:
        self._names, self._optimizers = frozenset(plan.averaged), optimizers

    def _each(self) -> Iterator[tuple[str, torch.Tensor, DistributedOptimizer]]:
        for optimizer in self._optimizers:
            for name, parameter in optimizer.trained().items():
                if name in self._names:
                    yield name, parameter, optimizer

    def give(self) -> dict[str, Any]:
        """As :func:`trainer.collective.object_bytes.to_bytes` can hold it."""
        values = {
            name: [parameter.detach(), dict(optimizer.inner.state.get(parameter, {}))]
            for name, parameter, optimizer in self._each()
        }
        return {"values": values, "steps": [each.steps for each in self._optimizers]}

    def take(self, given: Mapping[str, Any]) -> None:
        """Takes what :meth:`give` gave on another trainer."""
        for each, steps in zip(self._optimizers, given["steps"], strict=True):
            each.steps = steps
        for name, parameter, optimizer in self._each():
            value, state = given["values"][name]
            with torch.no_grad():
                parameter.copy_(value)
            if state:
                optimizer.inner.state[parameter] = {
                    key: _beside(key, held, parameter) for key, held in state.items()
                }


def _beside(key: str, held: Any, parameter: torch.Tensor) -> Any:
    """A part of a state where the optimizer keeps it: torch's counts of steps stay on the host."""
    if not isinstance(held, torch.Tensor) or key == "step":
        return held
    return held.to(parameter.device)
