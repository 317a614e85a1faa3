"""Sums and broadcasts over one ring of trainers: started at once, waited for when a result is
needed.

A bucket of tensors travels as one flat copy, so the tensors that backward still reads are never
written to.  In rows (see ``transpiler/plan/plan.py``) a sum has three parts, one after another
(``row_sum.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.collective.process_groups import ProcessGroups
from trainer.collective.row_sum import RowSum
from transpiler.plan.plan import flat_id, heads, heads_id, row_id, row_of


class PendingTensors:
    """The results of an operation that has begun.

    Args:
        finish: waits for the tensors and returns them; called once.
    """

    def __init__(self, finish: Callable[[], list[Tensor]]) -> None:
        self._finish = finish
        self._results: list[Tensor] | None = None

    def result(self, index: int) -> Tensor:
        """Waits for all results, and returns one of them."""
        if self._results is None:
            self._results = self._finish()
        return self._results[index]


class Ring:
    """One ring, with its process groups.  All trainers create their rings in the same order.

    Args:
        world: the trainers.
        inner: the number of trainers in a row; 0: no rows.
        number: of the ring.
        device: of the tensors that it takes.

    Raises:
        PServerError: a process group does not come up.
    """

    def __init__(self, world: ProcessGroups, inner: int, number: int, device: torch.device) -> None:
        self._world = world
        self._device = device
        self._flat = world.group(flat_id(number), range(world.size), device)
        self._rows: RowSum | None = None
        if inner:
            row, first = row_of(world.rank, inner), heads(world.size, inner)
            within = world.group(row_id(number), row, device)
            among = None
            if world.rank in first and len(first) > 1:
                among = world.group(heads_id(number), first, device)
            self._rows = RowSum(within, among, self._do, device, f"ring {number}")

    def sum(
        self, tensors: Sequence[Tensor], what: str, seconds: float = math.inf
    ) -> PendingTensors:
        """Begins the sum over all trainers of tensors of one dtype.

        Args:
            what: the operation, for messages.
            seconds: the longest wait; with rows, the limit does not apply to their operations.

        Returns:
            New tensors of the same shapes.

        Raises:
            PServerError: a trainer is lost, or has left.
        """
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        if self._rows is not None:
            arrived = self._rows.begin(flat, what)
        else:
            work = self._world.begin(lambda: self._flat.allreduce([flat]), what)

            def arrived() -> None:
                self._world.wait(work, what, self._device, seconds)

        def finish() -> list[Tensor]:
            arrived()
            parts = torch.split(flat, [tensor.numel() for tensor in tensors])
            return [
                self._like(part.view(tensor.shape), tensor)
                for part, tensor in zip(parts, tensors, strict=True)
            ]

        return PendingTensors(finish)

    def _like(self, value: Tensor, tensor: Tensor) -> Tensor:
        """The value, with the tensor's strides if there is one trainer: norms add up in the order
        of memory, and with one trainer every bit must be the same.
        """
        return torch.empty_like(tensor).copy_(value) if self._world.size == 1 else value

    def broadcast(self, tensors: Sequence[Tensor], root: int, what: str) -> PendingTensors:
        """Begins to send one trainer's values, of any dtypes, to all, in one message.

        Args:
            what: the operation, for messages.

        Returns:
            New tensors.

        Raises:
            PServerError: a trainer is lost, or has left.
        """
        options = dist.BroadcastOptions()
        options.rootRank = root
        flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
        work = self._world.begin(lambda: self._flat.broadcast([flat], options), what)

        def finish() -> list[Tensor]:
            self._world.wait(work, what, self._device)
            parts = torch.split(flat, [tensor.nbytes for tensor in tensors])
            return [
                # a copy: its memory is aligned for the dtype
                part.clone().view(tensor.dtype).view(tensor.shape)
                for part, tensor in zip(parts, tensors, strict=True)
            ]

        return PendingTensors(finish)

    def reduce(self, tensor: Tensor, root: int, what: str) -> PendingTensors:
        """Begins the sum of a tensor over all trainers, for one of them.

        Args:
            root: the trainer that gets the sum; the others' results have no meaning.
            what: the operation, for messages.

        Returns:
            A new tensor.

        Raises:
            PServerError: a trainer is lost, or has left.
        """
        options = dist.ReduceOptions()
        options.rootRank = root
        copy = tensor.detach().reshape(-1).clone()
        work = self._world.begin(lambda: self._flat.reduce([copy], options), what)

        def finish() -> list[Tensor]:
            self._world.wait(work, what, self._device)
            return [self._like(copy.view(tensor.shape), tensor)]

        return PendingTensors(finish)

    def close(self) -> None:
        """Ends the ring's thread, if it has one."""
        if self._rows is not None:
            self._rows.close()

    def _do(self, operation: Callable[[], dist.Work], what: str) -> None:
        self._world.wait(self._world.begin(operation, what), what, self._device)
