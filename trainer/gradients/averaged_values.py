"""What the trainers of a mixed job step by themselves, alike on all of them: values, and what their
optimizers keep of them.  A process that comes later gets it from another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import torch

from transpiler.plan.plan import Plan


class Inner(Protocol):
    """What steps parameters: the script's optimizer, or the optimizer ops of a program."""

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]:
        """What it keeps, by parameter."""


class Stepper(Protocol):
    """An optimizer of a job, and how far it is.

    Attributes:
        steps: taken by the job.
    """

    steps: int

    @property
    def inner(self) -> Inner:
        """What steps the parameters on this trainer."""

    def trained(self) -> Mapping[str, torch.Tensor]:
        """The parameters, by name."""


class AveragedValues:
    """Those of one trainer.

    Args:
        plan: of the job.
        optimizers: of the script.
    """

    def __init__(self, plan: Plan, optimizers: Sequence[Stepper]) -> None:
        self._names, self._optimizers = frozenset(plan.averaged), optimizers

    def _each(self) -> Iterator[tuple[str, torch.Tensor, Stepper]]:
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
