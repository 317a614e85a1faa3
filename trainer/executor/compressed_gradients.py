"""The op ``dgc`` of a trainer's program: what leaves of a large gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from trainer.gradients.dgc import Residuals
from transpiler.ir.graph import Op, Ref
from transpiler.ir.rules import Hparam
from transpiler.optim.dgc import Ramp
from transpiler.plan.plan import Plan

Hparams = Mapping[int, Mapping[str, Hparam]]


class CompressedGradients:
    """What one trainer keeps for the ``dgc`` ops of its program.

    Args:
        plan: of the job.
        live: the present hyper-parameters of each group whose optimizer this process holds.
        step: gives the steps that the job has taken.
    """

    def __init__(self, plan: Plan, live: Callable[[], Hparams], step: Callable[[], int]) -> None:
        self._plan, self._live, self._step = plan, live, step
        self._residuals: Residuals | None = None
        self._sources: dict[int, int] = {}  # group of large parameters -> the script's

    def kernel(self, op: Op, grad: Tensor, param: Tensor, **_: Any) -> Tensor:
        """The op: a tensor of the gradient's shape, with zeros for what waits."""
        arguments, name = op.arguments, op.arguments["param"]
        source, sparsity = arguments["group"], arguments["sparsity"]
        begin, steps = arguments["rampup_begin_step"], arguments["rampup_step"]
        assert isinstance(name, Ref) and isinstance(source, int), "the catalogue checks it"
        assert isinstance(begin, int) and isinstance(steps, int) and isinstance(sparsity, tuple)
        if self._residuals is None:
            stages = tuple(float(stage) for stage in sparsity if isinstance(stage, int | float))
            self._residuals = Residuals(Ramp(begin, steps, stages))
        group = self._plan.placement(name.name).group
        assert group is not None, "servers update it"
        self._sources[group] = source
        hparams = {**arguments, **self._live().get(source, {})}
        made = self._residuals.compress(name.name, param.detach(), grad, hparams, self._step())
        return made.dense()

    def hparams(self, present: Hparams) -> dict[int, Mapping[str, Hparam]]:
        """Those of all groups: servers step large parameters by plain SGD, at the present rate.

        Args:
            present: of all groups, as their optimizer has them.
        """
        own = {
            group: {**self._plan.groups[group].hparams, "lr": present[source]["lr"]}
            for group, source in self._sources.items()
        }
        return {**present, **own}

    def forget(self) -> None:
        """Begins again: parameters are others now."""
        if self._residuals is not None:
            self._residuals.forget()

    def end(self, applied: bool) -> None:
        """The step has ended."""
        if self._residuals is not None:
            self._residuals.end(applied)
