"""A listening socket, a thread that accepts on it, and a thread for each connection."""

from __future__ import annotations

import logging
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Lock, Thread

from pserver.half_open import HalfOpen, address_of
from pserver.limits import Limits
from pserver.repeated_lines import LimitedLog
from pserver.transport.endpoint import spell
from pserver.transport.open_streams import CANCEL_SECONDS, OpenStreams
from pserver.transport.stream import Stream

_log = logging.getLogger(__name__)
RETRY_SECONDS = 0.1
SWEEP_SECONDS = 0.5  # between two looks for connections whose greeting is late
BACKLOG = 1024  # connections that the kernel keeps until they are accepted


class AcceptLoop:
    """Serves each connection in a thread of its own.

    Args:
        listening: a socket that listens.
        greet: gives the stream of a connection, whose owner it becomes; None where the connection
            is a further one of another stream.  It raises OSError where the peer is no trainer.
        streams: runs the handler of each stream.
        name: of the port, for threads and messages: "shm 4711".
        limits: how many connections there may be.
    """

    def __init__(
        self,
        listening: socket.socket,
        greet: Callable[[socket.socket], Stream | None],
        streams: OpenStreams,
        name: str,
        limits: Limits,
    ) -> None:
        self._socket, self._greet, self._streams, self._name = listening, greet, streams, name
        self._limits = limits
        self._greeting = HalfOpen(limits.strangers, limits.hello_seconds)
        self._refusals = LimitedLog(_log)
        self._closing = Event()
        self._counting = Lock()  # guards the one below
        self._open = 0  # connections with a thread
        listening.listen(BACKLOG)
        listening.setblocking(False)
        self._thread = Thread(target=self._accept, name=f"accepts {name}", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        waiting = select.poll()  # select itself takes no descriptor above 1024
        waiting.register(self._socket, select.POLLIN)
        while not self._closing.is_set():
            self._greeting.end_late()
            try:
                waiting.poll(1000 * SWEEP_SECONDS)
                connection, _ = self._socket.accept()
            except BlockingIOError:
                continue
            except OSError as error:
                if self._closing.wait(RETRY_SECONDS):
                    return
                # out of descriptors; one may become free
                self._refusals.say("accept", f"{self._name}: cannot accept a stream: {error}")
                continue
            connection.setblocking(True)
            if not self._begin(connection):
                connection.close()

    def _begin(self, connection: socket.socket) -> bool:
        """Serves a connection in a thread, unless there are too many."""
        most = self._limits.connections
        with self._counting:
            full = self._open >= most
            self._open += not full
        if full:
            what = f"expected at most {most} connections (--max-connections)"
            self._refusals.say("full", f"{self._name}: {what}")
            return False
        thread = Thread(
            target=self._serve, args=(connection,), name=f"exchange {self._name}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the system has no more threads
            with self._counting:
                self._open -= 1
            self._refusals.say("thread", f"{self._name}: no thread for a connection: {error}")
            return False
        return True

    def _serve(self, connection: socket.socket) -> None:
        try:
            stream = self._greeted(connection)
            if stream is not None:
                self._streams.run(stream)
        except OSError as error:
            self._refusals.say("greeting", f"{self._name}: no stream: {error}")
            connection.close()
        finally:
            with self._counting:
                self._open -= 1

    def _greeted(self, connection: socket.socket) -> Stream | None:
        # of its own, because TLS puts another socket in the place of this one
        with connection.dup() as handle:

            def end() -> None:
                with suppress(OSError):
                    handle.shutdown(socket.SHUT_RDWR)

            number = self._greeting.begin(_address(connection), end)
            try:
                return self._greet(connection)
            finally:
                self._greeting.over(number)

    def close(self) -> None:
        """Accepts nothing from now on."""
        self._closing.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # close alone would leave select waiting
        self._thread.join(CANCEL_SECONDS)
        self._socket.close()


def _address(connection: socket.socket) -> str:
    """The peer's, without its port; on a unix socket its process."""
    with suppress(OSError):
        if connection.family != socket.AF_UNIX:
            return address_of(spell(*connection.getpeername()[:2]))
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return f"process {struct.unpack('3i', peer)[0]}"
    return ""
