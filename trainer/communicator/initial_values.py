"""A trainer's own values before the job's replace them: where the two differ, one warning says
so.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping

import torch

from pserver.client.replies import Reply
from pserver.transport.frames import buffer_of
from transpiler.plan.plan import Placement

log = logging.getLogger(__name__)


class InitialValues:
    """Checksums of a trainer's own values, taken before the servers' replace them.

    Args:
        names: of the variables that the servers hold.
        tensors: all variables, the live ones, on any device.
    """

    def __init__(self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._before = {name: _checksum(tensors[name]) for name in names}

    def warn(self, trainer_id: int) -> None:
        """Warns, in one line, if values that have come differ; names the first such variable."""
        other = [
            name
            for name, before in self._before.items()
            if _checksum(self._tensors[name]) != before
        ]
        if other:
            log.warning(
                "trainer %d: %d of %d variables had another initial value than the job's, first "
                "%r; they have the job's now",
                *(trainer_id, len(other), len(self._before), other[0]),
            )


def take_over(
    placements: Iterable[Placement],
    tensors: Mapping[str, torch.Tensor],
    pull: Callable[[], Reply],
    trainer_id: int,
) -> None:
    """Receives the job's values; warns, once, where the trainer's own differed.

    Args:
        placements: those whose values are the job's; none where this trainer's are.
        tensors: all variables, the live ones.
        pull: receives them.
    """
    own = InitialValues((placement.name for placement in placements), tensors)
    # at a later version the job's values have moved, and differ from every initial value
    if pull().version == 0:
        own.warn(trainer_id)


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(buffer_of(tensor.detach().to("cpu").contiguous()))
