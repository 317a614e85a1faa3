"""The plan: which server holds what and how it is updated, decided once and equal in every process.

A trainer that joins compares the fingerprint of its plan with the servers'.  Where they differ, an
error names the facts of the manifests that differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any

from transpiler.ir.rules import Clip, Rule
from transpiler.ir.tables import Table
from transpiler.ir.update_block import digest
from transpiler.plan.modes import CollectiveMode, Mode, collective_mode_of, mode_of
from transpiler.plan.settings import A_SYNC_CONFIGS

# ---- dump settings ----
#
# The values of each step that a trainer writes to files, for people to read.


@dataclass(frozen=True, slots=True)
class DumpSettings:
    """The tensors that are dumped, by name, and the directory.

    Attributes:
        path: a directory, or its URL; "" dumps nothing.
        fields: tensors whose samples are written, a line each.
        params: parameters that are written whole.
        stats: tensors of which the smallest, largest and mean values are written.
    """

    path: str = ""
    fields: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    stats: tuple[str, ...] = ()


# ---- execution ----
#
# Settings for one process, which are in no plan and which no other process needs.


@dataclass(frozen=True, slots=True)
class Execution:
    """The execution settings of a process.  All but the first three are for an Executor's program.

    Attributes:
        threads: of torch within one op; 0: as many as it had.
        benchmarks: cuDNN measures all its algorithms for convolutions, and takes the fastest.
        workspace_mb: of a convolution of cuDNN, at most; 0: no limit.
        iterations: steps of one run, each with a feed of its own.
        runs_per_cleanup: after so many runs memory that is kept for reuse is given back; 0: never.
        compiles: ``torch.compile`` compiles the computing ops.
        ordered: ops keep their order: sums over trainers are waited for where they begin, and
            compiled code keeps the order of the program.
        reuses: an element-wise op writes over an operand that no other op reads.
        fuses_broadcasts: trainer 0's first values travel together, one message for each ring.
        dump: the tensors of each step that are written to files.
    """

    threads: int = 0
    benchmarks: bool = False
    workspace_mb: int = 0
    iterations: int = 1
    runs_per_cleanup: int = 0
    compiles: bool = False
    ordered: bool = False
    reuses: bool = False
    fuses_broadcasts: bool = False
    dump: DumpSettings = DumpSettings()


# ---- plan ----


COMPRESSIONS = ("", "bfloat16", "float16", "int8", "sparse")


@dataclass(frozen=True, slots=True)
class Lane:
    """Parameters that share one update mode and one sequence of steps.

    A job has one lane for each combination of an optimizer, a mode and its settings; most jobs have
    one.  Each lane counts its own steps and sends its own messages, so that a message that waits in
    one lane never holds up another.

    Attributes:
        mode: the name of the update mode; ``kind`` is the mode itself, and modes.py explains each.
        merge: how a trainer merges several of its own steps: "sum" or "mean".
        max_merge_var_num: the most steps that one message merges.
        send_queue_size: steps that may be on their way before a further one waits; with 1 a step
            waits for its own result.
        send_wait_times: how often, 10 ms each, the sender waits for a further step to merge.
        thread_pool_size: the most servers that a lane's message leaves for at a time.
        independent_recv_thread: parameters are fetched by a thread of their own, not with the
            answer to a step.
        min_send_grad_num_before_recv: messages after which parameters are fetched again.
        k_steps: steps that a trainer takes by itself between two exchanges.
        staleness: a trainer may be this many steps ahead of the slowest (Ho et al.: stale
            synchronous parallel, 2013); None: any.
        dc_asgd: the factor lambda of delay compensation, g + lambda (w - w_then) g g (Zheng et al.,
            2017); 0: none.
        outer: the update rule of an outer optimizer (Douillard et al.: DiLoCo, 2023).
        nonfinite: what servers do with a step that has a NaN or an infinity in it: "refuse",
            "apply" or "stop"; "auto" is as ``on_nonfinite`` says.
        buffers: the models' buffers that all trainers have: those of "trainer0", the "mean" of the
            trainers', or each its "own"; all lanes of a job have the same value.
        optimizer: the number of the script's optimizer whose steps the lane takes.
        gradient_scale: of the gradients that servers merge: "avg": the mean over trainers; "sum":
            their sum; "customized": their sum, which the script has scaled.
        outlier_push: what servers do with a step of which a norm is far beyond its trainer's
            history: "refuse", "apply" or "stop"; "off": norms are not checked.
        outlier_factor: the factor by which such a norm exceeds its history.
        lost_trainer: what happens to a step of all trainers when one is lost: the others "wait" for
            another process in its place, and then continue without it; they continue at once
            ("go_on"); or the job is to "stop".
        row_invalidation: servers tell a trainer which rows others have changed, and it asks for
            those alone; otherwise it asks for every row once in a window.
        look_ahead: batches whose rows of tables a trainer looks up ahead; 0: none.
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
    nonfinite: str = "auto"
    buffers: str = "trainer0"
    optimizer: int = 0
    gradient_scale: str = "avg"
    outlier_push: str = "off"
    outlier_factor: float = 100.0
    lost_trainer: str = "wait"
    row_invalidation: bool = True
    look_ahead: int = 0

    @property
    def refreshes_rows(self) -> bool:
        """Whether rows that were looked up ahead are brought up to date before they are read;
        otherwise a trainer reads them as they were, ``look_ahead`` steps old at most.  Delay
        compensation has to know what a gradient's forward has read.
        """
        waits = self.kind.waits_for_all or self.kind.collects or self.staleness is not None
        return waits or bool(self.dc_asgd)

    @property
    def averages(self) -> bool:
        """Whether servers divide what they merge by the number of trainers."""
        return self.gradient_scale == "avg"

    @property
    def on_nonfinite(self) -> str:
        """ "refuse", "apply" or "stop".

        By default a step is refused, so that one trainer does not ruin the others'; but servers
        that merge all trainers' gradients apply it, as plain torch would.
        """
        if self.nonfinite != "auto":
            return self.nonfinite
        return "apply" if self.kind.merges_gradients else "refuse"

    @property
    def kind(self) -> Mode:
        """The lane's update mode.

        Raises:
            ValueError: no mode has this name.
        """
        return mode_of(self.mode)


_ALWAYS_SAID = (
    *("mode", "merge", "max_merge_var_num", "send_queue_size", "send_wait_times"),
    *("thread_pool_size", "independent_recv_thread", "min_send_grad_num_before_recv", "k_steps"),
    *("staleness", "dc_asgd", "outer"),
)
# Fields of a lane that manifests and messages leave out where they have their defaults: a field
# that is new leaves plans of before as they are.
UNSAID: Mapping[str, Any] = MappingProxyType(
    {each.name: each.default for each in fields(Lane) if each.name not in _ALWAYS_SAID}
)


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements [begin, end) of a flattened variable, held by one server.

    A variable that is not split is one slice with the variable's own name and shape.

    Attributes:
        name: ``fc.weight.block0``.
        begin, end: element indices of the flattened variable.
        shape: whole rows of a variable of two or more dimensions; otherwise (end - begin,).
        server: the index of the server that holds it.
    """

    name: str
    begin: int
    end: int
    shape: tuple[int, ...]
    server: int


@dataclass(frozen=True, slots=True)
class Placement:
    """A variable, its slices, and how servers update it.

    Attributes:
        name: of the variable: ``fc.weight``.
        shape: of the whole variable.
        dtype: name of a torch dtype: "float32".
        group: index of its update rule; None for a variable that servers hold and never update.
        slices: in the order of their elements.
        lane: index of its lane.
        compression: how its gradients travel: "" as they are, "bfloat16", "float16", "int8", or
            "sparse": their elements that are not 0 (pserver/dense/compression.py).
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
        """Whether there is more than one slice."""
        return len(self.slices) > 1


@dataclass(frozen=True, slots=True)
class Collective:
    """The settings by which the trainers of a job without servers share their work.

    Every trainer holds every variable whole; the plan has no lanes and no slices.

    Attributes:
        mode: the name of the mode; ``kind`` is the mode itself.  "grad_allreduce": gradients are
            averaged at every step.  "local_sgd": trainers step by themselves, and after every
            ``steps`` steps the parameters are averaged.  "nccl2": the program itself shares
            nothing; ``ParallelExecutor`` averages the gradients.
        rings: process groups over all trainers; buckets use them in turn.
        inner: the number of trainers in a row.  They reduce among themselves, then the first
            trainers of all rows among themselves; 0: no rows.
        bucket_bytes: the largest bucket; a single larger tensor is a bucket of its own.
        steps: of "local_sgd": that a trainer takes by itself between two averages.
        last_bytes: the largest last bucket, which nothing hides; 0: as the others.
        most: the most tensors of a bucket; 0: any number.
        dtype: as which gradients of more than 16 bits travel; "" for their own.
        waits: trainers wait for each bucket as soon as it has left.
        sharded: of "grad_allreduce": each parameter is updated by one trainer, its owner.
        gradient_scale: "avg": gradients are means over trainers; "sum", "customized": sums.
        begin: of "local_sgd": up to and including this step every one ends in an average.
        adaptive: of "local_sgd": the number of steps follows the loss, and is ``steps`` at first.
    """

    mode: str
    rings: int = 1
    inner: int = 0
    bucket_bytes: int = 32 * 2**20
    steps: int = 1
    last_bytes: int = 0
    most: int = 0
    dtype: str = ""
    waits: bool = False
    sharded: bool = False
    gradient_scale: str = "avg"
    begin: int = 0
    adaptive: bool = False

    @property
    def kind(self) -> CollectiveMode:
        """The mode itself.

        Raises:
            ValueError: there is no such mode.
        """
        return collective_mode_of(self.mode)


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a job: which server holds what, and how it is updated.  It is immutable, so every
    thread may read it.

    Attributes:
        lanes: of the parameters and tables; none in a job without servers.
        trainers, servers: the number of processes of each role.
        groups: the update rule of each parameter group.
        placements: of the trained variables in the order of the optimizer ops, then of the others.
        clip: how the system clips gradients; None: it does not.
        graph: the fingerprint of the single-node graph; "" for an eager script.
        tables: sparse ones.
        averaged: names of trained parameters whose gradients trainers average among themselves;
            servers only hold them.
        lost_trainer: as a lane's, for these averages.
        collective: how trainers share their work in a job without servers; otherwise None.
    """

    lanes: tuple[Lane, ...]
    trainers: int
    servers: int
    groups: tuple[Rule, ...]
    placements: tuple[Placement, ...]
    clip: Clip | None = None
    graph: str = ""
    tables: tuple[Table, ...] = ()
    averaged: tuple[str, ...] = ()
    collective: Collective | None = None
    lost_trainer: str = "wait"

    def placement(self, name: str) -> Placement:
        """The placement of a variable.

        Raises:
            KeyError: the plan has no such variable.
        """
        for placement in self.placements:
            if placement.name == name:
                return placement
        raise KeyError(name)

    def table(self, name: str) -> Table:
        """A sparse table.

        Raises:
            KeyError: the plan has no such table.
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

    @property
    def outlives_trainers(self) -> bool:
        """Whether a job with servers continues without a lost trainer.

        Where trainers average gradients among themselves, they then do so in another process group.
        They cannot if they also wait for one another at the end of several steps: the trainer that
        takes the lost one's place needs them for each step.
        """
        fixed = self.averaged and any(
            lane.kind.waits_for_all and lane.kind.steps_on_trainer for lane in self.lanes
        )
        return not fixed and "stop" not in self._lost_trainer

    @property
    def averages_alone(self) -> bool:
        """Whether a step needs all trainers only for the averages among themselves."""
        return bool(self.averaged) and not any(lane.kind.merges_gradients for lane in self.lanes)

    @property
    def averages_follow_servers(self) -> bool:
        """Whether a step's averages count only when servers have decided the step."""
        return bool(self.averaged) and not self.averages_alone

    @property
    def _lost_trainer(self) -> set[str]:
        """The values of ``lost_trainer`` for the steps that need all trainers."""
        said = {lane.lost_trainer for lane in self.lanes if lane.kind.merges_gradients}
        return said | ({self.lost_trainer} if self.averaged else set())

    @property
    def keeps_places(self) -> bool:
        """Whether a lost trainer's place is kept for another process for a while: steps that need
        all trainers wait.
        """
        return self.outlives_trainers and self.lets_in_late and "wait" in self._lost_trainer

    @property
    def lets_in_late(self) -> bool:
        """Whether a trainer may join while others train.

        It runs its script from the top.  Where the others take the steps of several optimizers
        together, they may be between two of one iteration, and would wait forever for a step that
        it takes later.
        """
        together = self.averaged or any(lane.kind.waits_for_all for lane in self.lanes)
        return not together or len({lane.optimizer for lane in self.lanes}) < 2

    def lanes_of(self, optimizer: int) -> tuple[int, ...]:
        """The indices of the lanes that take an optimizer's steps."""
        return tuple(i for i, lane in enumerate(self.lanes) if lane.optimizer == optimizer)

    def of_optimizer(self, number: int) -> Plan:
        """The part of the plan for a trainer's program that steps one optimizer: without the lanes
        of the others, whose parameters it does not update.
        """
        own = {index: place for place, index in enumerate(self.lanes_of(number))}
        if len(own) == len(self.lanes):
            return self
        placements = tuple(
            replace(p, lane=own[p.lane])
            if p.group is not None and p.lane in own
            else replace(p, group=None, lane=0)
            for p in self.placements
        )
        clip = self.clip if self.clips_on_servers else None
        lanes = tuple(self.lanes[index] for index in own)
        return replace(self, lanes=lanes, placements=placements, clip=clip)

    def lane_of(self, placement: Placement) -> Lane:
        """A variable's lane."""
        return self.lanes[placement.lane]

    @property
    def outlives_servers(self) -> bool:
        """Whether a job continues when a lost server comes back with the values that it had before.

        Not where trainers step together, with one another's gradients: all go back then.  Nor where
        norms are judged by their history, which that server has lost.
        """
        together = self.averaged or any(lane.kind.merges_gradients for lane in self.lanes)
        return not together and all(lane.outlier_push == "off" for lane in self.lanes)

    @property
    def clips_on_servers(self) -> bool:
        """Whether servers clip.

        They do where every lane merges the gradients of several trainers: only there is the
        gradient to clip not one trainer's own.  Gradients that trainers average are clipped there.
        """
        return (
            self.clip is not None
            and self.trainers > 1
            and bool(self.lanes)
            and not self.averaged
            and all(lane.kind.merges_gradients for lane in self.lanes)
        )

    def settings(self) -> dict[str, str]:
        """The strategy and the optimizers as facts: the manifest without variables and tables."""
        facts = {
            "mode": self.mode,
            "trainers": str(self.trainers),
            "servers": str(self.servers),
            "clip": "none"
            if self.clip is None
            else f"{self.clip.kind} {self.clip.low!r} {self.clip.high!r}",
        }
        for index, lane in enumerate(self.lanes):
            facts |= _facts(f"lane {index}: ", lane)
        for index, rule in enumerate(self.groups):
            facts[f"group {index}: optimizer"] = rule.type
            for key, value in {**rule.hparams, **rule.flags}.items():
                facts[f"group {index}: {key}"] = repr(value)
            if rule.update is not None:
                facts[f"group {index}: update"] = digest(rule.update)
        if self.collective is not None:
            facts |= _facts("collective: ", self.collective)
        if self.lost_trainer != UNSAID["lost_trainer"]:
            facts["averaged: lost_trainer"] = self.lost_trainer
        return facts

    def manifest(self) -> dict[str, str]:
        """The plan as facts, sorted by name: two processes whose fingerprints differ compare
        these.
        """
        facts = {**self.settings(), "graph": self.graph}
        for order, placement in enumerate(self.placements):
            facts[f"variable {placement.name}"] = _placement_fact(order, placement)
        for name in self.averaged:
            facts[f"averaged {name}"] = "by the trainers"
        for table in self.tables:
            facts[f"table {table.name}"] = _table_fact(table)
        return dict(sorted(facts.items()))

    def fingerprint(self) -> str:
        """The digest of the manifest, as 32 hexadecimal digits.

        No trainer's number, host, port or value of a variable is in it.
        """
        lines = "\n".join(f"{key} = {value}" for key, value in self.manifest().items())
        return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()


def differences(manifest: Mapping[str, str], reference: Mapping[str, str], whose: str) -> str:
    """The first few facts that differ between two plans' manifests, in words: ``"lr: 0.2 (trainer 0
    has 0.1)"``.

    Args:
        manifest: of the plan in question; ``reference``: of the plan that it is compared with.
        whose: the reference's owner: "trainer 0".
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


_COLLECTIVE_UNSAID = {
    "steps": 1,
    "last_bytes": 0,
    "most": 0,
    "dtype": "",
    "waits": False,
    "sharded": False,
    "begin": 0,
    "adaptive": False,
}


def _facts(prefix: str, owner: Lane | Collective) -> dict[str, str]:
    """The fields as facts, without those whose value is that of plans that had no such field."""
    unsaid = {**UNSAID, **_COLLECTIVE_UNSAID}
    values = {f.name: getattr(owner, f.name) for f in fields(owner)}
    return {
        f"{prefix}{name}": _fact(value)
        for name, value in values.items()
        if name not in unsaid or value != unsaid[name]
    }


def _placement_fact(order: int, placement: Placement) -> str:
    held = ", ".join(f"{s.name}[{s.begin}:{s.end}] on server {s.server}" for s in placement.slices)
    group = "held" if placement.group is None else f"group {placement.group}, lane {placement.lane}"
    group += f", gradients as {placement.compression}" if placement.compression else ""
    return f"number {order}, {placement.dtype}{list(placement.shape)}, {group}, {held}"


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
    bounds += f", gradients as {table.compression}" if table.compression else ""
    return (
        f"{table.dtype}[{table.rows!r}, {table.dim}], {columns}, lane {table.lane}, seed "
        f"{table.seed}, initial {initial}, "
        f"entry {entry}, {bounds}"
    )


def _fact(value: object) -> str:
    """A value in words that do not depend on the order of a mapping."""
    if isinstance(value, Rule):
        own = "" if value.update is None else f" {digest(value.update)}"
        return f"{value.type} {sorted(value.hparams.items())} {sorted(value.flags.items())}{own}"
    return repr(value)


@dataclass(frozen=True, slots=True)
class Deployment:
    """A plan, the addresses of its processes, and which of them this one is.

    Attributes:
        plan: of the job.
        endpoints: HOST:PORT of each server's control endpoint, by server index; without servers
            that of each trainer.
        trainer_id: None in a server's program.
        server_index: None in a trainer's program.
        wait_port: a trainer waits, up to the start timeout, until the servers (or the other
            trainers) answer.
        runtime_split_send_recv: a trainer's programs have no split and concat ops: gradients are
            cut into slices when they leave.
        soft_wait_ms: of a trainer: milliseconds for which a step of an async lane waits for the
            answer to the one before.
        optimizer: of a trainer's program: the number of the optimizer whose steps it takes.
        execution: how an Executor runs a trainer's programs.
    """

    plan: Plan
    endpoints: tuple[str, ...]
    trainer_id: int | None = None
    server_index: int | None = None
    wait_port: bool = True
    runtime_split_send_recv: bool = False
    soft_wait_ms: int = A_SYNC_CONFIGS["soft_wait_ms"].default
    optimizer: int = 0
    execution: Execution = Execution()

    @property
    def own_plan(self) -> Plan:
        """The part of the plan for a trainer's program."""
        return self.plan.of_optimizer(self.optimizer)

    def of_server(self, index: int) -> Deployment:
        """The deployment for the program of server ``index``: without the settings of trainers."""
        return Deployment(self.plan, self.endpoints, None, index, self.wait_port)

    def with_endpoints(self, endpoints: tuple[str, ...]) -> Deployment:
        """The same deployment at other addresses."""
        return replace(self, endpoints=endpoints)


def check_unique(what: str, names: Iterable[str]) -> None:
    """Checks that no name occurs twice.

    Raises:
        ValueError: naming the first that does.
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name!r}: expected once, got twice")
        seen.add(name)


# ---- comm rings ----
#
# Rings: the process groups of a job without servers, by name, and which trainers are in them.
#
# A flat ring has all trainers and the id ``NCCLID``, ``NCCLID_1``, ...  Trainers may form rows, for
# example the trainers of one host.  Ring i then has two further ids:
# ``Hierarchical_inter_NCCLID_i`` of the trainers of each row, and ``Hierarchical_exter_NCCLID_i``
# of the heads, the first trainers of all rows.  A sum is reduced within each row, then among the
# heads, then broadcast within each row, so that only one trainer of a row talks to other hosts (Jia
# et al.: Highly scalable deep learning training system with mixed-precision, 2018).


def flat_id(ring: int) -> str:
    """The id of a ring of all trainers."""
    return f"NCCLID_{ring}" if ring else "NCCLID"


def row_id(ring: int) -> str:
    """The id of a ring's rows; each row is a group of its own."""
    return f"Hierarchical_inter_NCCLID_{ring}"


def heads_id(ring: int) -> str:
    """The id of a ring's heads."""
    return f"Hierarchical_exter_NCCLID_{ring}"


def ids_of(collective: Collective, ring: int) -> tuple[str, ...]:
    """The ids of one ring."""
    return (flat_id(ring), row_id(ring), heads_id(ring)) if collective.inner else (flat_id(ring),)


def all_ids(collective: Collective) -> tuple[str, ...]:
    """The ids of all rings, the flat ones first."""
    flat = tuple(flat_id(ring) for ring in range(collective.rings))
    return flat + tuple(
        name for ring in range(collective.rings) for name in ids_of(collective, ring)[1:]
    )


def row_of(rank: int, inner: int) -> tuple[int, ...]:
    """The trainers of the row of trainer ``rank``; ``inner`` of them are in a row."""
    return tuple(range(rank - rank % inner, rank - rank % inner + inner))


def heads(trainers: int, inner: int) -> tuple[int, ...]:
    """The first trainer of every row."""
    return tuple(range(0, trainers, inner))


def row_length(asked: int, endpoints: Sequence[str]) -> int:
    """The number of trainers in a row.

    Args:
        asked: ``hierarchical_allreduce_inter_nranks``; 0 or 1: as many as run on each host.
        endpoints: HOST:PORT of each trainer, by its number.

    Raises:
        ValueError: hosts have different numbers of trainers, or the trainers of a host do not have
            consecutive numbers; or the trainers do not divide into several rows of this length.
    """
    name, trainers = "hierarchical_allreduce_inter_nranks", len(endpoints)
    if asked <= 1:
        hosts = [
            (host, len(list(group)))
            for host, group in groupby(endpoint.rpartition(":")[0] for endpoint in endpoints)
        ]
        counts = {count for _, count in hosts}
        if len(counts) > 1 or len(dict(hosts)) < len(hosts):
            said = ", ".join(f"{count} on {host}" for host, count in hosts)
            raise ValueError(
                f"{name}={asked}: expected the same number of trainers in a row on every host, "
                f"got {said}; set the number"
            )
        asked = counts.pop()
    if not 1 < asked < trainers:
        raise ValueError(
            f"{name}: expected from 2 to less than the number of trainers, {trainers}, got "
            f"{asked}; leave use_hierarchical_allreduce off"
        )
    if trainers % asked:
        raise ValueError(
            f"{name}: expected a divisor of the number of trainers, got {trainers} trainers and "
            f"{asked}"
        )
    return asked


def row_or_all(asked: int, hosts: Sequence[str]) -> int:
    """The number of trainers in a row of an eager job, where all may be in one row: on one host, or
    because they are no more than ``asked``.

    Args:
        asked: as above.
        hosts: the host of each trainer, by its number.

    Raises:
        ValueError: as above.
    """
    if asked >= len(hosts) or (asked <= 1 and len(set(hosts)) == 1):
        return len(hosts)
    return row_length(asked, [f"{host}:0" for host in hosts])


# ---- in words ----


def describe_collective(collective: Collective) -> str:
    """The rings of a plan, and when its trainers average, in words: "2 rings, every 4 steps"."""
    words = f"{collective.rings} ring{'' if collective.rings == 1 else 's'}"
    if collective.steps > 1 or collective.adaptive:
        words += f", {seldom(collective.steps, collective.begin)}"
    words += ", which follow the loss" if collective.adaptive else ""
    words += ", sharded updates" if collective.sharded else ""
    words += f", in rows of {collective.inner}" if collective.inner else ""
    return words + (f", gradients as {collective.dtype}" if collective.dtype else "")


def seldom(steps: object, begin: object) -> str:
    """The words for when parameters are averaged: "every 4 steps after step 30"."""
    every = "every step" if steps == 1 else f"every {steps} steps"
    return f"{every} after step {begin}" if begin else every
