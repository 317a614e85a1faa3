"""What a committed step must say before it is taken.  Pure checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pserver.dense.slice_update import SliceUpdate
from pserver.errors import Refused, Unprepared
from pserver.job.sync_round import Contribution
from transpiler.plan.modes import Mode
from transpiler.plan.plan import Lane


def check_groups(who: str, contribution: Contribution, groups: Collection[int]) -> None:
    """Returns if a step has hyper-parameters for every parameter group of its lane.

    Args:
        who: for messages: "step 3 of trainer 1".

    Raises:
        Refused: one is missing.
    """
    missing = set(groups) - set(contribution.hparams)
    if missing:
        raise Refused(f"{who} has no hyper-parameters for group {min(missing)}")


def check_norms(
    step: int,
    trainer: int,
    contribution: Contribution,
    updates: Mapping[str, SliceUpdate],
    lane: Lane,
) -> None:
    """Returns if a step says how large everything is that it brings, where its lane looks at that.

    Args:
        updates: how the lane's slices are updated, by slice name.

    Raises:
        Refused: a norm is missing.
    """
    if lane.outlier_push == "off" or contribution.overflow:
        return
    brought = {updates[name].parameter for name in contribution.gradients}
    brought.update(name for name, rows in contribution.row_gradients.items() if len(rows.ids))
    if missing := brought - contribution.norms.keys():
        raise Refused(
            f"step {step} of trainer {trainer}: expected the norm of what it brings of "
            f"{min(missing)!r}, as outlier_push is {lane.outlier_push!r}, got none"
        )


def check_written(
    step: int,
    trainer: int,
    contribution: Contribution,
    updated: Collection[str],
    known: Collection[str],
    mode: Mode,
) -> None:
    """Returns if what a step says of its script's writing is of the form that its lane takes.

    Args:
        updated: the slices that the lane updates.
        known: those, the slices that nobody updates, and the lane's tables.
        mode: of the lane.

    Raises:
        Unprepared: there is no such slice here.
        Refused: the lane waits for all, and the values are not trainer 0's, or come without their
            checksum; or it waits for nobody, and there is a checksum.
    """
    who = f"step {step} of trainer {trainer}"
    unknown = contribution.written.keys() - set(known)
    if unknown:
        raise Unprepared(f"{who}: {min(unknown)!r} cannot be written in this lane of this server")
    if contribution.written and not mode.waits_for_all:
        raise Refused(
            f"{who}: expected no checksums in a lane whose steps wait for nobody, got one of "
            f"{min(contribution.written)!r}"
        )
    if not mode.waits_for_all or not contribution.assignments:
        return
    if trainer != 0:
        raise Refused(
            f"{who}: expected assignments of trainer 0 alone, as all trainers wait for one "
            f"another, got one of {min(contribution.assignments)!r}"
        )
    unsaid = contribution.assignments.keys() & set(updated) - contribution.written.keys()
    if unsaid:
        raise Refused(f"{who} assigns {min(unsaid)!r}, and does not say its checksum")
