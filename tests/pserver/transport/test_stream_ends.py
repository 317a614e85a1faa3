"""How a stream ends, over every transport: closed, cancelled, failed or cut, each end hears of it,
and nothing stays.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from queue import Queue
from threading import Event

import pytest

from pserver.errors import Unreachable
from pserver.transport.registry import Transport
from pserver.transport.stream import Stream
from pserver.wire_pb2 import BYE, GRADIENT, HELLO, PULL, Frame
from tests.support.streams import (
    PROMPT,
    SECONDS,
    caught,
    echo,
    finish,
    listening,
    open_stream,
    send_until_blocked,
)

pytestmark = pytest.mark.usefixtures("no_thread_stays")


def wait_until_still(progress: list[float]) -> None:
    """Returns when nothing has left for a while: the sender is blocked."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if progress and time.monotonic() - progress[-1] > 0.3:
            return
        threading.Event().wait(0.02)
    raise AssertionError(
        f"a sender whose peer does not read sent {len(progress)} MB without blocking"
    )


def test_a_half_closed_stream_still_carries_answers(transport: Transport) -> None:
    """After the client has ended its side, the server sees the end and may go on sending."""

    def handle(stream: Stream) -> None:
        heard = []
        while (got := stream.receive()) is not None:
            heard.append(got[0].kind)
        for kind in heard * 2:
            stream.send(Frame(kind=kind), [bytes(1000)])

    with listening(transport, handle) as listener:
        stream = open_stream(transport, listener)
        stream.send(Frame(kind=PULL))
        stream.close()
        stream.close()
        with pytest.raises(Unreachable, match="closed"):
            stream.send(Frame(kind=PULL))
        kinds = [header.kind for header in finish(stream)]

    assert kinds == [PULL, PULL]


def test_the_client_sees_the_server_end(transport: Transport) -> None:
    """When the handler returns, what it sent still arrives, then the end; sending is an error soon
    after.
    """
    with listening(transport, lambda stream: stream.send(Frame(kind=HELLO))) as listener:
        stream = open_stream(transport, listener)
        got = stream.receive()
        assert got is not None and got[0].kind == HELLO
        assert stream.receive() is None
        with pytest.raises(Unreachable):
            stream.send(Frame(kind=GRADIENT), [b"late"])


def test_a_failing_handler_breaks_its_stream(
    transport: Transport, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that raises is logged with its traceback, and its client's wait ends with an
    error.
    """

    def handle(stream: Stream) -> None:
        raise RuntimeError("a mistake of ours")

    with listening(transport, handle) as listener:
        stream = open_stream(transport, listener)
        with pytest.raises(Unreachable):
            stream.receive()

    assert "a mistake of ours" in caplog.text


@pytest.mark.parametrize("end", ["client", "server"])
def test_cancel_unblocks_a_receive(transport: Transport, end: str) -> None:
    """A thread that waits for a silent peer is freed within two seconds of cancel, at either
    end.
    """
    streams: Queue[Stream] = Queue()
    results: Queue[object] = Queue()

    def handle(stream: Stream) -> None:
        streams.put(stream)
        try:
            results.put(stream.receive())
        except Exception as error:
            results.put(error)

    with listening(transport, handle) as listener:
        client = open_stream(transport, listener)
        server = streams.get(timeout=SECONDS)
        waiting = caught(client.receive)
        started = time.monotonic()
        (client if end == "client" else server).cancel()
        at_client, at_server = waiting.get(timeout=PROMPT), results.get(timeout=PROMPT)

    assert time.monotonic() - started < SECONDS
    assert isinstance(at_client, Unreachable) and isinstance(at_server, Unreachable)
    assert "cancelled" in str(at_client if end == "client" else at_server)


@pytest.mark.parametrize("end", ["client", "server"])
def test_cancel_unblocks_a_send(transport: Transport, end: str) -> None:
    """A peer that does not read blocks the sender, and cancel frees the sender within two seconds,
    at either end.
    """
    streams: Queue[Stream] = Queue()
    done = Event()
    progress: list[float] = []
    results: Queue[Queue[object]] = Queue()

    def handle(stream: Stream) -> None:
        streams.put(stream)
        if end == "server":
            results.put(caught(lambda: send_until_blocked(stream, progress)))
        done.wait(SECONDS)

    with listening(transport, handle) as listener:
        client = open_stream(transport, listener)
        server = streams.get(timeout=SECONDS)
        if end == "client":
            results.put(caught(lambda: send_until_blocked(client, progress)))
        outcome = results.get(timeout=SECONDS)
        wait_until_still(progress)
        (client if end == "client" else server).cancel()
        error = outcome.get(timeout=PROMPT)
        done.set()
        client.cancel()

    assert isinstance(error, Unreachable) and "cancelled" in str(error)
    assert len(progress) < 200


def test_a_vanished_client_does_not_read_as_a_clean_end(transport: Transport) -> None:
    """A client that breaks off is an error at the server, not an end of input."""
    outcome: Queue[object] = Queue()
    began = Event()

    def handle(stream: Stream) -> None:
        stream.receive()
        began.set()
        try:
            outcome.put(stream.receive())
        except Exception as error:
            outcome.put(error)

    with listening(transport, handle) as listener:
        client = open_stream(transport, listener)
        client.send(Frame(kind=HELLO))
        assert began.wait(SECONDS)
        client.cancel()
        error = outcome.get(timeout=PROMPT)

    assert isinstance(error, Unreachable)


def test_a_stream_may_be_used_after_its_handler_has_returned(transport: Transport) -> None:
    """Another thread that still sends on, cancels or closes a finished stream gets an error at
    most, never a crash.
    """
    streams: Queue[Stream] = Queue()

    def handle(stream: Stream) -> None:
        streams.put(stream)
        stream.receive()

    with listening(transport, handle) as listener:
        client = open_stream(transport, listener)
        server = streams.get(timeout=SECONDS)
        senders = [caught(lambda: send_until_blocked(server, [])) for _ in range(2)]
        client.send(Frame(kind=BYE))
        while client.receive() is not None:
            continue
        errors = [sender.get(timeout=SECONDS) for sender in senders]
        server.cancel()
        server.close()

    assert all(isinstance(error, Unreachable) for error in errors)


@pytest.mark.slow
def test_streams_leave_no_file_descriptor_behind(transport: Transport) -> None:
    """However a stream ends, its connection is given back."""

    def once(end: str) -> None:
        stream = open_stream(transport, listener)
        stream.send(Frame(kind=HELLO))
        server = servers.get(timeout=SECONDS)
        if end == "server":
            server.cancel()
            with suppress(Unreachable):
                stream.receive()
                stream.receive()
        elif end == "cancel":
            stream.cancel()
        else:
            finish(stream)

    def handle(stream: Stream) -> None:
        servers.put(stream)
        echo(stream)

    servers: Queue[Stream] = Queue()
    with listening(transport, handle) as listener:
        once("clean")
        before = len(os.listdir("/dev/fd"))
        for end in ("clean", "cancel", "server") * 4:
            once(end)
        deadline = time.monotonic() + SECONDS
        while len(os.listdir("/dev/fd")) > before + 4 and time.monotonic() < deadline:
            time.sleep(0.02)

        assert len(os.listdir("/dev/fd")) <= before + 4
