"""``pserver reset``: drops what a failed job has left, so that any job may begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from pserver.control.control_client import ControlClient
from pserver.errors import PServerError
from pserver.security.access import Access, always_open

ASK_SECONDS = 5.0


def reset(
    endpoints: Sequence[str],
    console: Console,
    access_of: Callable[[str], Access] = always_open,
) -> int:
    """Resets each server, and prints a line for each.

    Args:
        endpoints: HOST:PORT of each server.
        console: where to print.
        access_of: by endpoint, what is proved to the server.

    Returns:
        0 if all of them are empty now; otherwise 1: one does not answer, or has a running job.
    """
    failed = 0
    for endpoint in endpoints:
        control = ControlClient(endpoint, ASK_SECONDS, access=access_of(endpoint))
        try:
            before = control.reset().state
            line = "was empty" if before == "empty" else f"reset (it was {before})"
            console.print(f"{endpoint}: {line}", markup=False, highlight=False, soft_wrap=True)
        except PServerError as error:
            failed = 1
            console.print(f"not reset: {error}", markup=False, highlight=False, soft_wrap=True)
        finally:
            control.close()
    return failed
