"""Gradient validation: values of a step that are not finite, and norms far beyond their history.

A trainer checks each of its gradients before the gradient is sent; the servers decide what becomes
of the step, and their reply is counted and logged here.

[Note: refused by all]  A server checks only the slices that it holds.  So that a step is refused as
a whole, the trainer checks every encoded gradient before it commits to the first server, and tells
all servers.  With one server it does not, nor if values that are not finite are applied.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from pserver.client.replies import Reply
from pserver.dense.compression import encoded_norm
from pserver.finite import is_finite, listed
from pserver.onlookers import onlooker
from pserver.table.gradient import RowGradient
from pserver.telemetry.logs import RepeatedWarning
from pserver.transport.arrays import OutlierPush, PushNorm, described, l2_norm
from trainer.senders.parameters import ParameterSlices
from transpiler.plan.plan import Lane

log = logging.getLogger(__name__)

NamedTensors = list[tuple[str, torch.Tensor]]


# ---- nonfinite steps ----
#
# Steps of a lane with a value that is not finite.  If there are several servers, the trainer finds
# such steps for all of them, and it logs what the servers did with them.


class NonFiniteFindings:
    """The findings of a lane, and of its servers, about steps with values that are not finite.  Any
    thread may call it.

    Args:
        lane, slices: of the steps.

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
        """Sets the number of servers that have been joined."""
        self._servers = servers

    # ---- sending: one thread at a time ----

    def look(self, name: str, parts: NamedTensors) -> NamedTensors:
        """Checks a slice's encoded gradient, and returns it."""
        if self._looks and not all(is_finite(tensor) for _, tensor in parts):
            self._found.add(self._slices.owner(name)[0].name)
        return parts

    def look_at_rows(self, tables: Iterable[tuple[str, RowGradient]]) -> None:
        """Checks the gradients of tables."""
        self._found.update(
            name for name, gradient in tables if self._looks and not gradient.is_finite()
        )

    @property
    def _looks(self) -> bool:
        """Whether the trainer checks gradients; see [Note: refused by all]."""
        return self._servers > 1 and self._lane.on_nonfinite != "apply"

    def take_out(self) -> set[str]:
        """Takes the parameters and tables that were found in the step; the next step may begin."""
        found, self._found = self._found, set()
        return found

    # ---- answers ----

    @onlooker("what servers say of values that are not finite")
    def record(self, reply: Reply, first: int, last: int) -> None:
        """Counts and logs what the servers did with a message.

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


# ---- push norms ----
#
# The norms of a lane's steps, for servers that look for outliers; and the servers' findings.
#
# See [Note: one measure] in pserver/lane/judge.py.


def _only_looks(norms: PushNorms) -> bool:
    """Whether servers apply outliers, and only report them."""
    return norms._lane.outlier_push == "apply"


class PushNorms:
    """A lane's measured norms, and the servers' findings.  Any thread may call it.

    Args:
        lane, slices: of the steps.

    Attributes:
        refused: messages of this trainer of which servers have applied nothing.
    """

    def __init__(self, lane: Lane, slices: ParameterSlices) -> None:
        self.refused = 0
        self._lane = lane
        self._slices = slices
        self._measures = lane.outlier_push != "off"
        self._norms: dict[str, float] = {}  # by parameter
        self._of_tables: dict[str, PushNorm] = {}
        self._lock = threading.Lock()  # guards the next, and ``refused``
        self._warning = RepeatedWarning(log)

    # ---- sending: one thread at a time ----

    @onlooker("the norms of pushes", where=_only_looks)
    def look(
        self, name: str, parts: Iterable[tuple[str, torch.Tensor]], change: torch.Tensor | None
    ) -> None:
        """Measures a slice's gradient.

        Args:
            parts: the encoded gradient.
            change: what has changed, if a whole parameter is sent in place of a gradient.
        """
        if not self._measures:
            return
        placement, _ = self._slices.owner(name)
        if change is None:
            norm = encoded_norm(name, dict(parts), placement.compression)
        else:
            norm = l2_norm(change)
        before = self._norms.get(placement.name, 0.0)
        self._norms[placement.name] = math.hypot(before, norm)

    @onlooker("the norms of pushes", where=_only_looks)
    def look_at_rows(self, tables: Iterable[tuple[str, RowGradient]]) -> None:
        """Measures the gradients of tables."""
        for name, gradient in tables if self._measures else ():
            self._of_tables[name] = PushNorm.of_rows(gradient.ids, gradient.rows)

    @onlooker("the norms of pushes", otherwise=dict, where=_only_looks)
    def take_out(self, steps: int) -> dict[str, PushNorm]:
        """Takes the norms of the step, by parameter and table; the next step may begin.

        Args:
            steps: the number that the message merges; 0 if it brings only rounding differences or
                external writes, whose norms are not judged and are given as 0.
        """
        norms = {name: PushNorm(each) for name, each in self._norms.items()} | self._of_tables
        self._norms, self._of_tables = {}, {}
        share = 1.0 if steps else 0.0
        if self._lane.merge == "sum" and steps:
            share = 1 / steps
        return {name: each.scaled(share) for name, each in norms.items()}

    # ---- answers ----

    @onlooker("what servers say of norms")
    def record(self, reply: Reply, first: int, last: int) -> None:
        """Counts and logs what the servers did with a message.

        Args:
            first, last: the steps of this lane that the message brought.
        """
        if not reply.outliers:
            return
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        by_trainer: dict[int, list[OutlierPush]] = {}
        for each in reply.outliers:
            by_trainer.setdefault(each.trainer, []).append(each)
        with self._lock:
            self.refused += self._refused(reply)
            for trainer, outliers in by_trainer.items():
                text = f"{described(outliers)}: the servers {self._done(reply)} {steps}"
                self._warning.warn(trainer, text)

    def _refused(self, reply: Reply) -> bool:
        """Whether a message was refused because of outliers, not of values that are not finite."""
        others = bool(reply.nonfinite) and self._lane.on_nonfinite == "refuse"
        return reply.refused and self._lane.outlier_push == "refuse" and not others

    def _done(self, reply: Reply) -> str:
        if reply.refused:
            return "refused"
        return "applied" if self._lane.outlier_push == "apply" else "left it out of"


# ---- gradient validation ----
#
# The checks of each step of a lane before it is sent, and the servers' findings: values that are
# not finite, and norms.


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of one step.

    Attributes:
        nonfinite: parameters and tables with a NaN or an infinity.
        norms: by parameter and table; empty if servers do not look for outliers.
    """

    nonfinite: set[str]
    norms: Mapping[str, PushNorm]


class GradientValidation:
    """The findings of a lane, and of its servers.  Any thread may call it.

    Args:
        lane, slices: of the steps.
    """

    def __init__(self, lane: Lane, slices: ParameterSlices) -> None:
        self._nonfinite = NonFiniteFindings(lane, slices)
        self._norms = PushNorms(lane, slices)

    def start(self, servers: int) -> None:
        """Sets the number of servers that have been joined."""
        self._nonfinite.start(servers)

    def look(
        self, name: str, parts: NamedTensors, change: torch.Tensor | None = None
    ) -> NamedTensors:
        """Checks a slice's encoded gradient, and returns it.

        Args:
            change: what has changed, if a whole parameter is sent in place of a gradient.
        """
        self._norms.look(name, parts, change)
        return self._nonfinite.look(name, parts)

    def look_at_rows(self, tables: Iterable[tuple[str, RowGradient]]) -> None:
        """Checks the gradients of tables."""
        tables = list(tables)
        self._norms.look_at_rows(tables)
        self._nonfinite.look_at_rows(tables)

    def take_out(self, steps: int = 1) -> Findings:
        """Takes the findings of the step; the next step may begin.

        Args:
            steps: the number that the message merges.
        """
        return Findings(self._nonfinite.take_out(), self._norms.take_out(steps))

    def record(self, reply: Reply, first: int, last: int) -> Reply:
        """Counts and logs what the servers did with a message, and returns their reply.

        Args:
            first, last: the steps of this lane that the message brought.
        """
        self._norms.record(reply, first, last)
        self._nonfinite.record(reply, first, last)
        return reply

    def metrics(self) -> dict[str, float]:
        """Messages of which servers have applied nothing, by reason."""
        return {
            "steps_refused_nonfinite": self._nonfinite.refused,
            "steps_refused_outlier": self._norms.refused,
        }
