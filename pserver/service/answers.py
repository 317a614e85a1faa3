"""The frames that end an answer, and what steps say of values that are not finite, and of norms."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pserver.errors import PServerError, Unprepared
from pserver.finite import NonFiniteStep
from pserver.job.outcome import Outcome
from pserver.table.gradient import RowGradient
from pserver.transport.arrays import MOST_ROWS
from pserver.transport.arrays import PushNorm as Norm
from pserver.transport.stream import Stream
from pserver.wire_pb2 import Commit, Done, Failure, Frame, Kind, NonFinite, OutlierPush, PushNorm
from transpiler.plan.plan import Plan


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
        outliers=[
            OutlierPush(
                trainer_id=each.trainer,
                step=each.step,
                norm=PushNorm(variable=each.variable, norm=each.norm.norm, rows=each.norm.rows),
                history=each.history,
            )
            for each in outcome.outliers
        ],
    )


def nonfinite_steps(
    trainer: int, step: int, variables: Collection[str]
) -> tuple[NonFiniteStep, ...]:
    """The step, if values of some variables in it are not finite."""
    return (NonFiniteStep(trainer, step, tuple(sorted(variables))),) if variables else ()


def nonfinite_rows(gradients: Mapping[str, RowGradient]) -> set[str]:
    """The tables whose gradients have a value that is not finite."""
    return {name for name, gradient in gradients.items() if not gradient.is_finite()}


def norms_of(commit: Commit, plan: Plan) -> dict[str, Norm]:
    """How large a step is, by parameter and table, as its trainer says; of all servers' variables.

    Raises:
        Unprepared: the plan has no such parameter or table.
    """
    norms = {each.variable: Norm(each.norm, tuple(each.rows[:MOST_ROWS])) for each in commit.norms}
    if norms:
        known = {each.name for each in plan.placements} | {each.name for each in plan.tables}
        if unknown := norms.keys() - known:
            raise Unprepared(f"a norm of {min(unknown)!r}, which the plan does not have")
    return norms


def tell(stream: Stream, error: PServerError) -> None:
    """Sends an error to the peer, if it is still there."""
    try:
        stream.send(
            Frame(
                kind=Kind.FAILURE, failure=Failure(error=type(error).__name__, message=str(error))
            )
        )
    except PServerError:
        pass  # the peer is gone
