"""The requests that bring a program to a server: one, or one for each part of a long program."""

from __future__ import annotations

from collections.abc import Iterator

from pserver.limits import PART_BYTES
from pserver.wire_pb2 import InstallRequest
from transpiler.program import Program


def install_requests(session: str, program: Program) -> Iterator[InstallRequest]:
    """All of them, in order.

    Args:
        session: of the trainer that installs.
    """
    message = program.to_proto()
    whole = message.SerializeToString()
    if len(whole) <= PART_BYTES:
        yield InstallRequest(session=session, program=message)
        return
    parts = [whole[begin : begin + PART_BYTES] for begin in range(0, len(whole), PART_BYTES)]
    for number, part in enumerate(parts):
        yield InstallRequest(session=session, part=part, number=number, parts=len(parts))
