"""Counts payload bytes by name on the wire, at one end of streams, after compression."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from pserver.wire_pb2 import Frame, StatusReply, VariableBytes
from transpiler.plan.plan import Plan

Bytes = tuple[int, int]  # received, sent


class ByteCounters:
    """Byte counts of all streams of a process with one peer, or of a job.  Any thread may count.

    Args:
        has: whether there is something of this name on the wire.  What a peer invents is not
            counted, so that it is not kept.
    """

    def __init__(self, has: Callable[[str], bool] = lambda name: True) -> None:
        self._has = has
        self._lock = threading.Lock()  # guards the two below
        self._received: dict[str, int] = {}
        self._sent: dict[str, int] = {}

    def received(self, header: Frame) -> None:
        """Counts a frame that has arrived."""
        self._count(self._received, header)

    def sent(self, header: Frame) -> None:
        """Counts a frame that has left; one that is sent again counts again."""
        self._count(self._sent, header)

    def _count(self, counts: dict[str, int], header: Frame) -> None:
        if header.parts:
            with self._lock:
                for part in header.parts:
                    if part.name in counts or self._has(part.name):
                        counts[part.name] = counts.get(part.name, 0) + part.size

    def by_name(self) -> dict[str, Bytes]:
        """The counts: (received, sent) by name on the wire."""
        with self._lock:
            return {
                n: (self._received.get(n, 0), self._sent.get(n, 0))
                for n in {**self._received, **self._sent}
            }

    def report(self, plan: Plan, reply: StatusReply) -> None:
        """Writes the counts by variable into a server's status."""
        for name, (received, sent) in by_variable(self.by_name(), plan).items():
            reply.variables[name].CopyFrom(VariableBytes(bytes_in=received, bytes_out=sent))


def by_variable(counts: Mapping[str, Bytes], plan: Plan) -> dict[str, Bytes]:
    """Counts by variable: those of its slices and of their companions (scales, ids) are added up.
    Optimizer states keep their own names.
    """
    variables = {
        slice_.name: placement.name for placement in plan.placements for slice_ in placement.slices
    }
    total: dict[str, Bytes] = {}
    for name, (received, sent) in counts.items():
        name = name if name in variables else name.partition("@")[0]
        name = variables.get(name, name)
        before = total.get(name, (0, 0))
        total[name] = before[0] + received, before[1] + sent
    return total


def totals(counts: Iterable[ByteCounters], plan: Plan) -> dict[str, dict[str, int]]:
    """The sum of several counts: "bytes_in" and "bytes_out" of each variable."""
    total: dict[str, dict[str, int]] = {}
    for traffic in counts:
        for name, (received, sent) in by_variable(traffic.by_name(), plan).items():
            both = total.setdefault(name, {"bytes_in": 0, "bytes_out": 0})
            both["bytes_in"] += received
            both["bytes_out"] += sent
    return total
