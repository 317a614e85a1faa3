"""The frames of a server's streams: the first one, the values of an answer, the end of one."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from pserver import timeouts
from pserver.errors import (
    CorruptFrame,
    GarbledStream,
    NotAllowed,
    PServerError,
    Refused,
    Unprepared,
    Unreachable,
)
from pserver.finite import NonFiniteStep
from pserver.job.job import Job
from pserver.membership.members import Member
from pserver.membership.watermark import Outcome
from pserver.onlookers import onlooker
from pserver.security.access import Guard, role_for_frame
from pserver.security.tokens import Proof, Role, Stale, hello_bytes
from pserver.table.gradient import RowGradient
from pserver.telemetry.trace import Fact, Spans, now
from pserver.transport.arrays import MOST_ROWS
from pserver.transport.arrays import PushNorm as Norm
from pserver.transport.frames import Packed, Packer, frames
from pserver.transport.memory import IN_ORDER, ZoneMemory
from pserver.transport.stream import Land, SequencedStream, Stream
from pserver.wire_pb2 import (
    Commit,
    Done,
    Failure,
    Frame,
    Hello,
    Kind,
    NonFinite,
    OutlierPush,
    PushNorm,
    RowChanges,
)
from transpiler.plan.plan import Plan

if TYPE_CHECKING:
    from pserver.table.changes import TableChanges

# ---- answers ----
#
# The frames that end an answer, and what steps say of values that are not finite, and of norms.


def done_of(outcome: Outcome, changes: Mapping[str, TableChanges]) -> Done:
    """The contents of DONE about a step.

    Args:
        changes: of rows by other trainers, by table.
    """
    return Done(
        version=outcome.version,
        committed=outcome.committed,
        overflow=outcome.overflow,
        refused=outcome.refused,
        nonfinite=[
            NonFinite(trainer_id=each.trainer, step=each.step, variables=each.variables)
            for each in outcome.nonfinite
        ],
        outliers=[
            OutlierPush(
                trainer_id=each.trainer,
                step=each.step,
                norm=PushNorm(variable=each.variable, norm=each.norm.norm, rows=each.norm.rows),
                history=each.history,
            )
            for each in outcome.outliers
        ],
        changes={name: message_of(each) for name, each in changes.items()} if changes else None,
    )


def message_of(changes: TableChanges) -> RowChanges:
    """The changes of a table's rows, as they travel."""
    if changes.ids is None:
        return RowChanges(position=changes.position, any=True)
    return RowChanges(position=changes.position, ids=changes.ids.astype("<i8").tobytes())


def nonfinite_steps(
    trainer: int, step: int, variables: Collection[str]
) -> tuple[NonFiniteStep, ...]:
    """The step, if values of some variables in it are not finite."""
    return (NonFiniteStep(trainer, step, tuple(sorted(variables))),) if variables else ()


def nonfinite_rows(gradients: Mapping[str, RowGradient]) -> set[str]:
    """The tables whose gradients have a value that is not finite."""
    return {name for name, gradient in gradients.items() if not gradient.is_finite()}


def norms_of(commit: Commit, plan: Plan) -> dict[str, Norm]:
    """The norms of a step, by parameter and table, as its trainer reports them; of all servers'
    variables.

    Raises:
        Unprepared: the plan has no such parameter or table.
    """
    norms = {each.variable: Norm(each.norm, tuple(each.rows[:MOST_ROWS])) for each in commit.norms}
    if norms:
        known = {each.name for each in plan.placements} | {each.name for each in plan.tables}
        if unknown := norms.keys() - known:
            raise Unprepared(f"a norm of {min(unknown)!r}, which the plan does not have")
    return norms


def send_error(stream: Stream, error: PServerError) -> None:
    """Sends an error to the peer, if it is still connected."""
    try:
        stream.send(
            Frame(
                kind=Kind.FAILURE, failure=Failure(error=type(error).__name__, message=str(error))
            )
        )
    except PServerError:
        pass  # the peer is gone


# ---- first frame ----
#
# A stream's frames as the server reads them, and the first one, which says whose stream it is.


EXPECTED = "GRADIENT, COMMIT, VALUE, PULL or BYE"


def hello_of(stream: Stream, guard: Guard) -> tuple[Hello, Role]:
    """The HELLO that names the stream's owner, and its sender's role.

    Where the server asks for a key another HELLO comes before it, which brings a nonce and nothing
    else, and is answered with the server's own and its proof.

    Raises:
        Unreachable: there is none, or it arrived too late.
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
    """The trainer that a stream belongs to.

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
    """The next frame.  Bytes that are not a frame end the stream, and the trainer asks again over
    another.

    Args:
        role: of its sender; NOBODY until HELLO has proved one.

    Raises:
        GarbledStream: the received bytes are not a frame.
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


KINDS = {number: name for name, number in Kind.items()}


def kind_of(header: Frame) -> str:
    """A frame's kind, for messages."""
    return KINDS.get(header.kind) or f"kind {header.kind}"


# ---- stream times ----
#
# The spans of one stream: what its trainer's requests take on the server.


OF_STEPS = (Kind.GRADIENT, Kind.ROWS, Kind.ASSIGN, Kind.COMMIT)


class StreamTimes:
    """The times of a step's arrival on a stream, and of its answers.

    One thread uses it, while a trace is under way.

    Args:
        spans: of the server.
        trainer, lane: whose stream it is.
    """

    def __init__(self, spans: Spans, trainer: int, lane: int) -> None:
        self.spans = spans
        self._facts: dict[str, Fact] = {"trainer": trainer, "lane": lane}
        self._step, self._since = 0, 0.0  # of what arrives
        self._answers = "answer"

    @onlooker("the trace")
    def got(self, header: Frame) -> None:
        """Notes that a frame arrives, or has arrived: a step's first one begins the span that its
        COMMIT ends.
        """
        if header.kind == Kind.PULL:
            self._answers = "pull"
        if header.kind not in OF_STEPS or not header.step:
            return
        if header.step != self._step:
            self._step, self._since = header.step, now()
        if header.kind == Kind.COMMIT:
            self._add("receive", self._since, header.step)
            self._step, self._answers = 0, "answer"

    @onlooker("the trace")
    def answered(self, since: float, step: int) -> None:
        """Notes the end of an answer to a step, or to a pull, which began at that time."""
        self._add(self._answers, since, step)

    def _add(self, name: str, since: float, step: int) -> None:
        self.spans.add(name, since, now(), **self._facts, step=step)


# ---- value frames ----
#
# The values of one stream's answers as frames: they travel, or their names do, where the trainer
# reads them in the server's memory.


# of the values that one frame names: the server continues while the trainer reads them
NAMED_BYTES = 2**22


class ValueFrames:
    """Makes VALUE frames for one stream.  One thread uses it.

    See [Note: values that change] in pserver/transport/zones.py.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._shared: ZoneMemory | None = None  # in which the trainer reads

    def share(self, segment: ZoneMemory | None) -> bool:
        """Whether the trainer reads the values of a segment where they are; the first call offers
        it the segment.

        Raises:
            Unreachable: the peer is gone.
        """
        if segment is None or self._stream.offer is None:
            return False
        if self._shared is None:
            self._stream.offer(Kind.VALUE, segment)
            self._shared = segment
        return self._shared is segment

    @property
    def shared(self) -> bool:
        """Whether the trainer reads in the server's memory."""
        return self._shared is not None

    def __contains__(self, name: str) -> bool:
        """Whether a value may change while the trainer reads it."""
        return IN_ORDER and self._shared is not None and name in self._shared.zones

    def apart(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The same value outside of what is shared."""
        return tensor.clone() if self._lies(name, tensor) else tensor

    def _lies(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a value lies in the shared memory itself."""
        if self._shared is None or name not in self._shared.zones:
            return False
        return self._shared.address(name) == tensor.data_ptr()

    def frames(self, step: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Packed]:
        """All frames of these values, each as soon as it is full."""
        if self._shared is None:
            yield from frames(Kind.VALUE, step, tensors)
            return
        named, whole = Packer(2**62, NAMED_BYTES, NAMED_BYTES), Packer()
        for name, tensor in tensors:
            packer = named if self._lies(name, tensor) else whole
            yield from packer.add(Kind.VALUE, step, [(name, tensor)])
        yield from named.flush()
        yield from whole.flush()


# ---- working streams ----
#
# Streams on whose requests the server works: each gets a PROBE once a second.
#
# A trainer that receives nothing takes the connection for dead, and opens another: see [Note:
# sending again] in :mod:`pserver.client.stream`.  The thread that serves a stream answers PROBE
# only between two requests.  While it waits for other trainers or for a long update, this file says
# PROBE in its place.


class WorkingStreams:
    """The streams that are being worked on, with the times since when.  Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next; nothing blocks under it
        self._since: dict[SequencedStream, float] = {}

    def works(self, stream: SequencedStream) -> None:
        """Notes that a request of this stream is being worked on from now on."""
        with self._lock:
            self._since[stream] = time.monotonic()

    def rests(self, stream: SequencedStream) -> None:
        """Notes that this stream waits for its trainer, or has ended."""
        with self._lock:
            self._since.pop(stream, None)

    def probe_until(self, stopping: threading.Event) -> None:
        """Sends PROBE where it is due; ends with the event.

        A thread of its own runs it, which a trainer that does not read may hold up.
        """
        while not stopping.wait(timeouts.WORKING_SECONDS / 2):
            due = time.monotonic() - timeouts.WORKING_SECONDS
            with self._lock:
                streams = [stream for stream, since in self._since.items() if since <= due]
            for stream in streams:
                # broken: its own thread sees that; busy: it is just sending something
                with suppress(PServerError, OSError):
                    stream.send_if_free(Frame(kind=Kind.PROBE))
