"""The limits on what a server takes from its peers, as one frozen dataclass.

Each limit is checked before memory is taken or a thread is given.  Those that a large job may need
to raise are settings of ``pserver serve``, and an error that comes of one names its flag.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MOST_TRAINERS = 1024
MOST_OPEN = 4096
HELLO_SECONDS = 10.0
MOST_PROGRAM_MB = 64
PART_BYTES = 2**21  # of a program, in one message
SLACK_BYTES = 2**16  # what a message has besides


def machine_bytes(container: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """This machine's memory, or that of the container where it has less.

    Args:
        container: the file in which Linux says so: a number, or "max".
    """
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(whole, int(container.read_text()))
    except (OSError, ValueError):
        return whole


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one server.

    Attributes:
        trainers: of a job.  Each wait for all of them looks at each.
        connections: that are open on one port.  Each of a tensor stream has a thread or two.
        strangers: of them, those whose peers have not identified themselves; when the number is
            reached, a new one ends an earlier one.
        hello_seconds: for a peer to identify itself.
        hello_bytes: of a frame by which it does so.
        memory_bytes: that the slices of a program take, the states of its optimizers, and the rows
            of its tables; and of one request for rows.
        program_bytes: of the message of a program.
        program_parts: its ops, variables, slices, lanes and tables together: what its message
            becomes takes more memory than the message.
        manifest_bytes: of the message of Join.
        observers: that read what a job holds, at a time.
        name_bytes: of a name: an incarnation, a barrier, a topic.
        text_bytes: of a sentence that is kept: why a trainer has failed.
    """

    trainers: int = MOST_TRAINERS
    connections: int = MOST_OPEN
    strangers: int = 128
    hello_seconds: float = HELLO_SECONDS
    hello_bytes: int = 2**12
    memory_bytes: int = 2**63
    program_bytes: int = MOST_PROGRAM_MB * 2**20
    program_parts: int = 2**19
    manifest_bytes: int = MOST_PROGRAM_MB * 2**16
    observers: int = 16
    name_bytes: int = 1024
    text_bytes: int = 2**14

    @property
    def message_bytes(self) -> int:
        """The largest message on the control port: gRPC takes memory for all of it before it is
        read.  A part of a program, a frame of tensors or the facts of a plan fit.
        """
        return max(self.manifest_bytes, 2 * PART_BYTES) + SLACK_BYTES

    def short(self, text: str) -> str:
        """A text that is kept, cut where it is too long."""
        return text if len(text) <= self.text_bytes else text[: self.text_bytes] + " ..."


ANY_FIRST_FRAME = Limits(hello_bytes=2**26)
"""Of a listener whose streams need not be admitted."""
