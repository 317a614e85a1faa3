"""Lightning's Trainer with parameter servers: ``Trainer(strategy=PServerStrategy())``.

``pip install '.[lightning]'`` in a checkout brings it; nothing else of this package imports
Lightning.
docs/lightning.md says what each of the Trainer's settings does here.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from pserver.extras import extra
from trainer import fleet
from trainer.job.collective import CollectiveJob
from trainer.job.exchange import Exchange
from trainer.job.job import Job, overlaps, present
from trainer.optimizer import DistributedOptimizer
from trainer.samplers.passes import Passes
from trainer.samplers.shard import shard
from transpiler.clip import ClipGradByGlobalNorm, ClipGradByValue, GradClip

with extra("lightning", "trainer.lightning needs Lightning"):
    from lightning.fabric.plugins import CheckpointIO
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import Strategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning_utilities.core.rank_zero import rank_zero_only
    from torchmetrics import Metric

KEY = "pserver"  # in Lightning's checkpoint: the job's passes and steps
BESIDE = ".pserver"  # after the name of Lightning's file: the folder of fleet.save, with tables
_Value = TypeVar("_Value")


class PServerStrategy(Strategy):
    """Trains a LightningModule as one trainer of a job with servers, or alone without a job's
    variables.  The script's thread uses it.

    Call ``fleet.init()`` before the Trainer is made, and ``fleet.finish()`` last; between the two
    there is one ``fit``, and any number of ``validate``, ``test`` and ``predict``.

    Args:
        grad_clip: as in ``fleet.distributed_optimizer``, where ``Trainer(gradient_clip_val=...)``
            cannot say it.
        compression: as in ``fleet.distributed_optimizer``.
        precision_plugin: as in Lightning's own strategies.
        checkpoint_io: likewise.

    Raises:
        RuntimeError: when the Trainer is made, ``fleet.init()`` has not been called; or at a second
            ``fit``.
        ValueError: the Trainer, the module or the job's strategy asks for something that is
            impossible here; the message says what to write instead.

    Example::

        fleet.init()
        trainer = Trainer(max_epochs=3, devices=1, strategy=PServerStrategy())
        trainer.fit(module, loader)
        fleet.finish()
    """

    strategy_name = "pserver"

    def __init__(
        self,
        grad_clip: GradClip | None = None,
        compression: Mapping[str, str] | None = None,
        precision_plugin: Precision | None = None,
        checkpoint_io: CheckpointIO | None = None,
    ) -> None:
        super().__init__(checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self._grad_clip, self._compression = grad_clip, compression
        self._devices: list[torch.device] = []
        self._clip_value: float | int | None = None  # the Trainer's, which acts on the servers
        self._tables_from = ""  # beside the checkpoint that is being loaded

    # ---- set by the Trainer ----

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The one device of this process."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise ValueError(
                f"PServerStrategy: expected devices=1, got {len(devices)}: a trainer is a process "
                "with one device; `pserver launch --trainers N` starts N of them, and each takes "
                "its own, as by Trainer(devices=[fleet.worker_index()])"
            )
        self._devices = devices

    @property
    def num_nodes(self) -> int:
        """The number of this Trainer's nodes: 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, nodes: int) -> None:
        if nodes != 1:
            raise ValueError(
                f"PServerStrategy: expected num_nodes=1, got {nodes}: each host starts its own "
                "trainers, as docs/quickstart.md shows"
            )

    @property
    def _layer_sync(self) -> None:
        return None

    @_layer_sync.setter
    def _layer_sync(self, plugin: object) -> None:
        if plugin is not None:
            raise ValueError(
                "PServerStrategy: expected sync_batchnorm=False: set sync_batch_norm = True in the "
                "DistributedStrategy of fleet.init, which does it among these trainers"
            )

    def set_world_ranks(self) -> None:
        """Sets Lightning's rank: loggers and progress bars are trainer 0's.

        Raises:
            RuntimeError: ``fleet.init()`` has not been called.
            ValueError: the job has no servers, or its strategy cannot act under Lightning.
        """
        _check(present())
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # as Lightning's own do

    # ---- rank ----

    @property
    def global_rank(self) -> int:
        """This trainer's number."""
        return present().role.trainer_id

    @property
    def local_rank(self) -> int:
        """0: every trainer is a node of its own, whose data it prepares by itself."""
        return 0

    @property
    def node_rank(self) -> int:
        """This trainer's number, too."""
        return self.global_rank

    @property
    def world_size(self) -> int:
        """The number of the job's trainers."""
        return present().role.trainers

    @property
    def is_global_zero(self) -> bool:
        """Whether this is trainer 0."""
        return self.global_rank == 0

    @property
    def is_distributed(self) -> bool:
        """Whether trainers reach one another, as for ``self.log(..., sync_dist=True)``."""
        return self._exchange.size > 1

    @property
    def root_device(self) -> torch.device:
        """The device of the model."""
        return torch.device(self._devices[0])

    @property
    def _exchange(self) -> Exchange:
        return Exchange(present())

    # ---- the job ----

    def setup_environment(self) -> None:
        """Turns Lightning's sampler off: ``fleet.shard`` divides the samples."""
        super().setup_environment()
        assert self.lightning_module is not None, "the Trainer has connected it"
        self.lightning_module.trainer._accelerator_connector.use_distributed_sampler = False

    def model_to_device(self) -> None:
        """Moves the module to the device of this process."""
        assert self.model is not None, "the Trainer has connected it"
        self.model.to(self.root_device)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Joins the servers with the optimizers of ``configure_optimizers``; see
        ``fleet.distributed_optimizer``.
        """
        job, module = present(), self.lightning_module
        assert module is not None, "the Trainer has connected it"
        if job.optimizers:
            raise RuntimeError(
                "PServerStrategy: expected one fit between fleet.init() and fleet.finish(), got a "
                "further one: its optimizer would begin anew, and the servers have the first one's "
                "state; call fleet.finish() and fleet.init() in between"
            )
        _check_accumulation(trainer, job)
        grad_clip = self._take_clipping(trainer, module)
        self.model = fleet.distributed_model(module)
        super().setup_optimizers(trainer)
        given = self.optimizers
        for each in given:
            _check_optimizer(each)
        if not given:
            raise ValueError("configure_optimizers: expected an optimizer, got none")
        self.optimizers = [
            fleet.distributed_optimizer(each, grad_clip=grad_clip, compression=self._compression)
            for each in given
        ]
        for metric in module.modules():
            if isinstance(metric, Metric):
                metric.distributed_available_fn = lambda: self.is_distributed
                metric.dist_sync_fn = lambda value, group=None: self._exchange.gather(value)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):  # it asked before the trainers could answer
                callback.dirpath = self.broadcast(callback.dirpath)

    def _take_clipping(self, trainer: Trainer, module: LightningModule) -> GradClip | None:
        """The Trainer's clipping for the servers, which clip the mean over trainers."""
        value = trainer.gradient_clip_val
        if is_overridden("configure_gradient_clipping", module):
            if self.world_size > 1:
                raise ValueError(
                    f"{type(module).__name__}.configure_gradient_clipping: expected none with "
                    f"{self.world_size} trainers, for it clips one trainer's own gradient, before "
                    "the mean: use Trainer(gradient_clip_val=...) or "
                    "PServerStrategy(grad_clip=...)"
                )
            return self._grad_clip
        if not value:
            return self._grad_clip
        if self._grad_clip is not None:
            raise ValueError(
                f"expected Trainer(gradient_clip_val={value}) or PServerStrategy(grad_clip=...), "
                "got both"
            )
        self._clip_value, trainer.gradient_clip_val = value, None
        if trainer.gradient_clip_algorithm == "value":
            return ClipGradByValue(value)
        return ClipGradByGlobalNorm(value)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Takes parameters that have arrived without a step; then runs the module's own step."""
        job = present()
        communicator = job.communicator
        if communicator is not None and len(job.optimizers) == 1:
            if any(lane.independent_recv_thread for lane in communicator.plan.lanes):
                communicator.refresh()
        return super().training_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        """Makes the validated parameters have every step of this trainer."""
        self._flush()

    def on_train_end(self) -> None:
        """Makes the module after ``fit`` have every step of every trainer."""
        self._flush()
        self._exchange.barrier("the end of fit")
        self._flush()

    def _flush(self) -> None:
        for each in present().optimizers:
            each.flush()

    def teardown(self) -> None:
        """Leaves the module on its device: until ``fleet.finish()`` it is the job's."""
        if self._clip_value is not None and self.lightning_module is not None:
            self.lightning_module.trainer.gradient_clip_val = self._clip_value
            self._clip_value = None
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- data ----

    def process_dataloader(self, dataloader: Any) -> Any:
        """This trainer's part, by ``fleet.shard``, of training data, and of validation and test
        data once trainers reach one another.  Every trainer predicts on all data.
        """
        module = self.lightning_module
        assert module is not None, "the Trainer has connected it"
        if module.trainer.training:
            return fleet.shard(dataloader)
        if module.trainer.predicting or not self.is_distributed:
            return dataloader
        place, parts = present().place_in_data()
        # passes of their own: the order of the training data does not depend on validation
        return shard(dataloader, parts, place, None, Passes())

    # ---- collective calls ----

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The reduction of every trainer's tensor, the same on all of them.

        Args:
            tensor: of the same shape on every trainer.
            group: None.
            reduce_op: "mean", "sum", "max" or "min", or torch's ReduceOp.
        """
        _check_group(group)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"reduce: expected a tensor, got {type(tensor).__name__}")
        kind = "mean" if reduce_op is None else str(reduce_op).rpartition(".")[-1].lower()
        return self._exchange.reduce(tensor, "mean" if kind == "avg" else kind)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all trainers say yes; with ``all=False`` whether one does."""
        said = [bool(each) for each in self._exchange.gather_texts("decision", bool(decision))]
        return False not in said if all else True in said

    def barrier(self, name: str | None = None) -> None:
        """Waits for every trainer."""
        self._exchange.barrier(name or "barrier")

    def broadcast(self, obj: _Value, src: int = 0) -> _Value:
        """Trainer ``src``'s object, which JSON must be able to hold."""
        value: _Value = self._exchange.first(obj, src)
        return value

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Every trainer's tensor: [trainers, ...]; of one trainer its own, as it is."""
        _check_group(group)
        if sync_grads and self.is_distributed:
            raise ValueError(
                "all_gather: expected sync_grads=False: gradients do not flow between trainers"
            )
        found = self._exchange.gather(tensor, "all_gather")
        return tensor if len(found) == 1 else torch.stack(found)

    # ---- checkpoints ----

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is read after the servers are joined."""
        return True

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The whole state, from the servers, on trainer 0, which writes it; elsewhere nothing."""
        return super().optimizer_state(optimizer) if self.is_global_zero else {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Writes Lightning's file on trainer 0; ``fleet.save`` writes tables beside it."""
        job = present()
        if job.optimizers:
            steps = [each.steps for each in job.optimizers]
            checkpoint[KEY] = {"passes": job.passes.count, "steps": steps}
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if job.tables is not None:
            fleet.save(_beside(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Removes Lightning's file, and the tables beside it, on trainer 0."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero and Path(_beside(filepath)).is_dir():
            shutil.rmtree(_beside(filepath))

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Reads Lightning's file on every trainer; with tables the job loads those beside it."""
        found = super().load_checkpoint(checkpoint_path, weights_only)
        self._tables_from = _beside(checkpoint_path)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Gives the module the values, and the servers trainer 0's."""
        job = present()
        if job.tables is not None:
            fleet.load(self._tables_from)
        else:
            super().load_model_state_dict(checkpoint, strict)
            job.spread()
        said = checkpoint.get(KEY)
        if said is not None and job.optimizers:
            job.passes.count = int(said["passes"])
            for each, steps in zip(job.optimizers, said["steps"], strict=True):
                each.steps = int(steps)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Gives the optimizers groups and states, and the servers trainer 0's."""
        if present().tables is None:
            for each, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
                each.load_state_dict(state)


def _beside(filepath: Any) -> str:
    return f"{filepath}{BESIDE}"


def _check(job: Job) -> None:
    """Raises ValueError for a job that Lightning cannot train."""
    if isinstance(job, CollectiveJob):
        raise ValueError(
            "PServerStrategy: expected a job with servers, or one process alone, got trainers "
            'without servers: Lightning\'s own strategy="ddp" is made for these'
        )
    if job.strategy is not None and job.strategy.amp:
        raise ValueError(
            "strategy.amp: expected False under Lightning, whose loop does not call the module's "
            'forward: use Trainer(precision="bf16-mixed")'
        )


def _check_accumulation(trainer: Trainer, job: Job) -> None:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # the Trainer gets it while made
    scheduled = any(isinstance(each, GradientAccumulationScheduler) for each in callbacks)
    if overlaps(job.strategy) and (trainer.accumulate_grad_batches != 1 or scheduled):
        raise ValueError(
            "overlap: expected accumulate_grad_batches=1, for gradients leave during the first "
            "backward; leave overlap off"
        )


def _check_optimizer(optimizer: object) -> None:
    if isinstance(optimizer, DistributedOptimizer):
        raise ValueError(
            "configure_optimizers: expected an optimizer of torch, got one that is distributed "
            "already: PServerStrategy calls fleet.distributed_optimizer by itself"
        )
    if not isinstance(optimizer, torch.optim.Optimizer) or not optimizer.param_groups:
        raise ValueError(
            "configure_optimizers: expected an optimizer of torch, with parameters, got "
            f"{type(optimizer).__name__}"
        )


def _check_group(group: object) -> None:
    if group is not None:
        raise ValueError(f"group: expected None, for all trainers, got {type(group).__name__}")
