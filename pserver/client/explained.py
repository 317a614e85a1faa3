"""Which error a call ends with whose connection has ended meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pserver.errors import PServerError, TrainerLost, UnknownSession


@contextmanager
def explained(
    check: Callable[[], None], away: Callable[[PServerError], TrainerLost | None]
) -> Iterator[None]:
    """A call that fails here fails with what has ended the connection: the heartbeat knows better
    why than the call, whose channel it has closed.

    Args:
        check: raises what has ended the connection, if something did.
        away: the error of a trainer that its server has dropped as it did not run, if it is one.
    """
    try:
        yield
    except PServerError as error:
        check()
        if isinstance(error, UnknownSession) and (explanation := away(error)):
            raise explanation from error
        raise
