"""The coming feeds of a program, whose rows are looked up ahead of its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trainer.executor.loaded_program import Feed, check_feed
from trainer.executor.tables import ServedTables
from trainer.senders.look_ahead import LookAhead
from transpiler.inference.fed_ids import FedLookups
from transpiler.lower import lower
from transpiler.program import Program


class FeedsAhead:
    """The lookups that a trainer's program will make of coming feeds: those whose ids follow from a
    feed.

    Args:
        program: which is not kept.
        tensors: behind its persistent variables, by name.
        tables: of its job.
        look_ahead: of its job.
        device: where the program runs.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        tables: ServedTables,
        look_ahead: LookAhead,
        device: torch.device,
    ) -> None:
        fed = FedLookups.of(program.main)
        names = dict.fromkeys(name for each in fed.lookups for name in each.ids)
        self._lookups, self._tables, self._look_ahead = fed.lookups, tables, look_ahead
        self._device, self._ids = device, lower(fed.ops, list(names), device)
        self._tensors = {name: tensors[name] for name in self._ids.inputs if name in tensors}

    def announce(self, program: Program, feed: Feed, source: object = None) -> None:
        """Announces the lookups of a coming run.

        Args:
            program: that this object was made of.
            source: of the feed; None: the script itself announces it.

        Raises:
            TypeError, ValueError: the feed does not fit the program.
        """
        fed = check_feed(program, feed)
        read = {name: fed[name].to(self._device) for name in self._ids.inputs if name in fed}
        values = {**self._tensors, **read}
        with torch.no_grad():
            ids = dict(zip(self._ids.outputs, self._ids(values), strict=True))
        asked = [
            (
                self._tables.handles[each.table],
                self._tables.asked(each, [ids[name] for name in each.ids]),
            )
            for each in self._lookups
        ]
        self._look_ahead.announce(asked, source)

    def of_run(self, program: Program, feeds: Sequence[Feed]) -> Iterator[Feed]:
        """The feeds of one run of several steps; those of the next steps are announced."""
        announced = self.batches(lambda feed, source: self.announce(program, feed, source))
        said, source = 1, object()
        for number, feed in enumerate(feeds, 1):
            for following in feeds[said : number + announced.depth]:
                announced.announce_batch(following, source)
            said = max(said, number + announced.depth)
            yield feed

    def batches(self, announce: Callable[[Any, object], None]) -> BatchesAhead:
        """The batches of a pass as coming feeds.

        Args:
            announce: calls :meth:`announce` with the feed of a batch and its source.
        """
        return BatchesAhead(self._look_ahead, announce)


class BatchesAhead:
    """The batches of a dataset, as coming feeds of a program; an
    :class:`trainer.samplers.read_ahead.AnnouncedBatches`.

    Args:
        look_ahead: of the job.
        announce: announces the feed of a batch, which comes from a source.
    """

    def __init__(self, look_ahead: LookAhead, announce: Callable[[Any, object], None]) -> None:
        self.depth = look_ahead.depth
        self._look_ahead, self._announce = look_ahead, announce

    def announce_batch(self, batch: Any, source: object) -> None:
        """See :class:`AnnouncedBatches`."""
        try:
            self._announce(batch, source)
        except Exception:  # its run says what is wrong with it
            return

    def give(self, batch: Any) -> None:
        """See :class:`AnnouncedBatches`."""
        self._look_ahead.give(())

    def withdraw(self, source: object = None) -> None:
        """See :class:`AnnouncedBatches`."""
        self._look_ahead.withdraw(source)
