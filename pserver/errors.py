"""What can go wrong in a cluster, by cause.

::

    PServerError
    |-- Unreachable            a server does not answer
    |-- Lost                   a peer of a running job has fallen silent for longer than the deadline
    |   |-- ServerLost
    |   `-- TrainerLost
    |-- TimedOut               a wait ended at its deadline, for another reason than silence
    |-- JobFailed              another process of the job ended it, and said why
    |-- Refused                the peer understood and said no
    |   |-- Busy               the server has another job
    |   |-- FingerprintMismatch  two processes of a job run different programs
    |   `-- Unprepared         not yet installed, or no such variable here
    |-- CorruptFrame           bytes that are not a frame, or a frame that contradicts the plan
    `-- Draining               the server is shutting down

What the user wrote wrongly is a ``ValueError`` or a ``TypeError``.  Over the wire an error is its
class's name and one sentence.
"""

from __future__ import annotations


class PServerError(Exception):
    """The root: everything a cluster can raise.

    ``status`` names the gRPC status code that stands for it.
    """

    status = "UNKNOWN"


class Unreachable(PServerError):
    """A server does not answer at its endpoint."""

    status = "UNAVAILABLE"


class Lost(PServerError):
    """A peer of a running job has fallen silent for longer than the deadline."""

    status = "ABORTED"


class ServerLost(Lost):
    """A server has fallen silent."""


class TrainerLost(Lost):
    """A trainer has fallen silent, or its connection ended without a goodbye."""


class TimedOut(PServerError):
    """A wait ended at its deadline."""

    status = "DEADLINE_EXCEEDED"


class JobFailed(PServerError):
    """Another process of the job ended it."""

    status = "ABORTED"


class Refused(PServerError):
    """The peer understood the request and said no."""

    status = "INVALID_ARGUMENT"


class Busy(Refused):
    """The server has another job."""

    status = "RESOURCE_EXHAUSTED"


class FingerprintMismatch(Refused):
    """Two processes of one job run different programs."""

    status = "FAILED_PRECONDITION"


class Unprepared(Refused):
    """Not yet installed, or no such variable here."""

    status = "NOT_FOUND"


class CorruptFrame(PServerError):
    """Bytes that are not a frame, or a frame that contradicts the plan."""

    status = "DATA_LOSS"


class Draining(PServerError):
    """The server is shutting down."""

    status = "UNAVAILABLE"


def _tree(root: type[PServerError]) -> dict[str, type[PServerError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def from_wire(name: str, message: str) -> PServerError:
    """The exception that a peer named; a name from a newer peer becomes the root class."""
    return _tree(PServerError).get(name, PServerError)(message)
