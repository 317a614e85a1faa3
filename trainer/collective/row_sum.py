"""A sum in rows: three operations, one after another, on a thread of their own.

See ``transpiler/plan/plan.py``.  Each operation needs the result of the one before, so a thread has
to wait between them; backward continues meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Begins an operation, named for messages, and waits for it.
Run = Callable[[Callable[[], dist.Work], str], None]


class RowSum:
    """The sums of one ring.

    Args:
        row: the process group of this trainer's row.
        heads: the process group of the first trainers of all rows; None if this is not one of them,
            and with one row.
        run: waits for an operation; called on the thread.
        device: of the tensors.
        name: of the thread.
    """

    def __init__(self, row: Any, heads: Any, run: Run, device: torch.device, name: str) -> None:
        self._row, self._heads, self._run, self._device = row, heads, run, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def begin(self, flat: Tensor, what: str) -> Callable[[], None]:
        """Begins a sum over all trainers, in place; the function that it returns waits for it."""
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
        row, heads = self._row, self._heads
        self._run(lambda: row.reduce([flat], dist.ReduceOptions()), f"{what}, within the row")
        if heads is not None:
            self._run(
                lambda: heads.allreduce([flat], dist.AllreduceOptions()), f"{what}, between rows"
            )
        self._run(
            lambda: row.broadcast([flat], dist.BroadcastOptions()),
            f"{what}, broadcast within the row",
        )

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
