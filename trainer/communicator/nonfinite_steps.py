"""Steps of a lane in which a value is not finite, as the trainer sees them: it finds them for all
servers where there are several, and says what the servers made of them.

[Note: refused by all]  A server looks only at the slices that it holds.  So that a step is refused
as a whole, the trainer looks at every gradient, as it travels, before it commits to the first
server, and tells all of them.  With one server it does not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

import torch

from pserver.client.replies import Reply
from pserver.finite import is_finite, listed
from pserver.onlookers import onlooker
from pserver.table.gradient import RowGradient
from pserver.telemetry.logs import RepeatedWarning
from trainer.communicator.parameter_slices import ParameterSlices
from transpiler.plan.plan import Lane

log = logging.getLogger(__name__)

NamedTensors = list[tuple[str, torch.Tensor]]


class NonFiniteSteps:
    """What a lane finds and hears of such steps.  Any thread may call it.

    Args:
        lane, slices: whose steps.

    Attributes:
        refused: messages of this trainer of which servers have applied nothing.
    """

    def __init__(self, lane: Lane, slices: ParameterSlices) -> None:
        self.refused = 0
        self._lane = lane
        self._slices = slices
        self._servers = 0
        self._found: set[str] = set()
        self._lock = threading.Lock()  # guards the next, and ``refused``
        self._warning = RepeatedWarning(log)

    def start(self, servers: int) -> None:
        """Joined, with so many servers."""
        self._servers = servers

    # ---- the step that is sent: one thread at a time ----

    def look(self, name: str, parts: NamedTensors) -> NamedTensors:
        """Looks at a slice's gradient as it travels, and returns it."""
        if self._looks and not all(is_finite(tensor) for _, tensor in parts):
            self._found.add(self._slices.owner(name)[0].name)
        return parts

    def look_at_rows(self, tables: Iterable[tuple[str, RowGradient]]) -> None:
        """Looks at the gradients of tables."""
        self._found.update(
            name for name, gradient in tables if self._looks and not gradient.is_finite()
        )

    @property
    def _looks(self) -> bool:
        """See [Note: refused by all]."""
        return self._servers > 1 and self._lane.on_nonfinite != "apply"

    def take_out(self) -> set[str]:
        """The parameters and tables that were found in the step.  The next one may begin."""
        found, self._found = self._found, set()
        return found

    # ---- the answer ----

    @onlooker("what servers say of values that are not finite")
    def hear(self, reply: Reply, first: int, last: int) -> None:
        """Counts and says what the servers made of a message.

        Args:
            first, last: the steps of this lane that the message brought.
        """
        if not reply.nonfinite:
            return
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        with self._lock:
            self.refused += reply.refused and self._lane.on_nonfinite == "refuse"
            for each in reply.nonfinite:
                self._warning.warn(
                    each.trainer,
                    f"a NaN or an infinity in the step of trainer {each.trainer}, in "
                    f"{listed(each.variables)}: the servers {self._done(reply)} {steps}",
                )

    def _done(self, reply: Reply) -> str:
        if reply.refused:
            return "refused"
        return "applied" if self._lane.on_nonfinite == "apply" else "left it out of"
