"""The server's end of an observer's stream: slices, optimizer states and rows, as they are in its
pause.  Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pserver.errors import Refused, Unprepared
from pserver.job.job import Job
from pserver.job.observations import Observation
from pserver.transport import frames
from pserver.transport.stream import Stream
from pserver.wire_pb2 import Done, Frame, Kind, Scan


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
