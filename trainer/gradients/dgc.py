"""Deep gradient compression on a trainer: the velocity and the residual of each large parameter,
between its gradient and whatever carries it.  See [Note: deep gradient compression] in
transpiler/optim/dgc.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.gradients.residuals import Residuals
from transpiler.clip import ClipGradByGlobalNorm, ClipGradByNorm, GradClip
from transpiler.ir.rules import Rule, rule_of
from transpiler.optim.dgc import LEAST, Compressed, Ramp
from transpiler.plan.plan import Plan
from transpiler.strategy.strategy import DistributedStrategy

DTYPES = (torch.float32, torch.float64)
PLAIN = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}  # of the rule that servers apply

Gradients = dict[Tensor, Tensor]  # by parameter

log = logging.getLogger(__name__)


class DeepGradientCompression:
    """What one optimizer keeps of its large parameters.  The script's thread uses it.

    Args:
        ramp: how sparse the steps are.
        optimizer: the script's.

    Raises:
        ValueError: it is no SGD with momentum, or has dampening.
    """

    def __init__(self, ramp: Ramp, optimizer: torch.optim.Optimizer) -> None:
        self.ramp = ramp
        self._optimizer = optimizer
        self.check()
        self._residuals = Residuals(ramp)
        if not self.groups():
            log.warning(
                "strategy.dgc: no parameter in float32 or float64 has %d elements or more: all "
                "gradients stay whole",
                LEAST,
            )

    def check(self) -> None:
        """Whether trainers can apply the momentum of every group.

        Raises:
            ValueError: one has none, or dampening; or the optimizer is no SGD.
        """
        for index, group in enumerate(self._optimizer.param_groups):
            rule = rule_of(self._optimizer, group)
            if rule.type == "momentum" and not group["dampening"]:
                continue
            got = type(self._optimizer).__name__
            if rule.type in ("sgd", "momentum"):
                got += f" with momentum {group['momentum']:g}, dampening {group['dampening']:g}"
            raise ValueError(
                "strategy.dgc: expected torch.optim.SGD with a momentum above 0 and no dampening, "
                f"because trainers apply the momentum before they choose what to send; group "
                f"{index} has {got}"
            )

    # ---- which parameters, and by which rule ----

    def groups(self) -> dict[Tensor, int]:
        """The parameters that are compressed, each with the index of its group."""
        return {
            parameter: index
            for index, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
            if parameter.numel() >= LEAST and parameter.dtype in DTYPES
        }

    def rule(self, index: int) -> Rule:
        """The rule by which servers step a group's large parameters: plain SGD."""
        rule = rule_of(self._optimizer, self._optimizer.param_groups[index])
        flags = {key: on for key, on in rule.flags.items() if key != "nesterov"}
        return replace(rule, type="sgd", hparams={**rule.hparams, **PLAIN}, flags=flags)

    def hparams(self, plan: Plan, names: Mapping[Tensor, str]) -> dict[int, dict[str, Any]]:
        """The present hyper-parameters of those rules, by the number of each group in the plan.

        Args:
            names: of the parameters.
        """
        found: dict[int, dict[str, Any]] = {}
        one_of = {index: parameter for parameter, index in self.groups().items()}
        for index, parameter in one_of.items():
            group = plan.placement(names[parameter]).group
            assert group is not None, "servers update it"
            found[group] = dict(self.rule(index).hparams)
        return found

    # ---- a step ----

    def leaving(self, gradients: Mapping[Tensor, Tensor], step: int) -> dict[Tensor, Tensor]:
        """What leaves of each large parameter among these, in its shape, with zeros for what waits;
        see :meth:`compress`.
        """
        return {p: each.dense() for p, each in self.compress(gradients, step).items()}

    def compress(self, gradients: Mapping[Tensor, Tensor], step: int) -> dict[Tensor, Compressed]:
        """What leaves of each large parameter among these; :meth:`end` says whether the step
        counts.

        Args:
            gradients: of this trainer, by parameter.
            step: of the job, from 0.
        """
        groups = self._optimizer.param_groups
        return {
            p: self._residuals.compress(p, p, gradients[p], groups[index], step)
            for p, index in self.groups().items()
            if p in gradients
        }

    def end(self, applied: bool) -> None:
        """The step has ended; where it was not applied, nothing has changed."""
        self._residuals.end(applied)

    def forget(self) -> None:
        """Begins again: parameters and states are others now."""
        self._residuals.forget()

    def step(self, means: Mapping[Tensor, Tensor], take: Callable[[Gradients], None]) -> None:
        """Steps on this trainer: large parameters by plain SGD, the others by their ``.grad``.

        Args:
            means: what all trainers have sent of the large ones.
            take: the optimizer's step with these gradients, each of which is its parameter's.
        """
        groups = self._optimizer.param_groups
        own = {parameter: parameter.grad for group in groups for parameter in group["params"]}
        rest = {p: g for p, g in own.items() if g is not None and p not in means}
        hparams = [{key: group[key] for key in (*PLAIN, "nesterov")} for group in groups]
        try:
            for parameter, mean in means.items():
                parameter.grad = mean
            for group in groups:
                group.update(PLAIN, nesterov=False)
            take(dict(means))
        finally:
            for parameter in means:
                parameter.grad = own[parameter]
            for group, values in zip(groups, hparams, strict=True):
                group.update(values)
        take(rest)
        self.end(applied=True)


def dgc_of(
    strategy: DistributedStrategy | None, optimizer: torch.optim.Optimizer
) -> DeepGradientCompression | None:
    """What a strategy asks for; None where it does not.

    Raises:
        ValueError: the optimizer is no SGD with momentum.
    """
    if strategy is None or not strategy.dgc:
        return None
    configs = strategy.dgc_configs
    ramp = Ramp(configs["rampup_begin_step"], configs["rampup_step"], tuple(configs["sparsity"]))
    return DeepGradientCompression(ramp, optimizer)


def local_clip(clip: GradClip | None, trainers: int) -> GradClip | None:
    """How each trainer clips its own gradient where the merged one is to have this bound.

    Args:
        clip: as the script gives it.
        trainers: how many gradients a merged one is the mean of.

    Raises:
        ValueError: it clips values: a bound of a mean's values says nothing of those of its parts.

    Example:
        >>> local_clip(ClipGradByNorm(1.0), 4).clip_norm
        2.0
    """
    if clip is None:
        return None
    if not isinstance(clip, ClipGradByNorm | ClipGradByGlobalNorm):
        raise ValueError(
            "strategy.dgc: expected grad_clip=ClipGradByNorm(...) or ClipGradByGlobalNorm(...), "
            "whose bound trainers can divide among themselves, got "
            f"{type(clip).__name__}"
        )
    return type(clip)(clip.clip_norm * math.sqrt(trainers))
