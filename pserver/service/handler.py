"""Serves one stream from its HELLO to its end: for a trainer, an observer or another server."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from functools import partial
from threading import Condition, Thread

from pserver.errors import JobFailed, PServerError, Refused, Unreachable
from pserver.half_open import HalfOpen, address_of
from pserver.job.job import Job
from pserver.limits import Limits
from pserver.security.access import OPEN_GUARD, Guard, check, role_for_call
from pserver.service.streams import WorkingStreams, hello_of, member_of, send_error
from pserver.service.tables import ReadingService
from pserver.service.tensors import TensorService
from pserver.transport.stream import Buffer, Land, SequencedStream, Stream
from pserver.wire_pb2 import Frame, Hello, Kind

# ---- draining streams ----
#
# The tensor streams that a server has open, over all transports, and how they are drained.
#
# A transport's listener can only end streams.  This file also knows whether a stream is in the
# middle of an answer or waits for its trainer, so that answers are finished before DRAIN is sent.


log = logging.getLogger(__name__)


class DrainingStreams:
    """The open streams of all transports of one server.

    Any thread may call it.

    Args:
        serve: serves one stream until it ends.
        limits: how many streams may be open before their HELLO, and for how long.
    """

    def __init__(self, serve: Callable[[Stream], None], limits: Limits) -> None:
        self._serve = serve
        self._strangers = HalfOpen(limits.strangers, limits.hello_seconds)
        # guards _open and each stream's ``idle``; nothing blocks under it
        self.condition = Condition()
        self._open: set[_WatchedStream] = set()

    def handle(self, stream: Stream) -> None:
        """Serves one stream, in its transport's thread."""
        number = self._strangers.begin(address_of(stream.peer), stream.cancel)
        known = partial(self._strangers.over, number)
        watched = _WatchedStream(stream, self.condition, known)
        with self.condition:
            self._open.add(watched)
        try:
            self._serve(watched)
        finally:
            known()
            with self.condition:
                self._open.discard(watched)
                self.condition.notify_all()

    def end_late(self) -> None:
        """Breaks streams that have sent no HELLO in time; called from time to time."""
        self._strangers.end_late()

    def end_revoked(self, revoked: Set[int]) -> None:
        """Breaks the streams of peers with certificates of these serial numbers."""
        if not revoked:
            return
        with self.condition:
            streams = [each for each in self._open if each.bearer and each.bearer.serial in revoked]
        for stream in streams:
            log.warning("the stream of %s ends: its key is revoked", stream.bearer)
            stream.cancel()

    def drain(self, grace_seconds: float) -> None:
        """Waits until no stream is in the middle of an answer, then sends DRAIN on each.

        Args:
            grace_seconds: the longest wait; streams that still answer get DRAIN, too.
        """
        with self.condition:
            self.condition.wait_for(
                lambda: all(stream.idle for stream in self._open), grace_seconds
            )
            streams = list(self._open)
        # a thread for each: a peer that does not read must not keep the others waiting
        threads = [Thread(target=_send_drain, args=(stream,), daemon=True) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(0.5)


class _WatchedStream:
    """A stream that knows whether it waits for its peer (``idle``), and calls ``known`` once its
    peer is admitted.
    """

    def __init__(self, stream: Stream, condition: Condition, known: Callable[[], object]) -> None:
        self.transport, self.peer, self.bearer = stream.transport, stream.peer, stream.bearer
        self.offer = stream.offer
        self.idle = False
        self._stream, self._condition = stream, condition
        self._known = known
        self.send, self.close, self.cancel = stream.send, stream.close, stream.cancel

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        self._set_idle(True)
        try:
            return self._stream.receive(land)
        finally:
            self._set_idle(False)

    def admit(self) -> None:
        self._known()
        self._stream.admit()

    def _set_idle(self, idle: bool) -> None:
        with self._condition:
            self.idle = idle
            if idle:
                self._condition.notify_all()


def _send_drain(stream: _WatchedStream) -> None:
    payload: Sequence[Buffer] = ()
    try:
        stream.send(Frame(kind=Kind.DRAIN), payload)
    except PServerError:
        return  # it has ended in the meantime


# ---- stream handler ----


def handle(stream: Stream, job: Job, working: WorkingStreams, guard: Guard = OPEN_GUARD) -> None:
    """Serves one stream until its BYE.  Sends every error to the peer and logs it; raises none.

    Args:
        working: learns when a request is being worked on.
        guard: admits callers.
    """
    who = ""
    stream = numbered = SequencedStream(stream, job.traffic)
    try:
        hello, role = hello_of(stream, guard)
        if hello.follower:
            check(role, role_for_call("Follow", None), "a server's link")
            who = f"server {hello.server_index}"
            numbered.admit()
            _link(numbered, job, hello)
            return
        observation = job.observations.find(hello.session)
        if observation is not None:
            check(role, role_for_call("Observe", None), "an observer's stream")
            numbered.admit()
            ReadingService(numbered, job, observation).serve()
            return
        member = member_of(hello, job)
        who = f"trainer {member.trainer}"
        numbered.admit()
        place = "tables" if hello.tables else f"lane {hello.lane}"
        with job.tracing.spans.thread(f"trainer {member.trainer}, {place}"):
            TensorService(numbered, job, member, hello, role, working).serve()
    except Unreachable as error:
        _say(job, who, stream, "broke", error)
    except PServerError as error:
        _say(job, who, stream, "ends", error)
        send_error(stream, error)
    except Exception as error:
        job.log.log("bug", f"the stream of {_name(who, stream)} ends", logging.ERROR, error)
        send_error(stream, JobFailed(f"the server failed: {type(error).__name__}: {error}"))
    finally:
        working.rests(numbered)
        stream.close()


def _link(stream: SequencedStream, job: Job, hello: Hello) -> None:
    """Serves a stream of another server of the job."""
    links = job.links
    if links is None:
        raise Refused("this server coordinates no job now")
    links.serve(stream, hello)


def _say(job: Job, who: str, stream: Stream, how: str, error: PServerError) -> None:
    """Logs the end of a stream."""
    kind = f"{who or 'stranger'} {how} {type(error).__name__}"
    job.log.log(kind, f"the stream of {_name(who, stream)} {how}: {error}")


def _name(who: str, stream: Stream) -> str:
    return f"{who} ({stream.peer})" if who else stream.peer
