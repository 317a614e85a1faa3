"""How often an id occurs in a stream of batches, estimated in memory of a fixed size.

Yi, Yang, Hong, Cheng, Heldt, Kumthekar, Zhao, Wei, Chi: Sampling-Bias-Corrected Neural Modeling for
Large Corpus Item Recommendations, RecSys 2019, algorithms 2 and 3: for each bucket of a hash the
step at which one of its ids was last seen, and a moving average of the steps between.  An id that
shares a bucket seems more frequent than it is, so of several hashes the longest gap counts.

The counts are no buffers: in a job these travel with each step, and these would be megabytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.nn.ids import hash
from trainer.nn.labels import traced


class StreamingFrequency(nn.Module):
    """The probability of an id to be in a batch.

    Each trainer has its own.  ``state_dict()`` has it; ``fleet.save`` has not, and a job that goes
    on estimates anew.

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

    def __init__(self, buckets: int = 1 << 18, alpha: float = 0.05, hashes: int = 2) -> None:
        super().__init__()
        if buckets < 1 or hashes < 1 or not 0 < alpha <= 1:
            raise ValueError(
                "StreamingFrequency: expected buckets and hashes of 1 or more and alpha above 0 "
                f"and up to 1, got {buckets}, {hashes} and {alpha}"
            )
        self.alpha = alpha
        self.steps = torch.zeros((), dtype=torch.int64)
        self.last = torch.zeros(hashes, buckets, dtype=torch.int64)
        self.gap = torch.zeros(hashes, buckets)

    def forward(self, ids: Tensor) -> Tensor:
        """The present estimate; while training, the ids are a step of the stream first.

        Args:
            ids: int64 [n]; one may stand there several times.

        Returns:
            float32 [n], above 0 and up to 1.

        Raises:
            ValueError: ``capture`` is tracing: a program has no place for the counts.
        """
        if traced(ids):
            raise ValueError(
                "StreamingFrequency: a program does not count; expected logq=False there"
            )
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

    def get_extra_state(self) -> dict[str, Tensor]:
        """What ``state_dict()`` has of it."""
        return {"steps": self.steps, "last": self.last, "gap": self.gap}

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """Takes over what :meth:`get_extra_state` gave.

        Raises:
            ValueError: it is of another number of buckets or hashes.
        """
        if state["gap"].shape != self.gap.shape:
            raise ValueError(
                f"StreamingFrequency: expected counts {list(self.gap.shape)}, got "
                f"{list(state['gap'].shape)}"
            )
        for name, value in state.items():
            getattr(self, name).copy_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """``to`` moves the counts, and leaves their dtypes."""
        for name in ("steps", "last", "gap"):
            tensor = getattr(self, name)
            setattr(self, name, fn(tensor).to(tensor.dtype))
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own
