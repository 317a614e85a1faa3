"""What a server answers a trainer, as plain values: no caller sees a message of the protocol."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field
from typing import Any

from pserver.wire_pb2 import Done, JoinReply
from pserver.wire_pb2 import TableStatus as TableStatusMessage


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a server's answer to one request; values have arrived at their destinations.

    Attributes:
        version: updates applied to the server so far, counted in steps.
        committed: trainers whose gradients are in this update.
        overflow: some trainer saw an overflow, and nothing was applied.
        cursor: of a scan: where the next chunk begins; -1 after the last one.
        metadata: of a scan: what the server knows of the table besides its rows.
        checksums: of the variables that were asked for, by name.
    """

    version: int = 0
    committed: int = 0
    overflow: bool = False
    cursor: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    checksums: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_message(cls, done: Done) -> Reply:
        """The reply that a DONE frame brings.

        Raises:
            ValueError: its metadata are not JSON.
        """
        metadata = json.loads(done.metadata) if done.metadata else {}
        return cls(
            done.version,
            done.committed,
            done.overflow,
            done.cursor,
            metadata,
            dict(done.checksums),
        )


def first_of(replies: Sequence[Future[Reply]]) -> Reply:
    """Waits for the replies of one request to several servers.

    Heartbeats end the wait: a server that stays silent fails its channels.

    Args:
        replies: one for each server that was asked; at least one.

    Returns:
        The first server's reply, when all have come.

    Raises:
        PServerError: the first failure, as soon as it is known.
    """
    done, _ = wait(replies, return_when=FIRST_EXCEPTION)
    for reply in done:
        reply.result()
    return replies[0].result()


@dataclass(frozen=True, slots=True)
class Joined:
    """A server has let this trainer in.

    Attributes:
        install: this trainer is to install the program and its values (trainer 0, on an empty
            server).
        steps: by lane, the last step of this trainer that the server has applied; empty before the
            server is installed.
    """

    install: bool
    steps: tuple[int, ...]

    @classmethod
    def from_message(cls, reply: JoinReply) -> Joined:
        """The plain part of a JoinReply."""
        return cls(reply.install, tuple(reply.steps))


@dataclass(frozen=True, slots=True)
class TableStatus:
    """One table's part on one server.

    Attributes:
        rows: that the server holds.
        bytes_held: by them, with their optimizer states.
        counters: what was counted since the start: "admitted", "evicted", ...
    """

    name: str
    rows: int
    bytes_held: int
    counters: Mapping[str, int]

    @classmethod
    def from_message(cls, message: TableStatusMessage) -> TableStatus:
        """The same as a plain value."""
        return cls(message.name, message.rows, message.bytes_held, dict(message.counters))
