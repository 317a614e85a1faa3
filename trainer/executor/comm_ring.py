"""Sums and broadcasts over one ring of trainers: started at once, waited for where a result is
needed.

A bucket of tensors travels as one flat copy, so the tensors that backward goes on reading are never
written to.  In rows (see ``transpiler/plan/comm_rings.py``) a sum has three parts, one after
another, on a thread of the ring's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.collective.process_groups import ProcessGroups
from transpiler.plan.comm_rings import flat_id, heads, heads_id, row_id, row_of
from transpiler.plan.plan import Collective


class PendingTensors:
    """The results of an operation that has begun.

    Args:
        finish: waits for the tensors and returns them; called once.
    """

    def __init__(self, finish: Callable[[], list[Tensor]]) -> None:
        self._finish = finish
        self._results: list[Tensor] | None = None

    def result(self, index: int) -> Tensor:
        """Waits for all results; one of them."""
        if self._results is None:
            self._results = self._finish()
        return self._results[index]


class Ring:
    """One ring, with its process groups.  All trainers make theirs in the same order.

    Args:
        world: the trainers.
        collective: how the plan arranges its rings.
        number: of the ring.
        device: of the tensors that it takes.

    Raises:
        PServerError: a process group does not come up.
    """

    def __init__(
        self, world: ProcessGroups, collective: Collective, number: int, device: torch.device
    ) -> None:
        self._world = world
        self._device = device
        self._flat = world.group(flat_id(number), range(world.size), device)
        self._row = self._heads = self._thread = None
        if collective.inner:
            row, first = row_of(world.rank, collective.inner), heads(world.size, collective.inner)
            self._row = world.group(row_id(number), row, device)
            self._heads = (
                world.group(heads_id(number), first, device) if world.rank in first else None
            )
            self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"ring {number}")
            self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def sum(self, tensors: Sequence[Tensor], what: str) -> PendingTensors:
        """Begins the sum over all trainers of tensors of one dtype.

        Args:
            what: the operation, for messages.

        Returns:
            New tensors of the same shapes.

        Raises:
            PServerError: a trainer is gone.
        """
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        if self._thread is not None:
            arrived = self._in_rows(flat, what)
        else:
            work = self._world.begin(lambda: self._flat.allreduce([flat]), what)

            def arrived() -> None:
                self._world.wait(work, what, self._device)

        def finish() -> list[Tensor]:
            arrived()
            parts = torch.split(flat, [tensor.numel() for tensor in tensors])
            return [
                self._like(part.view(tensor.shape), tensor)
                for part, tensor in zip(parts, tensors, strict=True)
            ]

        return PendingTensors(finish)

    def _like(self, value: Tensor, tensor: Tensor) -> Tensor:
        """The value with the tensor's strides, where one trainer is alone: norms add up in the
        order of memory, and alone every bit is to be the same.
        """
        return torch.empty_like(tensor).copy_(value) if self._world.size == 1 else value

    def broadcast(self, tensor: Tensor, root: int, what: str) -> PendingTensors:
        """Begins to send one trainer's value, of any dtype, to all.

        Args:
            what: the operation, for messages.

        Returns:
            A new tensor.

        Raises:
            PServerError: a trainer is gone.
        """
        options = dist.BroadcastOptions()
        options.rootRank = root
        copy = tensor.detach().reshape(-1).clone()
        work = self._world.begin(
            lambda: self._flat.broadcast([copy.view(torch.uint8)], options), what
        )

        def finish() -> list[Tensor]:
            self._world.wait(work, what, self._device)
            return [copy.view(tensor.shape)]

        return PendingTensors(finish)

    def close(self) -> None:
        """Ends the ring's thread, where it has one."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- in rows ----

    def _in_rows(self, flat: Tensor, what: str) -> Callable[[], None]:
        """Begins a sum in rows; the function that it returns waits for it."""
        assert self._thread is not None, "a ring in rows"
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream(self._device).record_event()
            flat.record_stream(self._stream)
        done: Future[torch.cuda.Event | None] = self._thread.submit(
            self._three_parts, flat, ready, what
        )

        def wait() -> None:
            event = done.result()
            if event is not None:
                torch.cuda.current_stream(self._device).wait_event(event)

        return wait

    def _three_parts(
        self, flat: Tensor, ready: torch.cuda.Event | None, what: str
    ) -> torch.cuda.Event | None:
        if self._stream is None or ready is None:
            self._parts(flat, what)
            return None
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            self._parts(flat, what)
            event: torch.cuda.Event = self._stream.record_event()
            return event

    def _parts(self, flat: Tensor, what: str) -> None:
        row, first = self._row, self._heads
        assert row is not None, "a ring in rows"
        self._do(lambda: row.reduce([flat], dist.ReduceOptions()), f"{what}, within the row")
        if first is not None:
            self._do(lambda: first.allreduce([flat]), f"{what}, between rows")
        self._do(
            lambda: row.broadcast([flat], dist.BroadcastOptions()),
            f"{what}, broadcast within the row",
        )

    def _do(self, operation: Callable[[], dist.Work], what: str) -> None:
        self._world.wait(self._world.begin(operation, what), what, self._device)
