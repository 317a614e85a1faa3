"""transformers' Trainer with parameter servers: ``PServerTrainer`` in its place.

``pip install '.[transformers]'`` in a checkout brings it; nothing else of this package imports
transformers.
docs/transformers.md says what each of the TrainingArguments does here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from pserver.extras import extra
from trainer import fleet
from trainer.checkpoint.resume import jointly
from trainer.job.collective import CollectiveJob
from trainer.job.exchange import Exchange
from trainer.job.job import distributed, overlaps, present
from trainer.optimizer import DistributedOptimizer
from trainer.samplers.passes import Passes
from trainer.samplers.read_ahead import AnnouncedBatches, ReadAhead
from trainer.samplers.shard import Shard, shard
from transpiler.clip import ClipGradByGlobalNorm, GradClip

with extra("transformers", "trainer.huggingface needs transformers and accelerate"):
    import accelerate  # noqa: F401  # transformers' Trainer asks for it later
    import transformers
    from transformers import TrainingArguments
    from transformers.trainer_utils import SaveStrategy


class PServerTrainer(transformers.Trainer):
    """transformers' Trainer as one trainer of a job with servers, or alone without a job's
    variables.  The script's thread uses it.

    Call ``fleet.init()`` before it is made, and ``fleet.finish()`` last.

    Args:
        model, args and the others: as in ``transformers.Trainer``.
        grad_clip: as in ``fleet.distributed_optimizer``, in the place of ``max_grad_norm``, which
            must then be 0.
        compression: as in ``fleet.distributed_optimizer``.

    Raises:
        RuntimeError: ``fleet.init()`` has not been called.
        ValueError: the arguments ask for something that is impossible here; the message says what
            to write instead.

    Example::

        fleet.init()
        trainer = PServerTrainer(model, TrainingArguments("out"), train_dataset=samples)
        trainer.train()
        trainer.save_model("fine-tuned")
        fleet.finish()
    """

    def __init__(
        self,
        *args: Any,
        grad_clip: GradClip | None = None,
        compression: Mapping[str, str] | None = None,
        **named: Any,
    ) -> None:
        self._exchange = Exchange(present())
        self._grad_clip, self._compression = grad_clip, compression
        self._ahead: _TakenAhead | None = None  # while it trains
        super().__init__(*args, **named)
        _check(self.args, grad_clip)
        if isinstance(self.optimizer, DistributedOptimizer):
            raise ValueError(
                "optimizers: expected an optimizer of torch, got one that is distributed already: "
                "PServerTrainer calls fleet.distributed_optimizer by itself"
            )
        if not fleet.is_first_worker():
            level = max(transformers.logging.get_verbosity(), logging.WARNING)
            transformers.logging.set_verbosity(level)

    # ---- rank ----

    def is_world_process_zero(self) -> bool:
        """Whether this is trainer 0, which logs and writes."""
        return fleet.is_first_worker()

    def is_local_process_zero(self) -> bool:
        """Whether this is trainer 0, too: work for one process a host is done once a job."""
        return fleet.is_first_worker()

    # ---- training ----

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer whose steps the servers take; see ``fleet.distributed_optimizer``."""
        if present().optimizers:
            assert self.optimizer is not None, "a job's optimizer is this Trainer's"
            return self.optimizer
        given = self.model if model is None else model
        assert given is not None, "transformers has asked for a model"
        changed = fleet.distributed_model(given)
        if changed is not given:
            raise ValueError(
                "fleet.distributed_model: expected a change inside the model, got another one in "
                "its place: give that to PServerTrainer"
            )
        made = super().create_optimizer(model)
        clip = self._grad_clip
        if self.args.max_grad_norm:
            clip = ClipGradByGlobalNorm(self.args.max_grad_norm)
        self.optimizer = fleet.distributed_optimizer(
            made, grad_clip=clip, compression=self._compression
        )
        if present().tables is not None and self.args.save_strategy != SaveStrategy.NO:
            raise ValueError(
                'save_strategy: expected "no" for a model with tables, whose rows are on the '
                "servers: fleet.save and fleet.load keep them"
            )
        return self.optimizer

    def train(self, *args: Any, **named: Any) -> Any:
        """Trains as the original; afterwards the model has every step of every trainer."""
        self._ahead = _TakenAhead()
        try:
            found = super().train(*args, **named)
        finally:
            self._ahead = None
        optimizer = distributed(present())
        optimizer.flush()
        optimizer.barrier("the end of train")
        optimizer.flush()
        return found

    def _run_epoch(self, *args: Any, **named: Any) -> Any:
        """Trains for an epoch; what was read ahead of its end is dropped, as with an iterator."""
        try:
            return super()._run_epoch(*args, **named)  # type: ignore[no-untyped-call]
        finally:
            if self._ahead is not None:
                self._ahead.close()

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        """The norm, for the log; the servers clip."""
        return self._norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm(model) if grad_norm is None else grad_norm

    def _norm(self, model: nn.Module) -> Tensor:
        """The norm of this trainer's own gradients, before the mean and before clipping."""
        norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        scaler = self.accelerator.scaler
        return norm if scaler is None else norm / scaler.get_scale()

    # ---- data ----

    def get_train_dataloader(self) -> Any:
        """This trainer's part of the samples, by ``fleet.shard``."""
        loader = super().get_train_dataloader()
        job = present()
        place, parts = job.place_in_data()
        passes = Passes(place, lambda topic, text: job.agree(f"PServerTrainer, {topic}", text))
        divided = shard(loader, parts, place, None, passes)
        return TrainerLoader(loader, divided, passes) if isinstance(divided, Shard) else divided

    def get_batch_samples(self, epoch_iterator: Iterator[Any], *args: Any, **named: Any) -> Any:
        """The batches of a step, which are read ahead where rows are looked up ahead."""
        if self._ahead is not None:
            epoch_iterator = self._ahead.of(epoch_iterator)
        return super().get_batch_samples(epoch_iterator, *args, **named)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **named: Any) -> Tensor:
        """Trains on a batch as the original."""
        if self._ahead is not None:
            self._ahead.begin(inputs)
        return super().training_step(model, inputs, *args, **named)

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """Evaluates all samples, on every trainer; the metrics are trainer 0's, so that all decide
        alike.
        """
        for each in present().optimizers:
            each.flush()
        found = super().evaluation_loop(*args, **named)
        return found._replace(metrics=self._exchange.first(found.metrics))

    # ---- checkpoints ----

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        optimizer = distributed(present())
        optimizer.flush()
        optimizer.barrier("PServerTrainer: a checkpoint")
        with jointly(optimizer, "PServerTrainer", "a checkpoint is written"):
            if self.is_world_process_zero():
                super()._save_checkpoint(model, trial)
        best = self._exchange.first(self.state.best_model_checkpoint)
        self.state.best_model_checkpoint = best

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes, on trainer 0, what ``from_pretrained`` reads."""
        if self.is_world_process_zero():
            super().save_model(output_dir, _internal_call)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        present().spread()


class TrainerLoader:
    """A trainer's part of a loader, as transformers' Trainer iterates over it: an epoch at a time,
    also from the middle of one that is resumed.

    Args:
        loader: of all samples.
        divided: this trainer's part of it.
        passes: of ``divided``: pass n is that of epoch n.
    """

    def __init__(self, loader: DataLoader[Any], divided: Shard, passes: Passes) -> None:
        self._loader, self._divided, self._passes = loader, divided, passes
        self._drawn: Any = None  # the next pass, once it was asked for

    def set_epoch(self, epoch: int) -> None:
        """Makes the next pass that of this epoch."""
        if hasattr(self._loader, "set_epoch"):
            self._loader.set_epoch(epoch)
        self._passes.count, self._drawn = epoch, None

    def _next(self) -> Any:
        if self._drawn is None:
            self._drawn = self._divided.begin_pass()
        return self._drawn

    def __len__(self) -> int:
        return len(self._next())

    def __iter__(self) -> Iterator[Any]:
        drawn, self._drawn = self._next(), None
        return iter(drawn)

    def __getattr__(self, name: str) -> Any:
        """The attributes of a DataLoader: its data set, its batch sampler."""
        return getattr(self._next(), name)


class _TakenAhead:
    """The batches of transformers' loop, which takes those of a whole step before it begins: the
    rows of each are looked up while the forwards before it run.  An :class:`AnnouncedBatches`
    between the loop and the job's.

    Attributes:
        depth: of the job's.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._job: AnnouncedBatches | None = None
        self._read = ReadAhead(self._announced)
        self._pass: tuple[Iterator[Any], Iterator[Any]] | None = None  # given, and read ahead
        # batches whose forwards have not begun, the loop's before those that are read ahead
        self._coming: deque[Any] = deque()
        # how many of them, from the first on, the loop has, and were announced to the job
        self._taken = self._said = 0

    def _announced(self) -> AnnouncedBatches:
        """This object, for a pass that begins: the optimizer is there, and so is the connection."""
        self._job = present().look_ahead()
        self.depth = 0 if self._job is None else self._job.depth
        return self

    # ---- the loop ----

    def of(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of an epoch, until :meth:`close`; each call gives the same iterator."""
        if self._pass is None or self._pass[0] is not batches:
            self.close()
            self._pass = batches, self._read(batches)
        return self._pass[1]

    def begin(self, batch: Any) -> None:
        """Notes that the forward of a batch begins.  The rows of those behind it are asked for."""
        if self._job is None or not self._coming:
            return
        # a batch that the script has replaced stands where the first one stood
        before = next((n for n, each in enumerate(self._coming) if each is batch), 0)
        for _ in range(before + 1):
            self._coming.popleft()
        self._taken, self._said = (max(0, n - before - 1) for n in (self._taken, self._said))
        while self._said < min(self.depth, len(self._coming)):
            self._job.announce_batch(self._coming[self._said], self)
            self._said += 1
        self._job.give(batch)

    def close(self) -> None:
        """Ends the epoch."""
        if self._pass is not None and isinstance(self._pass[1], Generator):
            self._pass[1].close()
        self._pass = None

    # ---- AnnouncedBatches ----

    def announce_batch(self, batch: Any, source: object) -> None:
        """See :class:`AnnouncedBatches`."""
        self._coming.append(batch)

    def give(self, batch: Any) -> None:
        """See :class:`AnnouncedBatches`: the loop has a batch, whose forward is yet to come."""
        known = self._taken < len(self._coming) and self._coming[self._taken] is batch
        if not known:  # it was read when the loop asked for it
            self._coming.insert(self._taken, batch)
        self._taken += 1

    def withdraw(self, source: object = None) -> None:
        """See :class:`AnnouncedBatches`."""
        self._coming.clear()
        self._taken = self._said = 0
        if self._job is not None:
            self._job.withdraw(self)


def _check(args: TrainingArguments, grad_clip: GradClip | None) -> None:
    """Raises ValueError for arguments that cannot act in a trainer of a job."""
    job = present()
    if isinstance(job, CollectiveJob):
        raise ValueError(
            "PServerTrainer: expected a job with servers, or one process alone, got trainers "
            "without servers: transformers.Trainer and torchrun are made for these"
        )
    if args.parallel_mode.value == "distributed" or args.world_size > 1:
        raise ValueError(
            "PServerTrainer: expected a process that torchrun or accelerate has not made one of "
            f"{args.world_size}: `pserver launch --trainers N` starts the trainers of a job"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"PServerTrainer: expected one device, got {args.n_gpu}: a trainer is a process with "
            "one device: set CUDA_VISIBLE_DEVICES of each"
        )
    refused = {
        "deepspeed": (args.deepspeed, "the servers hold the optimizer's state"),
        "fsdp": (args.fsdp, "the servers hold the optimizer's state"),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            "a trainer that begins again leaves the others waiting",
        ),
        "fp16_full_eval": (args.fp16_full_eval, "it changes the parameters themselves"),
        "bf16_full_eval": (args.bf16_full_eval, "it changes the parameters themselves"),
    }
    for name, (value, reason) in refused.items():
        if value:
            raise ValueError(f"{name}: expected none under PServerTrainer, for {reason}")
    if grad_clip is not None and args.max_grad_norm:
        raise ValueError(
            f"expected grad_clip or max_grad_norm, got both: set max_grad_norm=0 (it is "
            f"{args.max_grad_norm})"
        )
    if overlaps(job.strategy) and args.gradient_accumulation_steps > 1:
        raise ValueError(
            "overlap: expected gradient_accumulation_steps=1, for gradients leave during the first "
            "backward; leave overlap off"
        )
