"""A job of one server whose log is recorded: its trainers are threads that commit random steps, in
any mode, with dense parameters of several rules, buffers and tables.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pserver import wire_pb2 as wire
from pserver.config import PROTOCOL, ServerConfig
from pserver.dense.update import clip_coefficients
from pserver.job.job import Job
from pserver.job.program import InstalledProgram
from pserver.lane.lane import LaneExecutor
from pserver.lane.rounds import Clipping
from pserver.lane.step import Step
from pserver.membership.decisions import process_of
from pserver.membership.members import Member
from pserver.table.gradient import RowGradient
from pserver.transport.arrays import Assignment, checksum
from tests.support.load import result
from trainer import CountFilterEntry, DistributedEmbedding, ShowClickEntry
from transpiler import DistributeTranspiler, DistributeTranspilerConfig, capture
from transpiler.clip import ClipGradByGlobalNorm
from transpiler.ir.graph import Role, Storage
from transpiler.program import Program

ENDPOINT = "127.0.0.1:6174"
TRAINERS = 2
PUSHED = 8  # rows of a table by a step, if nothing else is said

MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "clipped": {"clip": True},
    "async": {"sync_mode": False},
    "mean buffers": {"sync_mode": False, "buffers": "mean"},
    "half-async": {"sync_mode": False, "half_async": True},
    "staleness": {"sync_mode": False, "staleness": 2, "send_queue_size": 1},
    "delay-compensated": {"sync_mode": False, "enable_dc_asgd": True},
    "geo": {"sync_mode": False, "geo_sgd_mode": True, "geo_sgd_need_push_nums": 3},
    "two lanes": {"sync_mode": False, "modes": {"fc.*": "sync"}},
    "diloco": {"k_steps": 3, "outer_optimizer": {"type": "nesterov", "lr": 0.5, "momentum": 0.9}},
}


RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.Adam, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


class Net(nn.Module):
    """Weights, running statistics, and tables of every kind of life."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.emb = DistributedEmbedding(4, ttl=0.01)
        self.waits = DistributedEmbedding(4, entry=CountFilterEntry(2), capacity=capacity)
        self.shown = DistributedEmbedding(
            4, entry=ShowClickEntry("shows", "clicks", threshold=2.0, delete_threshold=1.0)
        )
        self.fc, self.norm = nn.Linear(12, 6), nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 2)

    def forward(self, ids: Tensor, shows: Tensor, clicks: Tensor) -> Tensor:
        """Logits."""
        rows = self.emb(ids), self.waits(ids), self.shown(ids, shows=shows, clicks=clicks)
        found: Tensor = self.out(self.norm(self.fc(torch.cat(rows, 1))))
        return found


@cache
def program_of(mode: str, rule: str = "adam", capacity: int = 12) -> Program:
    """The server's program of a job in a mode; one of its tables has so many rows at most."""
    torch.manual_seed(1)
    settings = dict(MODES[mode])
    model = Net(capacity)
    optimizer = RULES[rule](model.parameters())
    clip = ClipGradByGlobalNorm(0.5) if settings.pop("clip", False) else None
    inputs = torch.arange(4), torch.ones(4), torch.zeros(4)

    def step(model: nn.Module, ids: Tensor, shows: Tensor, clicks: Tensor) -> Tensor:
        loss: Tensor = model(ids, shows, clicks).square().mean()
        return loss

    main, startup = capture(model, step, optimizer, inputs, grad_clip=clip)
    config = DistributeTranspilerConfig()
    for name, value in settings.items():
        setattr(config, name, value)
    transpiler = DistributeTranspiler(config)
    transpiler.transpile(0, main, ENDPOINT, trainers=TRAINERS, startup_program=startup)
    program, _ = transpiler.get_pserver_programs(ENDPOINT)
    return program


class RecordedJob:
    """A job that begins with random values.

    Args:
        folder: where its log is recorded; None: nowhere.
        program: see :func:`program_of`.
        pushed: rows of a table by a step.
        settings: of the server.
    """

    def __init__(
        self, folder: Path | None, program: Program, pushed: int = PUSHED, **settings: Any
    ) -> None:
        self._pushed = pushed
        record = None if folder is None else str(folder)
        self.job = Job(ServerConfig(record_log=record, **settings), {"inprocess": 1})
        self.job.preset(program, _values(program))
        self.installed: InstalledProgram = self.job.installed()
        self.members: list[Member] = []
        self.taken = 0  # steps of each trainer
        for trainer in range(TRAINERS):
            request = wire.JoinRequest(
                protocol=PROTOCOL,
                trainer_id=trainer,
                incarnation=f"process {trainer} {secrets.token_hex(8)}",  # of this job alone
                fingerprint=self.job.fingerprint,
                manifest=self.installed.plan.manifest(),
                transports=["inprocess"],
            )
            self.members.append(self.job.member(self.job.join(request).session))

    def train(self, steps: int) -> None:
        """Every trainer takes so many steps, beside the others."""
        with ThreadPoolExecutor(TRAINERS) as pool:
            for future in [pool.submit(self._train, each, steps) for each in self.members]:
                result(future, 60)
        self.taken += steps

    def _train(self, member: Member, steps: int) -> None:
        for step in range(self.taken + 1, self.taken + steps + 1):
            for lane in self.installed.lanes:
                self._step(member, lane, step)

    def _step(self, member: Member, lane: LaneExecutor, step: int) -> None:
        rng = torch.Generator().manual_seed(1000 * step + 10 * member.trainer + lane.index)
        for name in lane.updates:
            lane.read(member, name)
        rows = {name: self._rows(name, lane, member, rng) for name in lane.tables}
        taken = lane.commit(member, self._whole(member, lane, step, rows, rng))
        if isinstance(taken, Clipping):
            assert self.installed.plan.clip is not None
            coefficients = clip_coefficients(self.installed.plan.clip, [taken.norms])
            taken = lane.scale(taken, coefficients)
        taken.finish()
        lane.outcome(member, step, taken)

    def _whole(
        self,
        member: Member,
        lane: LaneExecutor,
        step: int,
        rows: dict[str, RowGradient],
        rng: torch.Generator,
    ) -> Step:
        kind, plan = lane.lane.kind, self.installed.plan
        near = {n: u.value.clone() if kind.outer_optimizer else 0 for n, u in lane.updates.items()}
        hparams = {
            index: {
                key: value / step if key == "lr" and isinstance(value, float) else value
                for key, value in rule.hparams.items()
            }
            for index, rule in enumerate(plan.groups)
        }
        whole = Step(
            process_of(member),
            step,
            {
                name: near[name] + torch.randn(update.value.shape, generator=rng) / 8
                for name, update in lane.updates.items()
                if (step + member.trainer) % 3 or name != next(iter(lane.updates))
            },
            hparams,
            overflow=step == 3 and member.trainer == 1,
            row_gradients=rows,
        )
        self._writes(whole, member, lane, step)
        if lane.index == 0:
            whole.buffers = self._buffers(member, lane, rng)
        return whole

    def _writes(self, whole: Step, member: Member, lane: LaneExecutor, step: int) -> None:
        """What a script has written: in each fourth step."""
        if step % 4 or not lane.updates:
            return
        name, update = next(iter(lane.updates.items()))
        if not lane.lane.kind.waits_for_all:
            values = torch.full((1,), float(step + member.trainer))
            whole.assignments = {name: Assignment(values, torch.tensor([1]))}
            return
        whole = torch.full(update.value.shape, 1 / step)
        whole.written = {name: checksum(whole)}
        if member.trainer == 0:
            whole.assignments = {name: Assignment(whole)}

    def _buffers(
        self, member: Member, lane: LaneExecutor, rng: torch.Generator
    ) -> dict[str, Tensor]:
        held, whose = self.installed.slices.held, lane.lane.buffers
        return {
            name: torch.randn(value.shape, generator=rng)
            for name, value in held.items()
            if value.is_floating_point() and (member.trainer == 0 or whose == "mean")
        }

    def _rows(
        self, name: str, lane: LaneExecutor, member: Member, rng: torch.Generator
    ) -> RowGradient:
        """Of an eighth of the ids, which the trainer has looked up."""
        count, table = self._pushed, lane.tables[name]
        ids = torch.randperm(8 * count, generator=rng)[:count]
        table.lookup(ids, member.trainer)
        statistics = None
        if table.counts:
            statistics = torch.randint(1, 4, (count, 2), generator=rng).float()
        rows = torch.randn(count, table.table.dim, generator=rng)
        return RowGradient(ids, rows, statistics)

    def shrink(self, days: float = 1.0, number: int = 1) -> None:
        """As ``fleet.shrink``."""
        session = self.members[0].session
        self.job.shrink(wire.ShrinkRequest(session=session, days=days, number=number))

    def save(self, path: str) -> None:
        """As the servers' own save, below ``data_dir``."""
        self.job.save(wire.SaveRequest(session=self.members[0].session, path=path))

    def load(self, path: str) -> None:
        """As the servers' own load."""
        self.job.load(wire.LoadRequest(session=self.members[0].session, path=path))

    def end(self) -> None:
        """All trainers leave, and all is written."""
        for member in self.members:
            self.job.leave(wire.LeaveRequest(session=member.session, success=True))
        assert self.job.end_recording(30.0)


def held_by(installed: InstalledProgram) -> dict[str, Tensor]:
    """All that a server holds, by name: slices, states, rows in the order of their ids."""
    found = {name: tensor.clone() for name, tensor in installed.slices.tensors()}
    for name, table in installed.tables.items():
        chunks, cursor = [], 0
        while cursor >= 0:
            chunk, cursor = table.scan(cursor, 0, changed_since_save=False, materialized=False)
            chunks.append(chunk)
        whole = {key: np.concatenate([chunk[key] for chunk in chunks]) for key in chunks[0]}
        for ids in ("ids", "waiting.ids"):
            order = np.argsort(whole[ids]) if ids in whole else ()
            for key, column in whole.items():
                if key.startswith("waiting.") == ids.startswith("waiting.") and len(order):
                    found[f"{name}@{key}"] = torch.from_numpy(column[order])
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> Sequence[str]:
    """The names of what differs, in one bit or more."""
    names = sorted({*one, *other})
    return [
        name
        for name in names
        if name not in one
        or name not in other
        or one[name].numpy().tobytes() != other[name].numpy().tobytes()
    ]


def _values(program: Program) -> Storage:
    rng = torch.Generator().manual_seed(5)
    values: dict[str, Tensor] = {}
    for variable in program.main.variables_of(Role.PARAMETER, Role.BUFFER):
        shape = [int(extent) for extent in variable.shape]
        values[variable.name] = (
            torch.randn(shape, generator=rng)
            if variable.dtype == "float32"
            else torch.zeros(shape, dtype=torch.int64)
        )
    return Storage(values, None)
