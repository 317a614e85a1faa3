"""Gradient validation: the servers' findings of values that are not finite; and the norms of steps,
by which servers find outliers.

The servers decide what becomes of a step, all of them alike (see [Note: refused by all] in
pserver/job_log/coordinator.py), and their replies are counted and logged here.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable, Mapping

import torch

from pserver.client.replies import Reply
from pserver.dense.compression import encoded_norm
from pserver.finite import listed
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
# Steps of a lane with a value that is not finite: what the servers did with them.


class NonFiniteFindings:
    """The findings of a lane's servers about steps with values that are not finite.  Any thread may
    call it.

    Args:
        lane: of the steps.

    Attributes:
        refused: messages of this trainer of which servers have applied nothing.
    """

    def __init__(self, lane: Lane) -> None:
        self.refused = 0
        self._lane = lane
        self._lock = threading.Lock()  # guards ``refused``
        self._warning = RepeatedWarning(log)

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
# The norms of each step of a lane, and its servers' findings: outliers, and values that are not
# finite.


class GradientValidation:
    """The norms of a lane's steps, and its servers' findings.  Any thread may call it.

    Args:
        lane, slices: of the steps.

    Attributes:
        measures: whether norms of gradients are asked for.
    """

    def __init__(self, lane: Lane, slices: ParameterSlices) -> None:
        self.measures = lane.outlier_push != "off"
        self._nonfinite = NonFiniteFindings(lane)
        self._norms = PushNorms(lane, slices)

    def look(
        self, name: str, parts: NamedTensors, change: torch.Tensor | None = None
    ) -> NamedTensors:
        """Measures a slice's encoded gradient, and returns it.

        Args:
            change: what has changed, if a whole parameter is sent in place of a gradient.
        """
        self._norms.look(name, parts, change)
        return parts

    def look_at_rows(self, tables: Iterable[tuple[str, RowGradient]]) -> None:
        """Measures the gradients of tables."""
        self._norms.look_at_rows(tables)

    def take_out(self, steps: int = 1) -> Mapping[str, PushNorm]:
        """Takes the norms of the step, by parameter and table; the next step may begin.

        Args:
            steps: the number that the message merges.
        """
        return self._norms.take_out(steps)

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
