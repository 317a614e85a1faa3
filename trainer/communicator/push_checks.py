"""What a lane looks at in each of its steps before it leaves, and what it hears of it: values that
are not finite, and norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from pserver.client.replies import Reply
from pserver.table.gradient import RowGradient
from pserver.transport.arrays import PushNorm
from trainer.communicator.nonfinite_steps import NamedTensors, NonFiniteSteps
from trainer.communicator.parameter_slices import ParameterSlices
from trainer.communicator.push_norms import PushNorms
from transpiler.plan.plan import Lane


@dataclass(frozen=True, slots=True)
class Found:
    """What was found in one step.

    Attributes:
        nonfinite: parameters and tables with a NaN or an infinity.
        norms: how large each is, by parameter and table; empty where nobody looks for outliers.
    """

    nonfinite: set[str]
    norms: Mapping[str, PushNorm]


class PushChecks:
    """What a lane finds and hears.  Any thread may call it.

    Args:
        lane, slices: whose steps.
    """

    def __init__(self, lane: Lane, slices: ParameterSlices) -> None:
        self._nonfinite = NonFiniteSteps(lane, slices)
        self._norms = PushNorms(lane, slices)

    def start(self, servers: int) -> None:
        """Joined, with so many servers."""
        self._nonfinite.start(servers)

    def look(
        self, name: str, parts: NamedTensors, change: torch.Tensor | None = None
    ) -> NamedTensors:
        """Looks at a slice's gradient as it travels, and returns it.

        Args:
            change: what is new in it, where it is a whole parameter.
        """
        self._norms.look(name, parts, change)
        return self._nonfinite.look(name, parts)

    def look_at_rows(self, tables: Iterable[tuple[str, RowGradient]]) -> None:
        """Looks at the gradients of tables."""
        tables = list(tables)
        self._norms.look_at_rows(tables)
        self._nonfinite.look_at_rows(tables)

    def take_out(self, steps: int = 1) -> Found:
        """What was found in the step.  The next one may begin.

        Args:
            steps: that the message merges.
        """
        return Found(self._nonfinite.take_out(), self._norms.take_out(steps))

    def hear(self, reply: Reply, first: int, last: int) -> Reply:
        """Counts and says what the servers made of a message, and returns their reply.

        Args:
            first, last: the steps of this lane that the message brought.
        """
        self._norms.hear(reply, first, last)
        self._nonfinite.hear(reply, first, last)
        return reply

    def metrics(self) -> dict[str, float]:
        """Messages of which servers have applied nothing, by reason."""
        return {
            "steps_refused_nonfinite": self._nonfinite.refused,
            "steps_refused_outlier": self._norms.refused,
        }
