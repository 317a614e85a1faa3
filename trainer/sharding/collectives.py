"""torch's collectives over flat memory, by the names that the installed torch has for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

Collective = Callable[..., Any]

# (output, input, group=, async_op=); torch 2.13 renamed them.
all_gather: Collective = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Collective = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
