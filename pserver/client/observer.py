"""Reads a server's values without joining its job: for ``pserver save``."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pserver import timeouts
from pserver.client.channel import Channel, Hparams
from pserver.client.replies import log_place_of
from pserver.client.stream import arrived_in
from pserver.config import PREFERRED_TRANSPORTS, split_endpoint
from pserver.control.control_client import ControlClient
from pserver.errors import PServerError
from pserver.security.access import OPEN, Access
from pserver.timeouts import Timeouts
from pserver.transport.memory import ByteCounters
from pserver.transport.registry import TRANSPORTS, suited
from pserver.transport.stream import SequencedStream, Stream, greet
from pserver.wire_pb2 import Hello, ObserveReply, ObserveRequest
from transpiler.formats.messages import hparams_from_proto
from transpiler.program import Program

PAUSE_SECONDS = 600.0  # for the steps that run, and for another observer's pause
SCAN_ROWS = 65536


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a server's job.

    Attributes:
        versions: updates applied, by lane.
        step: the last applied step of the trainer that is furthest.
        hparams: of the last step of each group.
        failure: what has ended the job; "" while it runs.
        log_place: see :func:`~pserver.client.replies.log_place_of`.
    """

    versions: tuple[int, ...]
    step: int
    hparams: Hparams
    failure: str
    log_place: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_message(cls, reply: ObserveReply) -> JobProgress:
        """The same as plain values."""
        hparams = {each.group: hparams_from_proto(each.values) for each in reply.hparams}
        place = log_place_of(reply.recording)
        return cls(tuple(reply.versions), reply.step, hparams, reply.failure, place)


class Observer:
    """Reads one server's values, in a pause of its job.  One thread uses it.

    Args:
        endpoint: HOST:PORT.
        access: what is proved to the server, and asked of it.

    Attributes:
        program: the server's.
        fingerprint: of the job.
        progress: how far the job was when the server was asked last.

    Raises:
        Unreachable: no server answers there.
        Unprepared: it holds nothing.
    """

    def __init__(self, endpoint: str, access: Access = OPEN) -> None:
        self.endpoint = endpoint
        self._access = access
        self._control = ControlClient(endpoint, timeouts.CALL_SECONDS, access=access)
        self._pausing = False
        self._lock = threading.Lock()  # one Observe call at a time
        self._ended = threading.Event()
        try:
            wanted = suited(PREFERRED_TRANSPORTS, split_endpoint(endpoint)[0])
            self._reply = self._control.observe(ObserveRequest(transports=wanted))
            self.program = Program.from_proto(self._reply.program)
            self.fingerprint = self._reply.fingerprint
            self.progress = JobProgress.from_message(self._reply)
            timeout = self._reply.heartbeat_timeout_seconds
            self._channel = Channel(self._open, timeout, endpoint)
        except BaseException:
            self._control.close()
            raise
        threading.Thread(target=self._beat, args=(Timeouts(timeout).beat,), daemon=True).start()

    def pause(self, pausing: bool) -> None:
        """Pauses the job's steps, or ends the pause; asks for the job's progress."""
        with self._lock:
            self._pausing = pausing
            request = ObserveRequest(session=self._reply.session, pause=pausing)
            reply = self._control.observe(request, PAUSE_SECONDS)
        self.progress = JobProgress.from_message(reply)

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Slices and optimizer states, by name; a state that no update has made yet is left out."""
        if not names:
            return {}
        arrived: dict[str, torch.Tensor] = {}
        self._channel.pull(names, partial(arrived_in, arrived)).result()
        return arrived

    def scan(self, table: str) -> Iterator[tuple[dict[str, torch.Tensor], Mapping[str, Any]]]:
        """This server's rows of a table, chunk by chunk, each with what is known of the table
        besides its rows.
        """
        cursor = 0
        while cursor >= 0:
            arrived: dict[str, torch.Tensor] = {}
            destination = partial(arrived_in, arrived)
            reply = self._channel.scan(table, cursor, SCAN_ROWS, destination).result()
            chunk = {name.removeprefix(f"{table}@"): each for name, each in arrived.items()}
            cursor = reply.cursor
            yield chunk, reply.metadata

    def close(self) -> None:
        """Lets the job continue; never raises."""
        self._ended.set()
        self._channel.close()
        with suppress(PServerError), self._lock:
            self._control.observe(ObserveRequest(session=self._reply.session, end=True))
        self._control.close()

    def _open(self, number: int) -> Stream:
        host, _ = split_endpoint(self.endpoint)
        connect = TRANSPORTS[self._reply.transport].connect
        timeout = self._reply.heartbeat_timeout_seconds
        stream = connect(
            host, self._reply.data_port, timeout_seconds=timeout, keys=self._access.keys
        )
        numbered = SequencedStream(stream, ByteCounters())
        hello = Hello(session=self._reply.session, stream=number)
        greet(numbered, hello, self._access, self.endpoint, Timeouts(timeout).connection)
        return numbered

    def _beat(self, interval: float) -> None:
        while not self._ended.wait(interval):
            with suppress(PServerError, OSError), self._lock:
                if not self._ended.is_set():
                    request = ObserveRequest(session=self._reply.session, pause=self._pausing)
                    self._control.observe(request)
