"""A job: what ``fleet.init`` begins and ``fleet.finish`` ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pserver.checkpoint.checkpoint import Claims, Saved
from trainer.collective.dense_allreduce import dense_allreduce_of
from trainer.communicator.communicator import Communicator
from trainer.communicator.gradient_changes import changes_of
from trainer.communicator.options import options_of
from trainer.embedding.proxy_parameter import ProxyParameter
from trainer.embedding.served_rows import without_served_rows
from trainer.job.arrival import Arrival
from trainer.job.passes import Passes
from trainer.optimizer import DistributedOptimizer
from trainer.role import Connection, Role, RoleMaker
from transpiler.distribute import plan_parameters
from transpiler.ir.rules import rule_of
from transpiler.plan.lanes import describe
from transpiler.plan.plan import Deployment, Plan
from transpiler.strategy.from_strategy import lanes_of
from transpiler.strategy.strategy import DistributedStrategy

if TYPE_CHECKING:
    from trainer.communicator.tables import Tables

log = logging.getLogger(__name__)


class Job:
    """A process's part of a job with servers, or of one that trains alone: its role, its models,
    its optimizer, its connection.

    The script's thread uses it.

    Attributes:
        divided: whether no trainer has a whole model.
        compression: how gradients travel, by pattern of parameter names; None: as they are.
        models: that were registered, in order.
        optimizer: once it is distributed.
        passes: over data that ``fleet.shard`` has divided.
        saved: the last checkpoint that was written or read here.
        claims: the paths that it writes checkpoints to.
        tables: once the optimizer is distributed, where a model has embeddings of ours.
    """

    divided = False

    def __init__(self, role: RoleMaker, strategy: DistributedStrategy | None) -> None:
        self.role = role
        self.strategy = strategy
        self.compression: Mapping[str, str] | None = None
        self.models: list[nn.Module] = []
        self.optimizer: DistributedOptimizer | None = None
        self.saved: Saved | None = None
        self.claims = Claims()
        self.tables: Tables | None = None
        self.passes = Passes(role.trainer_id, self.agree)
        self._arrival: Arrival | None = None

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
        if self.optimizer is not None:
            self.optimizer.finish()

    def _arrived(self) -> None:
        arrival, self._arrival = self._arrival, None
        if arrival is not None:
            arrival.joined()

    def agree(self, topic: str, text: str) -> str | None:
        """What the first trainer said about a topic; None while this one is not connected."""
        if self.role.trainers == 1:
            return text
        return None if self.communicator is None else self.communicator.agree(topic, text)

    @property
    def communicator(self) -> Communicator | None:
        """The connection to the servers; None before there is one, and in a process that trains
        alone.
        """
        return None if self.optimizer is None else self.optimizer.communicator

    @property
    def transport(self) -> str:
        """The transport in use; "local" in a process that trains alone."""
        return "local" if self.communicator is None else self.communicator.transport

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Every module of every registered model, by name; several models are numbered."""
        for index, model in enumerate(self.models):
            prefix = f"model{index}." if len(self.models) > 1 else ""
            yield from ((prefix + name, module) for name, module in model.named_modules())

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

    def state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The model's state_dict as servers have it, whole; where the job is ``divided`` every
        trainer calls this.
        """
        served = self.served()
        names = {tensor: name for name, tensor in self.tensors().items()} if served else {}
        with without_served_rows():  # which are written chunk by chunk
            state = model.state_dict(keep_vars=True)
        return {
            name: served.get(names.get(value, ""), value)
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
            found.update(
                {
                    prefix + name: p
                    for name, p in model.named_parameters()
                    if not isinstance(p, ProxyParameter)
                }
            )
            found.update({prefix + name: b for name, b in model.named_buffers()})
        return found

    def connect(self, distributed: DistributedOptimizer) -> Communicator | None:
        """Joins the servers, with the plan for the optimizer as it is now.

        Returns:
            The connection; None in a process that trains alone.

        Raises:
            PServerError: a server cannot be reached, or says no.
        """
        plan = self._plan(distributed)
        if self.role.role is Role.SINGLE:
            return None
        strategy = self.strategy
        for lane in plan.lanes:
            note = "" if strategy is not None else " (no strategy given)"
            log.info("training %s: %s%s", lane.mode, describe(lane, plan.trainers), note)
        wait = strategy is None or strategy.a_sync_configs["launch_barrier"]
        deployment = Deployment(
            plan, self.role.server_endpoints, trainer_id=self.role.trainer_id, wait_port=wait
        )
        start_rows = None if self.tables is None else self.tables.start_rows()
        communicator = Communicator(
            deployment,
            self.tensors(),
            distributed.inner,
            start_rows=start_rows,
            options=options_of(strategy),
            incarnation="" if self._arrival is None else self._arrival.incarnation,
        )
        communicator.start(lambda: None if self._arrival is None else self._arrival.check())
        self._arrived()
        communicator.dense_allreduce = dense_allreduce_of(
            plan, communicator.clients, self.role.trainer_id
        )
        if self.tables is not None and communicator.lookups is not None:
            self.tables.connect(communicator.rows_of, communicator.lookups.pull_all)
        if strategy is None or not strategy.a_sync_configs["overlap"]:
            trained = distributed.trained()
            distributed.watch(changes_of(plan, self.role.trainer_id, trained, self.tables))
        if any(lane.independent_recv_thread for lane in plan.lanes):
            for model in self.models:
                model.register_forward_pre_hook(lambda *_: _refresh(communicator))
        return communicator

    def _plan(self, distributed: DistributedOptimizer) -> Plan:
        tensors, groups = self.tensors(), self._groups(distributed)
        tables, own_rules = (
            ([], []) if self.tables is None else self.tables.described(distributed.param_groups)
        )
        listed = [
            (
                name,
                tuple(tensors[name].shape),
                str(tensors[name].dtype).removeprefix("torch."),
                groups.get(name),
            )
            for name in (*groups, *(name for name in tensors if name not in groups))
        ]
        return plan_parameters(
            listed,
            [rule_of(distributed.inner, group) for group in distributed.param_groups] + own_rules,
            lanes=lanes_of(self.strategy),
            trainers=self.role.trainers,
            servers=max(1, len(self.role.server_endpoints)),
            clip=None if distributed.grad_clip is None else distributed.grad_clip.to_clip(),
            compression=self.compression,
            tables=tables,
        )

    @staticmethod
    def _groups(distributed: DistributedOptimizer) -> dict[str, int]:
        """The index of each parameter's group, by name, in the optimizer's order.

        Raises:
            ValueError: a parameter is in no registered model.
        """
        groups: dict[str, int] = {}
        for index, group in enumerate(distributed.param_groups):
            for number, parameter in enumerate(group["params"]):
                name = distributed.names.get(parameter)
                if isinstance(parameter, ProxyParameter):
                    continue
                if name is None:
                    raise ValueError(
                        f"parameter {number} of group {index}, of shape {list(parameter.shape)}, "
                        "is in no registered model "
                        "(where an embedding has moved, make the optimizer after "
                        "fleet.distributed_model): "
                        "pass every model to fleet.distributed_model first"
                    )
                groups[name] = index
        return groups


def _refresh(communicator: Communicator) -> None:
    """Takes in parameters that have arrived without a step, at the entry of a forward; not in a
    backward that calls a forward again.
    """
    if torch._C._current_graph_task_id() == -1:
        communicator.refresh()
