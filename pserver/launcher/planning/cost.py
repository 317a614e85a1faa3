"""The cost model: from a probe's measurements to the step of another cluster.

[Note: the cost model]  A step of a trainer has a compute part and messages.  With lanes that wait,
the two follow each other; with lanes that queue, messages are on their way meanwhile, and the
longer of the two decides.

::

    waits    step = compute + exchange + (wire + latency) / steps of a message
    queues   step = max(compute + exchange, (wire + latency) / steps of a message, processors)

- compute and exchange are the probe's own.  Where all processes share this machine, T trainers
  that compute need T times the processor time of one, of which only so many cores are there.
- exchange grows with the trainers by the servers' processor time.  SHARED of that is done for each
  trainer's message (receive, merge, answer), the rest once a step (the update).  Servers whose
  lanes do not wait for all update once a message.
- wire: what a message takes at the link's rate, of which headers leave PAYLOAD.  The messages of
  all servers share the trainer's link, and those of all trainers the server's; the slower one of
  the two decides.  A lane that waits sends first, and receives then.
- latency: two times one way for each message, and for each lookup of rows.  Where trainers do not
  wait for one another, a message goes to one server after the other.

It is a model of means: it knows no garbage collection, no slow host, no other job, and no overlap
of a gradient's way with the rest of the backward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transpiler.files import bounded_json
from transpiler.files.named_errors import naming

# ---- figures ----
#
# What a prediction is made of: the loads of a plan, and what a probe has measured.


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """The messages of one lane.

    Attributes:
        mode: the update mode's name.
        waits: the script waits for a message's answer before it continues.
        steps: of the script that one message stands for, at most.
        together: servers wait for every trainer's message.
        sent, received: bytes of dense parameters in one message of one trainer, by server.
    """

    mode: str
    waits: bool
    steps: int
    together: bool
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobLoad:
    """The quantities of a job's plan that its cost depends on.

    Attributes:
        trainers: of the job.
        lanes: in the plan's order; empty for a job without servers.
        memory: bytes by server; of tables the most that their rows take.
        unbounded: some tables grow without a bound, and are not in ``memory``.
        trainer_memory: bytes of a trainer's parameters and gradients.
        tables: whether there are any.
    """

    trainers: int
    lanes: tuple[LaneLoad, ...]
    memory: tuple[int, ...]
    unbounded: bool
    trainer_memory: int
    tables: bool

    @property
    def servers(self) -> int:
        """The number of servers."""
        return len(self.memory)

    def write(self, path: str) -> None:
        """Writes them as JSON."""
        with naming(path):
            Path(path).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> JobLoad:
        """Reads a file of :meth:`write`."""
        found = _object(path)
        lanes = tuple(
            LaneLoad(**{**lane, "sent": tuple(lane["sent"]), "received": tuple(lane["received"])})
            for lane in found.pop("lanes")
        )
        return cls(lanes=lanes, memory=tuple(found.pop("memory")), **found)


@dataclass(frozen=True, slots=True)
class Measured:
    """A probe's measurements: means over its window, for one step of its one trainer.

    Attributes:
        steps: in the window.
        seconds: of a step.
        exchange_seconds: of these, within the step's exchange.
        cpu_seconds: processor time of the trainer's process.
        exchange_cpu_seconds: of these, while the script's thread was in the exchange.
        messages: to each server; less than 1 where a message stands for several steps.
        lookups: requests for rows of tables.
        sent, received: bytes by server.
        looked_up: of those received, bytes of rows that a forward waited for, by server.
        begun, ended: of the window, on the system's monotonic clock; seconds.
        server_cpu_seconds: processor time by server; empty until the launcher has added it, as the
            next one.
        others: cores of this machine that other processes kept busy, on average.
    """

    steps: int
    seconds: float
    exchange_seconds: float
    cpu_seconds: float
    exchange_cpu_seconds: float
    messages: float
    lookups: float
    sent: tuple[float, ...]
    received: tuple[float, ...]
    looked_up: tuple[float, ...]
    begun: float = 0.0
    ended: float = 0.0
    server_cpu_seconds: tuple[float, ...] = field(default=())
    others: float = 0.0

    def write(self, path: str) -> None:
        """Writes it as JSON."""
        with naming(path):
            Path(path).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> Measured:
        """Reads a file of :meth:`write`."""
        found = _object(path)
        return cls(**{name: _whole(value) for name, value in found.items()})


def _object(path: str) -> dict[str, Any]:
    found: Mapping[str, Any] = bounded_json.loads(Path(path).read_text(encoding="utf-8"))
    return dict(found)


def _whole(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# ---- quantities ----
#
# What a user types for a link, a time or a memory; errors begin with the flag.


_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40, "m": 1e6, "g": 1e9, "t": 1e12}


def bandwidth(flag: str, text: str) -> float:
    """Bytes per second of a link.

    Raises:
        ValueError: it is no rate.

    Example:
        >>> bandwidth("--link", "1Gbit")
        125000000.0
    """
    return _parsed(flag, text, _BITS, "a rate as 200Mbit or 1Gbit") / 8


def latency(flag: str, text: str) -> float:
    """Seconds one way.

    Raises:
        ValueError: it is no time.

    Example:
        >>> latency("--latency", "0.2ms")
        0.0002
    """
    return _parsed(flag, text, _SECONDS, "a time as 200us or 0.2ms")


def memory(flag: str, text: str) -> int:
    """Bytes.

    Raises:
        ValueError: it is no size.

    Example:
        >>> memory("--memory", "8Gi")
        8589934592
    """
    return int(_parsed(flag, text, _BYTES, "a size as 500Mi or 8Gi"))


def _parsed(flag: str, text: str, units: dict[str, float], expected: str) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None or match[2].lower() not in units or not float(match[1]):
        raise ValueError(f"{flag}: expected {expected}, got {text!r}")
    return float(match[1]) * units[match[2].lower()]


# ---- cost ----


SHARED = 0.5  # of a server's processor time in a step that waits for all: for each trainer
PAYLOAD = 0.95  # of a link's rate: frames of 1538 bytes carry 1448 of TCP


@dataclass(frozen=True, slots=True)
class Where:
    """The machines of a cluster.

    Attributes:
        cores: of a machine.
        apart: each process has a machine of its own; otherwise all share one.
        link: bytes per second of each process's link, each way; None: as this machine's loopback.
        latency: seconds one way, beyond the loopback's.
    """

    cores: int
    apart: bool = False
    link: float | None = None
    latency: float = 0.0

    @property
    def rate(self) -> float | None:
        """Bytes of tensors per second of a link."""
        return None if self.link is None else PAYLOAD * self.link


@dataclass(frozen=True, slots=True)
class StepPart:
    """One part of a predicted step.

    Attributes:
        name: what limits the job, if this is the longest part.
        seconds: of a step.
        why: the figures behind it, in words.
        hidden: it passes while the others do.
    """

    name: str
    seconds: float
    why: str
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted step of each trainer.

    Attributes:
        seconds: from one step to the next.
        parts: that it is made of.
        bottleneck: the name of the part that decides.
    """

    seconds: float
    parts: tuple[StepPart, ...]
    bottleneck: str


@dataclass(frozen=True, slots=True)
class _Bytes:
    """The bytes of one trainer's messages, by server."""

    sent: tuple[float, ...]
    received: tuple[float, ...]


def predict(load: JobLoad, measured: Measured, where: Where) -> Prediction:
    """The step of a job.

    Args:
        load: of the job's plan.
        measured: by a probe of the same script, in the same modes.
        where: its processes run.

    Raises:
        ValueError: the job has no servers.
    """
    if not load.lanes:
        raise ValueError("expected a job with servers, got one without")
    waits = any(lane.waits for lane in load.lanes)
    steps = max(lane.steps for lane in load.lanes)
    travels = _travels(load, measured, steps)
    wire = [
        *_wire(load, travels, where, steps, waits),
        *_latency(load, where, waits),
        *_lookups(load, measured, where),
    ]
    own = [_compute(load, measured, where), _exchange(load, measured, where)]
    own += [part for part in wire if not part.hidden]
    hidden = [part for part in wire if part.hidden]
    # where trainers wait for one another, their parts share processors one by one
    processors = [] if _together(load) else [_processors(load, measured, where)]
    deciding = max(own, hidden, processors, key=_total)
    longest = max(deciding, key=lambda part: part.seconds)
    return Prediction(_total(deciding), (*own, *hidden, *processors), longest.name)


def _total(parts: Sequence[StepPart]) -> float:
    return sum(part.seconds for part in parts)


def _together(load: JobLoad) -> bool:
    return any(lane.together for lane in load.lanes)


def _compute(load: JobLoad, measured: Measured, where: Where) -> StepPart:
    """The time of forward and backward, and of the rest of the script."""
    alone = max(0.0, measured.seconds - measured.exchange_seconds)
    busy = max(0.0, measured.cpu_seconds - measured.exchange_cpu_seconds)
    if where.apart or not _together(load):
        return StepPart("compute", alone, "forward, backward and the script's own work")
    shared = load.trainers * busy / where.cores
    if shared <= alone:
        return StepPart("compute", alone, "forward, backward and the script's own work")
    why = f"{load.trainers} trainers, {busy * 1e3:.3g} ms of processor each, {where.cores} cores"
    return StepPart("compute", shared, why)


def _exchange(load: JobLoad, measured: Measured, where: Where) -> StepPart:
    """The time of copies, merging and updating, as on this machine's loopback."""
    alone, others = measured.exchange_seconds, load.trainers - 1
    together = _together(load)
    grows = SHARED if together else 1.0
    server = sum(measured.server_cpu_seconds)
    each = server / max(1, len(measured.server_cpu_seconds))
    if not together:  # what others send is hidden behind compute, as far as processors suffice
        return StepPart("exchange", alone, "copies, and the servers' work", False)
    if where.apart:
        more = others * grows * each / where.cores
    else:
        more = others * (measured.exchange_cpu_seconds + grows * server) / where.cores
    why = f"copies, and the servers' work: {server * 1e3:.3g} ms of processor in the probe"
    return StepPart("exchange", alone + more, why)


def _processors(load: JobLoad, measured: Measured, where: Where) -> StepPart:
    """The processor time of all steps, where trainers do not wait for one another."""
    server = sum(measured.server_cpu_seconds)
    if where.apart:
        servers = max(1, load.servers)
        seconds = load.trainers * server / servers / where.cores
        return StepPart(
            "processor of a server", seconds, f"{load.trainers} trainers' messages", True
        )
    seconds = load.trainers * (measured.cpu_seconds + server) / where.cores
    why = f"{load.trainers} trainers and {load.servers} servers on {where.cores} cores"
    return StepPart("processors", seconds, why, True)


def _travels(load: JobLoad, measured: Measured, steps: int) -> _Bytes:
    """The bytes of one trainer's message, by server of the job: those of the plan, and what the
    probe has measured of tables, spread evenly.
    """
    sent, received = (_dense(load.lanes, way, steps) for way in ("sent", "received"))
    if not load.tables:
        return _Bytes(sent, received)
    per_message = measured.messages or 1 / steps
    rows = sum(measured.sent) / per_message - sum(sent)
    rows_back = (sum(measured.received) - sum(measured.looked_up)) / per_message - sum(received)
    return _Bytes(
        tuple(each + max(0.0, rows) / load.servers for each in sent),
        tuple(each + max(0.0, rows_back) / load.servers for each in received),
    )


def _dense(lanes: Sequence[LaneLoad], way: str, steps: int) -> tuple[float, ...]:
    """The bytes of all lanes: those of more frequent messages count several times."""
    columns = zip(*(getattr(lane, way) for lane in lanes), strict=True)
    weights = [steps / lane.steps for lane in lanes]
    return tuple(
        sum(weight * each for weight, each in zip(weights, column, strict=True))
        for column in columns
    )


def _wire(
    load: JobLoad, travels: _Bytes, where: Where, steps: int, waits: bool
) -> Sequence[StepPart]:
    """The time of messages on a link."""
    if where.rate is None:
        return []
    ways = ((travels.sent, "to"), (travels.received, "from")) if waits else ()
    parts = []
    for by_server, word in ways:
        parts.append(_slower(load.trainers, by_server, where.rate, steps, word))
    if not waits:
        both = tuple(map(sum, zip(travels.sent, travels.received, strict=True)))
        own = StepPart("link of a trainer", sum(both) / where.rate / steps, _why(sum(both)), True)
        largest = max((*travels.sent, *travels.received))
        many = load.trainers * largest
        theirs = StepPart("link of a server", many / where.rate / steps, _why(many), True)
        parts.append(max(own, theirs, key=lambda part: part.seconds))
    return parts


def _slower(
    trainers: int, by_server: Sequence[float], link: float, steps: int, word: str
) -> StepPart:
    own, many = sum(by_server), trainers * max(by_server)
    server = by_server.index(max(by_server))
    if many > own:
        return StepPart(f"link {word} server {server}", many / link / steps, _why(many))
    name = "link from a trainer" if word == "to" else "link to a trainer"
    return StepPart(name, own / link / steps, _why(own))


def _why(count: float) -> str:
    return f"{count / 1e6:.3g} MB a message"


def _latency(load: JobLoad, where: Where, waits: bool) -> Sequence[StepPart]:
    """The latency of messages: those that queue go to one server after the other."""
    if not where.latency:
        return []
    often = min(lane.steps for lane in load.lanes)
    one_by_one = 1 if _together(load) else load.servers
    why = f"of a message and its answer, every {often} steps" if often > 1 else "of each message"
    return [StepPart("latency", 2 * where.latency * one_by_one / often, why, not waits)]


def _lookups(load: JobLoad, measured: Measured, where: Where) -> Sequence[StepPart]:
    """The time of lookups, whose rows a forward waits for."""
    if not measured.lookups:
        return []
    rows = sum(measured.looked_up)
    seconds = 2 * where.latency * min(1.0, measured.lookups)
    if where.rate is not None:
        seconds += max(rows, load.trainers * rows / max(1, load.servers)) / where.rate
    return [StepPart("lookups", seconds, f"{rows / 1e6:.3g} MB of rows a step")] if seconds else []
