"""Jobs: a script that trains one of six models, alone in plain torch or with servers in any mode,
eagerly or as a program.

::

    script = Script("clicks", adagrad, steps=6)
    expected = alone(script)
    assert_equal(run(script, "geo", servers(2), how="program")[0], expected)
"""

from __future__ import annotations

import copy
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.every_mode import with_every_mode
from tests.support.seeded import seeded
from tests.support.threads import at_once
from trainer import DistributedEmbedding, Executor, fleet
from trainer.communicator.communicator import Communicator
from trainer.embedding.conversion import moved
from trainer.embedding.proxy import ProxyParameter
from trainer.job.job import Job, begin, end
from transpiler import (
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    capture,
)
from transpiler.clip import GradClip

Batch = tuple[Tensor, ...]
Values = dict[str, Tensor]
Servers = Callable[[int], str]
How = Literal["eager", "program"]
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
HOW: tuple[How, ...] = ("eager", "program")
IDS, DIM = 30, 4


# ---- six models ----


class Dense(nn.Module):
    """A matrix that is cut between servers, one that is not, a vector and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(48, 257), nn.Linear(257, 3)
        self.scale = nn.ParameterList([torch.tensor(1.0)])

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.narrow(torch.tanh(self.wide(x))) * self.scale[0]
        return out


class Normed(nn.Module):
    """A batch norm, a buffer that ``state_dict`` leaves out and one that nothing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(48, 40), nn.BatchNorm1d(40), nn.Linear(40, 3)
        self.register_buffer("seen", torch.zeros(48), persistent=False)
        self.register_buffer("mask", torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += x[0]
        out: Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return out


class Tied(nn.Module):
    """A layer under two names, a parameter whose strides are not those of its shape, and a frozen
    one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(40, 48).t())
        self.frozen = nn.Parameter(torch.randn(3000), requires_grad=False)
        self.layer = nn.Linear(40, 3)
        self.again = self.layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(torch.tanh(x @ self.wide)) * self.frozen[:3]
        return out


class Halved(nn.Module):
    """A float32 body and a bfloat16 head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(48, 8), nn.Linear(8, 3).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.body(x)).to(torch.bfloat16)).float()
        return out


class Clicks(nn.Module):
    """A table that is looked up twice, another one, and dense layers on their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(IDS, DIM, sparse=True)
        self.user = nn.Embedding(IDS, 3, sparse=True)
        self.layers = nn.Sequential(nn.Linear(2 * DIM + 3, 40), nn.Tanh(), nn.Linear(40, 3))

    def forward(self, ids: Tensor) -> Tensor:
        rows = [self.item(ids[:, 0]), self.item(ids[:, 1]), self.user(ids[:, 2])]
        out: Tensor = self.layers(torch.cat(rows, 1))
        return out


class Rows(nn.Module):
    """A model of tables alone."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(IDS, 3, sparse=True)
        self.user = nn.Embedding(IDS, 3, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.item(ids[:, 0]) * self.user(ids[:, 2])
        return out


MODELS: Mapping[str, type[nn.Module]] = {
    "dense": Dense,
    "normed": Normed,
    "tied": Tied,
    "halved": Halved,
    "clicks": Clicks,
    "rows": Rows,
}
WITH_TABLES = ("clicks", "rows")
# of each model the parameters that a mixed job trains otherwise than the rest
PART = {
    "dense": "narrow*",
    "normed": "last*",
    "tied": "layer*",
    "halved": "head*",
    "clicks": "item*",
    "rows": "item*",
}


def made(model: str) -> nn.Module:
    """A model with the values that every copy begins with."""
    with seeded(7):
        return MODELS[model]()


def loss_of(model: nn.Module, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
    """Of samples that have weights, which a test uses for a gradient beyond all others."""
    return (F.cross_entropy(model(x), y, reduction="none") * weight).mean()


def batches(model: str, count: int, size: int = 8, seed: int = 11) -> list[Batch]:
    """Batches that follow from a seed: an id is at most once in a column, so twice among those of a
    table, as sums of three depend on their order.
    """
    generator = torch.Generator().manual_seed(seed)

    def inputs() -> Tensor:
        if model not in WITH_TABLES:
            return torch.randn(size, 48, generator=generator)
        columns = [torch.randperm(IDS, generator=generator)[:size] for _ in range(3)]
        return torch.stack(columns, 1)

    return [
        (inputs(), torch.randint(0, 3, (size,), generator=generator), torch.ones(size))
        for _ in range(count)
    ]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """A rate that is a power of two: its product is exact, with a fused addition or without."""
    return torch.optim.SGD(parameters, lr=0.125)


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def adagrad(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.1)


# ---- modes ----


@dataclass(frozen=True)
class Mode:
    """Settings under which a lane trains.

    Attributes:
        configs: ``a_sync_configs``.
        exact: one trainer equals plain torch to the bit, also for tables; otherwise a difference
            is rounded on its way.
        queued: a step does not wait for its result.
        own_steps: trainers step by themselves and exchange what has changed.
        together: one trainer's steps wait for another's.
    """

    configs: Mapping[str, Any]
    exact: bool = True
    queued: bool = False
    own_steps: bool = False
    together: bool = False

    def strategy(self, script: Script) -> DistributedStrategy:
        """These settings, with those of a script before them."""
        configs = {**self.configs, **script.configs}
        if "modes" in configs:
            part = PART[script.model]
            configs["modes"] = {
                part if pattern == "PART" else pattern: mode
                for pattern, mode in configs["modes"].items()
            }
        strategy = DistributedStrategy()
        strategy.a_sync, strategy.a_sync_configs = True, configs
        return strategy


_OUTER = {"type": "sgd", "lr": 1.0}
MODES: Mapping[str, Mode] = with_every_mode(
    {
        "sync": Mode({"modes": {"*": "sync"}}, together=True),
        "async": Mode({}, queued=True),
        "async, one slot": Mode({"send_queue_size": 1}),
        "async, cut by its thread": Mode({"runtime_split_send_recv": True}, queued=True),
        "async, fetched by a thread": Mode({"independent_recv_thread": True}, queued=True),
        "half-async": Mode({"half_async": True, "max_merge_var_num": 1}),
        "staleness": Mode({"staleness": 3}, together=True),
        "delay-compensated": Mode({"dc_asgd": 0.5, "send_queue_size": 1}),
        "geo": Mode({"k_steps": 2}, exact=False, own_steps=True),
        "diloco": Mode(
            {"k_steps": 2, "outer_optimizer": _OUTER}, exact=False, own_steps=True, together=True
        ),
        "mixed": Mode(
            {"modes": {"PART": "async", "*": "sync"}, "send_queue_size": 1}, together=True
        ),
    },
    Mode,
)


# ---- a script, and a trainer that runs it ----


@dataclass(frozen=True)
class Script:
    """A user's script.

    Attributes:
        before: called with the number of a step, from 1, and the model, before each step.
        clip: as the optimizer is given it, and the same in plain torch.
        gamma: of an exponential schedule.
    """

    model: str = "dense"
    optimizer: Make = sgd
    steps: int = 8
    before: Callable[[int, nn.Module], None] | None = None
    clip: tuple[GradClip, Callable[[nn.Module], Any]] | None = None
    gamma: float = 1.0
    compression: Mapping[str, str] | None = None
    configs: Mapping[str, Any] = field(default_factory=dict)

    def data(self, trainer: int = 0) -> list[Batch]:
        """The batches of a trainer."""
        return batches(self.model, self.steps, seed=11 + trainer)


def trained(model: nn.Module) -> Iterator[nn.Parameter]:
    """A model's parameters that are not frozen."""
    return (each for each in model.parameters() if each.requires_grad)


def held(model: nn.Module) -> Iterator[Tensor]:
    """A model's parameters and buffers."""
    return itertools.chain(model.parameters(), model.buffers())


def values(model: nn.Module) -> Values:
    """Copies of a model's parameters and buffers, but for rows that are on servers."""
    found = {
        name: each.detach().clone()
        for name, each in model.named_parameters()
        if not isinstance(each, ProxyParameter)
    }
    return found | {name: each.clone() for name, each in model.named_buffers()}


def rows(model: nn.Module) -> Values:
    """The rows of a model's tables that are on servers, as a lookup gives them."""
    with torch.no_grad():
        return {
            f"{name}.weight": each(torch.arange(IDS)).clone()
            for name, each in model.named_modules()
            if isinstance(each, DistributedEmbedding)
        }


def assert_equal(mine: Values, theirs: Values, tolerance: float = 0.0) -> None:
    """To the bit, or within a tolerance."""
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        difference = (mine[name].double() - value.double()).abs().max()
        assert difference <= tolerance, f"{name}: largest difference {difference}"


def alone(script: Script, data: Sequence[Batch] | None = None) -> Values:
    """The values that a script reaches in plain torch, with no server."""
    model = made(script.model)
    for each in model.modules():
        if isinstance(each, nn.Embedding):
            each.sparse = False  # torch adds sparse gradients up in another order
    optimizer = script.optimizer(trained(model))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, script.gamma)
    for number, batch in enumerate(script.data() if data is None else data, 1):
        if script.before is not None:
            script.before(number, model)
        optimizer.zero_grad()
        loss_of(model, *batch).backward()
        if script.clip is not None:
            script.clip[1](model)
        optimizer.step()
        schedule.step()
    return values(model)


_there: list[Trainer] = []  # those that have not left


def end_all() -> None:
    """Ends the jobs that a failed test has left, so that its servers serve the next one."""
    for each in list(_there):
        with suppress(Exception):
            each.leave("its test has failed")


class Trainer:
    """One trainer of a job, which has joined.

    Attributes:
        model: which it trains.
        step: takes a batch.
    """

    model: nn.Module
    optimizer: Any  # its schedules follow this one
    communicator: Communicator

    def __init__(self, script: Script, number: int) -> None:
        self.script, self.number, self._steps = script, number, 0
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, script.gamma)
        _there.append(self)

    def step(self, batch: Batch) -> None:
        """One step, and one of the schedule."""
        self._steps += 1
        if self.script.before is not None:
            self.script.before(self._steps, self.model)
        self._step(batch)
        self.schedule.step()

    def train(self, data: Iterable[Batch], flushes: bool = False) -> None:
        """Steps, each of which has landed where it ``flushes``."""
        for batch in data:
            self.step(batch)
            if flushes:
                self.flush()

    def metric(self, name: str) -> float:
        return self.communicator.metrics()[name]

    def served(self) -> Values:
        """The servers' values of the parameters."""
        own = {name: each.detach().clone() for name, each in self.model.named_parameters()}
        return own | {name: each.clone() for name, each in self.communicator.served().items()}

    def _step(self, batch: Batch) -> None:
        raise NotImplementedError

    def flush(self) -> None:
        """Waits until all that it has sent is applied."""
        raise NotImplementedError

    def save(self, path: str) -> None:
        """Writes a checkpoint, with the schedule."""
        raise NotImplementedError

    def load(self, path: str) -> int:
        """Reads one."""
        raise NotImplementedError

    def leave(self, failure: str = "") -> Values:
        """Ends its part of the job, for a reason where it has failed; gives what its model then
        holds.
        """
        _there.remove(self)
        return self._leave(failure)

    def _leave(self, failure: str) -> Values:
        raise NotImplementedError


class Eager(Trainer):
    """A script with ``fleet``; the only trainer of its job is the present one of this process."""

    def __init__(
        self, script: Script, mode: Mode, endpoints: str, number: int, trainers: int
    ) -> None:
        role = fleet.UserDefinedRoleMaker(
            number, worker_num=trainers, server_endpoints=endpoints.split(",")
        )
        self.job = Job(role, mode.strategy(script))
        model = made(script.model)
        tables = [name for name, each in model.named_modules() if isinstance(each, nn.Embedding)]
        self.model = moved(model, tables)
        self.job.models.append(self.model)
        self._present = trainers == 1
        if self._present:
            begin(self.job)
        clip = None if script.clip is None else copy.deepcopy(script.clip[0])
        optimizer = script.optimizer(trained(self.model))
        self.optimizer: Any = self.job.join(
            optimizer, grad_clip=clip, compression=script.compression
        )
        super().__init__(script, number)

    @property
    def communicator(self) -> Communicator:  # type: ignore[override]
        found = self.job.communicator
        assert found is not None
        return found

    def _step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model, *batch).backward()
        self.optimizer.step()

    def flush(self) -> None:
        self.optimizer.flush()

    def save(self, path: str) -> None:
        assert self._present
        fleet.save(path, self.schedule)

    def load(self, path: str) -> int:
        assert self._present
        return fleet.load(path, self.schedule)

    def _leave(self, failure: str) -> Values:
        if self._present:
            end()
        if failure:
            self.optimizer.close(failure)
            return values(self.model)
        self.optimizer.flush()
        found = rows(self.model)
        self.job.finish()
        return found | values(self.model)


_tracing = threading.Lock()  # one thread at a time may trace


@functools.cache
def _captured(model: str, make: Make, clip: GradClip | None, number: int) -> Any:
    """A trainer's model, optimizer and programs: capturing takes longer than all the rest."""
    made_ = made(model)
    optimizer = make(trained(made_))
    example = batches(model, 1)[0]
    return made_, optimizer, capture(made_, loss_of, optimizer, example, grad_clip=clip)


def _begun(script: Script, number: int) -> Any:
    """The same, with everything as it is before the first step."""
    clip = None if script.clip is None else script.clip[0]
    model, optimizer, programs = _captured(script.model, script.optimizer, clip, number)
    fresh = made(script.model)
    with torch.no_grad():
        for mine, other in zip(held(model), held(fresh), strict=True):
            mine.copy_(other)
    optimizer.load_state_dict(script.optimizer(trained(fresh)).state_dict())
    return model, optimizer, programs


class Programmed(Trainer):
    """A program that was captured and transpiled."""

    def __init__(
        self, script: Script, mode: Mode, endpoints: str, number: int, trainers: int
    ) -> None:
        with _tracing:
            self.model, self.optimizer, (main, startup) = _begun(script, number)
            config = DistributeTranspilerConfig(compression=dict(script.compression or {}))
            transpiler = DistributeTranspiler(config)
            transpiler.transpile(
                number,
                main,
                endpoints,
                trainers,
                startup_program=startup,
                strategy=mode.strategy(script),
            )
        self.program = transpiler.get_trainer_program()
        self.executor = Executor()
        self.executor.run(transpiler.get_startup_program())
        super().__init__(script, number)

    @property
    def communicator(self) -> Communicator:  # type: ignore[override]
        found: Communicator = self.executor._runtimes[0].communicator
        return found

    def _step(self, batch: Batch) -> None:
        self.executor.run(self.program, feed=batch)

    def flush(self) -> None:
        self.executor.flush()

    def save(self, path: str) -> None:
        self.executor.save(path, self.program, self.schedule)

    def load(self, path: str) -> int:
        return self.executor.load(path, self.program, self.schedule)

    def _leave(self, failure: str) -> Values:
        if failure:
            self.executor._close(failure)
        else:
            self.executor.close()
        return values(self.model)


# ---- jobs ----


def join(
    script: Script,
    mode: str,
    endpoints: str,
    number: int = 0,
    trainers: int = 1,
    how: How = "eager",
) -> Trainer:
    """A trainer that has joined."""
    kind = Eager if how == "eager" else Programmed
    return kind(script, MODES[mode], endpoints, number, trainers)


def run(
    script: Script, mode: str, endpoints: str, trainers: int = 1, how: How = "eager"
) -> list[Values]:
    """A job from its start to its end: what each trainer's model then holds.

    Each step of a job of one trainer has landed before the next, as in plain torch.
    """
    joined = at_once(
        *(
            functools.partial(join, script, mode, endpoints, number, trainers, how)
            for number in range(trainers)
        )
    )

    flushes = trainers == 1 and MODES[mode].queued
    at_once(*(functools.partial(each.train, script.data(each.number), flushes) for each in joined))
    return at_once(*(each.leave for each in joined))
