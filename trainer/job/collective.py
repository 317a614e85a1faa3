"""fleet's job without servers: the trainers average their gradients while backward runs, and each
steps by itself.

The script keeps its own module: hooks do what DataParallel does around a forward.  A forward
without gradients, as in an evaluation, needs no other trainer.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pserver.errors import FingerprintMismatch
from trainer.collective.all_reduce import AllReduce, all_reduce_over
from trainer.collective.data_parallel import (
    DataParallel,
    compare_models,
    share_values,
    trained_in,
)
from trainer.collective.fused_gradients import share_gradients
from trainer.collective.gradient_marks import GradientMarks
from trainer.collective.local_sgd import LocalSgd, schedule_of
from trainer.collective.world import (
    current_peers,
    init_parallel_env,
    leave_parallel_env,
    naming_trainers,
    world_total,
)
from trainer.communicator.trace import TRACING
from trainer.environment.environment import Connection, Role, RoleMaker
from trainer.gradients.dgc import DeepGradientCompression, check_alike, dgc_of, local_clip, means_of
from trainer.gradients.gradient_merge import GradientMerge, gradient_merge_of
from trainer.gradients.step import tell_scaler
from trainer.hybrid.mesh import data_place, forget_groups, hybrid_mesh
from trainer.hybrid.parallel import (
    forget_model_groups,
    hybrid_optimizer,
    hybrid_parallel,
    hybrid_state_dict,
)
from trainer.job.job import Job, groups_of
from trainer.modules.loss_scaling import loss_scaling_of
from trainer.modules.sync_batch_norm import check_batch_norms, connect_batch_norms
from trainer.optimizer import Connect, DistributedOptimizer
from trainer.samplers.lockstep_batches import LockstepBatches
from trainer.samplers.shard import shard
from transpiler.clip import GradClip
from transpiler.ir.plain_names import named_parameters
from transpiler.strategy.exchange import exchange_of
from transpiler.strategy.refusals import check
from transpiler.strategy.strategy import DistributedStrategy
from transpiler.strategy.update_rules import replaced

# ---- averaged gradients ----
#
# Gradient validation: checks that a step's gradients were averaged over the trainers.  Only a
# backward through a registered model averages them.


MOST_NAMED = 4  # parameters in a message


class AveragedGradients:
    """Checks, before each step, that all gradients of the step are marked as means.

    Args:
        marks: the marks that the registered models set.
        names: of the parameters.
    """

    def __init__(self, marks: GradientMarks, names: Mapping[Tensor, str]) -> None:
        self._marks, self._names = marks, names

    def check(self, parameters: Iterable[Tensor]) -> None:
        """Checks that every gradient is a mean over the trainers.

        Args:
            parameters: the step's parameters.

        Raises:
            RuntimeError: a gradient is this trainer's alone; the message names its parameter.
        """
        alone = list(self._marks.without(parameters))
        if not alone:
            return
        names = [
            repr(self._names[p]) if p in self._names else f"a parameter of shape {list(p.shape)}"
            for p in alone[:MOST_NAMED]
        ]
        more = f" and {len(alone) - MOST_NAMED} more" if len(alone) > MOST_NAMED else ""
        raise RuntimeError(
            "optimizer.step(): expected gradients that a backward through the registered model has "
            f"averaged over the trainers, got others, of {', '.join(names)}{more}: call the model "
            "itself, model(...), not its layers or another method, and make one backward of what "
            "it returns, of all losses together; where a loss does not depend on all parameters, "
            "set strategy.find_unused_parameters=True"
        )

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Notes that a step has been taken with the present gradients."""
        self._marks.applied(parameters)


# ---- collective optimizer ----
#
# The optimizer of a job without servers.


class CollectiveOptimizer(DistributedOptimizer):
    """The optimizer of a job without servers: it steps on this trainer, with gradients that are
    equal on all.

    Args:
        optimizer: the script's optimizer.
        names: of the parameters.
        connect: called when groups are added.
        grad_clip: clips the mean gradient; with local SGD or ``dgc`` this trainer's own.
        merge: see :class:`DistributedOptimizer`.
        shared: sums the merged gradients over the trainers; takes whether they overflowed here, and
            gives whether some trainer's did.  None: backward sums them.
        dgc: compresses large gradients; None: backward averages all of them.

    Attributes:
        local_sgd: averages parameters in place of gradients; None: gradients are averaged.
        averaged: the gradient validation; None if backward need not average.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: Mapping[torch.Tensor, str],
        grad_clip: GradClip | None,
        connect: Connect = lambda _: None,
        merge: GradientMerge | None = None,
        shared: Callable[[bool], bool] | None = None,
        dgc: DeepGradientCompression | None = None,
    ) -> None:
        super().__init__(optimizer, names, connect, grad_clip, merge=merge, dgc=dgc)
        self._barriers = 0
        self._shared = shared
        self.local_sgd: LocalSgd | None = None
        self.averaged: AveragedGradients | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, at any time between two steps.  Every trainer calls this.

        Raises:
            ValueError: a parameter is in no registered model.
            FingerprintMismatch: another trainer's models have other parameters.
            PServerError: another trainer is lost.
        """
        before = len(self.param_groups)
        try:
            super().add_param_group(param_group)
        except ValueError:
            del self.param_groups[before:]
            raise

    def _end_step(self, loss: Any) -> None:
        if self.local_sgd is not None:
            self.local_sgd.end_step(loss, float(self.param_groups[0].get("lr", 1.0)))

    def flush(self) -> None:
        """Gives all trainers the same parameters, with local SGD; every trainer calls this.

        See [Note: an average in between] in trainer/collective/local_sgd.py.

        Raises:
            TimedOut: a trainer does not make this call.
            TrainerLost: a trainer has left.
        """
        if self.local_sgd is not None and not self.local_sgd.same:
            self.barrier("the average of local SGD's parameters")
            self.local_sgd.average()

    def _step_alone(self, overflow: bool) -> bool:
        if self.dgc is not None:
            return self._step_compressed(self.dgc, overflow)
        anywhere = overflow if self._shared is None else self._shared(overflow)
        if anywhere and not overflow:
            tell_scaler(self)  # see [Note: an overflow in a window]
        if self.averaged is None:
            return super()._step_alone(anywhere)
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.averaged.check(parameters)
        skipped = super()._step_alone(anywhere)
        self.averaged.note(parameters)
        return skipped

    def _step_compressed(self, dgc: DeepGradientCompression, overflow: bool) -> bool:
        if not overflow:
            self._clip_here()
        trained = [p for p in self.trained().values() if p.requires_grad]
        means = means_of(dgc, trained, self.steps, overflow)
        if means is not None:
            dgc.step(means, self._step_here)
            self.steps += 1
        elif not overflow:
            tell_scaler(self)  # see [Note: whose overflow]
        return means is None

    def _overflowed(self) -> bool:
        """Whether a gradient of some trainer is not finite: all skip the step, and their loss
        scales stay equal.
        """
        overflow = super()._overflowed()
        if self.loss_scaling is None or current_peers().size == 1:
            return overflow
        found = torch.tensor([overflow], dtype=torch.int32)
        with naming_trainers():
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def barrier(self, name: str, text: str = "") -> dict[int, str]:
        """See :meth:`DistributedOptimizer.barrier`.

        Raises:
            TrainerLost: a trainer has left.
        """
        self._barriers += 1
        peers = current_peers()
        texts = peers.meet(f"{name} (barrier {self._barriers})", text, range(peers.size))
        return {rank: told for rank, told in enumerate(texts) if told}

    def __repr__(self) -> str:
        return (
            f"DistributedOptimizer of {current_peers().size} trainers without servers, of "
            f"{self.inner!r}"
        )


# ---- collective job ----


_jobs = itertools.count(1)  # the numbers of this process's jobs, for comparing strategies
# the settings of a step that must be equal on all trainers
AGREED = (
    "gradient_merge",
    "gradient_merge_configs.k_steps",
    "gradient_merge_configs.avg",
    "fuse_grad_merge",
    "gradient_scale_configs.scale_strategy",
)

log = logging.getLogger(__name__)


class CollectiveJob(Job):
    """One trainer's part of a job without servers; it may be the only trainer.

    Args:
        role: COLLECTIVE, or SINGLE.

    Raises:
        ValueError: the role is that of a job with servers, or a switch of the strategy has no
            effect here.
        PServerError: a trainer has not come up; see :func:`trainer.init_parallel_env`.
    """

    kind = "collective"  # selects the settings of a strategy that it reads

    def __init__(self, role: RoleMaker, strategy: DistributedStrategy | None) -> None:
        if role.role not in (Role.COLLECTIVE, Role.SINGLE):
            raise ValueError(
                f"is_collective=True: expected no servers, got the role {role.role.value} with "
                "PSERVER_ENDPOINTS "
                f"{','.join(role.server_endpoints)}"
            )
        check(strategy, self.kind)
        if mark := Connection.from_environment().finished:
            with suppress(OSError):
                Path(mark).unlink()  # of a job before this one
        init_parallel_env()
        world = current_peers()
        super().__init__(RoleMaker(Role.COLLECTIVE, world.rank, world.size), strategy)
        self._hooks: list[RemovableHandle] = []
        self._factor = 1.0 / world.size  # of each gradient, before it is summed over trainers
        self._wrapped: list[DataParallel] = []
        self._names: dict[torch.Tensor, str] = {}  # of the models' tensors at the last check
        self._former = set[torch.Tensor]()  # the optimizer's parameters that no model has any more
        self._shares = True  # backward averages gradients; otherwise step() does
        self._marks: GradientMarks | None = None
        self._own_sums: AllReduce | None = None
        log.info("training collectively: trainer %d of %d", world.rank, world.size)

    @property
    def transport(self) -> str:
        """The backend: "nccl" if a model is on a GPU, otherwise "gloo"."""
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
            FingerprintMismatch: another trainer's models differ.
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
        check_batch_norms(self.models, self.strategy)
        names = self._named()
        optimizer = replaced(optimizer, self.strategy, names, self.module_types())
        strategy = self.strategy or DistributedStrategy()
        self._agree_on(strategy)
        averages = strategy.gradient_scale_configs["scale_strategy"] == "avg"
        self._factor = 1.0 / self.role.trainers if averages else 1.0
        merge = gradient_merge_of(self.strategy, names)
        if merge is not None and strategy.find_unused_parameters:
            raise ValueError(
                "strategy.find_unused_parameters: has no effect with gradient_merge=True, where "
                "every parameter may lack a gradient; leave it at its default"
            )
        shared = None
        if merge is not None and schedule_of(strategy) is None:  # local SGD's steps are alone
            shared = partial(self._share, merge)
        dgc = dgc_of(self.strategy, optimizer)
        if dgc is not None:
            check_alike(dgc.ramp)
            grad_clip = local_clip(grad_clip, self.role.trainers)
        distributed = CollectiveOptimizer(
            optimizer, names, grad_clip, self._grown, merge, shared, dgc
        )
        distributed.loss_scaling = loss_scaling_of(self.models, optimizer.param_groups)
        groups_of(distributed)
        distributed.local_sgd = self._local_sgd(distributed)
        self._shares = merge is None and dgc is None
        if self.role.trainers > 1 and self._shares and distributed.local_sgd is None:
            self._marks = GradientMarks()
            distributed.averaged = AveragedGradients(self._marks, names)
        for model in self.models:
            self._attach(model)
        limit = current_peers().timeout_seconds
        connect_batch_norms(self.models, world_total, self.role.trainers, limit)
        return distributed

    def _local_sgd(self, optimizer: DistributedOptimizer) -> LocalSgd | None:
        """The local SGD that the strategy asks for; None if it asks for none."""
        schedule = None if self.strategy is None else schedule_of(self.strategy)
        if self.strategy is None or schedule is None:
            return None

        def trained() -> list[torch.Tensor]:
            self._named()
            groups_of(optimizer, self._former)
            return list(optimizer.trained().values())

        return LocalSgd(
            schedule,
            trained,
            lambda: [buffer for model in self.models for buffer in model.buffers()],
            self.strategy.fuse_grad_size_in_MB,
        )

    def _named(self) -> dict[torch.Tensor, str]:
        """Updates and returns the names of the models' present tensors: always the same dict."""
        tensors = self.tensors()
        there = set(map(id, tensors.values()))
        for each in self.optimizers:  # which keep former parameters
            groups = each.param_groups
            former = (p for group in groups for p in group["params"] if p in self._names)
            self._former.update(p for p in former if id(p) not in there)
        self._names.clear()
        self._names.update({tensor: name for name, tensor in tensors.items()})
        return self._names

    def _grown(self, optimizer: DistributedOptimizer) -> None:
        """Takes in further groups of the optimizer: new tensors of the models take trainer 0's
        values, and backward averages their gradients.
        """
        if not self.optimizers:  # the optimizer is being made
            return
        known = set(map(id, self._names))
        self._named()
        groups_of(optimizer, self._former)
        if optimizer.dgc is not None:
            optimizer.dgc.check()
        parallel = {wrapped.module: wrapped for wrapped in self._wrapped}
        for model in self.models:
            if model in parallel:
                parallel[model].follow_model()
            else:
                self._compare(model, known)

    def _agree_on(self, strategy: DistributedStrategy) -> None:
        """Compares the strategies' settings of a step over the trainers.

        Raises:
            FingerprintMismatch: another trainer's strategy differs.
        """
        said = agreed(strategy)
        peers, topic = current_peers(), f"the strategy of job {next(_jobs)}"
        for rank, other in enumerate(peers.meet(topic, said, range(peers.size))):
            if other != said:
                raise FingerprintMismatch(
                    f"the trainers' strategies differ: trainer {rank} has {other}; trainer "
                    f"{peers.rank} has {said}"
                )

    def _share(self, merge: GradientMerge, overflow: bool) -> bool:
        """Sums the merged gradients over the trainers, and tells whether a trainer's overflowed."""
        trained = merge.parameters
        have = torch.tensor([*(p.grad is not None for p in trained), overflow], dtype=torch.uint8)
        with naming_trainers():
            dist.all_reduce(have, dist.ReduceOp.MAX)
        if have[-1]:
            return True
        sums = self._sums()
        if not merge.buffers:
            share_gradients(trained, None, self._factor, exchange_of(self.strategy), sums)
            return False
        with naming_trainers():
            for number, buffer in enumerate(merge.buffers):
                sums.begin_gradients(buffer.mul_(self._factor), number)()
        for parameter, anywhere in zip(trained, have.tolist(), strict=False):
            if anywhere:
                parameter.grad = merge.room_of(parameter)
        return False

    def _sums(self) -> AllReduce:
        """The sums for gradients that backward does not sum, as the strategy says."""
        if self._wrapped:
            return self._wrapped[0].sums
        if self._own_sums is None:  # no model had a parameter to train
            exchange, device = exchange_of(self.strategy), next(iter(self._names)).device
            self._own_sums = all_reduce_over(None, exchange, device, "merged")
        return self._own_sums

    def _attach(self, model: nn.Module) -> None:
        """Gives a model trainer 0's values, and makes a backward through it average its gradients,
        unless local SGD is used.
        """
        if self.strategy is not None and schedule_of(self.strategy) is not None:
            self._compare(model)
            return
        parallel: DataParallel | None = None
        if trained_in(model):
            parallel = self._parallel(model)
        else:
            self._compare(model)

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            # a copy of the model has these hooks, too
            nonlocal parallel
            if module is not model or not torch.is_grad_enabled():
                return None
            if parallel is None and trained_in(model):
                parallel = self._parallel(model)
            if parallel is None:
                return None
            parallel.require_forward_param_sync = True  # buffers, in any case
            changes = parallel.changes
            given = parallel.before_forward(*args, **kwargs)
            if parallel.changes != changes:
                self._named()
            return given

        def after(module: nn.Module, args: Any, outputs: Any) -> Any:
            if module is not model or not torch.is_grad_enabled() or parallel is None:
                return None
            return parallel.after_forward(outputs)

        self._hooks += [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after),
        ]

    def _parallel(self, model: nn.Module) -> DataParallel:
        """Makes the reducer of a model with trainable parameters."""
        self._named()
        wrapped = DataParallel(model, exchange=exchange_of(self.strategy), marks=self._marks)
        wrapped.factor = self._factor
        wrapped.require_backward_grad_sync = self._shares
        self._wrapped.append(wrapped)
        return wrapped

    def _compare(self, model: nn.Module, known: Collection[int] = ()) -> None:
        """Compares a model whose gradients backward does not average, and gives it trainer 0's
        values.

        Args:
            known: the ids of tensors that have these values.
        """
        compare_models(model, _world(), current_peers())
        every = (*model.parameters(), *model.buffers())
        with naming_trainers():
            share_values([tensor for tensor in every if id(tensor) not in known], _world())

    def agree(self, topic: str, text: str) -> str | None:
        """The first trainer's text about a topic."""
        return current_peers().agree(topic, text)

    def shard(self, loader: Iterable[Any], seed: int | None, name: str) -> Iterable[Any]:
        """See :func:`trainer.fleet.shard`."""
        place, parts = self.place_in_data()
        mine = shard(loader, parts, place, seed, self.passes, name)
        return (
            mine
            if self.role.trainers == 1
            else LockstepBatches(mine, self.role.trainers, self.role.trainer_id)
        )

    def loaded(self) -> None:
        """See :meth:`Job.loaded`; local SGD continues from the step of the checkpoint."""
        for each in self.optimizers:
            if isinstance(each, CollectiveOptimizer) and each.local_sgd is not None:
                each.local_sgd.restart(each.steps)

    def spread(self) -> None:
        """See :meth:`Job.spread`."""
        for model in self.models:
            with naming_trainers():
                share_values([*model.parameters(), *model.buffers()], _world())
        self.loaded()

    def finish(self) -> None:
        """Leaves, with the same parameters on all trainers; at once if an error is being raised."""
        if sys.exc_info()[0] is None:
            if self.optimizer is not None:
                self.optimizer.flush()
            if mark := Connection.from_environment().finished:
                with suppress(OSError):  # only a hint for launch
                    Path(mark).touch()
        self.close()

    def close(self) -> None:
        """Leaves, and makes the models plain modules again."""
        TRACING.finish(failed=sys.exc_info()[0] is not None)
        connect_batch_norms(self.models, None, 1)
        for hook in self._hooks:
            hook.remove()
        for each in self.optimizers:
            each.end()
        for wrapped in self._wrapped:
            wrapped.close()
        self._wrapped.clear()  # the script may hold this job, by way of its optimizer or model
        if self._own_sums is not None:
            self._own_sums.close()
            self._own_sums = None
        steps = 0 if self.optimizer is None else self.optimizer.steps
        leave_parallel_env(
            f"it finished after {steps} steps; fleet.shard gives all trainers equally many"
        )


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "init_parallel_env has been called"
    return dist.group.WORLD


def agreed(strategy: DistributedStrategy) -> str:
    """The settings that must be equal on all trainers, as text."""
    return "; ".join(f"{key}={strategy.value(key)!r}" for key in AGREED)


# ---- hybrid job ----
#
# fleet's job with ``hybrid_configs``, ``sharding``, ``pipeline`` or ``tensor_parallel``: its model
# is made parallel when it is registered, and its optimizer steps this rank's parts.
#
# ::
#
#   strategy.hybrid_configs = {"dp_degree": -1, "mp_degree": 2}
#   fleet.init(is_collective=True, strategy=strategy)
#   model = fleet.distributed_model(Net(), tensor_plan={"*.up": "colwise", "*.down": "rowwise"})
#   optimizer = torch.optim.Adam(model.parameters())  # made after distributed_model
#   optimizer = fleet.distributed_optimizer(optimizer)


class HybridJob(CollectiveJob):
    """One trainer's part of a job that is parallel in several directions of a mesh.

    Args:
        strategy: a strategy that divides a model.

    Raises:
        ValueError: the degrees' product is not the number of trainers, or a switch has no effect
            here.
    """

    kind = "hybrid"
    divided = True

    def __init__(self, role: RoleMaker, strategy: DistributedStrategy) -> None:
        self.mesh: Any = None
        super().__init__(role, strategy)
        self._strategy = strategy
        try:
            self.mesh = hybrid_mesh(strategy)
        except ValueError:
            self.close()
            raise

    def close(self) -> None:
        """Leaves, and releases all process groups."""
        super().close()
        if self.mesh is not None:
            forget_groups(self.mesh)
        for model in self.models:
            forget_model_groups(model)

    def register(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        """See :func:`trainer.hybrid.hybrid_parallel`.

        Raises:
            ValueError: a model is registered already.
        """
        if self.models:
            raise ValueError(
                "fleet.distributed_model: expected one model, which is divided, got a second one"
            )
        return hybrid_parallel(model, self._strategy, **options)

    def distribute(
        self,
        optimizer: torch.optim.Optimizer,
        grad_clip: GradClip | None,
        compression: Mapping[str, str] | None,
    ) -> DistributedOptimizer:
        """See :func:`trainer.hybrid.hybrid_optimizer`.

        Raises:
            ValueError: ``compression`` or another strategy is given, or the optimizer was made
                before ``fleet.distributed_model``.
            RuntimeError: ``fleet.distributed_model`` has not been called.
        """
        if compression is not None:
            raise ValueError(
                "compression: acts only in a job with parameter servers, and this is one without; "
                "leave it out"
            )
        if self.strategy != self._strategy:
            raise ValueError(
                "strategy: expected that of fleet.init, which made the model parallel, got "
                "another one"
            )
        if not self.models:
            raise RuntimeError("call fleet.distributed_model first")
        names = {parameter: name for name, parameter in named_parameters(self.models[0])}
        optimizer = replaced(optimizer, self._strategy, names, self.module_types())
        inner = hybrid_optimizer(optimizer, self.models[0], grad_clip)
        return HybridOptimizer(
            inner,
            {inner.shards.of[p]: name for p, name in names.items() if p in inner.shards.of},
            None,
        )

    def state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's state_dict, whole on every trainer."""
        return hybrid_state_dict(model)

    def place_in_data(self) -> tuple[int, int]:
        """This trainer's part of the data, and the number of parts.  Trainers that differ only in
        the pipeline, tensor or sequence direction get the same batches.
        """
        return data_place(self.mesh) if self.splits_data else (0, 1)


class HybridOptimizer(CollectiveOptimizer):
    """The optimizer that fleet returns in a hybrid job: the sharded one, with fleet's calls.

    With AMP use ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``: an overflow on
    one rank then skips the step on all.
    """

    _step_supports_amp_scaling = False  # the scaler unscales, and all ranks agree on an overflow

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the shards, and the model's own."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state with whole tensors, of this rank's stage.  All ranks call this."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state that :meth:`state_dict` of the same stage gave."""
        self.inner.load_state_dict(state_dict)
        self._share()
