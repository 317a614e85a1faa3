"""How large each step of a lane is, for servers that look for outliers; and what they say of them.

See [Note: one measure] in pserver/lane/judge.py.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterable

import torch

from pserver.client.replies import Reply
from pserver.dense.compression import encoded_norm
from pserver.onlookers import onlooker
from pserver.table.gradient import RowGradient
from pserver.telemetry.logs import RepeatedWarning
from pserver.transport.arrays import OutlierPush, PushNorm, l2_norm, said
from trainer.communicator.parameter_slices import ParameterSlices
from transpiler.plan.plan import Lane

log = logging.getLogger(__name__)


def _only_looks(norms: PushNorms) -> bool:
    """Whether servers apply outliers, and only say so."""
    return norms._lane.outlier_push == "apply"


class PushNorms:
    """What a lane measures and hears.  Any thread may call it.

    Args:
        lane, slices: whose steps.

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

    # ---- the step that is sent: one thread at a time ----

    @onlooker("the norms of pushes", where=_only_looks)
    def look(
        self, name: str, parts: Iterable[tuple[str, torch.Tensor]], change: torch.Tensor | None
    ) -> None:
        """Measures a slice's gradient.

        Args:
            parts: as it travels.
            change: what is new in it, where it is a whole parameter.
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
        """The norms of the step, by parameter and table.  The next one may begin.

        Args:
            steps: that the message merges; 0: it brings none, but what rounding has left, or the
                script has written.  Those are no norms to judge: 0.
        """
        norms = {name: PushNorm(each) for name, each in self._norms.items()} | self._of_tables
        self._norms, self._of_tables = {}, {}
        share = 1.0 if steps else 0.0
        if self._lane.merge == "sum" and steps:
            share = 1 / steps
        return {name: each.scaled(share) for name, each in norms.items()}

    # ---- the answer ----

    @onlooker("what servers say of norms")
    def hear(self, reply: Reply, first: int, last: int) -> None:
        """Counts and says what the servers made of a message.

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
                text = f"{said(outliers)}: the servers {self._done(reply)} {steps}"
                self._warning.warn(trainer, text)

    def _refused(self, reply: Reply) -> bool:
        """Whether outliers are the reason; otherwise values that are not finite are."""
        others = bool(reply.nonfinite) and self._lane.on_nonfinite == "refuse"
        return reply.refused and self._lane.outlier_push == "refuse" and not others

    def _done(self, reply: Reply) -> str:
        if reply.refused:
            return "refused"
        return "applied" if self._lane.outlier_push == "apply" else "left it out of"
