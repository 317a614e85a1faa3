"""A stream's frames as the server reads them, and the first one, which says whose stream it is."""

from __future__ import annotations

from pserver.errors import CorruptFrame, GarbledStream, NotAllowed, Refused, Unreachable
from pserver.job.job import Job
from pserver.job.membership import Member
from pserver.security.guard import Guard
from pserver.security.nonces import Stale
from pserver.security.permissions import role_for_frame
from pserver.security.proof import Proof, hello_bytes
from pserver.security.role import Role
from pserver.transport.stream import Land, Stream
from pserver.wire_pb2 import Frame, Hello, Kind

EXPECTED = "GRADIENT, COMMIT, VALUE, PULL or BYE"


def hello_of(stream: Stream, guard: Guard) -> tuple[Hello, Role]:
    """The HELLO that says whose stream it is, and what its sender may do.

    Where the server asks for a key another HELLO comes before it, which brings a nonce and nothing
    else, and is answered with the server's own and its proof.

    Raises:
        Unreachable: there is none, or it came too late.
        NotAllowed: it proves no key of this job, or it is another frame.
    """
    hello, proof = _hello(stream), None
    if hello.nonce:
        nonce, code = guard.answer(hello.role, hello.nonce)
        stream.send(Frame(kind=Kind.HELLO, hello=Hello(nonce=nonce, proof=code)))
        asked, hello = hello, _hello(stream)
        proof = Proof(asked.role, asked.nonce, nonce, hello.proof)
    said = hello_bytes(hello.session, hello.trainer_id, hello.lane, hello.stream, hello.tables)
    try:
        here = stream.transport in ("shm", "inprocess")
        role = guard.admit("HELLO", said, proof, stream.bearer, here, of_peer=hello.follower)
    except Stale as error:
        raise Unreachable(str(error)) from error
    return hello, role


def _hello(stream: Stream) -> Hello:
    received = next_frame(stream, Role.NOBODY)
    if received is None:
        raise Unreachable("it ended before HELLO")
    return received[0].hello


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


def next_frame(
    stream: Stream, role: Role, land: Land | None = None
) -> tuple[Frame, memoryview] | None:
    """The next frame.  Bytes that are none end the stream, and the trainer asks again over another.

    Args:
        role: of its sender; NOBODY until HELLO has proved one.

    Raises:
        GarbledStream: what came is no frame.
        NotAllowed: this role sends no such frame.
    """
    try:
        received = stream.receive(land)
    except CorruptFrame as error:
        raise GarbledStream(str(error)) from error
    if received is not None and role < role_for_frame(kind_of(received[0])):
        wanted = "HELLO as the first frame" if role is Role.NOBODY else EXPECTED
        raise NotAllowed(f"expected {wanted}, got {kind_of(received[0])}")
    return received


def kind_of(header: Frame) -> str:
    """A frame's kind, for messages."""
    return Kind.Name(header.kind) if header.kind in Kind.values() else f"kind {header.kind}"
