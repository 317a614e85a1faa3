"""Made-up answers of servers: one lane, steps that take known times."""

from __future__ import annotations

from collections.abc import Mapping

from pserver.telemetry.job_view import Sample
from pserver.wire_pb2 import (
    Event,
    LaneReport,
    LaneStatus,
    StatusReply,
    TableStatus,
    TrainerReport,
    TrainerStatus,
)

HERE, THERE = "127.0.0.1:1", "127.0.0.1:2"
COMPUTE, UPDATE, WIRE = 0.040, 0.004, 0.006


def reply(
    second: float,
    late: Mapping[int, float] | None = None,
    values: Mapping[str, float] | None = None,
    **more: object,
) -> StatusReply:
    """A server's status some seconds after the job's start, of which each has ten steps.

    Args:
        late: by trainer, seconds by which its commit comes after the first; trainers 0 and 1 are on
            time unless given.
        values: that trainers report.
        more: fields of StatusReply.
    """
    late, steps = late or {0: 0.0, 1: 0.0}, round(10 * second)
    slowest = max(late.values())
    trainers = [
        _trainer(number, steps, slowest - by, slowest, values) for number, by in late.items()
    ]
    lane = LaneStatus(
        mode="sync",
        version=steps,
        steps=steps,
        step_seconds=steps * (slowest + UPDATE),
        updates=steps,
        update_seconds=steps * UPDATE,
        wait_seconds={number: steps * by for number, by in late.items()},
    )
    known: dict[str, object] = {
        "state": "serving",
        "fingerprint": "f" * 32,
        "mode": "sync",
        "version": steps,
        "uptime_seconds": 100.0 + second,
        "time": 1000.0 + second,
        "memory_bytes": 2000,
        "trainers": trainers,
        "trainers_expected": len(late),
        "lanes": [lane],
        "run": "first",
        "bytes_in": 1000 * steps,
        "bytes_out": 600 * steps,
    }
    return StatusReply(**{**known, **more})  # type: ignore[arg-type]


def _trainer(
    number: int, steps: int, waits: float, slowest: float, values: Mapping[str, float] | None
) -> TrainerStatus:
    """A trainer that waits so many seconds of each step for the slowest one."""
    answer = steps * (waits + UPDATE + WIRE)
    lane = LaneReport(
        steps=steps,
        step_seconds=steps * (COMPUTE + slowest + UPDATE + WIRE),
        blocked_seconds=answer,
        wait_seconds=answer,
        waits=steps,
    )
    return TrainerStatus(
        trainer_id=number,
        state="joined",
        step=steps,
        transport="shm",
        silence_seconds=0.1,
        activity=f"step {steps}",
        report=TrainerReport(
            samples=64 * steps,
            values=values or {},
            memory_bytes=1000,
            lanes=[lane],
            bytes_in=300 * steps,
            bytes_out=500 * steps,
        ),
    )


def sample(second: float, *replies: StatusReply | None) -> Sample:
    """All servers at a moment; None: a server that does not answer."""
    time = 5000.0 + second
    found = dict(zip((HERE, THERE), replies, strict=False))
    answered = {endpoint: each for endpoint, each in found.items() if each is not None}
    errors = {endpoint: "gone" for endpoint in found.keys() - answered.keys()}
    return Sample(time, answered, dict.fromkeys(answered, time), errors)


def event(number: int, time: float, kind: str, text: str) -> Event:
    """Something that a server tells."""
    return Event(number=number, time=time, kind=kind, text=text)


def table(rows: int, **counters: int) -> TableStatus:
    """A part of the table "users"."""
    return TableStatus(name="users", rows=rows, bytes_held=100 * rows, counters=counters)
