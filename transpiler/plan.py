"""The plan: everything that transpiling decides about who holds what, written down once and the same in every process.

Trainers compare the plan's fingerprint with the servers' on joining; what differs is said in the words of its manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

Number = float | tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter group's update rule: the optimizer op's type, its numbers (a schedule may move them) and its flags.

    ``numbers`` of a plan are the values at the time of transpiling.  A step carries its own row of them.
    """

    type: str  # "adam"
    numbers: Mapping[str, Number]
    flags: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Clip:
    """How merged gradients are clipped: ``"value"`` to [low, high]; ``"norm"`` (each tensor) or ``"global_norm"`` to ``high``."""

    kind: str
    high: float
    low: float = 0.0


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [begin, end) of a flattened variable, held by one server.

    ``shape`` is that of whole rows where the variable has two or more dimensions, otherwise (end - begin,).  A variable that is
    not split is one slice with its own name and shape.
    """

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]
    server: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A variable and its slices.  ``group`` is None for a variable that is held, handed out and never updated."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int | None
    slices: tuple[Slice, ...]

    @property
    def split(self) -> bool:
        """More than one slice."""
        return len(self.slices) > 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Who holds what, and how it is updated.  Placements of trained variables stand in the order of the optimizer ops."""

    mode: str  # "sync" or "async"
    trainers: int
    servers: int
    groups: tuple[Rule, ...]
    placements: tuple[Placement, ...]
    clip: Clip | None = None
    graph: str = ""  # fingerprint of the single-node graph; "" for an eager script

    def placement(self, name: str) -> Placement:
        """The placement of a variable.

        Raises:
            KeyError: there is none.
        """
        for placement in self.placements:
            if placement.name == name:
                return placement
        raise KeyError(name)

    @property
    def clips_on_servers(self) -> bool:
        """Whether the servers clip: only in sync mode with several trainers is the merged gradient not a trainer's own."""
        return self.clip is not None and self.mode == "sync" and self.trainers > 1

    def manifest(self) -> dict[str, str]:
        """The plan as facts, one a line, sorted: what two processes compare when their fingerprints differ."""
        facts = {"mode": self.mode, "trainers": str(self.trainers), "servers": str(self.servers), "graph": self.graph}
        facts["clip"] = "none" if self.clip is None else f"{self.clip.kind} {self.clip.low!r} {self.clip.high!r}"
        for index, rule in enumerate(self.groups):
            facts[f"group {index}: optimizer"] = rule.type
            facts.update({f"group {index}: {key}": repr(value) for key, value in {**rule.numbers, **rule.flags}.items()})
        for order, placement in enumerate(self.placements):
            held = ", ".join(f"{s.name}[{s.begin}:{s.end}] on server {s.server}" for s in placement.slices)
            group = "held" if placement.group is None else f"group {placement.group}"
            facts[f"variable {placement.name}"] = f"number {order}, {placement.dtype}{list(placement.shape)}, {group}, {held}"
        return dict(sorted(facts.items()))

    def fingerprint(self) -> str:
        """32 hexadecimal digits over the manifest: never a trainer's number, a host, a port or a value."""
        lines = "\n".join(f"{key} = {value}" for key, value in self.manifest().items())
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Deployment:
    """A plan, the addresses it runs on, and which of the processes this one is.

    Attributes:
        endpoints: HOST:PORT of each server's control endpoint, by server index.
        trainer_id: None in a server's program.
        server_index: None in a trainer's program.
        wait_port: a trainer waits, with a deadline, until the servers answer.
    """

    plan: Plan
    endpoints: tuple[str, ...]
    trainer_id: int | None = None
    server_index: int | None = None
    wait_port: bool = True

    def of_server(self, index: int) -> Deployment:
        """The same deployment as the program of server ``index`` has it."""
        return replace(self, trainer_id=None, server_index=index)

    def with_endpoints(self, endpoints: tuple[str, ...]) -> Deployment:
        """The same deployment at other addresses."""
        return replace(self, endpoints=endpoints)
