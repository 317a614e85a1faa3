"""What a trainer counts of its job, over all lanes and servers."""

from __future__ import annotations

from collections.abc import Sequence

from pserver.client.client import Client
from trainer.communicator.lane import LaneSender


def counters(
    steps: int, clients: Sequence[Client], lanes: Sequence[LaneSender]
) -> dict[str, float]:
    """Counters since the start.

    steps (closed by the script), messages, bytes_out and bytes_in (payload), reconnects,
    steps_merged (into messages), steps_queued (not yet answered), blocked_seconds (that a full
    queue took), steps_refused_nonfinite (messages with a NaN or an infinity, of which servers have
    applied nothing), steps_refused_outlier (the same of messages with a norm far beyond its
    history).
    """
    channels = [channel for client in clients for channel in client.every_channel]
    total = {
        "steps": float(steps),
        "bytes_out": float(sum(channel.bytes_out for channel in channels)),
        "bytes_in": float(sum(channel.bytes_in for channel in channels)),
        "reconnects": float(sum(channel.reconnects for channel in channels)),
        "steps_merged": 0.0,
        "steps_queued": 0.0,
        "blocked_seconds": 0.0,
        "steps_refused_nonfinite": 0.0,
        "steps_refused_outlier": 0.0,
    }
    for lane in lanes:
        for name, value in lane.metrics().items():
            total[name] = total.get(name, 0.0) + value
    return total
