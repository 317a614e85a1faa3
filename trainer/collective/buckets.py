"""The buckets of DataParallel: gradients that are reduced together, and their order.

[Note: the last bucket]  During backward, one bucket of gradients after the other is full and is
sent.  No computation is left to hide the last one, so it should be small.  torch's DDP counts
buckets from the first gradient, so that its last bucket is the remainder, up to the whole capacity;
and it lets a bucket grow until it has reached its capacity, so that one gradient may exceed it.
Here the last bucket is filled first, from the first parameter on, and no bucket exceeds its limit,
except with a single gradient that is larger by itself.  The buckets are made once:
:class:`FixedReducer` keeps torch from making them anew after the first step, by its own rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C._distributed_c10d import Reducer

MB = 1 << 20


def buckets(
    parameters: Sequence[torch.Tensor],
    sparse: Sequence[bool],
    size: float,
    last_size: float,
    most: int = 0,
) -> tuple[list[list[int]], list[int]]:
    """The numbers of the parameters in each bucket, in the order in which buckets are sent, and
    each bucket's limit in bytes.

    Args:
        parameters: in the module's order, which backward takes from its end.
        sparse: whether a parameter's gradient is sparse: it is then sent by itself.
        size, last_size: the most MB (2**20 bytes) of a bucket, and of the last one.
        most: the most gradients of a bucket; 0: any number.
    """
    most = most or len(parameters)
    last: list[int] = []
    room = int(last_size * MB)
    for number, parameter in enumerate(parameters):
        if last and (
            sparse[last[0]] or sparse[number] or _kind(parameter) != _kind(parameters[last[0]])
        ):
            break
        if last and (_bytes(parameter) > room or len(last) == most):
            break
        last.append(number)
        room -= _bytes(parameter)
    found: list[list[int]] = []
    open_ones: dict[object, list[int]] = {}
    room_in: dict[object, int] = {}
    for number in reversed(range(len(last), len(parameters))):
        parameter = parameters[number]
        kind = (number if sparse[number] else None, *_kind(parameter))
        full = len(open_ones.get(kind, ())) == most
        if kind not in open_ones or full or _bytes(parameter) > room_in[kind]:
            open_ones[kind], room_in[kind] = [], int(size * MB)
            found.append(open_ones[kind])
        open_ones[kind].append(number)
        room_in[kind] -= _bytes(parameter)
    found.sort(key=lambda bucket: -bucket[-1])  # by when the last gradient in it is ready
    return [*found, last[::-1]], [int(size * MB)] * len(found) + [int(last_size * MB)]


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _kind(parameter: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    """The dtype and device that all gradients of a bucket share: a bucket is one tensor."""
    return parameter.dtype, parameter.device


class FixedReducer(Reducer):
    """torch's reducer, with the buckets that it was given."""

    def _rebuild_buckets(self) -> bool:
        """Keeps the buckets; called before each forward.  torch's own method would make other
        buckets, by the order in which gradients became ready.

        Drops torch's notes of that order; otherwise they would grow with every step.
        """
        self._check_reducer_finalized()
        self._reset_state()
        return False
