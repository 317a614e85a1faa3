"""A listening socket, and a thread that accepts on it."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread

from pserver.transport.open_streams import CANCEL_SECONDS

_log = logging.getLogger(__name__)
RETRY_SECONDS = 0.1


class AcceptLoop:
    """Serves each connection in a thread of its own.

    Args:
        listening: a socket that listens.
        serve: called with each connection, whose owner it becomes.
        name: of the port, for threads and messages: "shm 4711".
    """

    def __init__(
        self, listening: socket.socket, serve: Callable[[socket.socket], None], name: str
    ) -> None:
        self._socket, self._serve, self._name = listening, serve, name
        self._closing = Event()
        self._thread = Thread(target=self._accept, name=f"accepts {name}", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if self._closing.wait(RETRY_SECONDS):
                    return
                # out of descriptors; one may become free
                _log.warning("%s: cannot accept a stream: %s", self._name, error)
                continue
            Thread(
                target=self._serve, args=(connection,), name=f"exchange {self._name}", daemon=True
            ).start()

    def close(self) -> None:
        """Accepts nothing from now on."""
        self._closing.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # close alone would leave accept waiting
        self._thread.join(CANCEL_SECONDS)
        self._socket.close()
