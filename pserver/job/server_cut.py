"""All that a server holds, as of one moment between two steps, to be written while steps continue.

[Note: a cut]  Steps wait only while the state of one moment is fixed.  Slices and their states
are copied, into memory that is there by then.  Tables are not: a step that is about to change a row
copies it first (table/snapshots.py).  Then steps continue, and the save reads copies and tables
beside them.  Every copy is given up when it is written.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pserver.checkpoint.checkpoint import Writer
from pserver.dense.slices import SliceCopies
from pserver.job.program import InstalledProgram
from pserver.membership.members import Membership
from pserver.undone import or_undone

if TYPE_CHECKING:
    from pserver.lane.tables import LockedCut


class ServerCut:
    """A server's values at the moment of :meth:`begin`.

    The caller has reserved the quiesce's cut.  One thread uses it.

    Args:
        installed: the program, whose steps continue while this is made.
        members: its trainers.

    Attributes:
        meta: the metadata of a save: the plan's fingerprint, versions, watermarks and what tables
            know besides their rows.
        pause_seconds: for how long steps waited.
    """

    def __init__(self, installed: InstalledProgram, members: Membership) -> None:
        self._installed, self._members = installed, members
        self._tables: dict[str, LockedCut] = {}
        self._slices = SliceCopies(installed.slices)
        self.meta: dict[str, Any] = {}
        self.pause_seconds = 0.0

    def begin(
        self, record: int | None = None, changed_since_save: bool = False, marks: bool = False
    ) -> None:
        """Fixes the moment; steps wait meanwhile.

        Args:
            record: of the job's log, as of which it is; None: the last one that is applied.
            changed_since_save: of tables only the rows that changed since the last cut that marked.
            marks: notes later changes of tables for the next such cut.
        """
        installed = self._installed
        with or_undone(self.close), installed.quiesce.paused():
            began = time.monotonic()
            installed.quiesce.read_cut()
            self._slices.copy()
            for name, table in installed.tables.items():
                self._tables[name] = table.cut(changed_since_save, marks)
            place = installed.log_place
            self.meta = {
                "fingerprint": installed.plan.fingerprint(),
                "versions": [lane.version for lane in installed.lanes],
                "watermarks": self._members.watermarks(),
                "leases": installed.leases.plain(),
                "log": place if record is None else {**place, "record": record},
                "lost": {t: [loss.steps, loss.rows] for t, loss in installed.lost.items()},
                "tables": {name: cut.metadata for name, cut in self._tables.items()},
            }
            self.pause_seconds = time.monotonic() - began

    def write(self, writer: Writer) -> None:
        """Writes all of it but the manifest.

        Raises:
            OSError: the disk is full, or refuses.
        """
        writer.drain(self._slices.copies)
        for name, cut in self._tables.items():
            writer.chunks(name, cut.chunks())
            cut.close()

    def close(self) -> None:
        """Closes the cut: steps copy nothing for it any more."""
        for cut in self._tables.values():
            cut.close()
