"""Deep gradient compression on a trainer: the velocity and the residual of each large parameter,
applied before its gradient is sent.  See [Note: deep gradient compression] in
transpiler/optim/dgc.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from pserver.errors import FingerprintMismatch
from pserver.finite import is_finite
from trainer.collective.all_reduce import all_reduce_over
from trainer.collective.fused_gradients import fused_allreduce_gradients
from trainer.collective.world import current_peers, naming_trainers
from transpiler.clip import ClipGradByGlobalNorm, ClipGradByNorm, GradClip
from transpiler.ir.rules import Rule, rule_of
from transpiler.optim.dgc import LEAST, Compressed, Ramp, compress
from transpiler.plan.plan import Plan
from transpiler.strategy.exchange import GradientExchange
from transpiler.strategy.strategy import DistributedStrategy

# ---- residuals ----
#
# Velocity and residual of large parameters, from step to step.  See [Note: deep gradient
# compression] in transpiler/optim/dgc.py.


class Residuals:
    """The velocities and residuals of a trainer's large parameters.  The script's thread uses it.

    Args:
        ramp: the sparsity by step.
    """

    def __init__(self, ramp: Ramp) -> None:
        self.ramp = ramp
        self._kept: dict[Hashable, tuple[Tensor, Tensor]] = {}  # velocity and residual
        self._next: dict[Hashable, tuple[Tensor, Tensor]] = {}  # after the step under way

    def compress(
        self,
        key: Hashable,
        parameter: Tensor,
        gradient: Tensor,
        hparams: Mapping[str, Any],
        step: int,
    ) -> Compressed:
        """Compresses a gradient to the part that is sent; :meth:`end` follows, with whether the
        step counts.

        A gradient that is not finite is sent, so that servers see it, and changes no velocity or
        residual.

        Args:
            key: of the parameter.
            gradient: this trainer's gradient, clipped.
            hparams: momentum, weight_decay, nesterov and maximize of the parameter's update.
            step: of the job, from 0.
        """
        if decay := float(hparams["weight_decay"]):
            gradient = gradient.add(parameter, alpha=-decay if hparams["maximize"] else decay)
        zeros = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        # in the parameter's dtype, which a script may have cast since
        velocity, residual = (each.to(zeros) for each in self._kept.get(key, (zeros, zeros)))
        kept = self.ramp.sent_count(parameter.numel(), step)
        momentum, nesterov = float(hparams["momentum"]), bool(hparams["nesterov"])
        made = compress(gradient, velocity, residual, kept, momentum, nesterov)
        self._next.pop(key, None)
        if is_finite(made.values):  # the largest elements
            self._next[key] = made.velocity, made.residual
        return made

    def end(self, applied: bool) -> None:
        """Ends the step; if it was not applied, velocities and residuals stay as they were."""
        if applied:
            self._kept.update(self._next)
        self._next = {}

    def forget(self) -> None:
        """Begins anew, because parameters and states have been replaced."""
        self._kept, self._next = {}, {}


# ---- deep gradient compression ----


DTYPES = (torch.float32, torch.float64)
PLAIN = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}  # of the rule that servers apply

Gradients = dict[Tensor, Tensor]  # by parameter

log = logging.getLogger(__name__)


class DeepGradientCompression:
    """Deep gradient compression for one optimizer's large parameters.  The script's thread uses it.

    Args:
        ramp: the sparsity by step.
        optimizer: the script's optimizer.

    Raises:
        ValueError: the optimizer is not SGD with momentum, or has dampening.
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
        """Checks that trainers can apply the momentum of every group.

        Raises:
            ValueError: a group has no momentum, or dampening; or the optimizer is not SGD.
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

    # ---- parameters and rules ----

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
        """The present hyper-parameters of these rules, by the number of each group in the plan.

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

    # ---- steps ----

    def leaving(self, gradients: Mapping[Tensor, Tensor], step: int) -> dict[Tensor, Tensor]:
        """The part of each large parameter's gradient that is sent, in its shape, with zeros
        elsewhere; see :meth:`compress`.
        """
        return {p: each.dense() for p, each in self.compress(gradients, step).items()}

    def compress(self, gradients: Mapping[Tensor, Tensor], step: int) -> dict[Tensor, Compressed]:
        """Compresses the gradient of each large parameter to the part that is sent; :meth:`end`
        follows, with whether the step counts.

        Args:
            gradients: this trainer's gradients, by parameter.
            step: of the job, from 0.
        """
        groups = self._optimizer.param_groups
        return {
            p: self._residuals.compress(p, p, gradients[p], groups[index], step)
            for p, index in self.groups().items()
            if p in gradients
        }

    def end(self, applied: bool) -> None:
        """Ends the step; if it was not applied, velocities and residuals stay as they were."""
        self._residuals.end(applied)

    def forget(self) -> None:
        """Begins anew, because parameters and states have been replaced."""
        self._residuals.forget()

    def step(self, means: Mapping[Tensor, Tensor], take: Callable[[Gradients], None]) -> None:
        """Steps on this trainer: large parameters by plain SGD with their means, the others by the
        optimizer's own rule with their ``.grad``.

        Args:
            means: the means of the sent parts of large parameters, over all trainers.
            take: takes the optimizer's step with these gradients, each of which is its parameter's
                ``.grad``.
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
    """The deep gradient compression that a strategy asks for; None if it asks for none.

    Raises:
        ValueError: the optimizer is not SGD with momentum.
    """
    if strategy is None or not strategy.dgc:
        return None
    configs = strategy.dgc_configs
    ramp = Ramp(configs["rampup_begin_step"], configs["rampup_step"], tuple(configs["sparsity"]))
    return DeepGradientCompression(ramp, optimizer)


def local_clip(clip: GradClip | None, trainers: int) -> GradClip | None:
    """The clipping of each trainer's own gradient, where the merged one is to have this bound.

    Args:
        clip: the script's clipping.
        trainers: the number of gradients in a merged one.

    Raises:
        ValueError: it clips by value: a bound on a mean's values gives no bound on those of its
            parts.

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


# ---- compression without servers ----
#
# Deep gradient compression among trainers without servers: positions and values in place of an
# all-reduce.
#
# Every trainer gathers the sent parts of all for the large parameters, and adds them up in the
# order of the trainers: the mean is the same on all, to the bit.  A trainer receives N times as
# much as it sends, so this pays while sparsity is well above 1 - 1/N. Small gradients are averaged
# whole, in the same call: nothing is sent during backward.


def check_alike(ramp: Ramp) -> None:
    """Compares the ramps of all trainers, which must gather equally many elements.

    Raises:
        FingerprintMismatch: another trainer's ramp differs.
    """
    peers = current_peers()
    for rank, other in enumerate(peers.meet("dgc", str(ramp), range(peers.size))):
        if other != str(ramp):
            raise FingerprintMismatch(
                f"strategy.dgc_configs: trainer {rank} has {other}, trainer {peers.rank} has {ramp}"
            )


def means_of(
    dgc: DeepGradientCompression, parameters: Sequence[Tensor], step: int, overflow: bool
) -> dict[Tensor, Tensor] | None:
    """One step's means over all trainers; every trainer calls this.

    A trainer without a gradient for a parameter adds zeros to its mean, and keeps its velocity and
    residual.

    Args:
        dgc: of this trainer; its step is not ended here.
        parameters: the trained ones, in the same order on every trainer; ``.grad`` of the small
            ones becomes the mean.
        step: of the job.
        overflow: a gradient of this trainer is not finite.

    Returns:
        The means of the large parameters with a gradient on some trainer; None: some trainer's step
        overflowed.

    Raises:
        PServerError: another trainer is lost.
    """
    have = torch.tensor([*(p.grad is not None for p in parameters), overflow], dtype=torch.uint8)
    with naming_trainers():
        dist.all_reduce(have, dist.ReduceOp.MAX)
    if have[-1]:
        return None
    large = dgc.groups()
    fused_allreduce_gradients([p for p in parameters if p not in large])
    sent = dgc.compress({p: p.grad for p in parameters if p.grad is not None}, step)
    found = [p for p, anywhere in zip(parameters, have, strict=False) if anywhere and p in large]
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in found:
        alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
    means: dict[Tensor, Tensor] = {}
    with naming_trainers():
        for own in alike.values():
            kept = {p: dgc.ramp.sent_count(p.numel(), step) for p in own}
            means |= (
                _of_elements(sent, kept) if dgc.ramp.stage(step) is not None else _whole(sent, own)
            )
    return means


def _whole(sent: Mapping[Tensor, Compressed], own: Sequence[Tensor]) -> dict[Tensor, Tensor]:
    """The means before the ramp: an all-reduce."""
    parts = [sent[p].values if p in sent else torch.zeros_like(p) for p in own]
    flat = _flatten_dense_tensors(parts)  # type: ignore[no-untyped-call]  # torch's own
    flat = flat.clone() if len(parts) == 1 else flat  # of one tensor it is a view
    all_reduce_over(None, GradientExchange(), flat.device, "").begin(flat, 0)()
    flat.div_(dist.get_world_size())
    means = _unflatten_dense_tensors(flat, parts)  # type: ignore[no-untyped-call]  # torch's own
    return dict(zip(own, means, strict=True))


def _of_elements(
    sent: Mapping[Tensor, Compressed], kept: Mapping[Tensor, int | None]
) -> dict[Tensor, Tensor]:
    """The means of elements: two gathers, of all positions and of all values."""
    indices, values = [], []
    for parameter, count in kept.items():
        one = sent.get(parameter)
        if one is None or one.indices is None:
            indices.append(torch.arange(count or 0, device=parameter.device, dtype=torch.int32))
            values.append(torch.zeros(count or 0, device=parameter.device, dtype=parameter.dtype))
        else:
            indices.append(one.indices.int())
            values.append(one.values)
    sizes = [len(each) for each in values]
    all_indices, all_values = _gathered(torch.cat(indices)), _gathered(torch.cat(values))
    means = {p: torch.zeros_like(p, memory_format=torch.contiguous_format) for p in kept}
    for theirs, there in zip(all_values, all_indices, strict=True):
        split = zip(torch.split(theirs, sizes), torch.split(there, sizes), strict=True)
        for mean, (part, where) in zip(means.values(), split, strict=True):
            mean.view(-1).index_add_(0, where.long(), part)
    return {p: mean.div_(len(all_values)) for p, mean in means.items()}


def _gathered(mine: Tensor) -> list[Tensor]:
    """The tensors of all trainers, of one size."""
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return every
