"""The means of gradients over a group, bucket by bucket, while backward is still running.

::

    backward:   ... gradient, gradient | gradient ...              | end
    bucket 0:                          | reduce ...........|       |
    bucket 1:                                     | reduce .|.......| wait, deliver

Buckets leave in one order everywhere, whichever is full first: ranks would otherwise reduce
different buckets with one another.  At most two are on their way, so that the memory of whole
gradients stays bounded where each rank keeps its share only.  At the end of backward a missing
gradient counts as zero; a parameter that no rank has a gradient of keeps none, as on a single node.

A backward that runs within another (a reentrant checkpoint's) is a pass of its own, which ends
before the other does; their means add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.sharding.bucket import Bucket, after_gradient
from trainer.sharding.collectives import reduce_scatter

# Takes a bucket, its mean (all of it, or this rank's share), and the parameters that have a
# gradient on some rank.
Deliver = Callable[[Bucket, Tensor, set[nn.Parameter]], None]
_IN_FLIGHT = 2


@dataclass(slots=True)
class _Pass:
    """One backward pass: the gradients that have come, the buckets that have left."""

    arrived: set[nn.Parameter] = field(default_factory=set)
    left: int = 0  # buckets
    # the work, and memory that must live as long
    flying: list[tuple[Any, Tensor]] = field(default_factory=list)
    results: list[Tensor] = field(default_factory=list)


class Reducer:
    """Averages gradients over a group, in every backward.

    Args:
        buckets: of parameters that require gradients.
        group: whose ranks all run the same number of backward passes.
        scatter: each rank gets its share of a bucket only, and ``p.grad`` is freed; otherwise all
            get all.
        at_once: a bucket is waited for when it leaves, so that nothing overlaps.
        deliver: takes the results at the end of backward.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        scatter: bool,
        at_once: bool,
        deliver: Deliver,
    ) -> None:
        self.buckets, self._group, self._scatter, self._at_once, self._deliver = (
            tuple(buckets),
            group,
            scatter,
            at_once,
            deliver,
        )
        self.reductions = 0  # collectives that carried gradients
        self._passes: dict[int, _Pass] = {}  # by their number; a later one is within an earlier one
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                after_gradient(parameter, self._arrived)

    def _arrived(self, parameter: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in self._passes:
            self._passes[task] = _Pass()
            # as torch's own do
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, task))
        now = self._passes[task]
        assert isinstance(parameter, nn.Parameter)
        now.arrived.add(parameter)
        while now.left < len(self.buckets) and now.arrived.issuperset(
            self.buckets[now.left].parameters
        ):
            self._send(now)

    @torch.no_grad()
    def _send(self, now: _Pass) -> None:
        bucket = self.buckets[now.left]
        now.left += 1
        whole = bucket.memory()
        for parameter, begin, end in bucket.spans():
            if parameter.grad is None:
                whole[begin:end].zero_()
            else:  # divided before it is summed, as DDP does
                now.arrived.add(parameter)  # or it has one from an earlier backward
                torch.mul(parameter.grad.reshape(-1), 1.0 / bucket.ranks, out=whole[begin:end])
                parameter.grad = None
        if self._scatter:
            result = whole.new_empty(bucket.share)
            work = reduce_scatter(result, whole, group=self._group, async_op=True)
        else:
            result = whole
            work = dist.all_reduce(whole, group=self._group, async_op=True)
        self.reductions += 1
        now.results.append(result)
        now.flying.append((work, whole))
        self._wait(now, 0 if self._at_once else _IN_FLIGHT)

    @staticmethod
    def _wait(now: _Pass, most: int) -> None:
        """Waits until at most so many buckets are on their way."""
        while len(now.flying) > most:
            work, _ = now.flying.pop(0)
            work.wait()

    def forget(self) -> None:
        """Drops the passes of backwards that have failed."""
        self._passes.clear()

    def _finish(self, task: int) -> None:
        now = self._passes.pop(task)
        while now.left < len(self.buckets):
            self._send(now)
        anywhere = self._anywhere(now.arrived)
        self._wait(now, 0)
        for bucket, result in zip(self.buckets, now.results, strict=True):
            if not self._scatter:
                _add_later(bucket, result)
            self._deliver(bucket, result, anywhere)

    def _anywhere(self, arrived: set[nn.Parameter]) -> set[nn.Parameter]:
        """The parameters that some rank has a gradient of."""
        ours = [parameter for bucket in self.buckets for parameter in bucket.parameters]
        if dist.get_world_size(self._group) == 1:
            return arrived
        marks = torch.tensor(
            [parameter in arrived for parameter in ours], dtype=torch.int32, device=ours[0].device
        )
        dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self._group)
        return {parameter for parameter, mark in zip(ours, marks.tolist(), strict=True) if mark}


@torch.no_grad()
def _add_later(bucket: Bucket, result: Tensor) -> None:
    """Adds what a backward within this one has delivered after the bucket had left."""
    for parameter, begin, end in bucket.spans():
        if parameter.grad is not None:
            result[begin:end].add_(parameter.grad.reshape(-1))
