"""The end of a job in agreement: a trainer waits until all have said that they take no further
step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from pserver.polling import poll
from pserver.wire_pb2 import FinishReply

log = logging.getLogger(__name__)


def all_finished(
    ask: Callable[[], FinishReply],
    server: str,
    check: Callable[[], None],
    ends: Callable[[], bool],
) -> bool:
    """Waits until a server says so.

    Args:
        ask: the server; it may take a second to answer.
        server: for the log.
        check: raises what has ended the job.
        ends: whether this trainer can wait no longer.

    Returns:
        Whether all have; False: it could wait no longer.
    """
    missing: Sequence[int] = ()

    def text() -> str:
        names = ", ".join(map(str, missing))
        return f"this trainer has finished, and waits for trainer {names} (so says {server})"

    for _ in poll(log, text):
        reply = ask()
        if reply.over:
            return True
        missing = reply.missing
        check()
        if ends():
            break
    return False
