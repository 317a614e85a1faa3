"""fleet's job without servers: the trainers average their gradients while backward runs, and each
steps by itself.

The model stays the module that it is: hooks do what DataParallel does around a forward.  A forward
without gradients, as in an evaluation, needs no other trainer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainer.collective.data_parallel import DataParallel
from trainer.collective.parallel_env import (
    current_peers,
    init_parallel_env,
    leave_parallel_env,
    naming_trainers,
)
from trainer.job.data_shard import shard
from trainer.job.job import Job
from trainer.job.joint_plan import groups_of
from trainer.optimizer import DistributedOptimizer
from trainer.role import Role, RoleMaker
from transpiler.clip import GradClip
from transpiler.strategy.refusals import check
from transpiler.strategy.strategy import DistributedStrategy

END = object()  # of a trainer's batches

log = logging.getLogger(__name__)


class CollectiveJob(Job):
    """One trainer's part of a job without servers; a process that trains alone is the only trainer.

    Args:
        role: COLLECTIVE, or SINGLE.

    Raises:
        ValueError: the role is one among servers, or a switch of the strategy has no effect here.
        PServerError: a trainer has not come up; see :func:`trainer.init_parallel_env`.
    """

    kind = "collective"  # which settings of a strategy it reads

    def __init__(self, role: RoleMaker, strategy: DistributedStrategy | None) -> None:
        if role.role not in (Role.COLLECTIVE, Role.SINGLE):
            raise ValueError(
                f"is_collective=True: expected no servers, got the role {role.role.value} with "
                "PSERVER_ENDPOINTS "
                f"{','.join(role.server_endpoints)}"
            )
        check(strategy, self.kind)
        init_parallel_env()
        world = current_peers()
        super().__init__(RoleMaker(Role.COLLECTIVE, world.rank, world.size), strategy)
        self._hooks: list[RemovableHandle] = []
        log.info("training collectively: trainer %d of %d", world.rank, world.size)

    @property
    def transport(self) -> str:
        """The backend: "nccl" where a model is on a GPU, otherwise "gloo"."""
        return "nccl" if any(tensor.is_cuda for tensor in self.tensors().values()) else "gloo"

    def distribute(
        self,
        optimizer: torch.optim.Optimizer,
        grad_clip: GradClip | None,
        compression: Mapping[str, str] | None,
    ) -> DistributedOptimizer:
        """Gives the models trainer 0's values, and makes every backward through them average its
        gradients.

        Raises:
            ValueError: a parameter of the optimizer is in no registered model, or ``compression``
                is given.
            FingerprintMismatch: another trainer's models are others.
        """
        if compression is not None:
            raise ValueError(
                "compression: acts only in a job with parameter servers, and this is one without; "
                "leave it out"
            )
        if self.find_tables() is not None:
            raise ValueError(
                "DistributedEmbedding: expected parameter servers to hold its rows, got a job "
                "without servers"
            )
        check(self.strategy, self.kind)
        names = {tensor: name for name, tensor in self.tensors().items()}
        distributed = CollectiveOptimizer(optimizer, names, grad_clip)
        groups_of(distributed)
        for model in self.models:
            self._attach(model)
        return distributed

    def _attach(self, model: nn.Module) -> None:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            with naming_trainers(), torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor, 0)
            return
        if self.strategy is None:
            wrapped = DataParallel(model)
        else:
            sizes = self.strategy.fuse_grad_size_in_MB, self.strategy.last_comm_group_size_MB
            wrapped = DataParallel(model, None, *sizes, self.strategy.find_unused_parameters)

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            # a copy of the model has these hooks, too
            if module is model and torch.is_grad_enabled():
                return wrapped.before_forward(*args, **kwargs)
            return None

        def after(module: nn.Module, args: Any, outputs: Any) -> Any:
            return (
                wrapped.after_forward(outputs)
                if module is model and torch.is_grad_enabled()
                else None
            )

        self._hooks += [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after),
        ]

    def agree(self, topic: str, text: str) -> str | None:
        """What the first trainer said about a topic."""
        return current_peers().store.compare_set(f"agree/{topic}", "", text).decode()

    def shard(self, loader: Iterable[Any], seed: int | None) -> Iterable[Any]:
        """See :func:`trainer.fleet.shard`."""
        mine = shard(loader, self.role.trainers, self.role.trainer_id, seed, self.passes)
        return (
            mine
            if self.role.trainers == 1
            else LockstepBatches(mine, self.role.trainers, self.role.trainer_id)
        )

    def finish(self) -> None:
        """The same as :meth:`close`."""
        self.close()

    def close(self) -> None:
        """Leaves; the models are plain modules again."""
        for hook in self._hooks:
            hook.remove()
        steps = 0 if self.optimizer is None else self.optimizer.steps
        leave_parallel_env(
            f"it finished after {steps} steps; fleet.shard gives all trainers equally many"
        )


class CollectiveOptimizer(DistributedOptimizer):
    """The optimizer of a job without servers: steps on this trainer, with gradients that are the
    same on all.

    Args:
        optimizer: the script's.
        names: of the parameters.
        grad_clip: applied to the mean gradient.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[torch.Tensor, str],
        grad_clip: GradClip | None,
    ) -> None:
        super().__init__(optimizer, names, lambda _: None, grad_clip)
        self._barriers = 0

    def barrier(self, name: str, text: str = "") -> dict[int, str]:
        """See :meth:`DistributedOptimizer.barrier`.

        Raises:
            TrainerLost: one has left.
        """
        self._barriers += 1
        peers = current_peers()
        texts = peers.exchange(f"{name} (barrier {self._barriers})", text, range(peers.size))
        return {rank: told for rank, told in enumerate(texts) if told}

    def __repr__(self) -> str:
        return (
            f"DistributedOptimizer of {current_peers().size} trainers without servers, of "
            f"{self.inner!r}"
        )


class LockstepBatches:
    """A trainer's batches, up to the first step for which some trainer has none.

    Before each batch the trainers tell one another whether they have one.  Without this a trainer
    with fewer batches would end, and the others would block in their next all-reduce.

    Args:
        batches: this trainer's, of any iterable.
        trainers, trainer_id: how many take part, and which one this is.
    """

    def __init__(self, batches: Iterable[Any], trainers: int, trainer_id: int) -> None:
        self._batches, self._trainers, self._trainer_id = batches, trainers, trainer_id

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # what has no length says so

    def __iter__(self) -> Iterator[Any]:
        batches, count = iter(self._batches), 0
        while True:
            batch = next(batches, END)
            have = torch.zeros(self._trainers, dtype=torch.int32)
            have[self._trainer_id] = int(batch is not END)
            with naming_trainers():
                dist.all_reduce(have)
            if not bool(have.all()):
                self._warn(have, count)
                return
            yield batch
            count += 1

    def _warn(self, have: torch.Tensor, count: int) -> None:
        without = [rank for rank, has in enumerate(have.tolist()) if not has]
        if len(without) < self._trainers:
            log.warning(
                "trainers %s have no batch after %d; the others' further ones are left out",
                without,
                count,
            )
