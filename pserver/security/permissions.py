"""The one table of who may do what: every call and every kind of frame of wire.proto, and the role
that it needs.

A call or a kind without a row is refused to everybody; a test holds the table against wire.proto.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pserver.security.role import Role

CALLS: Mapping[str, Role] = {
    "Challenge": Role.NOBODY,
    "Join": Role.TRAINER,
    "Install": Role.TRAINER,
    "Heartbeat": Role.TRAINER,
    "Announce": Role.TRAINER,
    "Finish": Role.TRAINER,
    "Leave": Role.TRAINER,
    "Barrier": Role.TRAINER,
    "Rendezvous": Role.TRAINER,
    "Save": Role.TRAINER,
    "Load": Role.TRAINER,
    "Shrink": Role.TRAINER,
    "Status": Role.TRAINER,
    "Drain": Role.OPERATOR,
    "Observe": Role.OPERATOR,
    "Reset": Role.OPERATOR,
    "Trace": Role.TRAINER,
    "Follow": Role.OPERATOR,  # or a server's certificate, see PEERS
    "Lease": Role.TRAINER,
    "Position": Role.TRAINER,
    "Exchange": Role.NOBODY,  # its frames are in the table below
}

# Calls of trainers that need an operator's key where the request says more.
OPERATOR_WHERE: Mapping[str, Callable[[Any], bool]] = {
    # a path of the caller's choice; without one the server's own directory is meant, and a save
    # in the background is a part of the trainers' checkpoint, below what the operator allows
    "Save": lambda request: bool(request.path) and not request.background,
    "Load": lambda request: bool(request.path),
    # the end of a process that does not speak for itself
    "Announce": lambda request: bool(request.failure) and not request.incarnation,
}

# What servers of a job ask each other.  Each holds the operator's secret.  A server's certificate
# counts as an operator's for these calls and for the HELLO of a link's stream, for nothing else.
PEERS = frozenset({"Follow"})

FRAMES: Mapping[str, Role] = {
    "UNKNOWN": Role.SERVER,
    "HELLO": Role.NOBODY,  # with it a client proves its role
    "VALUE": Role.TRAINER,
    "GRADIENT": Role.TRAINER,
    "COMMIT": Role.TRAINER,
    "NORMS": Role.SERVER,
    "SCALE": Role.TRAINER,
    "PULL": Role.TRAINER,
    "DONE": Role.SERVER,
    "FAILURE": Role.SERVER,
    "DRAIN": Role.SERVER,
    "BYE": Role.TRAINER,
    "PROBE": Role.TRAINER,
    "ROWS": Role.TRAINER,
    "LOOKUP": Role.TRAINER,
    "SCAN": Role.TRAINER,
    "ASSIGN": Role.TRAINER,
    "CHECKSUM": Role.TRAINER,
    "STAGED": Role.OPERATOR,
    "RECORD": Role.SERVER,
}


def role_for_call(name: str, request: Any) -> Role:
    """The role that a call needs.

    Args:
        name: of the call: "Join".
        request: its message.
    """
    more = OPERATOR_WHERE.get(name)
    if more is not None and more(request):
        return Role.OPERATOR
    return CALLS.get(name, Role.SERVER)


def is_logged(name: str, request: Any) -> bool:
    """Whether a call is an operator's, of which the log tells; an observer's only when it begins,
    as it is repeated each second.
    """
    begins = name != "Observe" or not request.session
    return begins and role_for_call(name, request) is Role.OPERATOR


def asks_for(name: str, request: Any) -> str:
    """Names what a caller asks for again and again, until it is answered: the log tells of that
    once.  "": each call of this name is one of its own.
    """
    return f"server {request.server_index}, {request.incarnation}" if name == "Follow" else ""


def role_for_frame(kind: str) -> Role:
    """The role that a frame of this kind needs: "GRADIENT"."""
    return FRAMES.get(kind, Role.SERVER)
