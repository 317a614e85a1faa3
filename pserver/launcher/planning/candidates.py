"""What ``--search`` compares: update modes and numbers of servers, predicted from probes of the
script in sync mode.

[Note: other modes from a sync probe]  The compute part is the same in every mode.  An async step
waits for the message before it: the longer of compute and exchange counts.  In geo mode a trainer
runs the optimizer itself, which takes about the part of the servers' work that a sync step has
once, and exchanges every k steps.  Between two probed numbers of servers the figures are
interpolated; beyond the larger one they are those of the larger one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pserver.launcher.planning.cost import SHARED, Prediction, Where, predict
from pserver.launcher.planning.figures import JobLoad, LaneLoad, Measured

K_STEPS = (10, 100)  # of the geo modes that are compared


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mode and a number of servers.

    Attributes:
        mode: its name.
        k_steps: of geo mode; otherwise 0.
        memory: bytes of the fullest server.
        prediction: of its step.
    """

    mode: str
    k_steps: int
    servers: int
    memory: int
    prediction: Prediction

    @property
    def setting(self) -> str:
        """How a script asks for it."""
        if self.mode == "sync":
            return "a_sync = False"
        if self.mode == "async":
            return "a_sync = True"
        return f"a_sync = True, a_sync_configs = {{'k_steps': {self.k_steps}}}"


def candidates(
    load: JobLoad, probes: Mapping[int, Measured], servers: int, where: Where, memory: int | None
) -> list[Candidate]:
    """Those that fit, the fastest first; of equally fast ones that with fewer servers, and in a
    mode that waits more.

    Args:
        load: of the script's plan, on any number of servers.
        probes: by number of servers.
        servers: the most.
        memory: bytes that each server has; None: any.

    Raises:
        ValueError: the script is in another mode than sync; or nothing fits.
    """
    check_modes(load)
    found = []
    for count in range(1, servers + 1):
        spread = on_servers(load, count)
        if memory is not None and max(spread.memory) > memory:
            continue
        measured = between(probes, count)
        for mode, k_steps in (("sync", 0), ("async", 0), *(("geo", k) for k in K_STEPS)):
            prediction = predict(*_in_mode(mode, k_steps, spread, measured), where)
            found.append(Candidate(mode, k_steps, count, max(spread.memory), prediction))
    if not found:
        needed = max(on_servers(load, servers).memory)
        raise ValueError(
            f"--memory: nothing fits: {servers} servers need {needed} bytes each, got {memory}"
        )
    return sorted(found, key=lambda each: each.prediction.seconds)


def check_modes(load: JobLoad) -> None:
    """Returns if other modes can be predicted from this one.

    Raises:
        ValueError: the script is in another mode than sync.
    """
    modes = sorted({lane.mode for lane in load.lanes})
    if modes != ["sync"]:
        raise ValueError(
            "--search: expected a script in sync mode, as the modes are what is searched for, got "
            f"{', '.join(modes)}"
        )


def on_servers(load: JobLoad, servers: int) -> JobLoad:
    """The same job with its bytes spread evenly over so many servers."""
    lanes = tuple(
        replace(lane, sent=_even(lane.sent, servers), received=_even(lane.received, servers))
        for lane in load.lanes
    )
    return replace(load, lanes=lanes, memory=_even(load.memory, servers))


def _even(parts: Sequence[int], servers: int) -> tuple[int, ...]:
    return (-(-sum(parts) // servers),) * servers


def between(probes: Mapping[int, Measured], servers: int) -> Measured:
    """The figures for a number of servers: between those that were probed."""
    below = max(count for count in probes if count <= max(servers, min(probes)))
    above = min((count for count in probes if count >= servers), default=below)
    if above == below:
        return _over(probes[below], servers)
    weight = (servers - below) / (above - below)
    low, high = _over(probes[below], servers), _over(probes[above], servers)

    def mixed(name: str) -> float:
        one, other = getattr(low, name), getattr(high, name)
        return float(one + weight * (other - one))

    server = sum(low.server_cpu_seconds) * (1 - weight) + sum(high.server_cpu_seconds) * weight
    return replace(
        low,
        seconds=mixed("seconds"),
        exchange_seconds=mixed("exchange_seconds"),
        cpu_seconds=mixed("cpu_seconds"),
        exchange_cpu_seconds=mixed("exchange_cpu_seconds"),
        server_cpu_seconds=(server / servers,) * servers,
    )


def _over(measured: Measured, servers: int) -> Measured:
    """What was measured on some servers, spread over others."""

    def even(parts: Sequence[float]) -> tuple[float, ...]:
        return (sum(parts) / servers,) * servers

    return replace(
        measured,
        sent=even(measured.sent),
        received=even(measured.received),
        looked_up=even(measured.looked_up),
        server_cpu_seconds=even(measured.server_cpu_seconds),
    )


def _in_mode(mode: str, k_steps: int, load: JobLoad, sync: Measured) -> tuple[JobLoad, Measured]:
    if mode == "sync":
        return load, sync
    compute = sync.seconds - sync.exchange_seconds
    if mode == "async":
        lanes = tuple(_queued(lane, mode, 1) for lane in load.lanes)
        own = replace(sync, seconds=max(compute, sync.exchange_seconds), exchange_seconds=0.0)
        return replace(load, lanes=lanes), own
    lanes = tuple(_queued(lane, mode, k_steps) for lane in load.lanes)
    update = (1 - SHARED) * sum(sync.server_cpu_seconds)
    sends = sync.exchange_cpu_seconds / k_steps
    own = replace(
        sync,
        seconds=compute + update + sync.exchange_seconds / k_steps,
        exchange_seconds=0.0,
        cpu_seconds=sync.cpu_seconds - sync.exchange_cpu_seconds + update + sends,
        exchange_cpu_seconds=0.0,
        messages=1 / k_steps,
        server_cpu_seconds=tuple(each * SHARED / k_steps for each in sync.server_cpu_seconds),
        sent=tuple(each / k_steps for each in sync.sent),
        received=tuple(
            (whole - rows) / k_steps + rows
            for whole, rows in zip(sync.received, sync.looked_up, strict=True)
        ),
    )
    return replace(load, lanes=lanes), own


def _queued(lane: LaneLoad, mode: str, steps: int) -> LaneLoad:
    return replace(lane, mode=mode, waits=False, together=False, steps=steps)
