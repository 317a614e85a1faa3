"""The cost model: from a probe's measurements to the step of another cluster.

[Note: the cost model]  A step of a trainer has a compute part and messages.  With lanes that wait,
the two follow each other, and nothing travels while the servers update.  What moves the bytes
works side by side: copies at both ends, the links, and the servers' processors; the slowest of
these decides.  With lanes that queue all of it goes on meanwhile, and the longer one decides.

::

    waits    step = compute + update + max(exchange, links, processor of a server) + latency
    queues   step = max(compute + exchange, links + latency, processors)

- compute and exchange are those of a probe.  Where all processes share this machine, a probe of two
  trainers says what sharing it costs; each further one adds its processor time, for which only so
  many cores are there.
- What the servers do in a step (update, and their processor time) is divided by them.  Where they
  merge what all trainers send, it grows with each trainer by as much as from one to two, otherwise
  it is as much for each.
- links: what a message takes at the link's rate, of which headers leave PAYLOAD.  The messages of
  all servers share the trainer's link, and those of all trainers the server's; the slower one of
  the two decides.  A lane that waits sends first, and receives then.
- latency: two times one way for each message, and for each lookup of rows.  Where trainers do not
  wait for one another, a message goes to one server after the other.
- Of a message that stands for several steps, each has its part.

It is a model of means: it knows no garbage collection, no slow host, no other job, and no overlap
of a gradient's way with the rest of the backward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from transpiler.files import bounded_json
from transpiler.files.named_errors import naming

# ---- figures ----
#
# What a prediction is made of: the loads of a plan, and what probes have measured.


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
        memory: bytes by server; of tables the most that their rows take, where that is bounded.
        tables: whether there are any.
    """

    trainers: int
    lanes: tuple[LaneLoad, ...]
    memory: tuple[int, ...]
    tables: bool

    @property
    def servers(self) -> int:
        """The number of servers."""
        return len(self.memory)

    @property
    def together(self) -> bool:
        """Whether servers wait for every trainer's message."""
        return any(lane.together for lane in self.lanes)

    def write(self, path: str) -> None:
        """Writes them as JSON."""
        with naming(path):
            Path(path).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> JobLoad:
        """Reads a file of :meth:`write`."""
        return cls.of(_object(path))

    @classmethod
    def of(cls, found: dict[str, Any]) -> JobLoad:
        """Makes it from what JSON has of it."""
        lanes = tuple(
            LaneLoad(**{**lane, "sent": tuple(lane["sent"]), "received": tuple(lane["received"])})
            for lane in found.pop("lanes")
        )
        return cls(lanes=lanes, memory=tuple(found.pop("memory")), **found)


@dataclass(frozen=True, slots=True)
class Measured:
    """A probe's measurements: means over its window, for one step of its trainer 0.

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
        update_seconds: in which a server merged and updated, by server.
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
    update_seconds: tuple[float, ...]
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
        return cls.of(_object(path))

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Measured:
        """Makes it from what JSON has of it."""
        return cls(**{name: _whole(value) for name, value in found.items()})


@dataclass(frozen=True, slots=True)
class Probed:
    """The measurements of two probes with as many servers.

    Attributes:
        alone: of one trainer.
        pair: of two trainers; for a job of one trainer ``alone`` again.
    """

    alone: Measured
    pair: Measured


@dataclass(frozen=True, slots=True)
class Figures:
    """All probes of a job, and what they hold for.

    Attributes:
        cores: of the machine that was probed.
        apart: the processes are to have machines of their own.
        transport: of the probes.
        load: of the job's plan.
        probes: by number of servers.
    """

    cores: int
    apart: bool
    transport: str
    load: JobLoad
    probes: Mapping[int, Probed]

    def write(self, path: str) -> None:
        """Writes them as JSON."""
        with naming(path):
            Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> Figures:
        """Reads a file of :meth:`write`.

        Raises:
            ValueError: something else has written it.
        """
        try:
            with naming(path):
                found = _object(path)
            load = JobLoad.of(found.pop("load"))
            probes = {
                int(count): Probed(Measured.of(each["alone"]), Measured.of(each["pair"]))
                for count, each in found.pop("probes").items()
            }
            return cls(load=load, probes=probes, **found)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise ValueError(
                f"{path}: expected what `pserver plan --figures` writes, got something else "
                f"({why}); remove it to probe again"
            ) from None


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


def predict(load: JobLoad, probed: Probed, where: Where) -> Prediction:
    """The step of a job.

    Args:
        load: of the job's plan.
        probed: from the same script, in the same modes.
        where: its processes run.

    Raises:
        ValueError: the job has no servers.
    """
    if not load.lanes:
        raise ValueError("expected a job with servers, got one without")
    waits = any(lane.waits for lane in load.lanes)
    steps = max(lane.steps for lane in load.lanes)
    wire = _wire(load, _travels(load, probed.alone, steps), where, steps, waits)
    late, servers = _latency(load, where), [_processors(load, probed, where)]
    own = [_compute(load, probed, where)]
    if waits:
        update = _update(load, probed)
        before = _mean(probed.alone.update_seconds) if where.apart else update.seconds
        exchange = _exchange(load, probed, where, before)
        beside = [[exchange], wire, servers if load.together and where.apart else []]
        slowest = max(beside, key=_total)
        own += [update, *slowest, *late]
        others = [part for each in beside if each is not slowest for part in each]
        queued = [] if load.together else [servers]
    else:
        own.append(_exchange(load, probed, where, 0.0))
        others, queued = [], [[*wire, *late], servers]
    own += _lookups(load, probed.pair, where)
    deciding = max([own, *queued], key=_total)
    hidden = [replace(part, hidden=True) for part in (*others, *chain(*queued))]
    longest = max(deciding, key=lambda part: part.seconds)
    return Prediction(_total(deciding), (*own, *hidden), longest.name)


def _total(parts: Sequence[StepPart]) -> float:
    return sum(part.seconds for part in parts)


def _compute(load: JobLoad, probed: Probed, where: Where) -> StepPart:
    """The time of forward and backward, and of the rest of the script."""
    own = "forward, backward and the script's own work"
    if where.apart:
        return StepPart("compute", _outside(probed.alone), own)
    shared, one = _outside(probed.pair), probed.alone
    busy = max(0.0, one.cpu_seconds - one.exchange_cpu_seconds)
    needed = load.trainers * busy / where.cores
    if needed <= shared or not load.together:  # the others' processors: see _processors
        return StepPart("compute", shared, own)
    why = f"{load.trainers} trainers, {busy * 1e3:.3g} ms of processor each, {where.cores} cores"
    return StepPart("compute", needed, why)


def _outside(measured: Measured) -> float:
    return max(0.0, measured.seconds - measured.exchange_seconds)


def _update(load: JobLoad, probed: Probed) -> StepPart:
    """The time in which servers merge and update, while nothing travels."""
    seconds = updated_seconds(load, probed) / load.servers
    return StepPart("update", seconds, "merging and the optimizer, while nothing travels")


def _exchange(load: JobLoad, probed: Probed, where: Where, update: float) -> StepPart:
    """The rest of the exchange, as on this machine's loopback."""
    found = probed.alone if where.apart else probed.pair
    seconds = found.exchange_seconds
    if load.together and not where.apart:
        served = served_seconds(load, probed) - sum(found.server_cpu_seconds)
        sent = max(0, load.trainers - 2) * probed.alone.exchange_cpu_seconds
        seconds += (max(0.0, served) + sent) / where.cores
    server = sum(found.server_cpu_seconds)
    why = f"copies; {server * 1e3:.3g} ms of the servers' processors"
    return StepPart("exchange", max(0.0, seconds - update), why)


def _processors(load: JobLoad, probed: Probed, where: Where) -> StepPart:
    """The processor time of all trainers' messages, without the update where all wait for it."""
    together = load.together
    one, server = probed.alone, served_seconds(load, probed)
    if not where.apart:
        seconds = (load.trainers * one.cpu_seconds + server) / where.cores
        why = f"{load.trainers} trainers and {load.servers} servers on {where.cores} cores"
        return StepPart("processors", seconds, why)
    update = updated_seconds(load, probed)
    # updates of one lane follow one another, on one core or on all
    work = max(0.0, server - update) if together else max(server, update * where.cores)
    why = f"{load.trainers} trainers' messages on {where.cores} cores"
    return StepPart("processor of a server", work / load.servers / where.cores, why)


def _mean(by_server: Sequence[float]) -> float:
    return sum(by_server) / max(1, len(by_server))


def served_seconds(load: JobLoad, probed: Probed) -> float:
    """The processor time of all servers for a step of all trainers."""
    one, two = sum(probed.alone.server_cpu_seconds), sum(probed.pair.server_cpu_seconds)
    if load.together:
        return one + (load.trainers - 1) * max(0.0, two - one)
    # beside others each asks for more: the rows that they have changed
    return load.trainers * max(one, two / 2)


def updated_seconds(load: JobLoad, probed: Probed) -> float:
    """How long all servers merge and update in a step of all trainers."""
    # what takes longer than its servers' processors worked has waited for other processes
    one, two = (
        min(sum(each.update_seconds), sum(each.server_cpu_seconds))
        for each in (probed.alone, probed.pair)
    )
    # while others compute an update takes their time, too: so it is one trainer's
    more = max(0.0, two - one) if load.together else one
    return one + (load.trainers - 1) * more


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


def _wire(load: JobLoad, travels: _Bytes, where: Where, steps: int, waits: bool) -> list[StepPart]:
    """The time of messages on a link."""
    if where.rate is None:
        return []
    ways = ((travels.sent, "to"), (travels.received, "from")) if waits else ()
    parts = []
    for by_server, word in ways:
        parts.append(_slower(load.trainers, by_server, where.rate, steps, word))
    if not waits:
        both = tuple(map(sum, zip(travels.sent, travels.received, strict=True)))
        own = StepPart("link of a trainer", sum(both) / where.rate / steps, _why(sum(both)))
        largest = max((*travels.sent, *travels.received))
        many = load.trainers * largest
        why = _why(many, load.trainers)
        theirs = StepPart("link of a server", many / where.rate / steps, why)
        parts.append(max(own, theirs, key=lambda part: part.seconds))
    return parts


def _slower(
    trainers: int, by_server: Sequence[float], link: float, steps: int, word: str
) -> StepPart:
    own, many = sum(by_server), trainers * max(by_server)
    server = by_server.index(max(by_server))
    if many > own:
        why = _why(many, trainers)
        return StepPart(f"link {word} server {server}", many / link / steps, why)
    name = "link from a trainer" if word == "to" else "link to a trainer"
    return StepPart(name, own / link / steps, _why(own))


def _why(count: float, trainers: int = 1) -> str:
    whose = "a message" if trainers == 1 else f"of {trainers} trainers"
    return f"{count / 1e6:.3g} MB {whose}"


def _latency(load: JobLoad, where: Where) -> Sequence[StepPart]:
    """The latency of messages: those that queue go to one server after the other."""
    if not where.latency:
        return []
    often = min(lane.steps for lane in load.lanes)
    one_by_one = 1 if load.together else load.servers
    why = f"of a message and its answer, every {often} steps" if often > 1 else "of each message"
    return [StepPart("latency", 2 * where.latency * one_by_one / often, why)]


def _lookups(load: JobLoad, measured: Measured, where: Where) -> Sequence[StepPart]:
    """The time of lookups, whose rows a forward waits for."""
    if not measured.lookups:
        return []
    rows = sum(measured.looked_up)
    seconds = 2 * where.latency * min(1.0, measured.lookups)
    if where.rate is not None:
        seconds += max(rows, load.trainers * rows / max(1, load.servers)) / where.rate
    return [StepPart("lookups", seconds, f"{rows / 1e6:.3g} MB of rows a step")] if seconds else []
