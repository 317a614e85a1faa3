"""Tells servers on other hosts that trainers of this one have ended: ``launch`` runs it as a
process, because it imports gRPC, and ``launch`` does not.

::

    python -m pserver.launcher.last_word TOKEN KEYS ENDPOINTS "1=its process ended with status 3"

TOKEN is the path of the operator's token file, KEYS the folder of this host's keys, each or "".
With keys it must have an operator's: others do not speak for a process that has ended.

A trainer tells its end itself if it can; this is for one that cannot.

With ``--unreplaced`` nobody will start them again, so that the others need not wait for it.

With ``--ask`` behind all that it prints one line of JSON::

    {"took_part": true, "done": false, "goes_on": false, "reason": "..."}

They took part where no server had seen them leave; their part was done where every server had heard
that they take no further step; the job goes on where every server serves it without them.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, Sequence

from pserver.control.control_client import ControlClient
from pserver.errors import PServerError
from pserver.polling import poll
from pserver.security.access import Access
from pserver.wire_pb2 import AnnounceRequest, StatusReply

CALL_SECONDS = 1.0
LOST_SECONDS = 3.0  # for the servers to agree that a trainer is lost
ASK, UNREPLACED = "--ask", "--unreplaced"
TOOK_PART, DONE = ("joined", "lost"), ("finished", "left")  # words of a status

log = logging.getLogger(__name__)


def tell(
    access: Access, endpoints: Sequence[str], words: Sequence[str], unreplaced: bool = False
) -> None:
    """Tells every server that can be reached.

    Args:
        access: an operator's.
        words: "NUMBER=REASON" of each trainer.
        unreplaced: nobody will start them again.
    """
    for endpoint in endpoints:
        control = ControlClient(endpoint, CALL_SECONDS, access=access)
        try:
            for word in words:
                number, _, reason = word.partition("=")
                request = AnnounceRequest(trainer_id=int(number), failure=reason)
                request.unreplaced = unreplaced
                control.announce(request)
        except PServerError as error:
            print(f"could not tell {error}", file=sys.stderr)
        finally:
            control.close()


def all_are(
    states: Collection[str], access: Access, endpoints: Sequence[str], trainers: Collection[int]
) -> bool:
    """Whether all trainers are in one of these states on all servers.

    Args:
        states: words of a status.
        access: anybody's that may ask for a status.
    """
    for endpoint in endpoints:
        control = ControlClient(endpoint, CALL_SECONDS, access=access)
        try:
            there = {each.trainer_id: each.state for each in control.status().trainers}
        except PServerError:
            return False
        finally:
            control.close()
        if not all(there.get(trainer) in states for trainer in trainers):
            return False
    return True


def goes_on(access: Access, endpoints: Sequence[str], trainers: Collection[int]) -> str:
    """Why the job does not go on without these trainers; "" if it does.

    Args:
        access: anybody's that may ask for a status.
        trainers: that have ended.
    """
    for endpoint in endpoints:
        control = ControlClient(endpoint, CALL_SECONDS, access=access)
        try:
            reason = _obstacle_at(control, trainers)
        except PServerError as error:
            reason = str(error)
        finally:
            control.close()
        if reason:
            return reason
    return ""


def _obstacle_at(control: ControlClient, trainers: Collection[int]) -> str:
    """Gives the server time to lose them."""
    text = f"{control.endpoint} still counts on trainer {', '.join(map(str, sorted(trainers)))}"
    for _ in poll(log, lambda: text, LOST_SECONDS, 0.2):
        reason = obstacle(control.status(), trainers)
        if reason is not None:
            return reason
    return text


def obstacle(status: StatusReply, trainers: Collection[int]) -> str | None:
    """Why a job does not go on without trainers; "" if it does; None while they take part.

    Args:
        status: of a server.
    """
    if status.state != "serving":
        return status.failure or f"the server is {status.state}"
    states = {
        each.trainer_id: each.state for each in status.trainers if each.trainer_id in trainers
    }
    if len(states) < len(trainers):
        return "they had not joined"
    return "" if not {"joined", "finished"} & set(states.values()) else None


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    flags = {ASK, UNREPLACED} & set(arguments)
    token, keys, endpoints, *words = [each for each in arguments if each not in flags]
    access, servers = Access.of(token, keys, "operator", "trainer"), endpoints.split(",")
    trainers = {int(word.partition("=")[0]) for word in words}
    asked = (access, servers, trainers)
    took_part = ASK in flags and all_are(TOOK_PART, *asked)
    done = ASK in flags and not took_part and all_are(DONE, *asked)
    tell(access, servers, words, UNREPLACED in flags)
    if ASK in flags:
        reason = goes_on(access, servers, trainers)
        said = {"took_part": took_part, "done": done, "goes_on": not reason, "reason": reason}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
