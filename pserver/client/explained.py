"""Which error a call ends with whose connection has ended meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pserver.errors import PServerError


@contextmanager
def explained(check: Callable[[], None]) -> Iterator[None]:
    """A call that fails here fails with what has ended the connection: the heartbeat knows better
    why than the call, whose channel it has closed.

    Args:
        check: raises what has ended the connection, if something did.
    """
    try:
        yield
    except PServerError:
        check()
        raise
