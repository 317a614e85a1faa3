"""Steps with a NaN or an infinity in them: what a lane does with one, and how often it has.

[Note: NaN]  A gradient that is not finite ruins every parameter that it is applied to, and with the
parameters every trainer.  So a server looks at each gradient as it arrives, and decides by the
lane's ``nonfinite`` before anything of the step is applied:

- *refuse*: nothing of the step is applied.  Its watermark moves, so that it counts as taken.  In a
  sync round nobody's step is applied, as after an overflow; in diloco the round goes on without the
  parameters of that trainer.
- *apply*: the step is applied.
- *stop*: the job fails.

Where there are several servers, a trainer looks at its own gradients, too, before it commits to the
first of them: what one server refuses all refuse (``Commit.nonfinite``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from pserver.errors import NonFinite
from pserver.job.lifecycle import Lifecycle
from pserver.job.sync_round import Contribution
from pserver.onlookers import onlooker
from pserver.repeated_lines import RepeatedWarning
from transpiler.plan.plan import Lane

log = logging.getLogger(__name__)


class NonFiniteSteps:
    """Decides what becomes of such steps in one lane.  The caller holds the job's lock.

    Args:
        lane: says what.
        job: fails where it is to stop.
        count: told the trainer of each such step.

    Attributes:
        refused: how many were.
    """

    def __init__(
        self, lane: Lane, job: Lifecycle, count: Callable[[int], None] = lambda trainer: None
    ) -> None:
        self._action = lane.on_nonfinite
        self._job = job
        self._count = count
        self._warning = RepeatedWarning(log)
        self.refused = 0

    @onlooker("values that are not finite", where=lambda steps: steps._action == "apply")
    def judge(self, contribution: Contribution) -> None:
        """Refuses a trainer's step, or lets it pass; a warning says so.  All finite ones pass.

        Raises:
            NonFinite: the job is to stop, and has failed.
        """
        for step in contribution.nonfinite if not contribution.overflow else ():
            self._count(step.trainer)
            if self._action == "stop":
                error = NonFinite(f'{step}, and a_sync_configs["nonfinite"] is "stop"')
                self._job.fail(error)
                raise error
            contribution.refused = self._action == "refuse"
            self.refused += contribution.refused
            done = "refused" if contribution.refused else "applied"
            self._job.events.add(
                "refused" if contribution.refused else "nonfinite", f"{step}: {done}"
            )
            self._warning.warn(step.trainer, f"{step}: {done}")
