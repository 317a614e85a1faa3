"""``fleet.shard``: this trainer's batches of the data that a single-node script iterates over.

``part.py`` divides samples, ``sample_order.py`` draws those of a pass.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from pserver.leases.epoch import Epoch
from trainer.samplers.counted_reader import CountedReader
from trainer.samplers.leased_part import LeasedPart, leased_batches
from trainer.samplers.part import (
    FixedPart,
    Part,
    dealt_by_and_by,
    expect_joint_batch,
    joint_batches_by_and_by,
    singles,
)
from trainer.samplers.passes import Passes
from trainer.samplers.sample_leases import SampleLeases
from trainer.samplers.sample_lists import BatchLists, SampleLists
from trainer.samplers.sample_order import (
    SAME_BATCHES,
    advice,
    base_seed,
    checksum,
    checksum_of_batch,
    divides,
    drawn,
    drawn_by_and_by,
    is_compared,
    randomness_of,
    refuse_parts,
)
from trainer.samplers.sample_pass import Pass

log = logging.getLogger(__name__)

Batch = TypeVar("Batch", covariant=True)
LoaderSource = SampleLists | BatchLists | CountedReader


class SizedBatches(Protocol[Batch]):
    """Batches whose number is known, such as a DataLoader's."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches of a pass."""

    def __len__(self) -> int:
        """Their number."""


class Shard:
    """One trainer's batches of a loader.  Each iteration is a pass of its own, with an order of its
    own where the loader shuffles.

    Args:
        loader: that a single-node script would iterate over.
        part: this trainer's.
        seed: of the shuffling.
        passes: of the job.
        name: of the loader, the same on every trainer; "": no message has it.
        leases: returns the job's, where leases deal out its samples.
        ahead: reads the batches of a pass ahead of the script, where the job does that.

    Attributes:
        number: of the last pass that was drawn.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        part: Part,
        seed: int | None,
        passes: Passes,
        name: str = "",
        leases: Callable[[], SampleLeases | None] = lambda: None,
        ahead: Callable[[Iterator[Any]], Iterator[Any]] = iter,
    ) -> None:
        self._loader, self._part, self._seed = loader, part, seed
        self._passes, self._name, self._leases = passes, name, leases
        self._ahead = ahead
        self._warned = False
        self._asked: Iterable[Any] | None = None  # the next pass, once its length was asked for
        self._share: Any = None  # it has the length of an equal share of the last pass, if any has
        self.number = -1  # of that pass

    def __len__(self) -> int:
        if self._share is None:
            self._asked = self.begin_pass()
        if not _knows_its_samples(self._loader):
            return len(self._loader) // self._part.of  # type: ignore[arg-type]  # raises without one
        return len(self._share)

    def __iter__(self) -> Iterator[Any]:
        asked, self._asked = self._asked, None
        if (leases := self._leased_by()) is not None:
            return self._leased(leases, self._passes.begin() if asked is None else self.number)
        return self._ahead(iter(self.begin_pass() if asked is None else asked))

    @property
    def size(self) -> int:
        """The number of samples of a full batch; 0: unknown."""
        made = getattr(self._loader, "batch_sampler", None)
        return int(made.batch_size) if type(made) is BatchSampler else 0

    def after(self, batches: int, number: int) -> Iterator[Any]:
        """The batches of the pass of this number, without its first ones.  Where the samples are
        known those are not read.  Where they are leased, the servers know which they were, unless
        the job before had no leases.
        """
        self._asked = None
        if (leases := self._leased_by()) is not None:
            return self._leased(leases, number, batches)
        return self._ahead(iter(self._fixed(number, batches)))

    def skip(self) -> None:
        """Skips a pass that is over already: a length that was asked for was that pass's."""
        self._asked = None

    def begin_pass(self) -> Iterable[Any]:
        """The next pass over this trainer's fixed part; a DataLoader where the samples are
        known.
        """
        return self._fixed(self._passes.begin())

    def _fixed(self, number: int, after: int = 0) -> Iterable[Any]:
        """The batches of this trainer's fixed part.

        Args:
            after: the number of first ones to leave out.
        """
        source, part = self._source(number, leased=False), self._part
        if source is None:
            self._share = draws = self._by_and_by(number)
            return self._loaded(islice(draws, after, None))
        self._share = dealer = FixedPart(source.epoch(part.of), part, after)
        return self._loaded(Pass(source, dealer))

    def _loaded(self, draws: Iterable[Any]) -> Iterable[Any]:
        """The script's batches: a loader like its own with another sampler; without a sampler the
        draws themselves.
        """
        loader = self._loader
        if not _knows_its_samples(loader):
            return draws
        chosen: dict[str, Any] = {"batch_sampler": draws}
        if loader.batch_sampler is None:
            chosen = {"batch_size": None, "sampler": draws}
        return DataLoader(
            loader.dataset,
            **chosen,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            timeout=loader.timeout,
            prefetch_factor=loader.prefetch_factor,
            multiprocessing_context=loader.multiprocessing_context,
        )

    # ---- leases ----

    @property
    def _followed(self) -> Any:
        """The identity of passes over the same data: the loader; this object where it is a list."""
        try:
            weakref.ref(self._loader)
            hash(self._loader)
        except TypeError:
            return self
        return self._loader

    def _leased_by(self) -> SampleLeases | None:
        """The leases of the pass that begins; None: this trainer has its fixed part.

        A pass without gradients is an evaluation: each trainer has its part of it.

        Raises:
            ValueError: leases cannot deal this data out, and the script has asked for leases.
        """
        if not torch.is_grad_enabled() or (leases := self._leases()) is None:
            return None
        reason = "" if _knows_its_samples(self._loader) else _unrepeatable(self._loader)
        if not reason:
            return leases
        if leases.elastic:
            raise ValueError(f"fleet.shard, strategy.elastic: {reason}")
        if not self._warned:
            log.warning("fleet.shard: %s", reason)
        self._warned = True
        return None

    def _leased(self, leases: SampleLeases, number: int, batches: int = 0) -> Iterator[Any]:
        """The batches of a pass that leases deal out.

        Args:
            batches: of each trainer that the steps of a job without leases have consumed.
        """
        source, part, self.number = self._source(number, leased=True), self._part, number
        assert source is not None, "leases deal out any data"
        # about as many batches as an equal share: a fast trainer has more
        known = not isinstance(source, CountedReader)
        self._share = FixedPart(source.epoch(part.of), part) if known else self._loader
        epoch = source.epoch(leases.stripes)
        begun = batches * epoch.batch_size * (1 if leases.stripes else part.of)
        epoch = replace(epoch, begun=begun)
        leases.begin(self._followed, epoch)
        mine = Pass(source, LeasedPart(leases, epoch))
        return leased_batches(mine, lambda draws: self._ahead(iter(self._loaded(draws))))

    # ---- sources ----

    def _source(self, number: int, leased: bool) -> LoaderSource | None:
        """The source of a pass; None where a sampler's draws have no known end, and are divided as
        they are drawn.

        Raises:
            ValueError: there are fewer samples than trainers; or another trainer has drawn others.
        """
        loader, part, self.number = self._loader, self._part, number
        if not _knows_its_samples(loader):
            return self._counted(number, loader, loader, leased)
        batches, sampler = loader.batch_sampler, _sampler_of(loader)
        samples = len(loader.dataset)  # type: ignore[arg-type]  # it knows its samples
        order = drawn(sampler, samples, self._seed, number, self._compare)
        if order is None:
            data = sampler if batches is None else batches
            return self._counted(number, data, sampler, leased) if leased else None
        epoch = self._epoch(number, sampler)
        if type(batches) is BatchSampler:
            size, drop_last = batches.batch_size, batches.drop_last
            expect_joint_batch(len(order), size, part, drop_last)
            epoch = replace(epoch, samples=len(order), batch_size=size, drop_last=drop_last)
            return SampleLists(epoch, order)
        if batches is None and not (len(order) and isinstance(order[0], list | tuple)):
            part.expect(len(order), "sample")
            epoch = replace(epoch, whole=True)  # each draw is the item of one step
        return BatchLists(epoch, order)

    def _epoch(self, number: int, sampler: Any) -> Epoch:
        """A pass, by its number, its loader, and its order."""
        return Epoch(number, self._name, str(base_seed(sampler, self._seed)), 0, 1)

    def _counted(
        self, number: int, data: Iterable[Any], sampler: Any, leased: bool
    ) -> CountedReader:
        """The source of batches, or draws, that have no known end."""
        seed, draws = base_seed(sampler, self._seed) + number, data is not self._loader
        together, group = 1 if leased else self._part.of, list[Any]()

        def compare(batch: int, found: Any) -> None:
            first = batch - batch % together
            if self._part.of == 1 or not is_compared(first // together + 1):
                return
            group.append(found)
            if len(group) == together:
                said = checksum(group) if draws else f"{checksum_of_batch(group):08x}"
                what = f"batch {batch}" if leased else f"batches {first} to {batch}"
                words = advice(sampler) if draws else SAME_BATCHES
                group.clear()
                self._compare(f"pass {number}, {what}", f"checksum {said}", words)

        return CountedReader(
            self._epoch(number, sampler),
            data,
            lambda: randomness_of(sampler, seed),
            compare,
            self._part.of,
        )

    def _compare(self, topic: str, said: str, words: str) -> None:
        where = f"{topic} of the loader at {self._name}" if self._name else topic
        self._passes.compare(where, said, words)

    def _by_and_by(self, number: int) -> Iterator[Any]:
        """This trainer's part of a sampler's draws that have no known end."""
        loader, part = self._loader, self._part
        assert _knows_its_samples(loader), "it has a sampler"
        batches, sampler = loader.batch_sampler, _sampler_of(loader)

        def windows(many: int) -> Iterator[list[Any]]:
            return drawn_by_and_by(sampler, many, self._seed, number, self._compare)

        if type(batches) is BatchSampler:
            size, drop_last = batches.batch_size, batches.drop_last
            return joint_batches_by_and_by(windows(size * part.of), size, part, drop_last)
        if batches is not None:
            return dealt_by_and_by(windows(part.of), part)
        return singles((draw for window in windows(part.of) for draw in window), part, number)


def _knows_its_samples(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _sampler_of(loader: DataLoader[Any]) -> Iterable[Any]:
    """The sampler that decides a loader's samples; the batch sampler, where it is the script's."""
    batches = loader.batch_sampler
    if batches is None:
        return loader.sampler
    return batches.sampler if type(batches) is BatchSampler else batches


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


def shard(
    loader: Iterable[Any],
    trainers: int,
    trainer_id: int,
    seed: int | None = None,
    passes: Passes | None = None,
    name: str = "",
    leases: Callable[[], SampleLeases | None] = lambda: None,
    ahead: Callable[[Iterator[Any]], Iterator[Any]] = iter,
) -> Iterable[Any]:
    """One trainer's part of the data.

    A ``DataLoader`` over a data set with a length is cut sample by sample; where it shuffles, every
    pass has another order, the same in every process.  A sampler or batch sampler of the script's
    own decides which samples there are, and in which order: it draws with the same random numbers
    everywhere.  Of any other iterable the trainer gets every ``trainers``-th batch.

    Args:
        loader: that a single-node script would iterate over.
        trainers, trainer_id: the number of trainers, and this trainer's.
        seed: of the shuffling; with None a loader that shuffles uses its generator's seed, or 0,
            and one that does not keeps its order.
        passes: of the job; None begins to count.
        name: of the loader, where a pass may have to begin in its middle; then every pass has an
            order that can be drawn again, even where one trainer has all data.
        leases: returns the job's, where leases deal out its samples.
        ahead: see :class:`Shard`.

    Returns:
        An iterable of batches; each iteration is a pass.

    Raises:
        TypeError: the loader is no iterable.
        ValueError: the sampler gives one rank's part only, and is not torch's DistributedSampler.
    """
    iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
    if not iterable or isinstance(loader, type):
        raise TypeError(
            "fleet.shard: expected a DataLoader or another iterable of batches, got "
            f"{type(loader).__name__} {loader!r}"
        )
    sampler = _sampler_of(loader) if _knows_its_samples(loader) else None
    if divides(sampler):
        refuse_parts(sampler)
    elif trainers == 1 and seed is None and not name:
        return loader
    part = Part(trainer_id, trainers)
    return Shard(loader, part, seed, passes or Passes(), name, leases, ahead)
