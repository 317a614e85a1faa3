"""An optimizer's updates as torch's fused kernels: ``build_strategy["fuse_all_optimizer_ops"]``.

The flag is one of the rule's, so that it is in the plan, and servers update in the same way.
"""

from __future__ import annotations

import torch

from transpiler.ir.fusion import fusion_of
from transpiler.ir.rules import rule_of
from transpiler.strategy.strategy import DistributedStrategy


def fuse_updates(optimizer: torch.optim.Optimizer, strategy: DistributedStrategy | None) -> None:
    """Sets the flag in the optimizer's groups, where the strategy asks for it.

    Raises:
        ValueError: torch has no such kernels for the optimizer's rule.
    """
    if strategy is None or not strategy.build_strategy["fuse_all_optimizer_ops"]:
        return
    for group in optimizer.param_groups:
        flag = fusion_of(rule_of(optimizer, group).type)
        group |= {key: None for key in ("foreach", "fused") if key in group} | {flag: True}
