"""What a prediction is made of: the loads of a plan, and what a probe has measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """The messages of one lane.

    Attributes:
        mode: the update mode's name.
        waits: the script waits for a message's answer before it goes on.
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
    """What the plan of a job says of its cost.

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
        """How many there are."""
        return len(self.memory)

    def write(self, path: str) -> None:
        """Writes them as JSON."""
        from transpiler.files.named_errors import naming

        with naming(path):
            Path(path).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> JobLoad:
        """Reads what :meth:`write` has written."""
        found = _object(path)
        lanes = tuple(
            LaneLoad(**{**lane, "sent": tuple(lane["sent"]), "received": tuple(lane["received"])})
            for lane in found.pop("lanes")
        )
        return cls(lanes=lanes, memory=tuple(found.pop("memory")), **found)


@dataclass(frozen=True, slots=True)
class Measured:
    """What a probe has measured: means over its window, for one step of its one trainer.

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
        from transpiler.files.named_errors import naming

        with naming(path):
            Path(path).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str) -> Measured:
        """Reads what :meth:`write` has written."""
        found = _object(path)
        return cls(**{name: _whole(value) for name, value in found.items()})


def _object(path: str) -> dict[str, Any]:
    from transpiler.files import bounded_json

    found: Mapping[str, Any] = bounded_json.loads(Path(path).read_text(encoding="utf-8"))
    return dict(found)


def _whole(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
