"""A trainer's batches where trainers step together: they end with the first trainer's last one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from trainer.collective.world import naming_trainers

END = object()  # of a trainer's batches

log = logging.getLogger(__name__)


class LockstepBatches:
    """A trainer's batches, up to the first step for which some trainer has none.  A pass under
    ``torch.no_grad()``, an evaluation, has all of them, and needs no other trainer.

    Before each batch the trainers exchange whether they have one.  Without this a trainer with
    fewer batches would end, and the others would block in their next all-reduce.

    Args:
        batches: this trainer's, of any iterable.
        trainers, trainer_id: their number, and this trainer's.
    """

    def __init__(self, batches: Iterable[Any], trainers: int, trainer_id: int) -> None:
        self._batches, self._trainers, self._trainer_id = batches, trainers, trainer_id

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # raises where there is no length

    def __iter__(self) -> Iterator[Any]:
        return self._together(iter(self._batches))

    @property
    def number(self) -> int:
        """See :class:`trainer.samplers.saved_batches.Resumable`, which the trainer's own are."""
        return int(self._batches.number)  # type: ignore[attr-defined]

    @property
    def size(self) -> int:
        """See :class:`trainer.samplers.saved_batches.Resumable`, which the trainer's own are."""
        return int(self._batches.size)  # type: ignore[attr-defined]

    def after(self, batches: int, number: int) -> Iterator[Any]:
        """See :class:`trainer.samplers.saved_batches.Resumable`, which the trainer's own are."""
        return self._together(self._batches.after(batches, number))  # type: ignore[attr-defined]

    def skip(self) -> None:
        """See :class:`trainer.samplers.saved_batches.Resumable`, which the trainer's own are."""
        self._batches.skip()  # type: ignore[attr-defined]

    def _together(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of a pass: decides at its beginning whether trainers step together."""
        return self._up_to_first(batches) if torch.is_grad_enabled() else batches

    def _up_to_first(self, batches: Iterator[Any]) -> Iterator[Any]:
        count = 0
        while True:
            batch = next(batches, END)
            have = torch.zeros(self._trainers, dtype=torch.int32)
            have[self._trainer_id] = int(batch is not END)
            with naming_trainers():
                dist.all_reduce(have)
            if not bool(have.all()):
                self._warn(have, count)
                return
            yield batch
            count += 1

    def _warn(self, have: torch.Tensor, count: int) -> None:
        without = [rank for rank, has in enumerate(have.tolist()) if not has]
        if len(without) < self._trainers:
            log.warning(
                "trainers %s have no batch after %d; the others' further ones are left out",
                without,
                count,
            )
