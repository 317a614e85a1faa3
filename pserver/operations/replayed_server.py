"""A server whose steps come from a recorded log: the arithmetic is that of a running one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from pserver.client.observer import Progress
from pserver.config import ServerConfig
from pserver.errors import Refused
from pserver.job.program import InstalledProgram, check_program
from pserver.job_log.files import Place
from pserver.lane.recorded_steps import arrays_of, hparams_of, steps_of
from pserver.membership.decisions import Decisions
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Membership
from pserver.operations.recorded_part import RecordedPart, standing_of
from transpiler.files import bounded_json


class ReplayedServer:
    """What one server of a job held.  One thread uses it.

    It offers what :class:`~pserver.client.observer.Observer` does, so that what it holds is saved
    as that of a running server is.

    Args:
        part: what the server has recorded.
        scratch: the directory for rows of tables that do not fit in memory; None: the system's.

    Attributes:
        installed: the program, as a running server has it.
        endpoint: names it in messages.
        program, fingerprint: of the server.
        steps: by trainer, how many were applied, also by processes of this server that were lost.
        record: the last one that was applied.
    """

    def __init__(self, part: RecordedPart, scratch: str | None = None) -> None:
        plan, index = check_program(part.program)
        lifecycle, members = Lifecycle(), Membership(plan.trainers, 0.0)
        rounds = [lane.kind.waits_for_all for lane in plan.lanes]
        decisions = Decisions(1, 0, rounds, members, lambda *lost: None, lifecycle)
        limits = ServerConfig().limits
        self.installed = InstalledProgram(
            part.program, members, lifecycle, decisions, limits, scratch
        )
        self.endpoint, self.program, self.fingerprint = (
            f"server {index}",
            part.program,
            part.fingerprint,
        )
        self.steps: Counter[int] = Counter()
        self.record = 0
        self._last: Counter[int] = Counter()  # by trainer: the number of its last step

    # ---- from the log ----

    def apply(self, place: Place) -> None:
        """Applies an entry.

        Raises:
            Refused: it does not fit the program.
        """
        what = place.entry.WhichOneof("what")
        acts = {
            "applied": self._steps,
            "values": self._values,
            "rows": self._rows,
            "shrunk": self._shrunk,
            "records": self._stands,
        }
        if what not in acts:
            return
        try:
            acts[what](place)
        except (KeyError, IndexError, ValueError, RuntimeError) as error:
            raise Refused(
                f"{self.endpoint}: entry {place.number} does not fit the program: "
                f"{type(error).__name__}: {error}"
            ) from error

    def count(self, place: Place) -> None:
        """Counts the steps of an entry, which a process before the part's has applied."""
        if place.entry.WhichOneof("what") == "applied":
            self.steps.update(each.step.process.trainer for each in place.entry.applied.steps)

    def _steps(self, place: Place) -> None:
        steps = steps_of(place.entry, place.payload)
        self.installed.lane(steps.lane).replay(steps)
        self.record = max(self.record, steps.record)
        self.count(place)
        for each in steps.steps:
            self._last[each.process.trainer] = max(self._last[each.process.trainer], each.step)

    def _stands(self, place: Place) -> None:
        standing = standing_of(place)
        if standing is not None:  # the server has come back, and has loaded what is before this
            self.record = standing.last

    def _values(self, place: Place) -> None:
        values = place.entry.values
        named = {array.name: tensor for array, tensor in arrays_of(place.entry, place.payload)}
        self.installed.slices.load(named)
        if values.last:
            self.installed.discard_snapshots()
            self._begin_at(values.versions, hparams_of(values.hparams))

    def _begin_at(self, versions: Sequence[int], hparams: Mapping[int, Any]) -> None:
        for lane, version in zip(self.installed.lanes, versions, strict=True):
            lane.version = version
            lane.hparams = hparams or lane.hparams

    def _rows(self, place: Place) -> None:
        rows = place.entry.rows
        table = self.installed.tables[rows.table]
        if rows.replaced:
            table.restore(rows.metadata)
        chunk = {
            array.name: tensor.numpy() for array, tensor in arrays_of(place.entry, place.payload)
        }
        if chunk:
            table.load(chunk)

    def _shrunk(self, place: Place) -> None:
        shrunk = place.entry.shrunk
        threshold = shrunk.threshold if shrunk.HasField("threshold") else None
        self.installed.tables[shrunk.table].shrink(shrunk.days, threshold, now=shrunk.time)

    # ---- what it holds, as an Observer tells it ----

    @property
    def progress(self) -> Progress:
        """How far it is."""
        lanes = self.installed.lanes
        hparams = {group: held for lane in lanes for group, held in lane.hparams.items()}
        step = max(self._last.values(), default=0)
        return Progress(tuple(lane.version for lane in lanes), step, hparams, "")

    def pause(self, pausing: bool) -> None:
        """Nothing changes while it is read."""

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Slices and optimizer states, by name; a state that no update has made is left out."""
        found = {name: self.installed.slices.read(name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def scan(self, table: str) -> Iterator[tuple[dict[str, torch.Tensor], Mapping[str, Any]]]:
        """Its rows of a table, chunk by chunk, each with what is known of the table besides."""
        held, cursor = self.installed.tables[table], 0
        while cursor >= 0:
            chunk, cursor = held.scan(cursor, 0, changed_since_save=False, materialized=False)
            arrays = {name: torch.from_numpy(column) for name, column in chunk.items()}
            yield arrays, bounded_json.loads(held.metadata())
