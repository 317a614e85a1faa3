"""Tells servers on other hosts that trainers of this one have ended: ``launch`` runs it as a
process, because it imports gRPC, and ``launch`` does not.

::

    python -m pserver.launcher.last_word TOKEN KEYS ENDPOINTS "1=its process ended with status 3"

TOKEN is the path of the operator's token file, KEYS the folder of this host's keys, each or "".
With keys it must have an operator's: others do not speak for a process that has ended.

A trainer that has joined tells its end itself, or is missed by its heartbeat; this is for one that
dies before the servers have seen it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pserver.control.control_client import ControlClient
from pserver.errors import PServerError
from pserver.security.access import Access
from pserver.wire_pb2 import AnnounceRequest

CALL_SECONDS = 1.0


def tell(access: Access, endpoints: Sequence[str], words: Sequence[str]) -> None:
    """Tells every server that can be reached.

    Args:
        access: an operator's.
        words: "NUMBER=REASON" of each trainer.
    """
    for endpoint in endpoints:
        control = ControlClient(endpoint, CALL_SECONDS, access=access)
        try:
            for word in words:
                number, _, reason = word.partition("=")
                control.announce(AnnounceRequest(trainer_id=int(number), failure=reason))
        except PServerError as error:
            print(f"could not tell {error}", file=sys.stderr)
        finally:
            control.close()


if __name__ == "__main__":
    access = Access.of(sys.argv[1], sys.argv[2], "operator", "trainer")
    tell(access, sys.argv[3].split(","), sys.argv[4:])
