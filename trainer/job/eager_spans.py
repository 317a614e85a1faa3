"""The spans of an eager script's model: forward and backward.

They come from hooks, which are there while a trace is under way and no longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from pserver.onlookers import onlooker
from pserver.telemetry.trace import SPANS, now


def watched(models: Sequence[nn.Module]) -> ExitStack:
    """Notes each forward and backward of the models until what is returned is closed."""
    undo, backwards = ExitStack(), Backwards()
    for number, model in enumerate(models):
        forwards = Forwards(number, backwards)
        before = model.register_forward_pre_hook(forwards.begin)
        after = model.register_forward_hook(forwards.end)
        undo.callback(before.remove)
        undo.callback(after.remove)
    return undo


class Forwards:
    """The forwards of one model.

    Args:
        model: its number.
        backwards: told of the outputs of each that a backward may follow.
    """

    def __init__(self, model: int, backwards: Backwards) -> None:
        self._model, self._backwards = model, backwards
        self._began: list[float] = []  # of those under way: a model may call itself

    @onlooker("the trace")
    def begin(self, module: nn.Module, args: Any) -> None:
        """Before a forward."""
        self._began.append(now())

    @onlooker("the trace")
    def end(self, module: nn.Module, args: Any, outputs: Any) -> None:
        """After it."""
        if not self._began:
            return  # it began before the trace
        SPANS.add("forward", self._began.pop(), now(), model=self._model)
        if torch.is_grad_enabled():
            self._backwards.follow(outputs)


class Backwards:
    """The backwards through what forwards have returned: each from the first gradient of an output
    to the end of the whole backward.
    """

    def __init__(self) -> None:
        self._task = -1  # of autograd, that is noted

    def follow(self, outputs: Any) -> None:
        """A backward through these may come."""
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(self._begin)

    @onlooker("the trace")
    def _begin(self, gradients: Any) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._task or not SPANS.on:
            return
        self._task, began = task, now()
        track = SPANS.track()
        Variable._execution_engine.queue_callback(
            lambda: SPANS.add("backward", began, now(), track) if SPANS.on else None
        )
