"""A stream's frames as the server reads them, and the first one, which says whose stream it is."""

from __future__ import annotations

from pserver.errors import CorruptFrame, GarbledStream, Refused, Unreachable
from pserver.job.job import Job
from pserver.job.membership import Member
from pserver.transport.stream import Land, Stream
from pserver.wire_pb2 import Frame, Hello, Kind


def hello_of(stream: Stream) -> Hello:
    """The stream's first frame.

    Raises:
        Unreachable: there is none.
        Refused: it is another.
    """
    received = next_frame(stream)
    if received is None:
        raise Unreachable("it ended before HELLO")
    header, _ = received
    if header.kind != Kind.HELLO:
        raise Refused(f"expected HELLO as the first frame, got {kind_of(header)}")
    return header.hello


def member_of(hello: Hello, job: Job) -> Member:
    """The trainer whose stream it is.

    Raises:
        Refused: it has not joined, or the plan has no such lane.
    """
    member = job.member(hello.session)
    if member.trainer != hello.trainer_id:
        raise Refused(
            f"the session of HELLO belongs to trainer {member.trainer}, not to trainer "
            f"{hello.trainer_id}"
        )
    job.check_lane(hello.lane)  # refused here, before it gets a watermark
    return member


def next_frame(stream: Stream, land: Land | None = None) -> tuple[Frame, memoryview] | None:
    """The next frame.  Bytes that are none end the stream, and the trainer asks again over another.

    Raises:
        GarbledStream: what came is no frame.
    """
    try:
        return stream.receive(land)
    except CorruptFrame as error:
        raise GarbledStream(str(error)) from error


def kind_of(header: Frame) -> str:
    """A frame's kind, for messages."""
    return Kind.Name(header.kind) if header.kind in Kind.values() else f"kind {header.kind}"
