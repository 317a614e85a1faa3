"""``pserver drain``: ends servers as SIGTERM does, from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from pserver.control.control_client import ControlClient
from pserver.operations.each_server import ask_each
from pserver.security.access import Access, always_open


def drain(
    endpoints: Sequence[str],
    console: Console,
    access_of: Callable[[str], Access] = always_open,
) -> int:
    """Drains each server, and prints a line for each.

    A server that drains takes no new step, tells its trainers, sends what it has begun to send, and
    ends within seconds; a job that runs on it fails.

    Args:
        endpoints: HOST:PORT of each server.
        console: where to print.
        access_of: by endpoint, what is proved to the server.

    Returns:
        0 if all of them have taken it; otherwise 1: one does not answer, or refuses.
    """
    return ask_each(endpoints, console, access_of, _drain, "not drained")


def _drain(control: ControlClient) -> str:
    control.drain()
    return "drains, and then ends"
