"""The error of two jobs that write to one path."""

from __future__ import annotations

import os
import socket


class InUse(OSError):
    """Another job writes to this path.  Nothing was written."""


def myself() -> str:
    """This process, for messages that others read."""
    return f"process {os.getpid()} on {socket.gethostname()}"
