"""Whether the rule of an optimizer may step shards: parts of parameters, on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from transpiler.ir.rules import Rule, rule_of
from transpiler.optim.dgc import LayerWiseOptimizer


def sharded_rule(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Rule:
    """The update rule of a parameter group: an element-wise one, or one whose norms ranks add up.

    Raises:
        ValueError: as of ``rule_of``; or the rule needs other numbers of whole tensors.
    """
    rule = rule_of(optimizer, group)
    if rule.whole and not isinstance(optimizer, LayerWiseOptimizer):
        raise ValueError(
            f"optimizer {type(optimizer).__qualname__} needs norms of whole tensors, so a slice "
            "cannot be updated alone"
        )
    return rule
