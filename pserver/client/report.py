"""What a trainer says of its training with each heartbeat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pserver.client.channel import Channel
from pserver.wire_pb2 import HeartbeatRequest, LaneReport, TrainerReport

MOST_VALUES = 64  # of a report: a server keeps no more


@dataclass(slots=True)
class LaneTotals:
    """What a trainer has measured of one lane's steps: running totals.

    Attributes:
        steps: that the script has closed.
        step_seconds: from one step's close to the next one's.
        blocked_seconds: for how long the script's thread waited in steps.
        wait_seconds, waits: by server, from a commit until it was answered, and how many.
    """

    steps: int = 0
    step_seconds: float = 0.0
    blocked_seconds: float = 0.0
    wait_seconds: dict[int, float] = field(default_factory=dict)
    waits: dict[int, int] = field(default_factory=dict)

    def answered(self, server: int, seconds: float) -> None:
        """A server has answered a commit.  One thread calls it for each server."""
        self.wait_seconds[server] = self.wait_seconds.get(server, 0.0) + seconds
        self.waits[server] = self.waits.get(server, 0) + 1

    def message(self, server: int) -> LaneReport:
        """What one server is told of it."""
        return LaneReport(
            steps=self.steps,
            step_seconds=self.step_seconds,
            blocked_seconds=self.blocked_seconds,
            wait_seconds=self.wait_seconds.get(server, 0.0),
            waits=self.waits.get(server, 0),
        )


@dataclass(frozen=True, slots=True)
class Report:
    """What a trainer says of its training.

    Attributes:
        samples: that the script has reported.
        values: the script's own numbers, by name.
        memory_bytes: resident; 0: not known.
        lanes: by lane.
        saves: checkpoints of the whole job that it has completed.
        since_save_seconds: since the last of them; 0 where there is none.
        position: in the data: passes begun, batches of the last one, and how many it has (0: not
            known).
    """

    samples: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    memory_bytes: int = 0
    lanes: Sequence[LaneTotals] = ()
    saves: int = 0
    since_save_seconds: float = 0.0
    position: tuple[int, int, int] = (0, 0, 0)


def heartbeat(
    session: str, activity: str, report: Report, server: int, channels: Iterable[Channel]
) -> HeartbeatRequest:
    """A heartbeat to a server, with what it is told.

    Args:
        server: its index.
        channels: all to this server.
    """
    streams = list(channels)
    names = sorted(report.values)[:MOST_VALUES]
    passes, batch, batches = report.position
    return HeartbeatRequest(
        session=session,
        activity=activity,
        report=TrainerReport(
            samples=report.samples,
            values={name: report.values[name] for name in names},
            memory_bytes=report.memory_bytes,
            lanes=[lane.message(server) for lane in report.lanes],
            bytes_in=sum(channel.bytes_in for channel in streams),
            bytes_out=sum(channel.bytes_out for channel in streams),
            reconnects=sum(channel.reconnects for channel in streams),
            saves=report.saves,
            since_save_seconds=report.since_save_seconds,
            passes=passes,
            batch=batch,
            batches=batches,
        ),
    )
