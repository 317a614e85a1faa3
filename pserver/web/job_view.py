"""A job as the page shows it, from what its servers say: servers, trainers, links, lanes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pserver.web.sightings import Change, Sighting
from pserver.web.step_split import LaneTimes
from pserver.wire_pb2 import StatusReply, TrainerReport, TrainerStatus

# of a trainer's states, the one that counts first
WORST = ("lost", "joined", "finished", "preempted", "left")


@dataclass(slots=True)
class Seen:
    """One trainer, as all servers see it.

    Attributes:
        number: of the trainer.
        state: "joined", "finished", ...: the first of ``WORST`` that a server says.
        step: the furthest.
        silence: seconds since the server that has heard it last has.
        activity: what it does.
        report: the freshest.
        behind: how many times as long as the others it computes, where it is slow; else 0.
    """

    number: int
    state: str = "left"
    step: int = 0
    silence: float = float("inf")
    activity: str = ""
    report: TrainerReport = field(default_factory=TrainerReport)
    behind: float = 0.0

    def add(self, status: TrainerStatus) -> None:
        """What one server says of it."""
        if WORST.index(status.state) < WORST.index(self.state):
            self.state = status.state
        if status.silence_seconds < self.silence:
            self.silence, self.activity = status.silence_seconds, status.activity
        self.step = max(self.step, status.step)
        self.behind = max(self.behind, status.behind)
        if status.report.ByteSize() and status.report.samples >= self.report.samples:
            self.report = status.report


def trainers_of(replies: Mapping[str, StatusReply]) -> list[Seen]:
    """The trainers that some server knows, by number."""
    found: dict[int, Seen] = {}
    for reply in replies.values():
        for status in reply.trainers:
            found.setdefault(status.trainer_id, Seen(status.trainer_id)).add(status)
    return [found[number] for number in sorted(found)]


def servers(endpoints: Sequence[str], sighting: Sighting, change: Change) -> list[dict[str, Any]]:
    """Each server, in the order in which the user has named them."""
    into, out = change.rates("bytes_in"), change.rates("bytes_out")
    found = []
    for place, endpoint in enumerate(endpoints):
        reply = sighting.replies.get(endpoint)
        entry: dict[str, Any] = {
            "endpoint": endpoint,
            "name": f"server {place if reply is None else reply.server_index}",
            "up": reply is not None,
            "state": "unreachable" if reply is None else reply.state,
            "error": sighting.errors.get(endpoint, ""),
        }
        if reply is not None:
            entry |= {
                "error": reply.failure,
                "mode": reply.mode,
                "version": reply.version,
                "slices": reply.slices,
                "held": reply.bytes_held,
                "memory": reply.memory_bytes,
                "uptime": reply.uptime_seconds,
                "in": into.get(endpoint, 0.0),
                "out": out.get(endpoint, 0.0),
            }
        found.append(entry)
    return found


def trainers(seen: Sequence[Seen], change: Change) -> list[dict[str, Any]]:
    """Each trainer."""
    samples, steps = change.samples(), change.steps()
    return [
        {
            "number": each.number,
            "state": each.state,
            "step": each.step,
            "activity": each.activity,
            "silence": each.silence,
            "behind": each.behind,
            "memory": each.report.memory_bytes,
            "samples": each.report.samples,
            "samples_per_second": samples.get(each.number, 0.0),
            "steps_per_second": steps.get(each.number, 0.0),
            "values": {name: spoken(value) for name, value in sorted(each.report.values.items())},
        }
        for each in seen
    ]


def links(
    endpoints: Sequence[str], replies: Mapping[str, StatusReply], change: Change
) -> list[dict[str, Any]]:
    """Each pair of a trainer and a server, with the bytes a second that travel."""
    found = []
    for place, endpoint in enumerate(endpoints):
        if (reply := replies.get(endpoint)) is None:
            continue
        rates = change.links(endpoint) if endpoint in change.seconds else {}
        for trainer in reply.trainers:
            down, up = rates.get(trainer.trainer_id, (0.0, 0.0))
            found.append(
                {
                    "trainer": trainer.trainer_id,
                    "server": place,
                    "up": up,
                    "down": down,
                    "transport": trainer.transport,
                    "reconnects": trainer.report.reconnects,
                    "state": trainer.state,
                }
            )
    return found


def lanes(times: Sequence[LaneTimes]) -> list[dict[str, Any]]:
    """Each lane: where its steps' time goes, who is late, how stale."""
    return [
        {
            "lane": index,
            "mode": lane.mode,
            "steps_per_second": lane.steps_per_second,
            "split": lane.mean.parts(),
            "by_trainer": {str(number): each.parts() for number, each in lane.by_trainer.items()},
            "lateness": {str(number): seconds for number, seconds in lane.lateness.items()},
            "answers": lane.answers,
            "staleness": lane.staleness,
            "most_stale": lane.most_stale,
        }
        for index, lane in enumerate(times)
    ]


def spoken(value: float) -> float | str:
    """A number as JSON has it: one that is not finite is "nan", "inf" or "-inf"."""
    return value if abs(value) < float("inf") else str(value)
