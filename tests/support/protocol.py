"""What a trainer and a server say to one another, written down message by message.

A real server and a real client in one process, over the transport ``inprocess``; what is written is
what the client sends and what it gets, control calls and frames, in their order.  Nothing in it
depends on the run: sessions, incarnations and ports are masked, heartbeats and probes, which come
by the clock, are left out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import grpc
import pytest
import torch
from google.protobuf.message import Message

from pserver import timeouts
from pserver.client import client
from pserver.control.control_client import ControlClient
from pserver.errors import PServerError
from pserver.job_log import follower
from pserver.security.access import OPEN, Access
from pserver.security.keys import Keys
from pserver.transport import frames
from pserver.transport.registry import TRANSPORTS, Transport
from pserver.transport.stream import Buffer, Land, Stream
from pserver.wire_pb2 import Frame, InstallRequest, Kind, Part
from tests.support.messages import is_repeated
from transpiler.program import Program

MASKED = {"session": "SESSION", "incarnation": "INCARNATION", "data_port": "PORT"}
BY_THE_CLOCK = ("Heartbeat", "Status")
NEVER_SECONDS = 600.0


class Transcript:
    """Lines, in the order in which the client's threads write them; any thread may."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the lines
        self._lines: list[str] = []

    def __str__(self) -> str:
        with self._lock:
            return "\n".join(self._lines) + "\n"

    def title(self, text: str) -> None:
        """A headline."""
        self._write(*([""] if self._lines else []), f"== {text}", "")

    def call(self, name: str, request: Message, reply: Message | None, refusal: str = "") -> None:
        """A control call, and its answer or why there is none."""
        first, *rest = _said(request)
        answer, *more = [f"refused: {refusal}"] if reply is None else _said(reply)
        self._write(
            f"{name} -> {first}".rstrip(),
            *map(_indented, rest),
            f"{name} <- {answer}".rstrip(),
            *map(_indented, more),
        )

    def frame(self, stream: str, arrow: str, header: Frame, payload: bytes) -> None:
        """A frame: its plain fields on one line, then its parts, each with its numbers, and the
        rest.
        """
        if header.kind == Kind.PROBE:
            return
        rest = Frame.FromString(header.SerializeToString())
        rest.ClearField("kind")
        rest.ClearField("parts")
        first, *lines = _said(rest)
        parts, begin = [], 0
        for part in header.parts:
            parts.append(_part(part, payload[begin : begin + part.size]))
            begin += part.size
        self._write(
            f"{stream} {arrow} {Kind.Name(header.kind)} {first}".rstrip(),
            *map(_indented, [*parts, *lines]),
        )

    def event(self, text: str) -> None:
        """Anything else."""
        self._write(f"** {text}")

    def _write(self, *lines: str) -> None:
        with self._lock:
            self._lines.extend(lines)


def _indented(line: str) -> str:
    return f"        {line}"


def _said(message: Message) -> list[str]:
    """A message's fields that are set: plain ones on the first line, each other one on a line of
    its own, with nothing in it that varies between runs.
    """
    if isinstance(message, InstallRequest):
        blocks = Program.from_proto(message.program).blocks
        ops = [f"block {block.index}: {', '.join(op.type for op in block.ops)}" for block in blocks]
        return ["session=SESSION", *ops]
    plain, lines = [], []
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for key in sorted(value):
                entry = value[key]
                said = " ".join(_said(entry)) if isinstance(entry, Message) else entry
                lines.append(f"{field.name} {key!r}: {said}")
        elif field.message_type is not None:
            for each in value if is_repeated(value) else [value]:
                first, *rest = _said(each)
                lines += [f"{field.name}: {first}", *(f"  {line}" for line in rest)]
        elif is_repeated(value):
            plain.append(f"{field.name}=[{', '.join(map(str, value))}]")
        else:
            plain.append(f"{field.name}={MASKED.get(field.name, value)}")
    return [" ".join(plain), *lines]


def _part(part: Part, payload: bytes) -> str:
    if not part.dtype:
        return part.name
    numbers = torch.frombuffer(bytearray(payload), dtype=frames.DTYPES[part.dtype])
    return (
        f"{part.name} {part.dtype} {list(part.shape)} at byte {part.offset}: "
        f"{' '.join(f'{number:g}' for number in numbers.tolist())}"
    )


class _WrittenStream:
    """A stream whose frames are written down as its client sends and receives them."""

    def __init__(self, stream: Stream, transcript: Transcript) -> None:
        self.transport, self.peer, self.bearer = stream.transport, stream.peer, stream.bearer
        self.offer = stream.offer
        self._stream, self._transcript = stream, transcript
        self._name = ""  # HELLO says it

    def send(self, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        if header.kind == Kind.HELLO:
            hello = header.hello
            self._name = "tables" if hello.tables else f"lane {hello.lane}"
            self._name = f"link {hello.server_index}" if hello.follower else self._name
            self._name += f" (stream {hello.stream})" if hello.stream > 1 else ""
        self._transcript.frame(self._name, "->", header, b"".join(payload))
        self._stream.send(header, payload)

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        try:
            received = self._stream.receive()
        except PServerError as error:
            if "broke" in str(error):
                self._transcript.event(f"{self._name}: the connection breaks")
            raise
        if received is not None:
            self._transcript.frame(self._name, "<-", received[0], bytes(received[1]))
        return received

    def admit(self) -> None:
        self._stream.admit()

    def close(self) -> None:
        self._stream.close()

    def cancel(self) -> None:
        self._stream.cancel()


class _WrittenTransport:
    def __init__(self, transport: Transport, transcript: Transcript) -> None:
        self.listen = transport.listen
        self._transport, self._transcript = transport, transcript

    def connect(
        self, host: str, port: int, *, timeout_seconds: float, keys: Keys | None = None
    ) -> Stream:
        stream = self._transport.connect(host, port, timeout_seconds=timeout_seconds, keys=keys)
        return _WrittenStream(stream, self._transcript)


class _WrittenControl(ControlClient):
    def __init__(
        self,
        transcript: Transcript,
        endpoint: str,
        timeout_seconds: float,
        name: str = "",
        access: Access = OPEN,
    ) -> None:
        super().__init__(endpoint, timeout_seconds, name, access)
        self._transcript = transcript

    def _ask(self, channel: grpc.Channel, name: str, request: Message, timeout: float) -> Message:
        if name in BY_THE_CLOCK:
            return super()._ask(channel, name, request, timeout)
        try:
            reply = super()._ask(channel, name, request, timeout)
        except grpc.RpcError as error:
            self._transcript.call(name, request, None, error.details())
            raise
        self._transcript.call(name, request, reply)
        return reply


@contextmanager
def written(transcript: Transcript) -> Iterator[Transcript]:
    """While it lasts, what clients of this process say and hear is written down."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeouts, "PROBE_SECONDS", NEVER_SECONDS)
        patch.setattr(timeouts, "LINK_BEAT_SECONDS", NEVER_SECONDS)
        patch.setattr(client, "ControlClient", partial(_WrittenControl, transcript))
        patch.setattr(follower, "ControlClient", partial(_WrittenControl, transcript))
        faithful = TRANSPORTS["inprocess"]
        patch.setitem(TRANSPORTS, "inprocess", _WrittenTransport(faithful, transcript))
        yield transcript
