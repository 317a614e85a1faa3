"""The frame that ends an answer, and what it says of values that are not finite."""

from __future__ import annotations

from collections.abc import Collection

from pserver.finite import NonFiniteStep
from pserver.job.outcome import Outcome
from pserver.wire_pb2 import Done, NonFinite


def done_of(outcome: Outcome) -> Done:
    """What DONE says of a step."""
    return Done(
        version=outcome.version,
        committed=outcome.committed,
        overflow=outcome.overflow,
        refused=outcome.refused,
        nonfinite=[
            NonFinite(trainer_id=each.trainer, step=each.step, variables=each.variables)
            for each in outcome.nonfinite
        ],
    )


def nonfinite_steps(
    trainer: int, step: int, variables: Collection[str]
) -> tuple[NonFiniteStep, ...]:
    """The step, if values of some variables in it are not finite."""
    return (NonFiniteStep(trainer, step, tuple(sorted(variables))),) if variables else ()
