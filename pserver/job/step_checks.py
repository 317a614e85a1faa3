"""What a committed step must say before it is taken.  Pure checks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from pserver.dense.slice_update import SliceUpdate
from pserver.errors import Refused, Unprepared
from pserver.job.sync_round import Contribution
from transpiler.plan.plan import Lane

if TYPE_CHECKING:
    from pserver.job.locked_table import LockedTable


class StepChecks:
    """The checks of one lane's steps.

    Args:
        lane: whose steps they are.
        updates: how the lane's slices are updated, by slice name.
        variables: what a step may assign: those slices, and the ones that nobody updates.
        tables: of the lane, by name.
    """

    def __init__(
        self,
        lane: Lane,
        updates: Mapping[str, SliceUpdate],
        variables: Collection[str],
        tables: Mapping[str, LockedTable],
    ) -> None:
        self._lane, self._updates = lane, updates
        self._known = {*variables, *tables}
        self._groups = {update.group for update in updates.values()}.union(
            *(table.groups for table in tables.values())
        )

    def check(self, step: int, trainer: int, contribution: Contribution) -> None:
        """Returns if a step may be taken.

        Args:
            step: its number in the lane.
            trainer: whose.

        Raises:
            Unprepared: it writes a slice that is not here.
            Refused: hyper-parameters or norms are missing, or what it writes has another form than
                the lane takes.
        """
        who = f"step {step} of trainer {trainer}"
        missing = self._groups - contribution.hparams.keys()
        if missing:
            raise Refused(f"{who} has no hyper-parameters for group {min(missing)}")
        self._check_written(who, contribution)
        self._check_norms(who, contribution)

    def _check_norms(self, who: str, contribution: Contribution) -> None:
        """A step says how large everything is that it brings, where its lane decides by that."""
        if self._lane.outlier_push in ("off", "apply") or contribution.overflow:
            return
        brought = {self._updates[name].parameter for name in contribution.gradients}
        brought.update(n for n, rows in contribution.row_gradients.items() if len(rows.ids))
        if missing := brought - contribution.norms.keys():
            raise Refused(
                f"{who}: expected the norm of what it brings of {min(missing)!r}, as outlier_push "
                f"is {self._lane.outlier_push!r}, got none"
            )

    def _check_written(self, who: str, contribution: Contribution) -> None:
        """What a step says of its script's writing is of the form that its lane takes: where
        trainers wait for one another with its checksum, otherwise without.
        """
        unknown = contribution.written.keys() - self._known
        if unknown:
            raise Unprepared(
                f"{who}: {min(unknown)!r} cannot be written in this lane of this server"
            )
        waits = self._lane.kind.waits_for_all
        if contribution.written and not waits:
            raise Refused(
                f"{who}: expected no checksums in a lane whose steps wait for nobody, got one of "
                f"{min(contribution.written)!r}"
            )
        if not waits or not contribution.assignments:
            return
        assigned = contribution.assignments.keys() & self._updates.keys()
        if unsaid := assigned - contribution.written.keys():
            raise Refused(f"{who} assigns {min(unsaid)!r}, and does not say its checksum")
