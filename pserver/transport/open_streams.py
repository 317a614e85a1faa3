"""The open streams of an accepting end, so that it can end them all."""

from __future__ import annotations

import logging
import time
from threading import Condition

from pserver.errors import PServerError
from pserver.repeated_lines import LimitedLog
from pserver.transport.stream import Handler, Stream

_log = logging.getLogger(__name__)
CANCEL_SECONDS = 2.0  # for a handler to notice that its stream is cancelled


class OpenStreams:
    """Runs a handler for each stream and knows which are running.  Any thread may call it.

    Args:
        handle: called with each stream, in the thread that calls :meth:`run`.
    """

    def __init__(self, handle: Handler) -> None:
        self._handle = handle
        # guards the two below; neither handlers nor cancel run under it
        self._condition = Condition()
        self._open: set[Stream] = set()
        self._closing = False
        self._log = LimitedLog(_log)

    def run(self, stream: Stream) -> None:
        """Runs the handler to its end, in this thread; logs what it raises, and breaks the stream.

        After :meth:`close` it only breaks the stream.
        """
        with self._condition:
            refused = self._closing
            if not refused:
                self._open.add(stream)
        if refused:
            stream.cancel()
            return
        try:
            self._handle(stream)
        except PServerError as error:
            text = f"the stream from {stream.peer} ended: {error}"
            self._log.say(type(error).__name__, text, logging.INFO)
            stream.cancel()
        except Exception as error:
            text = f"the handler of the stream from {stream.peer} failed"
            self._log.say("bug", text, logging.ERROR, error)
            stream.cancel()
        finally:
            stream.close()
            with self._condition:
                self._open.discard(stream)
                self._condition.notify_all()

    def close(self, grace_seconds: float) -> None:
        """Refuses new streams, waits ``grace_seconds`` for the open ones, then cancels them and
        waits ``CANCEL_SECONDS`` more.
        """
        with self._condition:
            self._closing = True
            self._wait_until_empty(grace_seconds)
            late = list(self._open)
        for stream in late:
            stream.cancel()
        with self._condition:
            if not self._wait_until_empty(CANCEL_SECONDS if late else 0):
                _log.error(
                    "handlers still running after cancel: %s",
                    ", ".join(stream.peer for stream in self._open),
                )

    def _wait_until_empty(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        return self._condition.wait_for(lambda: not self._open, deadline - time.monotonic())
