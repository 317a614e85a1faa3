"""What the holder of a key may do."""

from __future__ import annotations

import enum


class Role(enum.IntEnum):
    """What somebody may do; each role may do what those before it may.

    Attributes:
        NOBODY: holds no key.
        TRAINER: takes part in a job.
        OPERATOR: also ends a job, reads it from outside, and names files.
        SERVER: no client has it: what only servers say.
    """

    NOBODY = 0
    TRAINER = 1
    OPERATOR = 2
    SERVER = 3

    @property
    def word(self) -> str:
        """As token files, messages and the wire spell it: "trainer"."""
        return self.name.lower()
