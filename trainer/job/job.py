"""A job, which ``fleet.init`` begins and ``fleet.finish`` ends.

[Note: several optimizers]  A script may train with several optimizers over different parameters: a
GAN's two networks step in turn.  Each has lanes of its own in the plan, and a lane counts its own
steps, sends its own messages and has its own sync round.  So a step of one optimizer closes only
its lanes: the servers update, and the trainer receives, only its parameters, and trainers wait for
one another optimizer by optimizer.  Update rules are numbered consecutively: those of the second
optimizer's groups follow the first one's.  The synced buffers of all models travel with the first
lane of gradients, as with one optimizer.

Servers are installed once with a plan.  A second optimizer makes another plan: before the first
step the trainers leave together, announce that they return, and join with the new plan.

[Note: further optimizers of a job under way]  A trainer that joins while others train has made only
its first optimizer, and asks with a plan for that one, which is no longer the job's plan.  Servers
answer with ``PartialPlan``, and it asks again with each further optimizer.  Until it has joined it
cannot train: a step, a joint call or an iteration raises that error.
"""

from __future__ import annotations

import atexit
import copy
import glob
import logging
import secrets
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.hooks import RemovableHandle

from pserver.checkpoint.checkpoint import Claims, Saved
from pserver.client.announcement import Announcement
from pserver.errors import PartialPlan
from pserver.telemetry.metrics import current
from trainer.collective.dense_allreduce import DenseAllreduce
from trainer.collective.elastic_means import DenseSteps
from trainer.communicator.communicator import Communicator, options_of
from trainer.communicator.termination import REASON, spelled, termination
from trainer.communicator.trace import TRACING
from trainer.compat.flags import ProcessSettings
from trainer.embedding.proxy import ProxyParameter
from trainer.embedding.rows import without_served_rows
from trainer.environment.environment import Connection, Role, RoleMaker
from trainer.gradients.averaging import dense_means_of
from trainer.gradients.dgc import dgc_of, local_clip
from trainer.gradients.gradient_changes import changes_of
from trainer.gradients.gradient_merge import gradient_merge_of
from trainer.job.files import FileSystem
from trainer.job.part_saves import PartSaves
from trainer.modules.dump import ModuleDump
from trainer.modules.loss_scaling import check_overlap, loss_scaling_of
from trainer.modules.sync_batch_norm import (
    check_batch_norms,
    check_steps_together,
    connect_batch_norms,
)
from trainer.optimizer import DistributedOptimizer
from trainer.samplers.passes import Passes
from trainer.samplers.sample_leases import JobSamples
from trainer.samplers.saves import Saves
from transpiler.clip import GradClip
from transpiler.distribute import plan_parameters
from transpiler.ir.module_types import module_types
from transpiler.ir.plain_names import named_buffers, named_modules, named_parameters, plain_name
from transpiler.ir.rules import Clip, Rule, rule_of
from transpiler.param_attr import unclipped
from transpiler.plan.lanes import describe
from transpiler.plan.modes import SYNC
from transpiler.plan.plan import Deployment, Plan
from transpiler.plan.planner import OptimizerRequest
from transpiler.plan.settings import number as number_setting
from transpiler.plan.settings import optional, refuse_type
from transpiler.strategy.execution import dump_of, execution_of
from transpiler.strategy.from_strategy import is_async_unasked, lanes_of, modes_of
from transpiler.strategy.strategy import DistributedStrategy
from transpiler.strategy.update_rules import replaced

if TYPE_CHECKING:
    from trainer.checkpoint.tables import TableStore
    from trainer.communicator.tables import Tables
    from trainer.senders.look_ahead import LookAhead


# ---- arrival ----
#
# From ``fleet.init`` until it has joined, a trainer announces itself to the servers, so that the
# others learn of its end although it has not joined any server yet.


class LateArrival:
    """A trainer on its way into a job.

    Args:
        role: of a trainer, in a job with servers.

    Attributes:
        incarnation: the one with which it joins.
    """

    def __init__(self, role: RoleMaker) -> None:
        self.incarnation = secrets.token_hex(8)
        self._announcement = Announcement(
            role.server_endpoints,
            role.trainer_id,
            self.incarnation,
            Connection.from_environment().access_to(role.server_endpoints),
        )
        termination.add(self._announcement.failed)
        atexit.register(self._abandoned)

    def check(self) -> None:
        """Raises the error that ends the wait for a server, if a server has announced that it is
        shutting down.
        """
        if self._announcement.failure is not None:
            raise self._announcement.failure

    def joined(self) -> None:
        """Ends the announcement: the trainer has joined every server, or does not join, in good
        order.
        """
        termination.remove(self._announcement.failed)
        atexit.unregister(self._abandoned)
        self._announcement.joined()

    def _abandoned(self) -> None:
        """Reports the failure when the process ends without having joined."""
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        reason = spelled(error) if error is not None else "its script has ended"
        self._announcement.failed(REASON if termination.came else reason)


# ---- data position ----
#
# A trainer's position in its data: its passes over the data of ``fleet.shard``, and their batches.


class Display(Protocol):
    """The display of a running pass: see :class:`trainer.job.report.ProgressBar`."""

    def begin(self, number: int, batches: int) -> None:
        """Shows that a pass begins; ``batches`` is 0 if their number is not known."""

    def advance(self, batch: int) -> None:
        """Shows that so many batches have been given."""

    def end(self) -> None:
        """Shows that the pass is over, by its end, by ``break``, or by an error."""


class DataPosition:
    """The position in the last pass.  The script's thread writes it, any thread reads it.

    Attributes:
        batch_size: of this trainer, in the last pass; 0: not known.
    """

    def __init__(self) -> None:
        self._now = (0, 0, 0)
        self.batch_size = 0

    def now(self) -> tuple[int, int, int]:
        """The number of passes begun, the batches given of the last one, and its number of batches
        (0: not known).
        """
        return self._now

    def begin(self, batches: int) -> int:
        """Counts a new pass.

        Returns:
            Its number, from 1.
        """
        self._now = (self._now[0] + 1, 0, batches)
        return self._now[0]

    def at(self, number: int, batch: int, batches: int) -> None:
        """Notes that a batch of a pass has been given; batches of older passes do not count."""
        if number == self._now[0]:
            self._now = (number, batch, batches)


class CountedBatches:
    """Counts the batches of any iterable, unchanged; each iteration is a pass.

    Args:
        batches: the iterable.
        position: of this trainer.
        display: makes the display of a pass; None: passes are not shown.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        position: DataPosition,
        display: Callable[[], Display] | None = None,
    ) -> None:
        self._batches, self._position, self._display = batches, position, display

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # what has no length says so

    def __iter__(self) -> Iterator[Any]:
        # at once, not at the first batch: a loader draws random numbers here, and starts workers
        return self._counted(iter(self._batches))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        many = length(self._batches)
        number = self._position.begin(many)
        self._position.batch_size = getattr(self._batches, "size", 0)
        display = None if self._display is None else self._display()
        if display is not None:
            display.begin(number, many)
        try:
            for batch, each in enumerate(batches, 1):
                self._position.at(number, batch, many)
                if display is not None:
                    display.advance(batch)
                yield each
        finally:
            if display is not None:
                display.end()


def length(batches: Iterable[Any]) -> int:
    """The number of batches of an iterable; 0 if it is not known.

    A loader over an iterable data set only guesses, and warns if it was wrong: it is not asked.
    """
    if isinstance(batches, DataLoader) and isinstance(batches.dataset, IterableDataset):
        return 0
    try:
        return len(batches)  # type: ignore[arg-type]  # what has no length says so
    except (TypeError, NotImplementedError):
        return 0


# ---- further optimizers ----
#
# The settings that the optimizers of one job must share.


# keys of a_sync_configs that concern the whole job
ALIKE = ("buffers", "launch_barrier", "runtime_split_send_recv", "soft_wait_ms")
_SYNC = DistributedStrategy()


def check_further(
    first: DistributedStrategy | None,
    strategy: DistributedStrategy | None,
    number: int,
    steps: int | None,
) -> None:
    """Checks that a further optimizer may join a job.

    Args:
        first: the strategy of the job's first optimizer.
        strategy: the strategy of the further one.
        number: the number of the further one.
        steps: the number that the job has taken; None if it has not begun.

    Raises:
        RuntimeError: the job has taken steps already.
        ValueError: it does not fit the others.
    """
    if steps is not None:
        raise RuntimeError(
            "fleet.distributed_optimizer: expected every optimizer before the first step, got "
            f"a further one after step {steps}: the servers' plan is made for all of them"
        )
    if overlaps(strategy) or overlaps(first):
        raise ValueError(
            "overlap: expected one optimizer, got a further one: a backward of its loss may "
            "pass through the other's parameters, and their gradients would leave as those of "
            "the other's step; leave overlap off"
        )
    for key in ALIKE:
        one, other = ((s or _SYNC).value(f"a_sync_configs.{key}") for s in (first, strategy))
        if one != other:
            raise ValueError(
                f"a_sync_configs[{key!r}]: expected the same for every optimizer of a job, got "
                f"{one!r} for optimizer 0 and {other!r} for optimizer {number}"
            )


def overlaps(strategy: DistributedStrategy | None) -> bool:
    """Whether gradients are sent while a backward runs."""
    return strategy is not None and bool(strategy.a_sync_configs["overlap"])


# ---- joint plan ----
#
# The plan of a job, from the script's settings: one optimizer, or several.


@dataclass(frozen=True, slots=True)
class Distributed:
    """An optimizer of the job, with the script's settings for its steps.

    Attributes:
        optimizer: the script's optimizer, distributed.
        strategy: the modes of its parameters; None: sync.
        compression: of its gradients, by pattern of parameter names; None: uncompressed.
    """

    optimizer: DistributedOptimizer
    strategy: DistributedStrategy | None
    compression: Mapping[str, str] | None


def first_groups(distributed: Sequence[Distributed]) -> list[int]:
    """The number in the plan of each optimizer's first group."""
    sizes = [len(each.optimizer.param_groups) for each in distributed]
    return [sum(sizes[:number]) for number in range(len(sizes))]


def joint_plan(
    role: RoleMaker,
    tensors: Mapping[str, torch.Tensor],
    distributed: Sequence[Distributed],
    tables: Tables | None,
) -> Plan:
    """The plan for these optimizers as they are now.

    Args:
        role: of this process; gives the numbers of trainers and servers.
        tensors: parameters and buffers of all models, by name.
        distributed: the optimizers, in the order in which they were made.
        tables: of the job's embeddings, if there are any.

    Raises:
        ValueError: a parameter is in no registered model, or in two optimizers; or optimizers want
            their gradients clipped differently where servers clip them.
    """
    groups = [group for each in distributed for group in each.optimizer.param_groups]
    owners = [n for n, each in enumerate(distributed) for _ in each.optimizer.param_groups]
    rules = [
        rule_of(each.optimizer.inner, group)
        for each in distributed
        for group in each.optimizer.param_groups
    ]
    described, added = ([], []) if tables is None else tables.described(groups, owners)
    rules += [rule for rule, _ in added]
    owners += [owner for _, owner in added]
    of_name = _groups(distributed)
    sent_as = [_sent_as(each, n, of_name, rules, owners) for n, each in enumerate(distributed)]
    listed = [
        (
            name,
            tuple(tensors[name].shape),
            str(tensors[name].dtype).removeprefix("torch."),
            of_name.get(name),
        )
        for name in (*of_name, *(name for name in tensors if name not in of_name))
    ]
    plan = plan_parameters(
        listed,
        rules,
        trainers=role.trainers,
        servers=max(1, len(role.server_endpoints)),
        tables=described,
        optimizers=[
            OptimizerRequest(
                [group for group, owner in enumerate(owners) if owner == number],
                lanes_of(each.strategy),
                sent_as[number],
                _clip(each.optimizer),
            )
            for number, each in enumerate(distributed)
        ],
    )
    if plan.clips_on_servers and unclipped(groups):
        raise ValueError(
            "grad_clip: need_clip=False: expected a mode in which trainers clip, got sync with "
            f"{plan.trainers} trainers, where servers clip all merged gradients"
        )
    return plan


def _clip(optimizer: DistributedOptimizer) -> Clip | None:
    """The clipping of merged gradients; None with dgc, where trainers clip before they compress."""
    clip = optimizer.grad_clip
    return None if clip is None or optimizer.dgc is not None else clip.to_clip()


def _sent_as(
    each: Distributed, number: int, of_name: dict[str, int], rules: list[Rule], owners: list[int]
) -> Mapping[str, str] | None:
    """The compression of an optimizer's gradients.  With dgc its large parameters have update rules
    of their own, which are added: plain SGD.

    Args:
        number: the optimizer's number.
        of_name: the group of each parameter; it is changed.
        rules, owners: the rules of all groups, and their optimizers; the lists grow.

    Raises:
        ValueError: dgc and ``compression`` are both given.
    """
    dgc = each.optimizer.dgc
    if dgc is None:
        return each.compression
    if each.compression is not None:
        raise ValueError(
            "compression: excludes strategy.dgc, which itself compresses gradients; give one "
            "of the two"
        )
    dgc.check()  # groups may have been added
    added: dict[int, int] = {}  # group of the script -> group of the plan
    patterns: dict[str, str] = {}
    for parameter, index in dgc.groups().items():
        if index not in added:
            added[index] = len(rules)
            rules.append(dgc.rule(index))
            owners.append(number)
        name = each.optimizer.names[parameter]
        of_name[name] = added[index]
        patterns[glob.escape(name)] = "sparse"
    return patterns or None


def _groups(distributed: Sequence[Distributed]) -> dict[str, int]:
    """The number of each parameter's group, by name, in the order of the optimizers.

    Raises:
        ValueError: a parameter is in no registered model, or in two optimizers.
    """
    found: dict[str, int] = {}
    seen: dict[torch.Tensor, int] = {}
    for number, (each, first) in enumerate(
        zip(distributed, first_groups(distributed), strict=True)
    ):
        for parameter, group in groups_of(each.optimizer).items():
            if seen.setdefault(parameter, number) != number:
                name = each.optimizer.names.get(parameter, "the proxy parameter of a table")
                raise ValueError(
                    f"parameter {name!r}: expected in one optimizer of the job, got it in "
                    f"optimizer {seen[parameter]} and in optimizer {number}: servers hold one "
                    "state of it; give each optimizer parameters of its own"
                )
            if not isinstance(parameter, ProxyParameter):
                found[each.optimizer.names[parameter]] = first + group
    return found


def groups_of(
    optimizer: DistributedOptimizer, former: Collection[torch.Tensor] = ()
) -> dict[torch.Tensor, int]:
    """The index of each parameter's group, in the optimizer's order.

    Args:
        former: parameters that a model had until others replaced them.

    Raises:
        ValueError: a parameter is in no registered model.
    """
    groups: dict[torch.Tensor, int] = {}
    for index, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            known = parameter in optimizer.names or parameter in former
            if not known and not isinstance(parameter, ProxyParameter):
                raise ValueError(
                    f"parameter {number} of group {index}, of shape {list(parameter.shape)}, "
                    "is in no registered model "
                    "(where an embedding has moved, make the optimizer after "
                    "fleet.distributed_model): "
                    "pass every model to fleet.distributed_model first"
                )
            groups[parameter] = index
    return groups


# ---- collectives among trainers ----
#
# Collectives among the trainers of a job with servers: means of dense gradients, and sums of batch
# norms.


def connect_trainers(
    communicator: Communicator,
    models: Sequence[nn.Module],
    optimizers: Sequence[DistributedOptimizer],
    strategy: DistributedStrategy | None,
) -> None:
    """Connects the trainers of a job for their collectives; all have joined when it returns.

    Batch norms that sum over trainers need all trainers of the plan in each forward, so a job with
    them ends if a trainer is lost.

    Args:
        communicator: of a trainer that has joined.
        models, optimizers: of the script.
        strategy: determines how gradients travel; None: all of one dtype at once.

    Raises:
        PServerError: other trainers have not joined.
        ValueError: the trainers do not divide into rows; or a grace period is set, and preempted
            trainers cannot leave.
    """
    found = connect_batch_norms(models, None, 1)
    means = communicator.dense_allreduce = dense_means_of(communicator, optimizers, strategy, found)
    if isinstance(means, DenseAllreduce) and found:
        connect_batch_norms(
            models,
            lambda vector, seconds: means.total([vector], "a batch norm", seconds)[0],
            communicator.plan.trainers,
            Connection.from_environment().start_timeout_seconds,
        )


# ---- reports ----
#
# A script's reports of its training, for readers of metrics.


class Reported(Collector):
    """A trainer's reports: the number of samples, and the last value of each name.

    Attributes:
        heard: called with the values of each report.
        wrong_lines: that datasets have left out.
    """

    def __init__(self) -> None:
        self.heard: Callable[[Mapping[str, float]], None] = lambda values: None
        self.wrong_lines = 0
        self._wrong_guard = threading.Lock()  # guards it: passes read in threads of their own
        self._samples = 0
        self._values: dict[str, float] = {}

    def add(self, samples: int, values: dict[str, float]) -> None:
        """Counts samples, and replaces the last values."""
        self._samples += samples
        self._values = {**self._values, **values}
        self.heard(values)

    def leave_out(self, lines: int) -> None:
        """Counts wrong lines that a dataset has left out.  Any thread may call it."""
        with self._wrong_guard:
            self.wrong_lines += lines

    def now(self) -> tuple[int, dict[str, float]]:
        """The samples, and the last value of each name."""
        return self._samples, self._values

    def collect(self) -> Iterator[Metric]:
        """See :class:`Collector`."""
        samples: dict[tuple[str, ...], float] = {(): float(self._samples)}
        yield current("pserver_samples_total", "Samples that this trainer has reported.", samples)
        yield current(
            "pserver_reported",
            "The last value that the script has reported under a name.",
            {(name,): value for name, value in self._values.items()},
            "name",
        )


# ---- job ----


log = logging.getLogger(__name__)


class Job:
    """A process's part of a job with servers, or of one that trains alone: its role, its models,
    its optimizer, its connection.

    The script's thread uses it.

    Attributes:
        divided: whether the model is divided, so that no trainer has a whole one.
        strategy: of ``fleet.init``, or of a collective job's optimizer.
        first: the strategy of ``fleet.init``, as given there.
        models: the registered models, in order.
        optimizers: the distributed optimizers, in order.
        passes: the passes over data that ``fleet.shard`` has divided.
        saved: the last checkpoint that was written or read here.
        claims: the paths that it writes checkpoints to.
        parts: saves of which the servers write their parts.
        tables: of the models' DistributedEmbeddings, if any, once the optimizer is distributed.
        splits_data: whether ``fleet.shard`` gives each trainer its own part.
        process: the job's settings of this process.
        undo: the actions to undo at the job's end.
        reported: the script's reports of its training.
        loggers: metrics of the loggers that these reports go to; None: there are none.
        position: the position in the data of ``fleet.shard``.
        saves: follows the script, and writes automatic checkpoints, if they are set.
        samples: deals out samples to the trainers.
        early: the reason why this trainer has not joined yet: see [Note: further optimizers of a
            job under way] in job.py.
    """

    divided = False

    def __init__(self, role: RoleMaker, strategy: DistributedStrategy | None) -> None:
        self.role = role
        self.strategy = strategy
        self.first = copy.deepcopy(strategy)  # the script may change its own
        self.models: list[nn.Module] = []
        self.optimizers: list[DistributedOptimizer] = []
        self.early: PartialPlan | None = None
        self._communicator: Communicator | None = None
        self.saved: Saved | None = None
        self.claims = Claims()
        self.parts = PartSaves(self)
        self.tables: Tables | None = None
        self.passes = Passes(role.trainer_id, self.agree)
        self.splits_data = True
        self.process = ProcessSettings()
        self._files = FileSystem()
        self.undo = ExitStack()
        self.reported = Reported()
        self.loggers: Collector | None = None
        self.position = DataPosition()
        self.saves: Saves | None = None
        self.samples = JobSamples()
        self._arrival: LateArrival | None = None
        self._distributed: list[Distributed] = []
        self._hooks: list[RemovableHandle] = []  # refresh parameters before a forward pass

    def apply(self, strategy: DistributedStrategy | None) -> None:
        """Applies a strategy's settings for the whole job, as opposed to one optimizer, from now
        on.
        """
        if strategy is not None:
            self.process.apply(execution_of(strategy))
            self.splits_data = self.splits_data and strategy.split_data
            self._files.log_in(strategy, self.process)

    def dump(self, optimizer: DistributedOptimizer, strategy: DistributedStrategy | None) -> None:
        """Dumps the steps of the last optimizer, if its strategy asks for it.

        Raises:
            ValueError: a parameter to dump does not exist.
        """
        settings = dump_of(strategy or self.strategy)
        if settings.path:
            number, trained = len(self.optimizers) - 1, optimizer.trained()
            dump = ModuleDump(settings, self.modules(), trained, self.role.trainer_id, number)
            optimizer.dump = dump
            self.undo.callback(dump.close)

    def follow(self) -> None:
        """Called when an optimizer was distributed, and has joined: the job may load a checkpoint,
        and save its steps.
        """
        self.passes.ask()
        if self.saves is not None:
            self.saves.joined()

    def restore(self) -> None:
        """Restores the process's state from before the job."""
        self.undo.close()
        self._files.leave()
        self.process.restore()

    def place_in_data(self) -> tuple[int, int]:
        """This trainer's part of the data, and the number of parts."""
        return (self.role.trainer_id, self.role.trainers) if self.splits_data else (0, 1)

    @property
    def communicator(self) -> Communicator | None:
        """The connection to the servers; None before it exists, and in a process that trains alone.

        Raises:
            PartialPlan: the job's other trainers have further optimizers.
        """
        if self.early is not None:
            raise self.early
        return self._communicator

    def look_ahead(self) -> LookAhead | None:
        """The lookups of coming steps; None where the strategy asks for none."""
        return None if self._communicator is None else self._communicator.look_ahead

    def table_store(self) -> TableStore | None:
        """The rows of the job's tables, on servers or here; None without tables."""
        if self.tables is None:
            return None
        from trainer.checkpoint.tables import store_of  # imports numba

        return store_of(self.tables, self.communicator, [each.inner for each in self.optimizers])

    @property
    def is_first(self) -> bool:
        """Whether this trainer is the leader; see :class:`LiveTrainers`."""
        there = self.communicator
        return self.role.trainer_id == 0 if there is None else there.live.is_leader

    def announce(self) -> None:
        """Announces to the servers that this trainer has started; does nothing in other roles."""
        if self.role.role is Role.TRAINER and not Connection.from_environment().plan_only:
            self._arrival = LateArrival(self.role)

    def finish(self) -> None:
        """Leaves when every trainer has finished.

        Raises:
            PServerError: the job has failed.
        """
        self._arrived()
        TRACING.finish(failed=sys.exc_info()[0] is not None)
        for each in self.optimizers:
            each.end()
        if self.saves is not None:
            self.saves.finish()
        if self.communicator is not None:
            self.communicator.finish()
        connect_batch_norms(self.models, None, 1)

    def _arrived(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.joined()

    def agree(self, topic: str, text: str) -> str | None:
        """The text that the first trainer gave for a topic; None while this trainer is not
        connected.
        """
        if self.role.trainers == 1:
            return text
        there = self.communicator
        return None if there is None else there.clients[0].meetings.agree(topic, text)

    @property
    def transport(self) -> str:
        """The transport in use; "local" in a process that trains alone."""
        return "local" if self.communicator is None else self.communicator.transport

    def metrics(self) -> dict[str, float]:
        """See :func:`metrics`."""
        if self.communicator is not None:
            return self.communicator.metrics()
        return {"steps": float(sum(each.steps for each in self.optimizers))}

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module of every registered model, by name; several models are numbered."""
        for index, model in enumerate(self.models):
            prefix = f"model{index}." if len(self.models) > 1 else ""
            yield from ((prefix + name, module) for name, module in named_modules(model))

    def find_tables(self) -> Tables | None:
        """The tables that the models' embeddings look up, if there are any.

        Raises:
            ValueError: two embeddings of one name differ.
        """
        if not any(
            isinstance(parameter, ProxyParameter)
            for model in self.models
            for parameter in model.parameters()
        ):
            return None
        from trainer.communicator.tables import Tables  # imports numba

        self.tables = Tables(self.modules()) or None
        return self.tables

    def register(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        """Divides a model among the trainers; only in a ``divided`` job."""
        raise NotImplementedError

    def loaded(self) -> None:
        """Loads the leader's values into the servers, after a checkpoint has been loaded."""
        if self.communicator is not None:
            self.communicator.push()

    def spread(self) -> None:
        """Gives the servers and every trainer the leader's values of all parameters and buffers;
        the states of optimizers stay.  Every trainer calls this.
        """
        if self.communicator is not None:
            self.communicator.push([])

    def state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The model's state_dict with the servers' values, whole; in a ``divided`` job every
        trainer calls this.
        """
        served = self.served()
        names = {tensor: name for name, tensor in self.tensors().items()} if served else {}
        with without_served_rows():  # those are written chunk by chunk
            state = model.state_dict(keep_vars=True)
        plain = plain_name(model)
        return {
            plain(name): served.get(names.get(value, ""), value)
            for name, value in state.items()
            if torch.is_tensor(value)
        }

    def served(self) -> dict[str, torch.Tensor]:
        """The servers' values of the parameters that trainers step by themselves (the k-step
        modes), and of the buffers that travel with them, by name.
        """
        return {} if self.communicator is None else self.communicator.served()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of every registered model, by name, without the proxy parameters
        of tables; several models are numbered.
        """
        found: dict[str, torch.Tensor] = {}
        for index, model in enumerate(self.models):
            prefix = f"model{index}." if len(self.models) > 1 else ""
            for name, parameter in named_parameters(model):
                if not isinstance(parameter, ProxyParameter):
                    found[prefix + name] = parameter
            found.update({prefix + name: b for name, b in named_buffers(model)})
        return found

    def module_types(self) -> dict[str, str]:
        """The types of the parameters' modules, by the parameters' names."""
        found: dict[str, str] = {}
        for index, model in enumerate(self.models):
            found |= module_types(model, f"model{index}." if len(self.models) > 1 else "")
        return found

    # ---- the optimizers ----

    @property
    def optimizer(self) -> DistributedOptimizer | None:
        """The first optimizer; None before it is distributed."""
        return self.optimizers[0] if self.optimizers else None

    def join(
        self,
        optimizer: torch.optim.Optimizer,
        strategy: DistributedStrategy | None = None,
        grad_clip: GradClip | None = None,
        compression: Mapping[str, str] | None = None,
    ) -> DistributedOptimizer:
        """Joins the servers with one more optimizer.  See [Note: several optimizers] in job.py.

        Raises:
            ValueError: a parameter is another optimizer's, or the optimizers do not fit each other.
            RuntimeError: the job has taken a step already.
            PServerError: a server cannot be reached, or refuses.
        """
        strategy = strategy or self.strategy
        names = {tensor: name for name, tensor in self.tensors().items()}
        if self.optimizers:
            steps = max(each.steps for each in self.optimizers)
            begun = steps or (self._communicator is not None and self._communicator.step)
            number, first = len(self.optimizers), self._distributed[0].strategy
            check_further(first, strategy, number, steps if begun else None)
        check_batch_norms(self.models, self.strategy)
        optimizer = replaced(optimizer, strategy, names, self.module_types())
        tables = self.tables if self.optimizers else self.find_tables()
        number = len(self.optimizers)

        def connect(made: DistributedOptimizer) -> None:
            distributed = list(self._distributed)
            distributed[number : number + 1] = [Distributed(made, strategy, compression)]
            self._connect(distributed)

        overlap, scaling = overlaps(strategy), loss_scaling_of(self.models, optimizer.param_groups)
        check_overlap(overlap, scaling)
        merge = gradient_merge_of(strategy, names)
        dgc = dgc_of(strategy, optimizer)
        if dgc is not None:
            merged = strategy is not None and modes_of(strategy) == (SYNC.name,)
            grad_clip = local_clip(grad_clip, self.role.trainers if merged else 1)
        made = DistributedOptimizer(
            optimizer, names, connect, grad_clip, overlap, tables, merge, dgc
        )
        made.loss_scaling = scaling
        self.optimizers.append(made)
        return made

    def _connect(self, distributed: list[Distributed]) -> None:
        """Joins the servers with the plan for the present optimizers; if it has joined with another
        plan, all trainers leave first.
        """
        plan = joint_plan(_planned(self.role), self.tensors(), distributed, self.tables)
        self._distributed = distributed
        if self.role.role is Role.SINGLE:
            return
        check_steps_together(self.models, plan)
        strategy = distributed[0].strategy
        opens = self._communicator is None and self.early is None and self.role.trainer_id == 0
        level, note = logging.INFO, ""
        if strategy is None:
            note = " (no strategy given)"
        elif opens and is_async_unasked(strategy):
            level = logging.WARNING
            note = "; strategy.a_sync is True unless assigned: assign False for sync mode, or True"
        for lane in plan.lanes:
            log.log(level, "training %s: %s%s", lane.mode, describe(lane, plan.trainers), note)
        if self._communicator is not None:
            self.announce()
            self._communicator.barrier("another plan")
            self._communicator.leave(returns=True)
        try:
            communicator = self._communicator = self._joined(plan, distributed)
        except PartialPlan as error:
            self.early = error
            for each in distributed:
                each.optimizer.early = error
            return
        was_early, self.early = self.early, None
        firsts = first_groups(distributed)
        for number, (each, first) in enumerate(zip(distributed, firsts, strict=True)):
            each.optimizer.attach(communicator, number, first)
            there = communicator.dense_allreduce
            if not (isinstance(there, DenseSteps) and there.arrived):  # otherwise it has them
                # of servers that were started with an earlier job's programs
                steps = [communicator.lanes[lane].step for lane in plan.lanes_of(number)]
                each.optimizer.steps = max(steps, default=0) or each.optimizer.steps
            self._watch(each.optimizer, plan)
        if was_early is not None and len(distributed) == len(self.optimizers):
            self.follow()  # a group was added, and no optimizer

    def _joined(self, plan: Plan, distributed: Sequence[Distributed]) -> Communicator:
        """Joins every server with a plan, and returns the connection."""
        if self.tables is not None:
            self.tables.check_caches(plan)
        strategy = distributed[0].strategy
        wait = strategy is None or strategy.a_sync_configs["launch_barrier"]
        endpoints, own = self.role.server_endpoints, self.role.trainer_id
        deployment = Deployment(plan, endpoints, trainer_id=own, wait_port=wait)
        communicator = Communicator(
            deployment,
            self.tensors(),
            [each.optimizer.inner for each in distributed],
            start_rows=None if self.tables is None else self.tables.start_rows(),
            options=options_of(strategy),
            incarnation="" if self._arrival is None else self._arrival.incarnation,
        )
        others = (self.tables, self.loggers)
        communicator.page.more += [self.reported, *(each for each in others if each is not None)]
        communicator.page.said = self.reported.now
        communicator.page.position = self.position.now
        communicator.page.settings = self._settings
        communicator.page.wrong_lines = lambda: self.reported.wrong_lines
        communicator.hand_over = self.undo.close  # the folder of checkpoints, too
        if self.saves is not None:
            self.saves.connected(communicator)
        communicator.start(lambda: None if self._arrival is None else self._arrival.check())
        self._arrived()
        connect_trainers(communicator, self.models, [d.optimizer for d in distributed], strategy)
        if self.tables is not None:
            self.tables.connect(communicator.rows_of, self._pull_all, communicator.look_ahead)
        for hook in self._hooks:
            hook.remove()
        fetches = any(lane.independent_recv_thread for lane in plan.lanes)
        # with several optimizers values are taken in at step(): the forward of one model may run
        # between another's forward and backward
        self._hooks = [
            model.register_forward_pre_hook(lambda *_: _refresh(communicator))
            for model in self.models
            if fetches and len(distributed) == 1
        ]
        return communicator

    def _settings(self) -> dict[str, str]:
        """The script's settings in words, for who watches the job."""
        size = self.position.batch_size
        return {
            "script": Path(sys.argv[0]).name,
            "arguments": shlex.join(sys.argv[1:]),
            **({"batch size": f"{size} a trainer"} if size else {}),
        }

    def _pull_all(self, asked: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The servers' rows, by table, of the present connection."""
        assert self.communicator is not None, "a lookup of served rows"
        assert self.communicator.lookups is not None, "the plan has tables"
        return self.communicator.lookups.pull_all(asked)

    def _watch(self, optimizer: DistributedOptimizer, plan: Plan) -> None:
        trained, lanes = optimizer.trained(), optimizer.lanes
        optimizer.watch(changes_of(plan, self.role.trainer_id, trained, self.tables, lanes))


def _planned(role: RoleMaker) -> RoleMaker:
    """The role for which a plan is made: in a probe servers wait for its few trainers."""
    given = Connection.from_environment()
    if not given.probe or given.plan_only:
        return role
    return replace(role, trainers=given.probe_trainers)


def _refresh(communicator: Communicator) -> None:
    """Takes in parameters that were received between steps, before a forward pass; not in a
    backward that runs a forward again.
    """
    if torch._C._current_graph_task_id() == -1:
        communicator.refresh()


# ---- present job ----
#
# The present job of this process: at most one at a time.


_job: Job | None = None


def present() -> Job:
    """The present job.

    Raises:
        RuntimeError: ``fleet.init()`` has not been called.
    """
    if _job is None:
        raise RuntimeError("call fleet.init() first")
    return _job


def present_or_none() -> Job | None:
    """The present job; None if there is none."""
    return _job


def is_present(job: Job) -> bool:
    """Whether this is the present job."""
    return job is _job


def begin(job: Job) -> None:
    """Makes a job the present one.

    Raises:
        RuntimeError: there is one already.
    """
    global _job
    if _job is not None:
        raise RuntimeError(
            "fleet.init() was called before; call fleet.finish() to end that job first"
        )
    _job = job


def end() -> Job | None:
    """Ends the present job.

    Returns:
        The job that was present, if any.
    """
    global _job
    job, _job = _job, None
    return job


def distributed(job: Job) -> DistributedOptimizer:
    """The job's optimizer.

    Raises:
        RuntimeError: there is none yet.
    """
    if job.optimizer is None:
        raise RuntimeError("call fleet.distributed_optimizer first")
    return job.optimizer


# ---- queries ----
#
# The queries of a script about its job: the role of this process, the job's processes, counters.
#
# ``trainer/fleet.py`` offers these calls.  In a process that trains alone::
#
#   fleet.init()
#   fleet.is_worker()                           # True
#   fleet.worker_index(), fleet.worker_num()    # 0, 1
#   fleet.server_num(), fleet.transport()       # 0, "local"
#   fleet.finish()


def is_worker() -> bool:
    """The role of this process, as a truth.

    Returns:
        Whether it is a trainer.
    """
    return present().role.role is not Role.PSERVER


def is_server() -> bool:
    """The role of this process, as a truth.

    Returns:
        Whether it is a parameter server.
    """
    return present().role.role is Role.PSERVER


def is_first_worker() -> bool:
    """The role of this process, as a truth.

    Returns:
        Whether it is trainer 0.
    """
    return is_worker() and present().role.trainer_id == 0


def worker_index() -> int:
    """The place of this process among the trainers.

    Returns:
        This trainer's number, from 0.
    """
    return present().role.trainer_id


def worker_num() -> int:
    """The size of the job.

    Returns:
        The number of trainers.
    """
    return present().role.trainers


def server_num() -> int:
    """The size of the job.

    Returns:
        The number of servers; 0 if the process trains alone.
    """
    return len(present().role.server_endpoints)


def server_index() -> int:
    """The place of this process among the servers.

    Returns:
        This server's place in the list of endpoints, from 0.

    Raises:
        RuntimeError: the process is not a server.
    """
    if not is_server():
        raise RuntimeError("this process is a trainer, not a server")
    return present().role.server_index


def server_endpoints() -> list[str]:
    """The servers' control endpoints.

    Returns:
        HOST:PORT of every server.
    """
    return list(present().role.server_endpoints)


def worker_endpoints() -> list[str]:
    """The trainers' endpoints, of which there are none: trainers listen on no port.

    Returns:
        Always an empty list.  The number of trainers is :func:`worker_num`.
    """
    return []


def metrics() -> dict[str, float]:
    """Counters of this trainer.

    Returns:
        By name: see :meth:`trainer.communicator.communicator.Communicator.metrics`.  In a process
        that trains alone there is only "steps".
    """
    return present().metrics()


def variable_bytes() -> dict[str, dict[str, int]]:
    """The traffic of each variable since the start.

    Returns:
        By variable: payload "bytes_in" and "bytes_out", after compression.  Empty in a job without
        servers.
    """
    job = present()
    return {} if job.communicator is None else job.communicator.variable_bytes()


def transport() -> str:
    """How tensors travel.

    Returns:
        "shm", "tcp", "grpc"; "gloo" or "nccl" without servers; "local" if the process trains alone.
    """
    return present().transport


# ---- table administration ----
#
# The calls of a script on its tables between steps: their status, and dropping rows.
#
# ``trainer/fleet.py`` offers these calls.


DAYS = number_setting(lambda value: value >= 0, "of 0 or more that is finite")
THRESHOLD = optional(number_setting(lambda value: True, "that is finite"))


def table_status() -> dict[str, dict[str, int]]:
    """The status of every table, over all servers.

    Any trainer may ask at any time, without waiting for others.

    Returns:
        By table: "rows", "bytes_held", and counters since the start ("admitted", "evicted", ...).
        Empty without tables.

    Raises:
        PServerError: a server does not answer.

    ::

        fleet.init()
        model = fleet.distributed_model(DistributedEmbedding(8, name="emb"))
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        model(torch.tensor([3, 5])).sum().backward()
        optimizer.step()
        fleet.table_status()["emb"]["rows"]  # 2
    """
    job = present()
    if job.tables is None:
        return {}
    if job.communicator is None:
        return job.tables.status()
    found: dict[str, Counter[str]] = {}
    for client in job.communicator.clients:
        for table in client.table_status():
            held = {"bytes_held": table.bytes_held, **table.counters, "rows": table.rows}
            found.setdefault(table.name, Counter()).update(held)
    return {name: dict(sorted(counted.items())) for name, counted in sorted(found.items())}


def epoch_status() -> dict[int, dict[str, int]]:
    """Counts the samples of the epochs that are under way, or of the last one.

    Server 0 counts them where it deals them out in leases; any trainer may ask at any time, without
    waiting for others.  Samples are batches where the data has no numbers of samples.

    Returns:
        By the number of the pass: "samples" (0 until a trainer has met the end of the data),
        "decided" (in steps that count), "leased" (to trainers, and in no decided step yet),
        "skipped", "handed_back" (of lost trainers; dealt out again; counted when the end of their
        data is known) and "left_out".
        Empty without servers, and where no leases deal out the data.

    Raises:
        PServerError: server 0 does not answer.

    ::

        for batch in fleet.shard(loader):
            ...
        fleet.epoch_status()  # {1: {"samples": 60000, "decided": 60000, "leased": 0, ...}}
    """
    job = present()
    return {} if job.communicator is None else job.communicator.clients[0].epoch_status()


def shrink(
    threshold: float | None = None, days: float = 1.0, tables: Collection[str] = ()
) -> dict[str, int]:
    """Applies time decay, then drops rows below the score threshold or past their TTL.

    Every trainer calls this, between steps; when it returns, all servers have done it.

    Args:
        threshold: replaces each table's own ``delete_threshold``.
        days: the days since the last call.
        tables: only these; empty for all.

    Returns:
        The number of rows dropped, by table (with servers on the leader alone; empty elsewhere).

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: the job has no such table, ``days`` is below 0, or a number is not finite.
        RuntimeError: ``distributed_optimizer`` has not been called.
        PServerError: a server is lost.

    ::

        fleet.shrink(days=1.0)  # {"emb": 120} where 120 rows of the table "emb" were dropped
    """
    job = present()
    known = [] if job.tables is None else job.tables.names
    threshold = THRESHOLD.check("shrink: threshold", threshold)
    days = DAYS.check("shrink: days", days)
    names = _names(tables, known)
    optimizer = distributed(job)
    optimizer.flush()
    optimizer.barrier("shrink")
    removed: Counter[str] = Counter()
    if job.communicator is None and job.tables is not None:
        removed.update(job.tables.shrink(days, threshold, names or known))
    elif job.communicator is not None and job.is_first:
        clients = job.communicator.clients
        with ThreadPoolExecutor(len(clients), "shrink") as pool:
            for found in pool.map(lambda each: each.shrink(days, threshold, names), clients):
                removed.update(found)
    optimizer.barrier("shrunk")
    if (look_ahead := job.look_ahead()) is not None:
        look_ahead.changed()
    return dict(sorted(removed.items()))


def _names(tables: Any, known: Collection[str]) -> list[str]:
    """The chosen tables.

    Raises:
        TypeError: they are not a list of names.
        ValueError: the job has no such table.
    """
    if isinstance(tables, str | bytes) or not isinstance(tables, Collection):
        refuse_type("shrink: tables", "a list of names", tables)
    names = list(tables)
    for name in names:
        if not isinstance(name, str):
            refuse_type("shrink: tables", "a list of names", tables)
        if name not in known:
            raise ValueError(
                f"shrink: expected tables among {', '.join(known) or 'none'}, got {name!r}"
            )
    return names
