"""Promises of one end of a link: which streams count, in which order messages are handed out, and
how much is on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue

import pytest

from pserver.errors import CorruptFrame, GarbledStream, Unreachable
from pserver.job_log.link import WINDOW_BYTES, WINDOW_MESSAGES, LinkEnd, Messages
from pserver.transport import inprocess
from pserver.transport.stream import SequencedStream, Stream
from pserver.wire_pb2 import Frame, Kind
from tests.support.links import SECONDS


@contextmanager
def streams(count: int) -> Iterator[list[SequencedStream]]:
    """Connecting ends, whose other ends say nothing."""
    over = threading.Event()

    def stay(_: Stream) -> None:
        over.wait(SECONDS)

    listener = inprocess.listen(stay)
    try:
        yield [SequencedStream(listener.accept()) for _ in range(count)]
    finally:
        over.set()
        listener.close(1.0)


def staged(first: int, *messages: bytes, heard: int = 0) -> Frame:
    return Frame(kind=Kind.STAGED, log=messages, log_first=first, log_heard=heard)


def test_an_earlier_stream_does_not_count_any_more() -> None:
    """A frame that it still brings is not taken, and it cannot take its place back."""
    heard: list[bytes] = []
    end = LinkEnd(Kind.RECORD, heard.append)
    with streams(2) as (earlier, later):
        end.attach(earlier, 1)
        end.receive(earlier, staged(1, b"one"))
        end.attach(later, 2)
        with pytest.raises(Unreachable, match="another stream"):
            end.receive(earlier, staged(2, b"from the earlier one"))
        with pytest.raises(Unreachable, match="stream 1 of the link, and came after stream 2"):
            end.attach(earlier, 1)
        end.receive(later, staged(1, b"one", b"two"))

    assert heard == [b"one", b"two"]


def test_messages_of_two_streams_are_handed_out_in_their_order() -> None:
    """While the thread of the earlier stream hands one out, that of the later waits."""
    heard: Queue[bytes] = Queue()
    taking, going_on = threading.Event(), threading.Event()

    def received(message: bytes) -> None:
        if message == b"one":
            taking.set()
            going_on.wait(SECONDS)
        heard.put(message)

    end = LinkEnd(Kind.RECORD, received)
    with streams(2) as (earlier, later):
        end.attach(earlier, 1)
        first = threading.Thread(target=end.receive, args=(earlier, staged(1, b"one")))
        first.start()
        assert taking.wait(SECONDS)
        end.attach(later, 2)
        second = threading.Thread(target=end.receive, args=(later, staged(2, b"two")))
        second.start()
        second.join(0.05)
        going_on.set()
        for thread in (first, second):
            thread.join(SECONDS)

    assert [heard.get_nowait() for _ in range(2)] == [b"one", b"two"]


def test_after_the_end_nothing_is_handed_out() -> None:
    """Not the rest of a frame either; and who waits for that returns when the last has been."""
    heard: list[bytes] = []
    taking, going_on = threading.Event(), threading.Event()

    def received(message: bytes) -> None:
        heard.append(message)
        taking.set()
        going_on.wait(SECONDS)

    end = LinkEnd(Kind.RECORD, received)
    with streams(2) as (stream, later):
        end.attach(stream, 1)
        thread = threading.Thread(target=end.receive, args=(stream, staged(1, b"one", b"two")))
        thread.start()
        assert taking.wait(SECONDS)
        end.end()
        going_on.set()
        end.wait_handed_out()

        assert heard == [b"one"]
        with pytest.raises(Unreachable, match="the link has ended"):
            end.attach(later, 2)
        end.send(b"for nobody")
        thread.join(SECONDS)


@pytest.mark.parametrize(
    "frame",
    [staged(3, b"two is missing"), staged(0, b"no number"), staged(2, heard=1)],
    ids=["gap", "unnumbered", "more than was said"],
)
def test_frames_that_contradict_others_break_the_stream(frame: Frame) -> None:
    """A gap in the messages, none of their numbers, and what nobody said."""
    end = LinkEnd(Kind.RECORD, lambda _: None)
    with streams(1) as (stream,):
        end.attach(stream, 1)
        end.receive(stream, staged(1, b"one"))
        with pytest.raises(GarbledStream):
            end.receive(stream, frame)


def test_what_is_on_its_way_is_bounded() -> None:
    """By number and by bytes; it goes on as the peer hears; one message always leaves."""
    messages = Messages()
    for number in range(2 * WINDOW_MESSAGES):
        messages.add(b"%d" % number)
    first, batch = messages.next_batch()

    assert (first, len(batch)) == (1, WINDOW_MESSAGES)
    assert messages.next_batch() == (WINDOW_MESSAGES + 1, [])
    messages.was_heard(2)
    assert messages.next_batch() == (WINDOW_MESSAGES + 1, [b"128", b"129"])
    messages.was_heard(2 * WINDOW_MESSAGES)
    for _ in range(2):
        messages.add(bytes(WINDOW_BYTES))
    assert len(messages.next_batch()[1]) == 1 and messages.next_batch()[1] == []


def test_what_was_not_heard_is_said_again_in_order() -> None:
    """On another stream, from the first that the peer has not heard, whichever had left."""
    messages = Messages()
    for number in range(1, 2 * WINDOW_MESSAGES + 1):
        messages.add(b"%d" % number)
    messages.next_batch()
    messages.was_heard(5)
    messages.next_batch()
    messages.begin_again()
    messages.was_heard(7)  # it had come on the earlier stream
    first, batch = messages.next_batch()

    assert first == 8 and batch == [b"%d" % number for number in range(8, 8 + WINDOW_MESSAGES)]
    with pytest.raises(CorruptFrame, match="up to 256 messages, got 257"):
        messages.was_heard(257)
