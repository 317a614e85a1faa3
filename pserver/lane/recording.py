"""A server's recording of its job's log: all that a replay needs, in the order in which it takes
effect here.

[Note: the order of a recorded log]  Records are written as they take effect.  A step is written
when its update begins, and what is loaded or shrunk while no update runs: so what an entry finds is
what the entries before it leave, lane by lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pserver.dense.slices import SliceStore
from pserver.job_log.records import LogSnapshot, Record, records_bytes
from pserver.job_log_pb2 import Entry, LoadedRows, LoadedValues, Opening, Records, ShrunkTable
from pserver.lane.recorded_steps import StepEntries, entry_of_arrays, hparams_message
from pserver.lane.recorder import PendingEntry, Recorder, pending_entry
from pserver.lane.step import Hparams, LaneUpdate
from transpiler.program_pb2 import Program


class LogRecording:
    """The recording of one job; it does nothing until :meth:`begin`.  Any thread may call it.

    Attributes:
        recorder: writes it; None: nothing is recorded.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._steps = StepEntries()

    def begin(self, recorder: Recorder, program: Program) -> None:
        """Begins the recording.

        Args:
            program: of this server, without values.
        """
        recorder.append(
            pending_entry(Entry(opening=Opening(recording=recorder.recording, program=program)))
        )
        self.recorder = recorder

    def close(self) -> None:
        """Ends the recording: the job is over."""
        if self.recorder is not None:
            self.recorder.close()

    @property
    def place(self) -> tuple[str, int]:
        """The recording's name, and its last entry; "" and 0: nothing is recorded."""
        if self.recorder is None or self.recorder.failure:
            return "", 0
        return self.recorder.recording, self.recorder.entries

    # ---- records and steps ----

    def record(self, record: Record) -> None:
        """Records that a record of the log takes effect."""
        if self.recorder is not None:
            self.recorder.append(
                pending_entry(Entry(records=Records.FromString(records_bytes([record]))))
            )

    def stands(self, standing: LogSnapshot) -> None:
        """Records that this server has come back, and has loaded its save; records continue from
        here.
        """
        if self.recorder is not None:
            records = Records.FromString(standing.to_bytes())
            self.recorder.append(pending_entry(Entry(records=records)))

    def copies_of(self, update: LaneUpdate) -> PendingEntry | None:
        """Copies of an update that is about to begin; waits until there is room.  Not called under
        the job's lock.
        """
        if self.recorder is None or not self.recorder.make_room():
            return None
        return self._steps.entry(update)

    def begins(self, update: LaneUpdate) -> None:
        """Records that an update begins.  The caller holds the job's lock."""
        if self.recorder is None or update.entry is None:
            return
        update.entry.entry.applied.coefficients.update(update.coefficients)
        self.recorder.append(update.entry)

    @property
    def on(self) -> bool:
        """Whether a recording is running."""
        return self.recorder is not None

    # ---- replaced values; the caller keeps steps from changing anything ----

    def values(self, slices: SliceStore, versions: Sequence[int], hparams: Hparams) -> None:
        """Records that slices and states have been loaded.

        Args:
            slices: as they are now.
            versions: of the lanes.
            hparams: of the last step, by group.
        """
        if self.recorder is None:
            return
        for name, value in slices.values.items():
            states = slices.updates[name].states.values() if name in slices.updates else ()
            held = {state: slices.read(state) for state in states}
            named = {state: tensor for state, tensor in held.items() if tensor is not None}
            self._append(Entry(values=LoadedValues()), {name: value} | named)
        values = LoadedValues(last=True, versions=versions, hparams=hparams_message(hparams))
        self._append(Entry(values=values), {})

    def rows(
        self, table: str, chunk: Mapping[str, np.ndarray], metadata: str | None = None
    ) -> None:
        """Records that rows have been loaded into a table.

        Args:
            metadata: the table's, where the rows replace all that it had; None: they are added to
                its other rows.
        """
        rows = LoadedRows(table=table, metadata=metadata or "", replaced=metadata is not None)
        columns = {name: torch.from_numpy(column) for name, column in chunk.items()}
        self._append(Entry(rows=rows), columns)

    def shrunk(
        self, table: str, time: float, days: float, threshold: float | None, number: int
    ) -> None:
        """Records that a table is shrunk.

        Args:
            time: in seconds since 1970.
            number: of the caller's calls.
        """
        shrunk = ShrunkTable(table=table, time=time, days=days, threshold=threshold, number=number)
        self._append(Entry(shrunk=shrunk), {})

    def _append(self, entry: Entry, named: Mapping[str, torch.Tensor]) -> None:
        if self.recorder is not None and self.recorder.make_room():
            self.recorder.append(entry_of_arrays(entry, named))
