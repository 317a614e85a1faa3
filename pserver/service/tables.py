"""The server's end of the stream that reads and loads rows: lookups, what has changed of them,
chunks for a save, chunks from a load.

Only a load changes rows.  So any other request that arrives again is answered again, and a load
that arrives again counts once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from pserver.errors import Refused, Unprepared
from pserver.job.job import Job
from pserver.job.program import Observation
from pserver.membership.members import Member
from pserver.service.streams import kind_of
from pserver.table.kept_lookups import KEPT_BYTES, KeptLookups, SentRows
from pserver.telemetry.trace import now
from pserver.transport import frames
from pserver.transport.arrays import PLACES, ROWS, ArrayAssembler
from pserver.transport.stream import Stream, bytes_of
from pserver.wire_pb2 import Done, Frame, Kind, Scan

if TYPE_CHECKING:
    from pserver.lane.tables import LockedTable


# ---- reading service ----
#
# The server's end of an observer's stream: slices, optimizer states and rows, as they are in its
# pause.  Nothing is changed.


class ReadingService:
    """Serves one stream of an observer, after its HELLO.  One thread uses it."""

    def __init__(self, stream: Stream, job: Job, observation: Observation) -> None:
        self._stream = stream
        self._job = job
        self._observation = observation
        self._installed = observation.installed

    def serve(self) -> None:
        """Answers frames until BYE, or the stream's end; replaces the observer's earlier stream.

        Raises:
            PServerError: the error that the peer is to be sent.
        """
        with self._job.condition:
            observation = self._observation
            end_earlier, observation.end_stream = observation.end_stream, self._stream.cancel
        end_earlier()
        while (received := self._stream.receive()) is not None:
            header, _ = received
            self._observation.last_heard = self._job.now()
            if header.kind == Kind.BYE:
                return
            if header.kind == Kind.PROBE:
                self._stream.send(Frame(kind=Kind.PROBE))
            elif header.kind == Kind.PULL:
                self._pull([part.name for part in header.parts])
            elif header.kind == Kind.SCAN and not header.scan.mark_saved:
                self._scan(header.scan)
            else:
                raise Refused("an observer's stream takes PULL, SCAN and BYE, and changes nothing")

    def _pull(self, names: Iterable[str]) -> None:
        slices = self._installed.slices
        found = ((name, slices.read(name)) for name in names or list(slices.values))
        self._answer(
            ((name, tensor) for name, tensor in found if tensor is not None),
            Done(version=self._installed.version),
        )

    def _scan(self, asked: Scan) -> None:
        tables = self._installed.tables
        if asked.table not in tables:
            raise Unprepared(f"the plan has no table {asked.table!r}")
        table = tables[asked.table]
        chunk, cursor = table.scan(asked.cursor, asked.limit, False, asked.materialized)
        arrays = [(f"{asked.table}@{key}", torch.from_numpy(array)) for key, array in chunk.items()]
        self._answer(arrays, Done(cursor=cursor, metadata=table.metadata()))

    def _answer(self, tensors: Iterable[tuple[str, torch.Tensor]], done: Done) -> None:
        for header, payload in frames.frames(Kind.VALUE, 0, tensors):
            self._stream.send(header, payload)
        self._stream.send(Frame(kind=Kind.DONE, done=done))


# ---- table service ----


AFTER_SECONDS = 10.0  # for which a refresh waits for steps before it
ARRAYS = (Kind.LOOKUP, Kind.VALUE)  # frames with a request's arrays
TABLES = -1  # stands for a lane: the watermark of the stream of the tables


class TableService:
    """Answers the requests of one trainer's stream of the tables, which ``TensorService`` passes
    on.

    One thread uses it.

    Args:
        check_place: raises where a later stream has replaced this one.
    """

    def __init__(
        self, stream: Stream, job: Job, member: Member, check_place: Callable[[], None]
    ) -> None:
        self._stream, self._check_place = stream, check_place
        self._job = job
        self._member = member
        self._watermark = member.watermark(TABLES)
        memory = job.config.limits.memory_bytes
        self._arrays = ArrayAssembler(job.has, memory)
        self._kept = KeptLookups(most_bytes=min(memory, KEPT_BYTES))
        member.kept_bytes = 0

    def land(self, header: Frame, payload_bytes: int) -> list[memoryview] | None:
        """The memory for a frame's payload; None: any memory."""
        if header.kind not in ARRAYS:
            return None
        return self._arrays.land(header, payload_bytes)

    def act(self, header: Frame, payload: memoryview) -> None:
        """Acts on a frame.

        Raises:
            Refused: it belongs to no request for tables.
        """
        if header.kind in ARRAYS:
            self._arrays.take_in(header, payload)
        elif header.kind == Kind.PULL:
            self._look_up(_each_once(header), header.lookup)
        elif header.kind == Kind.REFRESH:
            self._refresh(_each_once(header), header.lookup, dict(header.after))
        elif header.kind == Kind.SCAN:
            self._scan(header.scan)
        elif header.kind == Kind.COMMIT and header.step == 0:
            self._load(header)
        else:
            raise Refused(
                "the stream of the tables takes LOOKUP, PULL, REFRESH, SCAN, VALUE and COMMIT 0, "
                f"not {kind_of(header)}"
            )

    def _table(self, name: str) -> LockedTable:
        tables = self._job.installed().tables
        if name not in tables:
            raise Unprepared(
                f"the plan has no table {name!r}; it has {', '.join(tables) or 'none'}"
            )
        return tables[name]

    def _look_up(self, names: Collection[str], number: int) -> None:
        """Answers with rows.

        Args:
            number: under which the lookup is kept; 0: it is not.
        """
        self._job.lifecycle.check_running()
        spans = self._job.tracing.spans
        began = now() if spans.on else 0.0
        asked = self._arrays.take_out()
        found, sent = [], dict[str, SentRows]()
        for name in names:
            ids = asked[name] if name in asked else torch.empty(0, dtype=torch.int64)
            if ids.dtype != torch.int64 or ids.dim() != 1:
                raise Refused(
                    f"table {name!r}: expected int64 ids of one dimension, got {ids.dtype} "
                    f"{list(ids.shape)}"
                )
            values = self._table(name).lookup(ids, self._member.trainer, ahead=number > 0)
            found.append((name, values))
            if number:
                # ids that no name asks for may share their memory, and are not counted
                kept = ids if asked.keys() <= set(names) else ids.clone()
                sent[name] = SentRows(kept.numpy(), _bits(values))
        if number:
            self._kept.keep(number, sent)
            self._member.kept_bytes = self._kept.bytes_held
        self._answer(found, Done(version=self._job.installed().version))
        if began:
            rows = sum(len(values) for _, values in found)
            spans.add("lookup", began, now(), trainer=self._member.trainer, rows=rows)

    def _refresh(self, names: Sequence[str], number: int, after: Mapping[int, int]) -> None:
        """Answers with those rows of a lookup that are not what was sent.  See [Note: look-ahead]
        in pserver/table/kept_lookups.py.

        Args:
            after: by lane, the step of this trainer that is applied before.
        """
        self._job.lifecycle.check_running()
        kept, arrays = self._kept.find(number), list[tuple[str, torch.Tensor]]()
        known = all(name in kept for name in names) and self._are_applied(after)
        spans = self._job.tracing.spans
        began = now() if spans.on else 0.0
        for name in names if known else ():
            rows = self._table(name).lookup(torch.from_numpy(kept[name].ids), self._member.trainer)
            places, changed = kept[name].refresh(_bits(rows))
            if len(places):
                arrays.append((name + PLACES, torch.from_numpy(places)))
                arrays.append((name + ROWS, torch.from_numpy(changed).view(rows.dtype)))
        version = self._job.installed().version
        self._answer(arrays, Done(version=version, unknown_lookup=not known))
        if began:
            refreshed = sum(len(array) for name, array in arrays if name.endswith(PLACES))
            spans.add("refresh", began, now(), trainer=self._member.trainer, rows=refreshed)

    def _are_applied(self, steps: Mapping[int, int]) -> bool:
        """Waits for a while until steps of this trainer are applied, by lane; whether they are."""
        lanes, deadline = self._job.installed().lanes, time.monotonic() + AFTER_SECONDS
        for lane in steps:
            if lane >= len(lanes):
                raise Refused(f"expected a lane below {len(lanes)}, got {lane}")
        return all(
            lanes[lane].wait_until_applied(self._member, step, deadline, self._check_place)
            for lane, step in steps.items()
        )

    def _scan(self, asked: Scan) -> None:
        self._job.lifecycle.check_running()
        table = self._table(asked.table)
        if asked.mark_saved:
            table.mark_saved()
            self._answer((), Done(cursor=-1))
            return
        chunk, cursor = table.scan(
            asked.cursor, asked.limit, asked.changed_since_save, asked.materialized
        )
        arrays = [(f"{asked.table}@{key}", torch.from_numpy(array)) for key, array in chunk.items()]
        self._answer(arrays, Done(cursor=cursor, metadata=table.metadata()))

    def _load(self, header: Frame) -> None:
        arrays = self._arrays.take_out()
        condition, check = self._job.condition, self._check_place
        with self._watermark.upload(condition, check, header.request, last=True) as new:
            if new:  # it counts where all of it was taken: one that was refused may come again
                self._replace(arrays, header)
        self._answer((), Done(version=self._job.installed().version))

    def _replace(self, arrays: dict[str, torch.Tensor], header: Frame) -> None:
        chunks: dict[str, dict[str, torch.Tensor]] = {}
        for full, array in arrays.items():
            name, _, key = full.rpartition("@")
            chunks.setdefault(name, {})[key] = array
        self._check_loader(header, chunks)
        if header.commit.metadata:  # all rows go
            self._job.installed().quiesce.await_cut()
        installed = self._job.installed()
        for name in (*header.commit.metadata, *chunks):
            self._table(name)  # it is there
        if header.commit.metadata:
            with installed.quiesce.paused():
                for name, metadata in header.commit.metadata.items():
                    installed.restore_table(name, metadata)
        installed.budget.check({name: len(chunk.get("ids", ())) for name, chunk in chunks.items()})
        with installed.quiesce.paused():
            for name, chunk in chunks.items():
                installed.load_rows(name, {key: array.numpy() for key, array in chunk.items()})

    def _check_loader(self, header: Frame, chunks: Mapping[str, Collection[str]]) -> None:
        """Returns if this trainer may load: :attr:`Membership.first` anything; others values of
        rows, into tables whose steps wait for no other trainer.
        """
        values = all(
            set(keys) == {"ids", "values"} and self._table(name).any_trainer_loads
            for name, keys in chunks.items()
        )
        if header.commit.metadata or not values:
            self._job.check_loads(self._member, "rows")

    def _answer(self, arrays: Iterable[tuple[str, torch.Tensor]], done: Done) -> None:
        for header, payload in frames.frames(Kind.VALUE, 0, arrays):
            self._stream.send(header, payload)
            self._job.sent[self._member.transport] += bytes_of(payload)
        self._stream.send(Frame(kind=Kind.DONE, done=done))


def _each_once(header: Frame) -> list[str]:
    """The tables that a frame names.

    Raises:
        Refused: one is there twice: its rows would be, too.
    """
    names = dict[str, None]()
    for part in header.parts:
        if part.name in names:
            raise Refused(f"{part.name!r}: expected each table once in {kind_of(header)}")
        names[part.name] = None
    return list(names)


def _bits(rows: torch.Tensor) -> np.ndarray:
    """The same memory, [n, dim], as bytes, [n, bytes of a row]: numpy has no bfloat16."""
    bits: np.ndarray = rows.view(torch.uint8).numpy()
    return bits
