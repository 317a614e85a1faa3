"""A port of this machine that a process can be told to listen on."""

from __future__ import annotations

import itertools
import random
import socket
from contextlib import suppress

# below the ports that a kernel gives to a process that asks for any, so that it gives none of these
PORTS = range(20000, 32000)
# A process does not give a port twice, and two processes begin at different ones, whatever either
# has told `random` to begin with.
_turns = itertools.count(random.SystemRandom().randrange(len(PORTS)))


def free_port() -> int:
    """A port of this machine on which trainer 0 can listen: unused now, and outside of the range
    from which the kernel picks ports for other processes.

    Raises:
        OSError: none was found.
    """
    for _ in range(100):
        port = PORTS[next(_turns) % len(PORTS)]
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(
        f"expected a free port of {PORTS.start} to {PORTS.stop - 1} on 127.0.0.1, found none in "
        "100 tries"
    )
