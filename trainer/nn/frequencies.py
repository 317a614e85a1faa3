"""How often an id occurs in a stream of batches, estimated in memory of a fixed size.

Yi, Yang, Hong, Cheng, Heldt, Kumthekar, Zhao, Wei, Chi: Sampling-Bias-Corrected Neural Modeling for
Large Corpus Item Recommendations, RecSys 2019, algorithms 2 and 3: for each bucket of a hash the
step at which one of its ids was last seen, and a moving average of the steps between.  An id that
shares a bucket seems more frequent than it is, so of several hashes the longest gap counts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.nn.ids import hash


class StreamingFrequency(nn.Module):
    """The probability of an id to be in a batch.

    Args:
        buckets: of each hash; a few times as many as ids that are frequent.
        alpha: the weight of the newest gap in the average.
        hashes: how many there are.

    Attributes:
        steps: of the stream, int64.
        last: when an id of the bucket was last seen, int64 [hashes, buckets].
        gap: steps between two sights, float32 [hashes, buckets]; 0: none was seen.

    Raises:
        ValueError: a number is out of its range.
    """

    steps: Tensor
    last: Tensor
    gap: Tensor

    def __init__(self, buckets: int = 1 << 18, alpha: float = 0.05, hashes: int = 2) -> None:
        super().__init__()
        if buckets < 1 or hashes < 1 or not 0 < alpha <= 1:
            raise ValueError(
                "StreamingFrequency: expected buckets and hashes of 1 or more and alpha above 0 "
                f"and up to 1, got {buckets}, {hashes} and {alpha}"
            )
        self.alpha = alpha
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(hashes, buckets, dtype=torch.int64))
        self.register_buffer("gap", torch.zeros(hashes, buckets))

    def forward(self, ids: Tensor) -> Tensor:
        """The present estimate; while training, the ids are a step of the stream first.

        Args:
            ids: int64 [n]; one may stand there several times.

        Returns:
            float32 [n], above 0 and up to 1.
        """
        hashes, buckets = self.gap.shape
        places = hash(ids, buckets, hashes).squeeze(2).t()
        if self.training:
            with torch.no_grad():
                self.steps += 1
                since = self.steps - self.last.gather(1, places)
                before = self.gap.gather(1, places)
                moved = before + self.alpha * (since - before)
                # equal ids write equal numbers
                self.gap.scatter_(1, places, torch.where(before == 0, since.float(), moved))
                self.last.scatter_(1, places, self.steps.expand_as(places))
        seen = self.gap.gather(1, places).amax(0)
        never = self.steps.clamp(min=1).float() + 1
        return 1 / torch.where(seen == 0, never, seen).clamp(min=1)
