"""A trainer's calls to one server that have it write what it holds."""

from __future__ import annotations

from dataclasses import dataclass

from pserver.control.control_client import ControlClient
from pserver.wire_pb2 import SaveReply, SaveRequest


@dataclass(frozen=True, slots=True)
class SaveState:
    """How far a server's save is.

    Attributes:
        file: where it is, as the server says it.
        bytes: that are written.
        done: it is whole, and may be read, or has failed.
        failure: why it has failed; "": it has not.
        seconds: since it began; once it is done, how long it took.
        pause_seconds: for how long steps waited for it.
        identity: of what is whole; "": it is not.
    """

    file: str
    bytes: int
    done: bool
    failure: str
    seconds: float
    pause_seconds: float
    identity: str = ""

    @classmethod
    def from_message(cls, reply: SaveReply) -> SaveState:
        """The state that a reply tells."""
        measured = reply.seconds, reply.pause_seconds
        return cls(reply.file, reply.bytes, reply.done, reply.failure, *measured, reply.identity)


class SaveCalls:
    """The saves that one trainer asks of one server.  Any thread may make them.

    Each raises PServerError where the server cannot be reached, or refuses.

    Args:
        control: the connection.
        session: of this trainer.
    """

    def __init__(self, control: ControlClient, session: str) -> None:
        self._control, self._session = control, session

    def in_background(self, path: str, number: int, base: str = "") -> SaveState:
        """Has the server write all that it holds now, while steps go on; or asks how far that is.

        Returns as soon as the moment that is saved is fixed, which is one place in the job's log:
        so it is called on all servers side by side.  The call may be repeated as often as
        one likes: of one number one save is begun.

        Args:
            path: below the server's directory or store.
            number: of this trainer's saves on this server, from 1.
            base: the path of the last of them: of tables only the rows that have changed since
                are written; "": all rows.

        Raises:
            Busy: another save is being written there.
            Refused: the server keeps no files, or cannot write there, or what has changed since
                ``base`` is not known; or it was withdrawn.
        """
        request = SaveRequest(session=self._session, path=path, background=True)
        request.number, request.base = number, base
        return SaveState.from_message(self._control.save(request))

    def withdraw(self, number: int) -> None:
        """The save of a number does not begin, as another server cannot save; unless it has."""
        self._control.save(SaveRequest(session=self._session, number=number, withdraw=True))
