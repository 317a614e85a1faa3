"""A program that comes in parts: no message of the control port is longer than a few MB, as gRPC
takes memory for all of a message before anybody can look at it.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from pserver import wire_pb2 as wire
from pserver.errors import Refused
from pserver.limits import PART_BYTES, Limits
from transpiler.program_pb2 import Program


class ProgramParts:
    """Collects the parts of one program.  The caller holds the job's lock.

    Args:
        limits: how long the program may be.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._parts: dict[int, bytes] = {}

    def add(self, request: wire.InstallRequest) -> Program | None:
        """Takes a part, which may come again.

        Returns:
            The program, when all parts are here.

        Raises:
            Refused: it is no part of a program that this server takes.
        """
        most = -(-self._limits.program_bytes // PART_BYTES)
        if not request.number < request.parts <= most or len(request.part) > PART_BYTES:
            raise Refused(
                f"expected a program in up to {most} parts (--max-program) of up to {PART_BYTES} "
                f"bytes, got part {request.number} of {request.parts} of {len(request.part)} bytes"
            )
        self._parts[request.number] = request.part
        if not all(number in self._parts for number in range(request.parts)):
            return None
        try:
            return Program.FromString(b"".join(self._parts[n] for n in range(request.parts)))
        except DecodeError as error:
            raise Refused(f"the parts are of no program: {error}") from error
