"""Segments of several modules, of which a forward need not run all, or not in order.

[Note: runs of a segment]  FSDP2 gathers a segment when the first of its modules is called, and
takes the output of the one that is called last for that of the segment: there its backward begins.
A forward may use an earlier module's output elsewhere, or the last one's without a gradient; then
nothing would gather the segment for backward, nor reduce its gradients.  So backward is followed
from the output of each of its modules.  Autograd goes through them in the reverse order of their
calls, so the first one's inputs are the last to be reached, as FSDP2 expects.  A module that the
script calls by itself, outside of its model's forward, ends the run: otherwise the segment would
stay gathered, with values that the next update makes old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def follow_runs(segment: Sequence[nn.Module], outermost: Callable[[], bool]) -> None:
    """Follows backward from each module of a segment; see [Note: runs of a segment].

    Args:
        segment: modules that FSDP2 shards together.
        outermost: whether the forward that runs is the outermost one.
    """
    first = segment[0]
    if len(segment) == 1:
        return
    assert isinstance(first, FSDPModule)
    state = first._get_fsdp_state()

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1  # which runs a forward again
        if in_backward or not state._modules_to_run_forward:
            return output
        if not outermost():
            return state._register_pre_backward_hook(output)
        state._modules_to_run_forward.clear()
        return state._post_forward(module, args, output)

    for module in segment:
        module.register_forward_hook(after)
