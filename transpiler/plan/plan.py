"""The plan: everything that transpiling decides about who holds what, written down once and the
same in every process.

Trainers compare the plan's fingerprint with the servers' on joining; what differs is said in the
words of its manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from transpiler.ir.rules import Clip, Rule
from transpiler.ir.tables import Table

COMPRESSIONS = ("", "bfloat16", "float16", "int8")


@dataclass(frozen=True, slots=True)
class Lane:
    """When, and how often, gradients of some parameters travel, and what a server does with them.

    Most jobs have one lane.  Where the parameters of a job are in several modes, each mode is a
    lane: it has steps, messages and marks of its own, so that what waits in one never holds up
    another.

    Attributes:
        mode: "sync": servers average the trainers' gradients of a step, and everybody goes on from
            the result.  "async": a trainer's gradients are applied as they arrive.  "half_async":
            the same, after a trainer has averaged ``max_merge_var_num`` of its own steps.  "geo":
            trainers step by themselves, and every ``k_steps`` steps what changed is added on the
            server.  "diloco": likewise, but the mean change is the gradient of ``outer`` (Douillard
            et al.: DiLoCo, 2023), and everybody goes on from the result.
        merge: how a trainer merges several of its own steps: "sum" or "mean".
        max_merge_var_num: the most steps that one message merges.
        send_queue_size: steps that may be on their way before a further one waits; with 1 a step
            waits for its own result.
        send_wait_times: how often, 10 ms each, the sender waits for a further step to merge.
        thread_pool_size: the most servers that a lane's message is on its way to at a time.
        independent_recv_thread: parameters are fetched by a thread of their own, not with the
            answer to a step.
        min_send_grad_num_before_recv: messages after which parameters are fetched again.
        k_steps: for "geo" and "diloco".
        staleness: a trainer may be this many steps ahead of the slowest (Ho et al.: stale
            synchronous parallel, 2013); None: any.
        dc_asgd: the factor lambda of delay compensation, g + lambda (w - w_then) g g (Zheng et al.,
            2017); 0: none.
        outer: the update rule of "diloco".
    """

    mode: str
    merge: str = "mean"
    max_merge_var_num: int = 1
    send_queue_size: int = 1
    send_wait_times: int = 1
    thread_pool_size: int = 1
    independent_recv_thread: bool = False
    min_send_grad_num_before_recv: int = 1
    k_steps: int = 0
    staleness: int | None = None
    dc_asgd: float = 0.0
    outer: Rule | None = None

    @property
    def rounds(self) -> bool:
        """Whether a server waits for every trainer's part of a step."""
        return self.mode in ("sync", "diloco")

    @property
    def local(self) -> bool:
        """Whether trainers run the optimizer themselves and send what has changed."""
        return self.mode in ("geo", "diloco")


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [begin, end) of a flattened variable, held by one server.

    ``shape`` is that of whole rows where the variable has two or more dimensions, otherwise (end -
    begin,).  A variable that is not split is one slice with its own name and shape.
    """

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]
    server: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A variable and its slices.

    Attributes:
        group: index of its update rule; None for a variable that is held, handed out and never
            updated.
        lane: index of its lane.
        compression: how its gradients travel: "" as they are, "bfloat16", "float16" or "int8"
            (pserver/dense/compression.py).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int | None
    slices: tuple[Slice, ...]
    lane: int = 0
    compression: str = ""

    @property
    def split(self) -> bool:
        """More than one slice."""
        return len(self.slices) > 1


@dataclass(frozen=True, slots=True)
class Collective:
    """How trainers share their work where there are no servers: everybody holds everything, and
    lanes and slices there are none.

    Attributes:
        mode: "grad_allreduce": gradients are averaged at every step.  "local_sgd": trainers step by
            themselves, and after every step the parameters are averaged.  "nccl2": the program
            itself shares nothing; ``ParallelExecutor`` averages them.
        rings: process groups over all trainers, which the buckets take in turn.
        inner: trainers in a row that reduce among themselves before one of each such row reduces
            with the others; 0: no rows.
        bucket_bytes: what travels together, at most, except for a single tensor that is larger.
    """

    mode: str
    rings: int = 1
    inner: int = 0
    bucket_bytes: int = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Plan:
    """Who holds what, and how it is updated.

    Placements of trained variables stand in the order of the optimizer ops.
    """

    lanes: tuple[Lane, ...]
    trainers: int
    servers: int
    groups: tuple[Rule, ...]
    placements: tuple[Placement, ...]
    clip: Clip | None = None
    graph: str = ""  # fingerprint of the single-node graph; "" for an eager script
    tables: tuple[Table, ...] = ()
    # trained parameters whose gradients trainers average among themselves; servers only hold them
    averaged: tuple[str, ...] = ()
    collective: Collective | None = None  # of a job without servers

    def placement(self, name: str) -> Placement:
        """The placement of a variable.

        Raises:
            KeyError: there is none.
        """
        for placement in self.placements:
            if placement.name == name:
                return placement
        raise KeyError(name)

    def table(self, name: str) -> Table:
        """A sparse table.

        Raises:
            KeyError: there is none of this name.
        """
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(name)

    @property
    def mode(self) -> str:
        """The mode of all parameters, or "mixed"."""
        if self.collective is not None:
            return self.collective.mode
        modes = {lane.mode for lane in self.lanes}
        return modes.pop() if len(modes) == 1 else "mixed"

    def lane_of(self, placement: Placement) -> Lane:
        """A variable's lane."""
        return self.lanes[placement.lane]

    @property
    def clips_on_servers(self) -> bool:
        """Whether the servers clip: only in sync mode with several trainers is the merged gradient
        not a trainer's own.
        """
        return self.clip is not None and self.mode == "sync" and self.trainers > 1

    def manifest(self) -> dict[str, str]:
        """The plan as facts, one a line, sorted: what two processes compare when their fingerprints
        differ.
        """
        facts = {
            "mode": self.mode,
            "trainers": str(self.trainers),
            "servers": str(self.servers),
            "graph": self.graph,
        }
        for index, lane in enumerate(self.lanes):
            facts.update(
                {
                    f"lane {index}: {field.name}": _fact(getattr(lane, field.name))
                    for field in fields(lane)
                }
            )
        facts["clip"] = (
            "none"
            if self.clip is None
            else f"{self.clip.kind} {self.clip.low!r} {self.clip.high!r}"
        )
        for index, rule in enumerate(self.groups):
            facts[f"group {index}: optimizer"] = rule.type
            facts.update(
                {
                    f"group {index}: {key}": repr(value)
                    for key, value in {**rule.hparams, **rule.flags}.items()
                }
            )
        if self.collective is not None:
            facts.update(
                {
                    f"collective: {f.name}": repr(getattr(self.collective, f.name))
                    for f in fields(self.collective)
                }
            )
        for order, placement in enumerate(self.placements):
            held = ", ".join(
                f"{s.name}[{s.begin}:{s.end}] on server {s.server}" for s in placement.slices
            )
            group = (
                "held"
                if placement.group is None
                else f"group {placement.group}, lane {placement.lane}"
            )
            group += f", gradients as {placement.compression}" if placement.compression else ""
            facts[f"variable {placement.name}"] = (
                f"number {order}, {placement.dtype}{list(placement.shape)}, {group}, {held}"
            )
        facts.update({f"averaged {name}": "by the trainers" for name in self.averaged})
        for table in self.tables:
            facts[f"table {table.name}"] = _table_fact(table)
        return dict(sorted(facts.items()))

    def fingerprint(self) -> str:
        """32 hexadecimal digits over the manifest: never a trainer's number, a host, a port or a
        value.
        """
        lines = "\n".join(f"{key} = {value}" for key, value in self.manifest().items())
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def differences(manifest: Mapping[str, str], reference: Mapping[str, str], whose: str) -> str:
    """What differs between two plans' manifests, in words, the first few facts: ``"lr: 0.2 (trainer
    0 has 0.1)"``.
    """
    changed = [
        key
        for key in sorted(set(manifest) | set(reference))
        if manifest.get(key) != reference.get(key)
    ]
    facts = [
        f"{key}: {manifest.get(key, 'absent')} ({whose} has {reference.get(key, 'absent')})"
        for key in changed[:5]
    ]
    return "; ".join(facts) + (f"; and {len(changed) - 5} more" if len(changed) > 5 else "")


def _table_fact(table: Table) -> str:
    columns = ", ".join(f"columns {s.begin}:{s.end} in group {s.group}" for s in table.segments)
    initial = f"{table.initial.kind} {table.initial.low!r} {table.initial.high!r}"
    entry = "none"
    if table.entry is not None:
        entry = " ".join(
            [
                type(table.entry).__name__,
                *(repr(getattr(table.entry, f.name)) for f in fields(table.entry)),
            ]
        )
    bounds = (
        f"ttl {table.ttl!r}, capacity {table.capacity!r}, eviction {table.eviction}, memory "
        f"{table.memory_bytes!r}"
    )
    return (
        f"{table.dtype}[{table.rows!r}, {table.dim}], {columns}, lane {table.lane}, seed "
        f"{table.seed}, initial {initial}, "
        f"entry {entry}, {bounds}"
    )


def _fact(value: object) -> str:
    """A value in words that do not depend on the order of a mapping."""
    if isinstance(value, Rule):
        return f"{value.type} {sorted(value.hparams.items())} {sorted(value.flags.items())}"
    return repr(value)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A plan, the addresses it runs on, and which of the processes this one is.

    Attributes:
        endpoints: HOST:PORT of each server's control endpoint, by server index; without servers
            that of each trainer.
        trainer_id: None in a server's program.
        server_index: None in a trainer's program.
        wait_port: a trainer waits, with a deadline, until the servers (or the other trainers)
            answer.
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


def check_unique(what: str, names: Iterable[str]) -> None:
    """Whether no name comes twice.

    Raises:
        ValueError: naming the first that does.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name!r}: expected once, got twice")
        seen.add(name)
