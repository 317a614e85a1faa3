"""One call to each of several servers, with a line for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from pserver.control.control_client import ControlClient
from pserver.errors import PServerError
from pserver.security.access import Access

ASK_SECONDS = 5.0


def ask_each(
    endpoints: Sequence[str],
    console: Console,
    access_of: Callable[[str], Access],
    ask: Callable[[ControlClient], str],
    refused: str,
) -> int:
    """Asks each server, and prints what has come of it.

    Args:
        endpoints: HOST:PORT of each server.
        access_of: by endpoint, what is proved to the server.
        ask: makes the call, and says what it has done.
        refused: what a server was not, in the line of one that refuses or does not answer.

    Returns:
        0 if all have done it, otherwise 1.
    """
    failed = 0
    for endpoint in endpoints:
        control = ControlClient(endpoint, ASK_SECONDS, access=access_of(endpoint))
        try:
            line = f"{endpoint}: {ask(control)}"
        except PServerError as error:
            failed, line = 1, f"{refused}: {error}"
        finally:
            control.close()
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return failed
