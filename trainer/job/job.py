"""A job: what ``fleet.init`` begins and ``fleet.finish`` ends."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pserver.checkpoint.checkpoint import Claims, Saved
from pserver.errors import PartialPlan
from trainer.collective.elastic_means import DenseSteps
from trainer.communicator.communicator import Communicator, options_of
from trainer.communicator.gradient_changes import changes_of
from trainer.communicator.trace import TRACING
from trainer.compat.flags import ProcessSettings
from trainer.embedding.proxy import ProxyParameter
from trainer.embedding.rows import without_served_rows
from trainer.environment.environment import Connection, Role, RoleMaker
from trainer.gradients.dgc import dgc_of, local_clip
from trainer.gradients.gradient_merge import gradient_merge_of
from trainer.job.arrival import Arrival
from trainer.job.data_position import DataPosition
from trainer.job.file_system import FileSystem
from trainer.job.further_optimizers import check_further, overlaps
from trainer.job.joint_plan import Distributed, first_groups, joint_plan
from trainer.job.met_trainers import connect_trainers
from trainer.job.passes import Passes
from trainer.job.reported import Reported
from trainer.job.sample_leases import JobSamples
from trainer.job.saves import Saves
from trainer.modules.dump import ModuleDump
from trainer.modules.loss_scaling import check_overlap, loss_scaling_of
from trainer.modules.sync_batch_norm import (
    check_batch_norms,
    check_steps_together,
    connect_batch_norms,
)
from trainer.optimizer import DistributedOptimizer
from transpiler.clip import GradClip
from transpiler.ir.module_types import module_types
from transpiler.ir.plain_names import named_buffers, named_modules, named_parameters, plain_name
from transpiler.plan.lanes import describe
from transpiler.plan.modes import SYNC
from transpiler.plan.plan import Deployment, Plan
from transpiler.strategy.execution import dump_of, execution_of
from transpiler.strategy.from_strategy import modes_of
from transpiler.strategy.strategy import DistributedStrategy
from transpiler.strategy.update_rules import replaced

if TYPE_CHECKING:
    from trainer.communicator.tables import Tables

log = logging.getLogger(__name__)


class Job:
    """A process's part of a job with servers, or of one that trains alone: its role, its models,
    its optimizer, its connection.

    The script's thread uses it.

    Attributes:
        divided: whether no trainer has a whole model.
        strategy: of ``fleet.init``, or of a collective job's optimizer.
        first: that of ``fleet.init`` as it was there.
        models: that were registered, in order.
        optimizers: once they are distributed, in order.
        passes: over data that ``fleet.shard`` has divided.
        saved: the last checkpoint that was written or read here.
        claims: the paths that it writes checkpoints to.
        tables: once the optimizer is distributed, where a model has embeddings of ours.
        splits_data: whether ``fleet.shard`` gives each trainer its own part.
        process: what the job has set in this process.
        undo: what the job's end takes back.
        reported: what the script has said of its training.
        position: in the data of ``fleet.shard``.
        saves: follows the script, and writes checkpoints, where the job does that by itself.
        samples: how they are dealt out to the trainers.
        early: why this trainer has not joined yet: see [Note: further optimizers of a job under
            way] in joint_plan.py.
    """

    divided = False

    def __init__(self, role: RoleMaker, strategy: DistributedStrategy | None) -> None:
        self.role = role
        self.strategy = strategy
        self.first = copy.deepcopy(strategy)  # which the script may change
        self.models: list[nn.Module] = []
        self.optimizers: list[DistributedOptimizer] = []
        self.early: PartialPlan | None = None
        self._communicator: Communicator | None = None
        self.saved: Saved | None = None
        self.claims = Claims()
        self.tables: Tables | None = None
        self.passes = Passes(role.trainer_id, self.agree)
        self.splits_data = True
        self.process = ProcessSettings()
        self._files = FileSystem()
        self.undo = ExitStack()
        self.reported = Reported()
        self.position = DataPosition()
        self.saves: Saves | None = None
        self.samples = JobSamples()
        self._arrival: Arrival | None = None
        self._distributed: list[Distributed] = []
        self._hooks: list[RemovableHandle] = []  # that refresh at the entry of a forward

    def take(self, strategy: DistributedStrategy | None) -> None:
        """Settings of the whole job, not of one optimizer, act from now on."""
        if strategy is not None:
            self.process.take(execution_of(strategy))
            self.splits_data = self.splits_data and strategy.split_data
            self._files.take(strategy, self.process)

    def dump(self, optimizer: DistributedOptimizer, strategy: DistributedStrategy | None) -> None:
        """Lets the steps of the last optimizer be dumped, where its strategy asks for it.

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
        """An optimizer was distributed, and has joined: the job may take up a checkpoint, and its
        steps be saved.
        """
        self.passes.ask()
        if self.saves is not None:
            self.saves.joined()

    def restore(self) -> None:
        """The process is again as it was before the job."""
        self.undo.close()
        self._files.leave()
        self.process.restore()

    def place_in_data(self) -> tuple[int, int]:
        """Which part of the data this trainer gets, and of how many parts."""
        return (self.role.trainer_id, self.role.trainers) if self.splits_data else (0, 1)

    @property
    def communicator(self) -> Communicator | None:
        """The connection to the servers; None before there is one, and in a process that trains
        alone.

        Raises:
            PartialPlan: the job's other trainers have further optimizers.
        """
        if self.early is not None:
            raise self.early
        return self._communicator

    @property
    def is_first(self) -> bool:
        """Whether this trainer does what one does for all: trainer 0, or who stands in for it."""
        there = self.communicator
        return self.role.trainer_id == 0 if there is None else there.roll.is_first

    def announce(self) -> None:
        """Says to the servers that this trainer has started; nothing in other roles."""
        if self.role.role is Role.TRAINER and not Connection.from_environment().plan_only:
            self._arrival = Arrival(self.role)

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
        """What the first trainer said about a topic; None while this one is not connected."""
        if self.role.trainers == 1:
            return text
        there = self.communicator
        return None if there is None else there.clients[0].agree(topic, text)

    @property
    def transport(self) -> str:
        """The transport in use; "local" in a process that trains alone."""
        return "local" if self.communicator is None else self.communicator.transport

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
        """Divides a model among the trainers; only where the job is ``divided``."""
        raise NotImplementedError

    def loaded(self) -> None:
        """A checkpoint has been taken into the trainers' values: the servers get them, too."""
        if self.communicator is not None:
            self.communicator.push()

    def state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The model's state_dict as servers have it, whole; where the job is ``divided`` every
        trainer calls this.
        """
        served = self.served()
        names = {tensor: name for name, tensor in self.tensors().items()} if served else {}
        with without_served_rows():  # which are written chunk by chunk
            state = model.state_dict(keep_vars=True)
        plain = plain_name(model)
        return {
            plain(name): served.get(names.get(value, ""), value)
            for name, value in state.items()
            if torch.is_tensor(value)
        }

    def served(self) -> dict[str, torch.Tensor]:
        """The servers' values of those parameters that trainers step by themselves (the k-step
        modes), by name.
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
        """The types of the modules that parameters are of, by the parameters' names."""
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
        """Joins the servers with one more optimizer.  See [Note: several optimizers] in
        joint_plan.py.

        Raises:
            ValueError: a parameter is another optimizer's, or the two do not go together.
            RuntimeError: the job has taken a step already.
            PServerError: a server cannot be reached, or says no.
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
        """Joins the servers, with the plan for the optimizers as they are now; where it has joined
        with another plan, all trainers leave first.
        """
        plan = joint_plan(_planned(self.role), self.tensors(), distributed, self.tables)
        self._distributed = distributed
        if self.role.role is Role.SINGLE:
            return
        check_steps_together(self.models, plan)
        strategy = distributed[0].strategy
        for lane in plan.lanes:
            note = "" if strategy is not None else " (no strategy given)"
            log.info("training %s: %s%s", lane.mode, describe(lane, plan.trainers), note)
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
            if not (isinstance(there, DenseSteps) and there.arrived):  # otherwise it was told
                # of servers that go on with what a job has left
                steps = [communicator.lanes[lane].step for lane in plan.lanes_of(number)]
                each.optimizer.steps = max(steps, default=0) or each.optimizer.steps
            self._watch(each.optimizer, plan)
        if was_early is not None and len(distributed) == len(self.optimizers):
            self.follow()  # a group was added, and no optimizer

    def _joined(self, plan: Plan, distributed: Sequence[Distributed]) -> Communicator:
        """The connection with a plan, when every server has let this trainer in."""
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
        communicator.page.more += [self.reported, *([] if self.tables is None else [self.tables])]
        communicator.page.said = self.reported.now
        communicator.page.position = self.position.now
        communicator.hand_over = self.undo.close  # the folder of checkpoints, too
        if self.saves is not None:
            self.saves.connected(communicator)
        communicator.start(lambda: None if self._arrival is None else self._arrival.check())
        self._arrived()
        connect_trainers(communicator, self.models, [d.optimizer for d in distributed], strategy)
        if self.tables is not None:
            self.tables.connect(communicator.rows_of, self._pull_all)
        for hook in self._hooks:
            hook.remove()
        fetches = any(lane.independent_recv_thread for lane in plan.lanes)
        # of several optimizers values land at step(): the forward of one model may stand between
        # another's and its backward
        self._hooks = [
            model.register_forward_pre_hook(lambda *_: _refresh(communicator))
            for model in self.models
            if fetches and len(distributed) == 1
        ]
        return communicator

    def _pull_all(self, asked: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The servers' rows, by table, of the present connection."""
        assert self.communicator is not None, "a lookup of served rows"
        assert self.communicator.lookups is not None, "the plan has tables"
        return self.communicator.lookups.pull_all(asked)

    def _watch(self, optimizer: DistributedOptimizer, plan: Plan) -> None:
        if not overlaps(self._distributed[0].strategy):
            trained, lanes = optimizer.trained(), optimizer.lanes
            optimizer.watch(changes_of(plan, self.role.trainer_id, trained, self.tables, lanes))


def _planned(role: RoleMaker) -> RoleMaker:
    """The role that a plan is made for: in a probe servers wait for this trainer alone."""
    given = Connection.from_environment()
    return replace(role, trainer_id=0, trainers=1) if given.probe and not given.plan_only else role


def _refresh(communicator: Communicator) -> None:
    """Takes in parameters that have arrived without a step, at the entry of a forward; not in a
    backward that calls a forward again.
    """
    if torch._C._current_graph_task_id() == -1:
        communicator.refresh()
