"""Steps of one lane that a record decides, with all that their update reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pserver.job.shared_buffers import Gathered
from pserver.job.sync_round import Contribution
from pserver.job_log.records import ProcessStep


@dataclass(slots=True)
class DecidedSteps:
    """One update of one lane.

    Attributes:
        lane: its index in the plan.
        record: the number of the record.
        time: of the record, in seconds since 1970.
        steps: in the order of the trainers.
        contributions: by trainer.
        buffers: of the model, which the steps bring.
        coefficients: where norms clip.
    """

    lane: int
    record: int
    time: float
    steps: tuple[ProcessStep, ...]
    contributions: Mapping[int, Contribution]
    buffers: Gathered = field(default_factory=dict)
    coefficients: Mapping[str, float] = field(default_factory=dict)

    @property
    def own(self) -> Contribution:
        """The one contribution, where each trainer's step is an update of its own."""
        (contribution,) = self.contributions.values()
        return contribution
