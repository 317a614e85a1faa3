"""Sums of gradients over the trainers of a torch process group, as a strategy says.

[Note: float16 between trainers]  A gradient is divided by the number of trainers before it becomes
float16, so that no partial sum is larger than the largest gradient of one trainer.  So only a
gradient above 65504, float16's largest number, can overflow, and then it arrives as an infinity on
all trainers, as a scaler expects.  A part below 6e-8 is lost.  Gradients of 16 bits travel as they
are.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.collective.rendezvous import Peers
from trainer.collective.row_sum import RowSum
from trainer.collective.world import wait_on_cpu
from transpiler.plan.plan import heads, row_of, row_or_all
from transpiler.strategy.exchange import GradientExchange


class GradientSums:
    """The process groups of one model's gradients.  All trainers of the job create theirs in the
    same order.

    Args:
        exchange: how gradients travel.
        group: of the trainers; all trainers of the job if further groups are made.
        peers: all trainers.
        device: of the gradients.
        topic: under which the trainers exchange their hosts' names; used once.

    Raises:
        ValueError: the trainers do not divide into rows.
    """

    def __init__(
        self,
        exchange: GradientExchange,
        group: dist.ProcessGroup,
        peers: Peers,
        device: torch.device,
        topic: str,
    ) -> None:
        self._exchange, self._peers, self._device = exchange, peers, device
        self._group = group
        ranks = dist.get_process_group_ranks(group)
        self._groups: list[dist.ProcessGroup] = []
        self._rows: list[RowSum] = []
        if exchange.row is None:
            more = [_group(ranks) for _ in range(exchange.rings - 1)]
            self._groups = [group, *more]
            return
        hosts = peers.meet(f"{topic}, hosts", platform.node(), ranks)
        inner = row_or_all(exchange.row, hosts)
        self._rows = [self._in_rows(ranks, inner, ring) for ring in range(exchange.rings)]

    def _in_rows(self, ranks: list[int], inner: int, ring: int) -> RowSum:
        """The groups of one ring: this trainer's row, and the rows' first trainers."""
        mine = ranks.index(self._peers.rank)
        first = heads(len(ranks), inner)
        # torch makes a group on all trainers, also on those that are not in it
        rows = {at: _group([ranks[place] for place in row_of(at, inner)]) for at in first}
        among = _group([ranks[place] for place in first]) if len(first) > 1 else None
        return RowSum(
            rows[mine - mine % inner],
            among if mine in first else None,
            self._run,
            self._device,
            f"gradients {ring}",
        )

    def begin(self, gradients: Tensor, bucket: int) -> Callable[[], None]:
        """Begins the sum of a bucket, whose gradients have been divided already.

        Args:
            gradients: flat; overwritten.
            bucket: its number; buckets take the groups in turn.

        Returns:
            A function that waits for the sum, which ``gradients`` then holds.

        Raises:
            PServerError: another trainer is lost, or has left.
        """
        sent = as_sent(gradients, self._exchange)
        if self._rows:
            rows = self._rows[bucket % len(self._rows)]
            arrived = rows.begin(sent, f"the sum of bucket {bucket}")
        else:
            group = self._groups[bucket % len(self._groups)]
            work = dist.all_reduce(sent, group=group, async_op=True)

            def arrived() -> None:
                self._wait(work)

        def finish() -> None:
            arrived()
            if sent is not gradients:
                gradients.copy_(sent)

        if not self._exchange.waits:
            return finish
        finish()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return lambda: None

    def close(self) -> None:
        """Ends its threads, if it has some."""
        for rows in self._rows:
            rows.close()

    def _run(self, operation: Callable[[], dist.Work], what: str) -> None:
        self._wait(operation())

    def _wait(self, work: Any) -> None:
        if self._device.type != "cpu":
            work.wait()  # its stream waits, not this thread
            return
        wait_on_cpu(work, self._peers, self._group)


def as_sent(gradients: Tensor, exchange: GradientExchange) -> Tensor:
    """The tensor that is sent: another one if gradients travel as float16."""
    wide = gradients.is_floating_point() and gradients.element_size() > 2
    return gradients.to(torch.float16) if exchange.dtype and wide else gradients


def _group(ranks: list[int]) -> Any:
    return dist.new_group(ranks)
