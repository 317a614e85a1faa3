"""Gradient validation: a lane's handling of steps with a NaN, an infinity, or a norm far beyond its
history.

[Note: NaN]  A gradient that is not finite ruins every parameter that it is applied to, and with the
parameters every trainer.  So a server looks at each gradient as it arrives, and decides by the
lane's ``nonfinite`` before anything of the step is applied:

- *refuse*: nothing of the step is applied.  Its watermark moves, so that it counts as taken.  In a
  sync round no trainer's step is applied, as after an overflow; in diloco the round continues
  without the parameters of that trainer.
- *apply*: the step is applied.
- *stop*: the job fails.

A server sees the slices that it holds, and what one server refuses all refuse: see [Note: refused
by all] in pserver/job_log/coordinator.py.

[Note: outliers]  A wrong label, a broken file or a loss that diverges makes a gradient that is
finite and ruins the parameters all the same.  So where a lane's ``outlier_push`` is set, a server
compares each norm of a step with the history of the same trainer and variable, before anything of
the step is applied, and treats the step as one with a NaN (see [Note: NaN]):

- *refuse*: nothing of the step is applied, and in a sync round no trainer's step is; in diloco the
  round continues without the parameters of that trainer.
- *apply*: the step is applied.
- *stop*: the job fails.

A history learns only of steps that are whole: not of one that is not finite or overflows, and of no
variable of a step in which another one is an outlier.  See [Note: far beyond its history] in
membership/watermark.py.

[Note: one measure]  The trainer measures, and every server judges.  A server sees the slices that
it holds and does not know how many steps a message has merged.  Of the same norms in the same order
all servers come to the same decision, unless one has begun its histories anew.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from pserver.errors import NonFinite, Outlier
from pserver.lane.step import Step
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.watermark import NormHistory
from pserver.onlookers import onlooker
from pserver.telemetry.logs import RepeatedWarning
from pserver.transport.arrays import OutlierPush, described
from transpiler.plan.plan import Lane

# ---- nonfinite steps ----
#
# Steps with a NaN or an infinity in them: what a lane does with one.


log = logging.getLogger(__name__)

NONFINITE, OUTLIER = "nonfinite", "outlier"  # why a step is refused
ELSEWHERE = "refused, as another server has found"


class NonFiniteSteps:
    """Decides about such steps in one lane.  The caller holds the job's lock.

    Args:
        lane: has the setting.
        job: fails where it is to stop.
        count: counts a step of a trainer, by a name of ``COUNTS``.
    """

    def __init__(
        self,
        lane: Lane,
        job: Lifecycle,
        count: Callable[[int, str], None] = lambda trainer, name: None,
    ) -> None:
        self._action = lane.on_nonfinite
        self._job = job
        self._count = count
        self._warning = RepeatedWarning(log)

    @onlooker("values that are not finite", where=lambda steps: steps._action == "apply")
    def judge(self, step: Step) -> None:
        """Refuses a trainer's step, or lets it pass, with a warning.  All finite ones pass.

        Raises:
            NonFinite: the job is to stop, and has failed.
        """
        for found in step.nonfinite if not step.overflow else ():
            self._count(found.trainer, "nonfinite")
            if self._action == "stop":
                error = NonFinite(f'{found}, and a_sync_configs["nonfinite"] is "stop"')
                self._job.fail(error)
                raise error
            if self._action == "refuse":
                step.refused = NONFINITE
                self._count(found.trainer, "refused_nonfinite")
            done = "refused" if step.refused else "applied"
            self._job.events.add("refused" if step.refused else "nonfinite", f"{found}: {done}")
            self._warning.warn(found.trainer, f"{found}: {done}")

    def refuse(self, step: Step) -> None:
        """Refuses a step, because a server does; nothing where that is this one."""
        if not step.refused:
            step.refused = NONFINITE
            self._count(step.trainer, "refused_nonfinite")
            text = f"step {step.number} of trainer {step.trainer}: {ELSEWHERE} a NaN or an infinity"
            self._job.events.add("refused", text)
            self._warning.warn(step.trainer, text)


# ---- outlier pushes ----
#
# Steps with a norm far beyond its history: what a lane does with one.


class OutlierPushes:
    """Decides about such steps in one lane.  The caller holds the job's lock.

    Args:
        lane: has the setting.
        job: fails where it is to stop.
        count: counts a step of a trainer, by a name of ``COUNTS``.
    """

    def __init__(
        self,
        lane: Lane,
        job: Lifecycle,
        count: Callable[[int, str], None] = lambda trainer, name: None,
    ) -> None:
        self._action, self._factor = lane.outlier_push, lane.outlier_factor
        self._refuses_nonfinite = lane.on_nonfinite == "refuse"
        self._job = job
        self._count = count
        self._warning = RepeatedWarning(log)

    @onlooker("the norms of pushes", where=lambda pushes: pushes._action == "apply")
    def judge(self, step: Step, histories: dict[str, NormHistory]) -> None:
        """Refuses a trainer's step, or lets it pass, with a warning.

        Args:
            step: gets ``outliers`` and ``refused``.
            histories: of its trainer in this lane, by parameter and table; they learn.

        Raises:
            Outlier: the job is to stop, and has failed.
        """
        # on every server alike, whichever holds the value
        finite = all(math.isfinite(each.norm) for each in step.norms.values())
        if self._action == "off" or step.overflow or (self._refuses_nonfinite and not finite):
            return
        norms = {n: each for n, each in step.norms.items() if 0 < each.norm < math.inf}
        for name in norms.keys() - histories.keys():
            histories[name] = NormHistory(self._factor)
        step.outliers = tuple(
            OutlierPush(step.trainer, step.number, name, each, histories[name].expected)
            for name, each in sorted(norms.items())
            if histories[name].beyond(each.norm)
        )
        found = {each.variable for each in step.outliers}
        whole = not found and finite
        for name, each in norms.items():
            if name in found:
                histories[name].pass_over(each.norm)
            elif whole:
                histories[name].learn(each.norm)
            else:
                histories[name].interrupt()
        if found:
            self._act(step)

    def _act(self, step: Step) -> None:
        self._count(step.trainer, "outlier")
        text = described(step.outliers)
        if self._action == "stop":
            error = Outlier(f'{text}, and a_sync_configs["outlier_push"] is "stop"')
            self._job.fail(error)
            raise error
        if self._action == "refuse":
            step.refused = OUTLIER
            self._count(step.trainer, "refused_outlier")
        self._warning.warn(step.trainer, f"{text}: {'refused' if step.refused else 'applied'}")

    def refuse(self, step: Step) -> None:
        """Refuses a step, because a server does; nothing where that is this one."""
        if not step.refused:
            step.refused = OUTLIER
            self._count(step.trainer, "refused_outlier")
            self._warning.warn(
                step.trainer,
                f"step {step.number} of trainer {step.trainer}: {ELSEWHERE} an outlier",
            )
