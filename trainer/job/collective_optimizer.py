"""The optimizer of a job without servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from trainer.collective.local_sgd import LocalSgd
from trainer.collective.world import current_peers, naming_trainers
from trainer.gradients.dgc import DeepGradientCompression, means_of
from trainer.gradients.gradient_merge import GradientMerge
from trainer.gradients.step import tell_scaler
from trainer.job.averaged_gradients import AveragedGradients
from trainer.optimizer import Connect, DistributedOptimizer
from transpiler.clip import GradClip


class CollectiveOptimizer(DistributedOptimizer):
    """The optimizer of a job without servers: steps on this trainer, with gradients that are the
    same on all.

    Args:
        optimizer: the script's.
        names: of the parameters.
        connect: takes up groups that are added.
        grad_clip: applied to the mean gradient; with local SGD or ``dgc`` to this trainer's own.
        merge: see :class:`DistributedOptimizer`.
        shared: sums the merged gradients over the trainers: given whether they overflowed here, it
            gives whether some trainer's have.  None: backward does that.
        dgc: compresses large gradients; None: backward averages all of them.

    Attributes:
        local_sgd: averages parameters in the place of gradients; None: gradients are averaged.
        averaged: looks whether a backward has done so; None: none need have.
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
        """Gives all trainers the same parameters, where each has its own: every trainer calls this.

        See [Note: an average in between] in trainer/collective/local_sgd.py.

        Raises:
            TimedOut: one does not come.
            TrainerLost: one has left.
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
        scales stay in step.
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
