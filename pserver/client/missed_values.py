"""Values that changed while they were read where they are: they are asked for once more."""

from __future__ import annotations

from pserver.wire_pb2 import Done, Frame, Kind, Part


class MissedValues:
    """What of a reply has been missed.  The inbox's thread uses it.

    See [Note: values that change] in pserver/transport/zones.py.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._done: Done | None = None  # of the reply whose values are asked for again

    def add(self, header: Frame) -> None:
        """A VALUE frame has brought nothing."""
        self._names.update((part.name, None) for part in header.parts)

    def end(self, done: Done) -> Done | None:
        """A DONE has come: that of the reply, when nothing of it is missed."""
        if self._names:
            self._done = self._done or done
            return None
        done, self._done = self._done or done, None
        return done

    def ask(self, request: int) -> Frame:
        """Asks for what was missed, once."""
        names, self._names = self._names, {}
        return Frame(kind=Kind.PULL, request=request, parts=[Part(name=name) for name in names])

    def forget(self) -> None:
        """The whole request is sent again."""
        self._names, self._done = {}, None
