"""The flags of ``pserver web``, and ``--web`` of ``pserver launch``."""

from __future__ import annotations

import argparse

from pserver.command_line.key_flags import add_protection
from pserver.command_line.texts import ENDPOINTS

MOST_PORT = 65535


def add_web(sub: argparse.ArgumentParser) -> None:
    """Adds the flags of ``pserver web``."""
    add = sub.add_argument
    add("endpoints", metavar=ENDPOINTS, help="all servers of the job")
    add("--port", metavar="PORT", type=port, default=0, help="of the page (default: any free one)")
    add(
        "--host",
        metavar="HOST",
        default="127.0.0.1",
        help="where the page is served (default: 127.0.0.1, for this host alone)",
    )
    add(
        "--log-dir",
        metavar="DIR",
        help="the folder whose files *.log the page shows (default: none)",
    )
    add(
        "--save-dir",
        metavar="DIR",
        default="saved",
        help="the folder, or URL, below which the page's Save writes checkpoints (default: saved)",
    )
    add("--read-only", action="store_true", help="the page offers neither Save nor Drain")
    add_protection(sub)


def add_web_of_launch(sub: argparse.ArgumentParser) -> None:
    """Adds ``--web``."""
    sub.add_argument(
        "--web",
        nargs="?",
        const=0,
        metavar="PORT",
        type=_port_of_launch,
        help="serve a page that shows the job, on this host, at this port (or any free one)",
    )


def _port_of_launch(text: str) -> int:
    """The port of ``--web``, for which SCRIPT is taken where it follows."""
    try:
        return port(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; right before SCRIPT write --web=0") from None


def port(text: str) -> int:
    """A port as the user types it.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if text.isascii() and text.isdigit() and int(text) <= MOST_PORT:
        return int(text)
    raise argparse.ArgumentTypeError(
        f"expected a port of 0 to {MOST_PORT}, got {text!r} (0 is any free one)"
    )
