"""A port of this machine that a process can be told to listen on."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# below the ports that a kernel gives to a process that asks for any, so that it gives none of these
PORTS = range(20000, 32000)


def free_port() -> int:
    """A port of this machine on which trainer 0 can listen: unused now, and outside of the range
    from which the kernel picks ports for other processes.

    Raises:
        OSError: none was found.
    """
    for port in random.sample(PORTS, 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(
        f"expected a free port of {PORTS.start} to {PORTS.stop - 1} on 127.0.0.1, found none in "
        "100 tries"
    )
