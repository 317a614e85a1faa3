"""Streams on whose requests the server works: each is told once a second that it does.

A trainer that hears nothing takes the connection for dead, and opens another: see [Note: sending
again] in :mod:`pserver.client.stream`.  The thread that serves a stream answers PROBE only
between two requests.  While it waits for other trainers or for a long update, this file says PROBE
in its place.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from pserver.errors import PServerError
from pserver.transport.stream import SequencedStream
from pserver.wire_pb2 import Frame, Kind

PROBE_SECONDS = 1.0


class WorkingStreams:
    """The streams that are being worked on, and since when.  Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the next; nothing blocks under it
        self._since: dict[SequencedStream, float] = {}

    def works(self, stream: SequencedStream) -> None:
        """A request of this stream is being worked on from now on."""
        with self._lock:
            self._since[stream] = time.monotonic()

    def rests(self, stream: SequencedStream) -> None:
        """This stream waits for its trainer, or has ended."""
        with self._lock:
            self._since.pop(stream, None)

    def probe_until(self, stopping: threading.Event) -> None:
        """Says PROBE where it is due; ends with the event.

        A thread of its own runs it, which a trainer that does not read may hold up.
        """
        while not stopping.wait(PROBE_SECONDS / 2):
            due = time.monotonic() - PROBE_SECONDS
            with self._lock:
                streams = [stream for stream, since in self._since.items() if since <= due]
            for stream in streams:
                # broken: its own thread sees that; busy: it is just sending something
                with suppress(PServerError, OSError):
                    stream.send_if_free(Frame(kind=Kind.PROBE))
