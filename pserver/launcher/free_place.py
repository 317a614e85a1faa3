"""The free places of a job under way: a launch that joins one asks the first server.  It runs this
as a process, because it imports gRPC, and ``launch`` does not::

    python -m pserver.launcher.free_place TOKEN KEYS ENDPOINT LEAST SECONDS

It prints one line of JSON: ``{"free": [3, 4], "reason": ""}``.  TOKEN is the path of the job's
token file, KEYS the folder of this host's keys, each or "".  The first LEAST places belong to the
host that has begun the job.  SECONDS is the longest wait for a server that is not up yet, or has no
job yet.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress

from pserver import timeouts
from pserver.control.control_client import ControlClient
from pserver.errors import PServerError, TimedOut, Unreachable
from pserver.polling import poll
from pserver.security.access import Access
from pserver.wire_pb2 import StatusReply

log = logging.getLogger(__name__)


def free_places(status: StatusReply, least: int) -> list[int]:
    """The free places, and those of lost trainers.

    Args:
        status: of a server that serves the job.
        least: the first places, which belong to the host that has begun the job.
    """
    taken = {each.trainer_id for each in status.trainers if each.state != "lost"}
    return [each for each in range(least, status.trainers_expected) if each not in taken]


def wait_for_places(access: Access, endpoint: str, least: int, seconds: float) -> list[int]:
    """The free places of a server's job, when there is one.

    Args:
        access: with any role that may ask for a status.
        seconds: the longest wait for a job.

    Raises:
        PServerError: the server cannot be reached, or refuses.
    """
    control = ControlClient(endpoint, timeouts.CALL_SECONDS, access=access)
    try:
        control.wait_ready(seconds)
        for _ in poll(log, lambda: f"{endpoint} has no job that serves", seconds, 0.25):
            with suppress(TimedOut, Unreachable):  # it is busy: it has not said no
                status = control.status()
                if status.state == "serving":
                    return free_places(status, least)
        return []
    finally:
        control.close()


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    token, keys, endpoint, least, seconds = arguments
    access, free, reason = Access.of(token, keys, "operator", "trainer"), list[int](), ""
    try:
        free = wait_for_places(access, endpoint, int(least), float(seconds))
    except PServerError as error:
        reason = str(error)
    print(json.dumps({"free": free, "reason": reason}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
