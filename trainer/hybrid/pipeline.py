"""One rank's stage of a pipelined model, on torch.distributed.pipelining.

A batch is cut into micro batches, which the stages compute at the same time: by the schedule "1F1B"
a forward and a backward in turn, by "F-then-B" all forwards and then all backwards, which keeps the
activations of all of them.  ``accumulate_steps`` is their number, ``micro_batch_size`` the samples
of each; where only the size is given, the batch says how many there are.

(Narayanan et al.: PipeDream-2BW, memory-efficient pipeline-parallel DNN training, 2021.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.collective.world import naming_trainers
from trainer.hybrid.stages import Stage

Loss = Callable[[Any, Tensor], Tensor]


class Pipeline(nn.Module):
    """This rank's stage of a model: its parameters are those of the stage, with the names that they
    have in the model.

    ::

        # in the place of loss = loss_fn(model(x), y); loss.backward()
        loss = pipeline.forward_backward(x, target=y)
        optimizer.step()

    All ranks of the pipeline give the same batch.  The gradient is that of the mean over micro
    batches, which is ``loss_fn``'s own where it is a mean over samples.

    Args:
        model: the whole one, for the names of its inputs.
        stage: this rank's.
        group: the ranks of the pipeline, in the order of the stages.
        micro_batches: into so many equal parts a batch is cut, along dimension 0; None: into as
            many as ``micro_size`` makes, and without that it is one.
        micro_size: samples of each; None: as many as the batch has for each.
        loss_fn: (the model's output, target) -> a mean over samples, a scalar.
        schedule: "1F1B" or "F-then-B".

    Raises:
        ValueError: fewer micro batches than stages, with "1F1B".
    """

    def __init__(
        self,
        model: nn.Module,
        stage: Stage,
        group: dist.ProcessGroup,
        micro_batches: int | None,
        micro_size: int | None,
        loss_fn: Loss,
        schedule: str = "1F1B",
    ) -> None:
        super().__init__()
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

        index, count = dist.get_rank(group), dist.get_world_size(group)
        self._least = count if schedule == "1F1B" else 1  # micro batches
        if micro_batches is None and micro_size is None:
            micro_batches = 1
        if micro_batches is not None:
            self._check_enough(micro_batches)
        self.stage, self._inputs, self._group = stage.module, stage.inputs, group
        self._names = batch_names(model)
        self._micro_batches, self._micro_size = micro_batches, micro_size
        self._first, self._last = index == 0, index == count - 1
        self._device = next(
            (parameter.device for parameter in model.parameters()), torch.device("cpu")
        )
        order = Schedule1F1B if schedule == "1F1B" else ScheduleGPipe
        self._make: Callable[[int], Any] = lambda parts: order(
            PipelineStage(self.stage, index, count, self._device, group=group),
            parts,
            loss_fn=loss_fn,
        )
        # by the shapes of the batch: a stage's buffers have one shape
        self._schedules: dict[tuple[Any, ...], Any] = {}

    def forward_backward(self, *args: Tensor, target: Tensor, **kwargs: Tensor) -> Tensor:
        """Runs a batch forward and backward; gradients add to ``p.grad``.

        Args:
            args, kwargs: the model's inputs, the same on all ranks of the pipeline.
            target: for ``loss_fn``, cut like the batch.

        Returns:
            The mean loss of the micro batches, a 0-dim tensor, on every rank of the pipeline.

        Raises:
            ValueError: the batch cannot be cut into equal parts.
        """
        return self._run(args, kwargs, target, "step")

    @torch.no_grad()
    def evaluate(self, *args: Tensor, target: Tensor, **kwargs: Tensor) -> Tensor:
        """The same loss, without gradients."""
        return self._run(args, kwargs, target, "eval")

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Refused: one rank has one stage only.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "this rank has one stage of the model: call forward_backward(*inputs, target=...) or "
            "evaluate"
        )

    def _run(
        self, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], target: Tensor, what: str
    ) -> Tensor:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        count = self._parts(target.shape[0])
        for name, tensor in (*given.items(), ("target", target)):
            samples = tensor.shape[0]
            if samples % count:
                raise ValueError(
                    f"{name}: expected a batch that {count} micro batches divide evenly, got "
                    f"{samples} samples"
                )
            if self._micro_size is not None and samples != count * self._micro_size:
                raise ValueError(
                    f"{name}: expected {count} micro batches of {self._micro_size} samples, got "
                    f"{samples} samples"
                )
        missing = [name for name in self._inputs if name not in given]
        if missing:
            raise TypeError(
                f"forward_backward: this rank's stage needs the model's input {missing[0]!r}"
            )
        mine = {name: given[name] for name in self._inputs}
        losses: list[Tensor] = []
        wanted: dict[str, Any] = {"target": target, "losses": losses} if self._last else {}
        run = getattr(self._schedule(what, count, (*given.items(), ("target", target))), what)
        with naming_trainers():
            if self._first:
                run(*mine.values(), **wanted)
            else:
                run(**mine, **wanted)
            loss = (
                torch.stack(losses).detach().mean()
                if self._last
                else torch.zeros((), device=self._device)
            )
            dist.broadcast(loss, group=self._group, group_src=dist.get_world_size(self._group) - 1)
        return loss

    def _parts(self, samples: int) -> int:
        """The number of micro batches of a batch.

        Raises:
            ValueError: the size of micro batches does not divide it, or leaves too few of them.
        """
        if self._micro_batches is not None:
            return self._micro_batches
        assert self._micro_size is not None
        if samples % self._micro_size:
            raise ValueError(
                f"target: expected a batch of micro batches of {self._micro_size} samples, got "
                f"{samples} samples"
            )
        self._check_enough(samples // self._micro_size)
        return samples // self._micro_size

    def _check_enough(self, parts: int) -> None:
        if parts < self._least:
            raise ValueError(
                "pipeline_configs: expected accumulate_steps (micro batches) of at least "
                f"pp_degree {self._least}, got {parts}"
            )

    def _schedule(self, what: str, count: int, batch: tuple[tuple[str, Tensor], ...]) -> Any:
        shapes = (what, *((name, tensor.shape, tensor.dtype) for name, tensor in batch))
        if shapes not in self._schedules:
            self._schedules[shapes] = self._make(count)
        return self._schedules[shapes]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of this stage, by the names in the model."""
        return self.stage.state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """Of this stage, by the names in the model."""
        return self.stage.named_parameters(*args, **kwargs)


def batch_names(model: nn.Module) -> list[str]:
    """The names of a model's inputs."""
    import inspect

    return list(inspect.signature(model.forward).parameters)
