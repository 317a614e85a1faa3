"""Streams that break, lose and repeat frames, at the trainer's end: what it notices, and what it
then asks again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch

from pserver import timeouts
from pserver.client import stream as retrying_stream
from pserver.client.channel import Channel
from pserver.client.stream import dropped
from pserver.errors import CorruptFrame, ServerLost, Unreachable
from pserver.table.gradient import RowGradient
from pserver.transport import inprocess
from pserver.transport.stream import Buffer, Land, SequencedStream, Stream
from pserver.wire_pb2 import (
    Done,
    Frame,
    Hello,
    Kind,
)
from tests.support.waiting import eventually

# ---- frames are counted ----


class Scripted:
    """A stream that receives what a test wrote down."""

    transport, peer = "scripted", "nobody"
    bearer = offer = None

    def __init__(self, *hparams: int) -> None:
        self._hparams = list(hparams)
        self.out: list[int] = []

    def send(self, header: Frame, payload: object = ()) -> None:
        self.out.append(header.sequence)

    def receive(self, land: Land | None = None) -> tuple[Frame, memoryview] | None:
        if not self._hparams:
            return None
        return Frame(kind=Kind.PULL, sequence=self._hparams.pop(0)), memoryview(b"")

    def admit(self) -> None: ...

    def close(self) -> None: ...

    def cancel(self) -> None: ...


def test_frames_are_numbered_from_1_and_one_that_is_sent_again_has_a_new_number() -> None:
    """Numbers belong to the stream, not to the frame."""
    stream, frame = Scripted(), Frame(kind=Kind.PULL)
    numbered = SequencedStream(stream)
    for _ in range(3):
        numbered.send(frame)

    assert stream.out == [1, 2, 3]


def test_a_number_that_comes_again_is_ignored_and_a_missing_one_breaks_the_stream() -> None:
    """1 1 2 0 1 3 gives 1 2 0 3: a peer that does not count passes; 5 after that is a gap."""
    numbered = SequencedStream(Scripted(1, 1, 2, 0, 1, 3, 5))
    received = [numbered.receive() for _ in range(4)]

    assert [header.sequence for header, _ in received if header] == [1, 2, 0, 3]
    with pytest.raises(Unreachable, match="expected frame 4 of the stream, got frame 5"):
        numbered.receive()


# ---- the channel ----


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(retrying_stream, "RETRY_SECONDS", 0.01)


def opened(serve: Callable[[Stream], None], deadline: float = 10.0) -> Channel:
    """A channel to a server that a function plays, once for each stream."""
    listener = inprocess.listen(serve)

    def open_stream(number: int) -> Stream:
        stream = SequencedStream(inprocess.connect("h", listener.port, timeout_seconds=1.0))
        stream.send(Frame(kind=Kind.HELLO, hello=Hello(stream=number)))
        return stream

    return Channel(open_stream, deadline, "the server")


def test_a_server_that_is_slow_is_asked_but_not_taken_for_lost() -> None:
    """It answers only after several probes have been waiting: nothing was sent twice, and no stream
    was opened again.
    """
    seen: list[int] = []
    slow = threading.Event()

    def serve(stream: Stream) -> None:
        stream = SequencedStream(stream)
        while (received := stream.receive()) is not None:
            seen.append(received[0].kind)
            if received[0].kind == Kind.COMMIT:
                slow.wait(10)
                stream.send(Frame(kind=Kind.DONE, done=Done(version=7)))
            elif received[0].kind == Kind.PROBE:
                stream.send(Frame(kind=Kind.PROBE))

    opening = opened(serve)
    answer = opening.begin()
    opening.commit(1, {})
    threading.Event().wait(0.2)
    slow.set()

    assert answer.result(timeout=10).version == 7
    eventually(lambda: seen.count(Kind.PROBE) >= 2)
    assert seen.count(Kind.COMMIT) == 1 and opening.reconnects == 0
    opening.close()


def test_nothing_is_probed_between_requests() -> None:
    """A trainer that computes for long sends nothing."""
    seen: list[int] = []

    def serve(stream: Stream) -> None:
        stream = SequencedStream(stream)
        while (received := stream.receive()) is not None:
            seen.append(received[0].kind)
            if received[0].kind == Kind.PULL:
                stream.send(Frame(kind=Kind.DONE))

    opening = opened(serve)
    answer = opening.pull([], dropped)
    answer.result(timeout=10)
    before = len(seen)
    threading.Event().wait(0.1)

    # while the answer is awaited there may be some, and one of them may arrive behind it
    assert seen[0] == Kind.HELLO and seen.count(Kind.PULL) == 1
    assert len(seen) <= before + 1
    opening.close()


def test_a_request_is_sent_again_whole_with_its_own_number() -> None:
    """Each stream has a number of its own, greater than the one before."""
    streams: list[list[tuple[int, int, int]]] = []

    def serve(stream: Stream) -> None:
        stream, frames = SequencedStream(stream), []
        streams.append(frames)
        while (received := stream.receive()) is not None:
            if received[0].kind == Kind.PROBE:  # it is late
                continue
            frames.append((received[0].kind, received[0].request, received[0].hello.stream))
            if received[0].kind == Kind.COMMIT:
                if len(streams) < 3:
                    return
                stream.send(Frame(kind=Kind.DONE))

    opening = opened(serve)
    answer = opening.begin()
    opening.push(1, [("w", torch.zeros(3))])
    opening.commit(1, {})
    answer.result(timeout=10)

    assert streams == [
        [(Kind.HELLO, 0, number), (Kind.GRADIENT, 1, 0), (Kind.COMMIT, 1, 0)]
        for number in (1, 2, 3)
    ]
    assert opening.reconnects == 2
    opening.close()


@pytest.mark.parametrize(("rows", "last"), [(1, False), (8000, True), (8000, False), (40000, True)])
def test_the_asker_sends_small_rows_and_those_of_the_last_server(
    monkeypatch: pytest.MonkeyPatch, rows: int, last: bool
) -> None:
    """Of up to 1 MB: no other server waits for its own meanwhile.  Larger ones, and those of the
    servers before, leave beside one another.
    """

    def serve(stream: Stream) -> None:
        stream = SequencedStream(stream)
        while (received := stream.receive()) is not None:
            if received[0].kind == Kind.COMMIT:
                stream.send(Frame(kind=Kind.DONE))

    sent, right = dict[int, threading.Thread](), SequencedStream.send

    def send(self: SequencedStream, header: Frame, payload: Sequence[Buffer] = ()) -> None:
        sent[header.kind] = threading.current_thread()
        right(self, header, payload)

    monkeypatch.setattr(SequencedStream, "send", send)
    opening = opened(serve)
    answer = opening.begin()
    gradient = RowGradient(torch.arange(rows), torch.ones(rows, 16))
    opening.push_rows(1, {"emb": gradient}, last=last)
    opening.commit(1, {})
    answer.result(timeout=10)

    assert (sent[Kind.ROWS] is threading.current_thread()) == (rows < 40000 and (rows == 1 or last))
    opening.close()


def test_streams_that_keep_breaking_are_a_lost_server() -> None:
    """Opening them works, and nothing ever comes: that ends at the deadline, with the reason."""

    def serve(stream: Stream) -> None:
        stream.receive()

    opening = opened(serve, deadline=0.3)
    answer = opening.begin()
    opening.commit(1, {})

    with pytest.raises(
        ServerLost, match="streams have broken for 0.3 s: the server: the stream ended"
    ):
        answer.result(timeout=10)


def test_a_stream_that_brings_nothing_is_opened_again() -> None:
    """No frame arrives, and no error: the second stream begins with PROBE, and the request follows,
    whole.
    """
    streams: list[list[int]] = []

    def serve(stream: Stream) -> None:
        stream, kinds = SequencedStream(stream), []
        streams.append(kinds)
        while (received := stream.receive()) is not None:
            kinds.append(received[0].kind)
            if received[0].kind == Kind.COMMIT and len(streams) == 2:
                stream.send(Frame(kind=Kind.DONE))

    opening = opened(serve, deadline=0.4)  # a silence may last a quarter of it
    answer = opening.begin()
    opening.push(1, [("w", torch.zeros(3))])
    opening.commit(1, {})

    def ended() -> bool:
        opening.end_if_silent()
        return answer.done()

    eventually(ended)
    assert answer.result().version == 0 and opening.reconnects == 1
    assert streams[0][:3] == [Kind.HELLO, Kind.GRADIENT, Kind.COMMIT] and Kind.PROBE in streams[0]
    assert streams[1][:4] == [Kind.HELLO, Kind.PROBE, Kind.GRADIENT, Kind.COMMIT]
    opening.close()


def test_bytes_that_are_no_frame_end_streams_and_then_the_channel() -> None:
    """A few times the request is asked again; what comes garbled each time is no accident."""
    streams: list[int] = []

    class Garbled:
        """A stream that brings bytes which are no frame."""

        transport, peer, offer = "garbled", "nobody", None

        def send(self, header: Frame, payload: object = ()) -> None: ...

        def receive(self, land: object = None) -> None:
            raise CorruptFrame("it is garbage")

        def admit(self) -> None: ...

        def close(self) -> None: ...

        def cancel(self) -> None: ...

    def open_stream(number: int) -> Stream:
        streams.append(number)
        return Garbled()

    channel = Channel(open_stream, 10.0, "the server")
    with pytest.raises(CorruptFrame, match="it is garbage"):
        channel.begin().result(timeout=10)

    assert streams == list(range(1, retrying_stream.MAX_CORRUPT + 2))


# ---- Ctrl-C ----


class Played:
    """A server that answers no request of its first stream, and every one of the later ones.

    Attributes:
        asked: the names that were asked for, by stream.
    """

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, stream: Stream) -> None:
        stream, asked = SequencedStream(stream), list[str]()
        self.asked.append(asked)
        while (received := stream.receive()) is not None:
            if received[0].kind == Kind.PULL:
                asked += [part.name for part in received[0].parts]
                if len(self.asked) > 1:
                    stream.send(Frame(kind=Kind.DONE, done=Done(version=len(self.asked))))


def test_a_request_without_an_answer_is_withdrawn_before_the_next() -> None:
    """The wait for its answer was interrupted: what comes is the next one's."""
    played = Played()
    channel = opened(played)
    first = channel.pull(["a"], dropped)
    eventually(lambda: played.asked == [["a"]])

    assert channel.pull(["b"], dropped).result(10).version == 2
    with pytest.raises(Unreachable, match="withdrawn"):
        first.result(0)
    assert (channel.reconnects, played.asked) == (1, [["a"], ["b"]])
    channel.close()


def test_a_request_that_has_left_in_part_is_withdrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server forgets what came of it."""
    played = Played()
    channel = opened(played)
    channel.begin()
    channel.push(1, [("a", torch.ones(3))])
    with monkeypatch.context() as patched:

        def send(*_: object) -> None:
            raise KeyboardInterrupt

        patched.setattr(SequencedStream, "send", send)
        with pytest.raises(KeyboardInterrupt):
            channel.commit(1, {})
    channel.withdraw()
    channel.withdraw()

    assert channel.pull(["b"], dropped).result(10).version == 2
    assert (channel.reconnects, played.asked) == (1, [[], ["b"]])
    channel.close()


def test_a_stream_that_was_withdrawn_has_not_broken(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that breaks a deadline later is the first that does, and nobody warns before."""
    running, later, streams = retrying_stream.RUNNING, [0.0], list[int]()
    monkeypatch.setattr(retrying_stream, "RUNNING", lambda: running() + later[0])

    def serve(stream: Stream) -> None:
        stream = SequencedStream(stream)
        streams.append(len(streams) + 1)
        number = streams[-1]
        while (received := stream.receive()) is not None:
            if received[0].kind == Kind.PULL and number == 2:
                return
            if received[0].kind == Kind.PULL and number == 3:
                stream.send(Frame(kind=Kind.DONE, done=Done(version=number)))

    channel = opened(serve)
    channel.pull(["a"], dropped)
    channel.withdraw()
    assert not caplog.records
    later[0] = 20.0  # the deadline is 10
    assert channel.pull(["b"], dropped).result(10).version == 3
    assert "opened a stream again" in caplog.text
    channel.close()
