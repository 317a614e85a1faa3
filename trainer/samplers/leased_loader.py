"""The leases of a loader that a script iterates over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from pserver.leases.epoch import Epoch
from trainer.samplers.counted_reader import CountedReader
from trainer.samplers.leased_pass import BatchLists, PassItems, SampleLists
from trainer.samplers.part import JointBatches, Part, dealt
from trainer.samplers.passes import LoaderPasses
from trainer.samplers.sample_leases import SampleLeases
from trainer.samplers.sample_order import (
    SAME_BATCHES,
    advice,
    base_seed,
    checksum,
    checksum_of_batch,
    is_compared,
    randomness_of,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeasedData:
    """The data of one pass.

    Attributes:
        epoch: of the lease table.
        items: that its positions stand for.
        argument: of a DataLoader, for the drawn items; "": these are batches already.
        share: has the length of an equal share, where one is known.
    """

    epoch: Epoch
    items: PassItems
    argument: str
    share: Any


class LoaderLeases:
    """The leases of one loader, pass by pass.

    Args:
        loader: that the script iterates over.
        knows: whether it is a DataLoader that knows its samples.
        part: this trainer's.
        seed: of the shuffling.
        passes: over this loader.
        drawn: returns all draws of a sampler in a pass; None: it has no known end.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        knows: bool,
        part: Part,
        seed: int | None,
        passes: LoaderPasses,
        drawn: Callable[[Iterable[Any], int], Sequence[Any] | None],
    ) -> None:
        self._loader, self._knows, self._part = loader, knows, part
        self._seed, self._passes, self._drawn = seed, passes, drawn
        self._warned = False

    def possible(self, leases: SampleLeases | None) -> SampleLeases | None:
        """The leases, if this data can be dealt out by them.

        Raises:
            ValueError: it cannot, and the script has asked for leases.
        """
        reason = "" if self._knows else _unrepeatable(self._loader)
        if leases is None or not reason:
            return leases
        if leases.elastic:
            raise ValueError(f"fleet.shard, strategy.elastic: {reason}")
        if not self._warned:
            log.warning("fleet.shard: %s", reason)
        self._warned = True
        return None

    def begin(self, number: int, stripes: int, batches: int = 0) -> LeasedData:
        """The data of the pass of this number.

        Args:
            batches: of each trainer that the steps of a job without leases have consumed.

        Raises:
            ValueError: there are fewer samples than trainers; or another trainer has drawn others.
        """
        data = self._whole(number, stripes)
        each = batches * (1 if stripes else self._part.of)
        return replace(data, epoch=replace(data.epoch, begun=each * data.epoch.batch_size))

    def _whole(self, number: int, stripes: int) -> LeasedData:
        loader = self._loader
        if not self._knows:
            return self._counted(loader, loader, number, stripes, "")
        assert isinstance(loader, DataLoader), "its samples are known"
        batches = loader.batch_sampler
        if batches is None:
            return self._singles(loader, number, stripes)
        if type(batches) is not BatchSampler:
            order = self._drawn(batches, number)
            if order is None:
                return self._counted(batches, batches, number, stripes, "batch_sampler")
            return self._lists(order, batches, number, stripes, "batch_sampler")
        order = self._drawn(batches.sampler, number)
        if order is None:
            return self._counted(batches, batches.sampler, number, stripes, "batch_sampler")
        self._part.expect(len(order), "sample")
        size, drop = batches.batch_size, batches.drop_last
        seed = str(base_seed(batches.sampler, self._seed))
        epoch = Epoch(number, self._passes.loader, seed, len(order), size, stripes, drop)
        # about as many batches as this: a fast trainer has more
        share = JointBatches(order, size, self._part, drop)
        return LeasedData(epoch, SampleLists(epoch, order), "batch_sampler", share)

    def _singles(self, loader: DataLoader[Any], number: int, stripes: int) -> LeasedData:
        """The data of a loader that makes no batches: each draw of its sampler is a step."""
        order = self._drawn(loader.sampler, number)
        if order is None:
            return self._counted(loader.sampler, loader.sampler, number, stripes, "sampler")
        if len(order) and isinstance(order[0], list | tuple):  # a sampler of batches
            return self._lists(order, loader.sampler, number, stripes, "sampler")
        self._part.expect(len(order), "sample")
        seed = str(base_seed(loader.sampler, self._seed))
        epoch = Epoch(number, self._passes.loader, seed, len(order), 1, stripes, whole=True)
        share = range(len(order) // self._part.of)
        return LeasedData(epoch, BatchLists(order, whole=True), "sampler", share)

    def _lists(
        self, order: Sequence[Any], sampler: Any, number: int, stripes: int, argument: str
    ) -> LeasedData:
        """The data of batches that a sampler of the script makes."""
        share, items = dealt(order, self._part), BatchLists(order)
        seed, count = str(base_seed(sampler, self._seed)), len(order)
        loader, positions = self._passes.loader, items.count(stripes)
        epoch = Epoch(number, loader, seed, count, 1, stripes, unit="batches", positions=positions)
        return LeasedData(epoch, items, argument, share)

    def _counted(
        self, data: Iterable[Any], sampler: Any, number: int, stripes: int, argument: str
    ) -> LeasedData:
        """The data of an iterable that has no known end."""
        base = base_seed(sampler, self._seed)

        def compare(batch: int, drawn: Any) -> None:
            if self._part.of == 1 or not is_compared(batch + 1):
                return
            said = checksum([drawn]) if argument else f"{checksum_of_batch(drawn):08x}"
            words = advice(sampler) if argument else SAME_BATCHES
            self._passes.compare(f"pass {number}, batch {batch}", f"checksum {said}", words)

        reader = CountedReader(
            data, lambda: randomness_of(sampler, base + number), compare, self._part.of
        )
        epoch = Epoch(
            number,
            self._passes.loader,
            str(base),
            0,
            1,
            stripes,
            unit="batches",
            whole=True,
            segments=stripes or 1,
        )
        return LeasedData(epoch, reader, argument, None)


def _unrepeatable(loader: Iterable[Any]) -> str:
    """The reason why a lost trainer's batches cannot be read again; "": they can."""
    if isinstance(loader, Iterator):
        return (
            f"expected data that can be iterated over again, got a {type(loader).__name__}: the "
            "batches of a pass that a trainer has when it is lost cannot be read again, and are "
            "lost with it; give a list, a DataLoader, or an object whose __iter__ begins again"
        )
    if not getattr(loader, "in_order", True) and getattr(loader, "num_workers", None):
        return (
            "expected a DataLoader with in_order=True, got False: its workers' batches have no "
            "order by which a lost trainer's could be found again, and are lost with it"
        )
    return ""
