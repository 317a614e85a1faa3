"""Both ends of a stream over any transport, and threads that use them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from threading import Thread

import pytest

from pserver.security.keys import Keys
from pserver.transport.registry import Transport
from pserver.transport.stream import Handler, Listener, Stream
from pserver.wire_pb2 import VALUE, Frame

SECONDS = 10.0  # the deadline of every wait here


@pytest.fixture
def no_thread_stays() -> Iterator[None]:
    """After every test all of its threads are gone."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + SECONDS
    for thread in set(threading.enumerate()) - before:
        # a thread of C++'s pool that has run Python once
        if isinstance(thread, threading._DummyThread):
            continue
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive(), f"{thread.name} still runs"


@contextmanager
def listening(transport: Transport, handle: Handler) -> Iterator[Listener]:
    """An accepting end."""
    listener = transport.listen(handle, "127.0.0.1", 0)
    try:
        yield listener
    finally:
        listener.close(grace_seconds=2.0)


class CheckedTransport:
    """A transport whose frames have checksums, or have none, whatever is the default there.

    Args:
        transport: one between hosts: tcp, grpc.
        checksum: "on" or "off".
        settings: more of its accepting end.
    """

    def __init__(self, transport: Transport, checksum: str, **settings: int) -> None:
        self._transport, self._settings = transport, {"checksum": checksum, **settings}

    def listen(self, handle: Handler, host: str = "127.0.0.1", port: int = 0) -> Listener:
        return self._transport.listen(handle, host, port, **self._settings)

    def connect(
        self, host: str, port: int, *, timeout_seconds: float, keys: Keys | None = None
    ) -> Stream:
        return self._transport.connect(host, port, timeout_seconds=timeout_seconds, keys=keys)


def open_stream(transport: Transport, listener: Listener) -> Stream:
    """A connecting end."""
    return transport.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)


def finish(stream: Stream) -> list[Frame]:
    """Ends the client's side and reads what is left."""
    stream.close()
    left = []
    while (got := stream.receive()) is not None:
        left.append(got[0])
    return left


def echo(stream: Stream) -> None:
    """Sends back what comes, until the client ends its side."""
    while (got := stream.receive()) is not None:
        stream.send(got[0], [bytes(got[1])])


def caught(action: Callable[[], object]) -> Queue[object]:
    """Runs ``action`` in a thread; the queue gets what it returned or raised."""
    result: Queue[object] = Queue()

    def run() -> None:
        try:
            result.put(action())
        except Exception as error:
            result.put(error)

    Thread(target=run, daemon=True).start()
    return result


def send_until_blocked(stream: Stream, progress: list[float], frames: float = math.inf) -> None:
    """Sends so many frames of 1 MB; ``progress`` gets the time of each that left."""
    megabyte = bytes(2**20)
    while len(progress) < frames:
        stream.send(Frame(kind=VALUE), [megabyte])
        progress.append(time.monotonic())
