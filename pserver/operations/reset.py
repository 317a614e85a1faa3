"""``pserver reset``: drops what a failed job has left, so that any job may begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from pserver.control.control_client import ControlClient
from pserver.operations.each_server import ask_each
from pserver.security.access import Access, always_open


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
    return ask_each(endpoints, console, access_of, _reset, "not reset")


def _reset(control: ControlClient) -> str:
    before = control.reset().state
    return "was empty" if before == "empty" else f"reset (it was {before})"
