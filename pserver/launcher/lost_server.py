"""Asks for the save from which a dead server can be restarted.  ``launch`` runs it as a process,
because it imports gRPC and torch, and ``launch`` does not.

::

    python -m pserver.launcher.lost_server TOKEN KEYS ENDPOINTS INDEX FOLDER LOG SECONDS

TOKEN is the path of the operator's token file, KEYS the folder of this host's keys, each or "".
ENDPOINTS are those of the other servers of the job, INDEX is the dead one's number, FOLDER is where
the job saves, LOG the file to which server 0 writes its own state, SECONDS for how long a server
that does not answer is asked again.

It prints one line of JSON: ``{"path": "saved/step-000120/server-1", "reason": ""}``.  The path is
that of the part that the server has written of the newest whole checkpoint; "", with a reason,
where the job does not resume from it: another server does not wait, server 0 is the dead one and
has written no log, there is no checkpoint yet, or none of this job's servers.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence

from pserver import timeouts
from pserver.checkpoint import manifest
from pserver.checkpoint.manifest import listed_in
from pserver.control.control_client import ControlClient
from pserver.errors import PServerError, TimedOut, Unreachable
from pserver.job_log import files
from pserver.polling import poll
from pserver.security.access import Access
from pserver.storage.place import place_at
from pserver.wire_pb2 import StatusReply

PAUSE_SECONDS = 0.2

log = logging.getLogger(__name__)


def obstacle(status: StatusReply) -> str:
    """Why a server does not wait for another one; "" where it does.

    Args:
        status: its own.
    """
    if status.state != "serving":
        return status.failure or f"a server is {status.state}"
    return "" if status.awaits_servers else f"in {status.mode} mode all go back to a checkpoint"


def part_of(folder: str, index: int, fingerprint: str) -> tuple[str, str]:
    """The directory, or the URL, of a server's part of the newest whole checkpoint; or the reason
    why there is none.

    Args:
        folder: of the job's checkpoints.
        fingerprint: of the job's plan.

    Raises:
        OSError, ValueError: the folder cannot be read.
    """
    place = place_at(folder)
    _, kept = listed_in(place)
    if not kept:
        return "", "there is no checkpoint yet"
    newest = manifest.read(place.at(kept[-1].name))
    parts = manifest.parts_of(newest)
    if index >= len(parts):
        return "", f"{newest.place} has no part of server {index}"
    if parts[index].meta.get("fingerprint") != fingerprint:
        return "", f"{newest.place} was written by servers of another plan"
    return parts[index].place.path, ""


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    token, keys, endpoints, index, folder, written, seconds = arguments
    access = Access.of(token, keys, "operator", "trainer")
    path, fingerprints = "", list[str]()
    try:
        statuses = [
            status_of(access, each, float(seconds)) for each in endpoints.split(",") if each
        ]
        reason = next(filter(None, map(obstacle, statuses)), "")
        fingerprints = [each.fingerprint for each in statuses]
        if index == "0" and not reason:
            fingerprints, reason = _written(written)
        if not reason:
            path, reason = part_of(folder, int(index), fingerprints[0])
    except (PServerError, OSError, ValueError) as error:
        reason = str(error)
    print(json.dumps({"path": path, "reason": reason}), flush=True)


def _written(path: str) -> tuple[list[str], str]:
    """The fingerprint of the job's plan, as server 0 has written it; and why it has not."""
    try:
        fingerprint = next(files.read(path)).plan
    except (OSError, ValueError, StopIteration):
        return [], "server 0 has written no log: all go back to a checkpoint"
    return [fingerprint], "" if fingerprint else f"{path} is no log of server 0"


def status_of(access: Access, endpoint: str, seconds: float) -> StatusReply:
    """A server's status; one that does not answer is asked again for so long.

    Raises:
        PServerError: it has refused, or has not answered by then.
    """
    control = ControlClient(endpoint, timeouts.CALL_SECONDS, access=access)
    unanswered: PServerError = TimedOut(f"{endpoint} does not answer")
    try:
        for _ in poll(log, lambda: f"{endpoint} does not answer", seconds, PAUSE_SECONDS):
            try:
                return control.status()
            except (Unreachable, TimedOut) as error:
                unanswered = error
    finally:
        control.close()
    raise unanswered


if __name__ == "__main__":
    main(sys.argv[1:])
