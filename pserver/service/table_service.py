"""The server's end of the stream that reads and loads rows: lookups, chunks to be saved, chunks to
be loaded.

It changes nothing but by loading, so a request that comes again is simply answered again; one that
loads counts once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from pserver.errors import Refused, Unprepared
from pserver.job.job import Job
from pserver.job.membership import Member
from pserver.transport import codec
from pserver.transport.array_assembler import ArrayAssembler
from pserver.transport.stream import Stream
from pserver.wire_pb2 import Done, Frame, Kind, Scan

if TYPE_CHECKING:
    from pserver.job.locked_table import LockedTable

TABLES_MARK = -1  # where a member's marks have the stream of the tables


class TableService:
    """The requests of one trainer's stream of tables, as ``TensorService`` hands them on."""

    def __init__(self, stream: Stream, job: Job, member: Member) -> None:
        self._stream = stream
        self._job = job
        self._member = member
        self._mark = member.mark(TABLES_MARK)
        self._arrays = ArrayAssembler()

    def act(self, header: Frame, payload: memoryview) -> bool:
        """Acts on a frame; False where it is none of a request for tables."""
        if header.kind in (Kind.LOOKUP, Kind.VALUE):
            self._arrays.take_in(header, payload)
        elif header.kind == Kind.PULL:
            self._look_up([part.name for part in header.parts])
        elif header.kind == Kind.SCAN:
            self._scan(header.scan)
        elif header.kind == Kind.COMMIT and header.step == 0:
            self._load(header)
        else:
            return False
        return True

    def _table(self, name: str) -> LockedTable:
        tables = self._job.installed().tables
        if name not in tables:
            raise Unprepared(
                f"the plan has no table {name!r}; it has {', '.join(tables) or 'none'}"
            )
        return tables[name]

    def _look_up(self, names: Iterable[str]) -> None:
        self._job.check_standing()
        asked = self._arrays.take_out()
        found = []
        for name in names:
            ids = asked.get(name, torch.empty(0, dtype=torch.int64))
            if ids.dtype != torch.int64 or ids.dim() != 1:
                raise Refused(
                    f"table {name!r}: expected int64 ids of one dimension, got {ids.dtype} "
                    f"{list(ids.shape)}"
                )
            found.append((name, self._table(name).lookup(ids)))
        self._answer(found, Done(version=self._job.installed().version))

    def _scan(self, asked: Scan) -> None:
        self._job.check_standing()
        held = self._table(asked.table)
        if asked.mark_saved:
            held.mark_saved()
            self._answer((), Done(cursor=-1))
            return
        chunk, cursor = held.scan(
            asked.cursor, asked.limit, asked.changed_since_save, asked.materialized
        )
        arrays = [(f"{asked.table}@{key}", torch.from_numpy(array)) for key, array in chunk.items()]
        self._answer(arrays, Done(cursor=cursor, metadata=held.metadata()))

    def _load(self, header: Frame) -> None:
        arrays = self._arrays.take_out()
        with self._job.changed:
            again = 0 < header.request <= self._mark.uploaded
            self._mark.uploaded = max(self._mark.uploaded, header.request)
        if not again:
            self._replace(arrays, header)
        self._answer((), Done(version=self._job.installed().version))

    def _replace(self, arrays: dict[str, torch.Tensor], header: Frame) -> None:
        if self._member.trainer != 0:
            raise Refused(f"only trainer 0 loads rows, and this is trainer {self._member.trainer}")
        for name, metadata in header.commit.metadata.items():
            self._table(name).restore(metadata)
        chunks: dict[str, dict[str, torch.Tensor]] = {}
        for full, array in arrays.items():
            name, _, key = full.rpartition("@")
            chunks.setdefault(name, {})[key] = array
        with self._job.installed().gate.closed():
            for name, chunk in chunks.items():
                self._table(name).load({key: array.numpy() for key, array in chunk.items()})

    def _answer(self, arrays: Iterable[tuple[str, torch.Tensor]], done: Done) -> None:
        for header, payload in codec.frames(Kind.VALUE, 0, arrays):
            self._stream.send(header, payload)
            self._job.bytes_out += sum(memoryview(buffer).nbytes for buffer in payload)
        self._stream.send(Frame(kind=Kind.DONE, done=done))
