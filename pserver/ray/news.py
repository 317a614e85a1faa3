"""What an actor says of its process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where an actor is.

    Attributes:
        address: of its node, as other nodes reach it.
        node: the hexadecimal digits by which Ray names it.
        public_key: of the key that the actor has made for its process, as PEM.
    """

    address: str
    node: str
    public_key: bytes


@dataclass(frozen=True)
class Ended:
    """How a process has ended.

    Attributes:
        status: its exit status, or 128 + the signal that killed it.
        tail: its last lines; from its last traceback on, where there is one.
        told: the words in which it says that another process has ended it; "" where there are
            none.
        value: what a function has returned.
    """

    status: int
    tail: tuple[str, ...] = ()
    told: str = ""
    value: Any = None


@dataclass(frozen=True)
class News:
    """What has happened since an actor was last asked.

    Attributes:
        lines: of output.
        left_out: lines that came faster than they were fetched, and are lost.
        endpoint: of a server that is ready; "" until then.
        ended: None while the process runs.
    """

    lines: tuple[str, ...] = ()
    left_out: int = 0
    endpoint: str = ""
    ended: Ended | None = None
