"""Which error a call ends with whose connection has ended meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pserver.errors import PServerError, TrainerLost, UnknownSession


@contextmanager
def explained(
    check: Callable[[], None], lost_while_away: Callable[[PServerError], TrainerLost | None]
) -> Iterator[None]:
    """A call that fails here fails with what has ended the connection: the heartbeat knows better
    why than the call, whose channel it has closed.

    Args:
        check: raises what has ended the connection, if something did.
        lost_while_away: explains an unknown session by this trainer's own pause, if it had one.
    """
    try:
        yield
    except PServerError as error:
        check()
        if isinstance(error, UnknownSession) and (cause := lost_while_away(error)):
            raise cause from error
        raise
