"""How often an id is in a batch, counted where tables are: on the servers of a job.

Yi, Yang, Hong, Cheng, Heldt, Kumthekar, Zhao, Wei, Chi: Sampling-Bias-Corrected Neural Modeling for
Large Corpus Item Recommendations, RecSys 2019, algorithm 2: a moving average of the steps between
two steps whose batches have the id.  There ids share the buckets of a hash; here each has a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainer.embedding.embedding import DistributedEmbedding
from trainer.row_optimizers import Interval
from transpiler.ir.tables import Constant


class StreamingFrequency(nn.Module):
    """The probability of an id to be in the batch of a step.

    A backward through the estimate counts its ids, in the step that follows, whatever the loss
    says: the gradient is zero, and :class:`~trainer.row_optimizers.Interval` is the table's rule.
    So clipping and loss scaling leave the counts alone, evaluation counts nothing, and checkpoints
    have them.  In sync mode a step has the batches of all trainers, otherwise that of one.

    Example::

        frequency = StreamingFrequency(1_000_000, name="how_often")
        logits = logits - frequency(items).log()    # int64 [n]; gives float32 [n]

    Args:
        num_ids: ids are below it.
        alpha: the weight of the newest interval in the average.
        table: further arguments of :class:`~trainer.DistributedEmbedding`: name, capacity...

    Attributes:
        intervals: the table, of one column; 0 in rows that were not counted yet.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(self, num_ids: int, alpha: float = 0.05, **table: Any) -> None:
        super().__init__()
        rule = Interval(alpha)
        rule.rule()  # says at once what is wrong with alpha
        self.intervals = DistributedEmbedding(
            1, num_embeddings=num_ids, init=Constant(0.0), optimizer=rule, **table
        )

    def forward(self, ids: Tensor) -> Tensor:
        """The present estimate; of an id that was not counted yet, that of ids which all are
        equally frequent.

        Args:
            ids: int64 [n]; one may stand there several times.

        Returns:
            float32 [n], above 0 and up to 1.
        """
        assert self.intervals.num_embeddings is not None
        intervals = self.intervals(ids).squeeze(-1)
        found: Tensor = _Frequency.apply(intervals, self.intervals.num_embeddings)  # type: ignore[no-untyped-call]  # torch's own
        return found


class _Frequency(torch.autograd.Function):
    """One by the interval; its gradient is zero, and there."""

    @staticmethod
    def forward(ctx: Any, intervals: Tensor, num_ids: int) -> Tensor:
        # by sums of tensors: a program's batch may have any size
        alike = (torch.ones_like(intervals).sum() / num_ids).clamp(max=1)
        return torch.where(intervals == 0, alike, 1 / intervals.clamp(min=1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.zeros_like(grad), None
