"""The errors that a cluster can raise, by cause.

::

    PServerError
    |-- Unreachable            a server does not answer
    |-- Lost                   a peer of a running job sent no heartbeat for the heartbeat timeout,
    |   |                      or is shutting down
    |   |-- ServerLost
    |   |   `-- Draining       the server is shutting down
    |   `-- TrainerLost
    |-- TimedOut               a wait reached its timeout, though heartbeats went on
    |-- JobFailed              another process of the job ended it, and said why
    |   |-- NonFinite          a step had a NaN or an infinity, and the job was to stop at one
    |   `-- Outlier            a norm was far beyond its history, and the job was to stop at one
    |-- Refused                the peer understood and said no
    |   |-- Busy               the server has another job
    |   |-- NotAllowed         no key, another job's, or one whose role may not
    |   |-- FingerprintMismatch    two processes of a job run different programs
    |   |   `-- PartialPlan    one has not made all optimizers of the job yet
    |   |-- Untrusted          a certificate is missing, foreign, expired, revoked, or another's
    |   |-- Unprepared         not yet installed, or no such variable here
    |   `-- UnknownSession     the server knows no such trainer: it may have been started again
    `-- CorruptFrame           bytes that are not a frame, or a frame that contradicts the plan
        `-- GarbledStream      bytes that are not a frame came to a server

A mistake in what the user wrote is a ``ValueError`` or a ``TypeError``.  On the wire an error is
the name of its class and one sentence.
"""

from __future__ import annotations


class PServerError(Exception):
    """The root of all errors that a cluster can raise.

    Attributes:
        status: the name of the gRPC status code that a control call fails with.
    """

    status = "UNKNOWN"


class Unreachable(PServerError):
    """A server does not answer at its endpoint."""

    status = "UNAVAILABLE"


class Lost(PServerError):
    """A peer of a running job has sent no heartbeat for longer than the heartbeat timeout."""

    status = "ABORTED"


class ServerLost(Lost):
    """A server has not answered a heartbeat for longer than the heartbeat timeout, or is shutting
    down.
    """


class TrainerLost(Lost):
    """A trainer has sent no heartbeat for longer than the heartbeat timeout, or has not joined in
    time.
    """


class TimedOut(PServerError):
    """A wait reached its timeout, although the peer still sends heartbeats."""

    status = "DEADLINE_EXCEEDED"


class JobFailed(PServerError):
    """Another process of the job ended it."""

    status = "ABORTED"


class NonFinite(JobFailed):
    """A step had a NaN or an infinity in it, and ``a_sync_configs["nonfinite"]`` is "stop"."""


class Outlier(JobFailed):
    """A norm in a step was far beyond its trainer's history, and ``a_sync_configs["outlier_push"]``
    is "stop".
    """


class Refused(PServerError):
    """The peer understood the request and said no."""

    status = "INVALID_ARGUMENT"


class Busy(Refused):
    """The server has another job, or keeps the values of one that failed."""

    status = "RESOURCE_EXHAUSTED"


class NotAllowed(Refused):
    """One end has no key of the job, another job's, or one whose role may not do that."""

    status = "PERMISSION_DENIED"


class FingerprintMismatch(Refused):
    """Two processes of one job run different programs."""

    status = "FAILED_PRECONDITION"


class PartialPlan(FingerprintMismatch):
    """A trainer asks to join a job under way, and has fewer parameter groups than the job: its
    script may make further optimizers.
    """


class Untrusted(Refused):
    """A peer's certificate is missing, foreign, expired, revoked, or was made for another host or
    role; or one end speaks TLS and the other does not.
    """

    status = "UNAUTHENTICATED"


class Unprepared(Refused):
    """The server has no program yet, or does not hold a variable of this name."""

    status = "NOT_FOUND"


class UnknownSession(Refused):
    """The server does not know this session; it may have been started again since."""


class CorruptFrame(PServerError):
    """Bytes that are not a frame, or a frame that contradicts the plan."""

    status = "DATA_LOSS"


class GarbledStream(CorruptFrame):
    """Bytes that are not a frame came to a server: the stream ends, and the trainer asks again over
    another.
    """


class Draining(ServerLost):
    """The server is shutting down."""

    status = "UNAVAILABLE"


def _tree(root: type[PServerError]) -> dict[str, type[PServerError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def from_wire(name: str, message: str) -> PServerError:
    """The exception for an error that came over the wire.

    Args:
        name: of its class; a name that is not known here, from a newer peer, means the root class.
        message: one sentence.
    """
    return _tree(PServerError).get(name, PServerError)(message)
