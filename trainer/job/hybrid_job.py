"""fleet's job with ``hybrid_configs``, ``sharding``, ``pipeline`` or ``tensor_parallel``: its model
is made parallel when it is registered, its optimizer steps this rank's parts.

::

    strategy.hybrid_configs = {"dp_degree": -1, "mp_degree": 2}
    fleet.init(is_collective=True, strategy=strategy)
    model = fleet.distributed_model(Net(), tensor_plan={"*.up": "colwise", "*.down": "rowwise"})
    optimizer = torch.optim.Adam(model.parameters())  # made after distributed_model
    optimizer = fleet.distributed_optimizer(optimizer)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.environment.environment import RoleMaker
from trainer.hybrid.mesh import data_place, forget_groups, hybrid_mesh
from trainer.hybrid.parallel import (
    forget_model_groups,
    hybrid_optimizer,
    hybrid_parallel,
    hybrid_state_dict,
)
from trainer.job.collective_job import CollectiveJob
from trainer.job.collective_optimizer import CollectiveOptimizer
from trainer.optimizer import DistributedOptimizer
from transpiler.clip import GradClip
from transpiler.ir.plain_names import named_parameters
from transpiler.strategy.strategy import DistributedStrategy
from transpiler.strategy.update_rules import replaced


class HybridJob(CollectiveJob):
    """One trainer's part of a job that is parallel in several directions of a mesh.

    Args:
        strategy: one that divides a model.

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
        """Leaves, and lets all process groups go."""
        super().close()
        if self.mesh is not None:
            forget_groups(self.mesh)
        for model in self.models:
            forget_model_groups(model)

    def register(self, model: nn.Module, options: Mapping[str, Any]) -> nn.Module:
        """See :func:`trainer.hybrid.hybrid_parallel`.

        Raises:
            ValueError: a second model.
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
            ValueError: ``compression`` is given, another strategy, or the optimizer was made before
                ``fleet.distributed_model``.
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
        """Whole on every trainer."""
        return hybrid_state_dict(model)

    def place_in_data(self) -> tuple[int, int]:
        """Trainers that differ only in the pipeline, tensor or sequence direction get the same
        batches.
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
        """Whole tensors, of this rank's stage.  All ranks call this."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up what :meth:`state_dict` of the same stage gave."""
        self.inner.load_state_dict(state_dict)
        self._share()
