"""``fleet.shard``: this trainer's batches of the data that a single-node script iterates over.

``part.py`` divides samples, ``sample_order.py`` draws those of a pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from trainer.samplers.leased_loader import LoaderLeases
from trainer.samplers.leased_pass import LeasedPass, leased_batches
from trainer.samplers.part import (
    JointBatches,
    Part,
    dealt,
    dealt_by_and_by,
    joint_batches_by_and_by,
    singles,
    warn_left_out,
)
from trainer.samplers.passes import LoaderPasses, Passes
from trainer.samplers.sample_leases import SampleLeases
from trainer.samplers.sample_order import (
    SAME_BATCHES,
    base_seed,
    checksum_of_batch,
    divides,
    drawn,
    drawn_by_and_by,
    is_compared,
    randomness_of,
    refuse_parts,
)

_END = object()
Batch = TypeVar("Batch", covariant=True)


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
        passes: over this loader.
        leases: returns the job's, where leases deal out its samples.

    Attributes:
        number: of the last pass that was drawn.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        part: Part,
        seed: int | None,
        passes: LoaderPasses,
        leases: Callable[[], SampleLeases | None] = lambda: None,
    ) -> None:
        self._loader, self._part, self._seed, self._passes = loader, part, seed, passes
        self._leases = leases
        knows = _knows_its_samples(loader)
        self._dealt = LoaderLeases(loader, knows, part, seed, passes, self._draws)
        self._last: Iterable[Any] | None = None  # the last pass that was drawn
        self.number = -1  # of that pass
        self._begun = False  # whether an iteration over it has begun

    def __len__(self) -> int:
        if self._last is None:
            self._last = self.begin_pass()
        return len(self._last)  # type: ignore[arg-type]  # raises where there is no length

    def __iter__(self) -> Iterator[Any]:
        asked, self._begun = self._last is not None and not self._begun, True
        if (leases := self._leased_by()) is not None:
            return self._leased(leases, self.number if asked else self._passes.begin())
        if not asked:
            self._last = self.begin_pass()
        assert self._last is not None, "a pass has begun"
        return iter(self._last)

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
        if (leases := self._leased_by()) is not None:
            return self._leased(leases, number, batches)
        self._last, self._begun = self._pass(number), True
        if not isinstance(self._last, DataLoader):
            return islice(self._last, batches, None)
        if self._last.batch_sampler is None:
            later = {"batch_size": None, "sampler": islice(self._last.sampler, batches, None)}
        else:
            later = {"batch_sampler": islice(self._last.batch_sampler, batches, None)}
        return iter(_remade(self._last, later))

    def skip(self) -> None:
        """Skips a pass that is over already: a length that was asked for was that pass's."""
        self._begun = True

    def begin_pass(self) -> Iterable[Any]:
        """The next pass; a DataLoader where the samples are known."""
        return self._pass(self._passes.begin())

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
        """
        return self._dealt.possible(self._leases()) if torch.is_grad_enabled() else None

    def _leased(self, leases: SampleLeases, number: int, batches: int = 0) -> Iterator[Any]:
        """The batches of a pass that leases deal out."""
        loader, self.number = self._loader, number
        data = self._dealt.begin(number, leases.stripes, batches)
        self._last = loader if data.share is None else data.share
        if not _knows_its_samples(loader):
            self._last = self._pass(number)
        leases.begin(self._followed, data.epoch)

        def loaded(draws: Iterator[Any]) -> Iterator[Any]:
            if not data.argument:
                return draws
            assert isinstance(loader, DataLoader), "it takes a sampler"
            plain = {"batch_size": None} if data.argument == "sampler" else {}
            return iter(_remade(loader, {data.argument: draws, **plain}))

        return leased_batches(LeasedPass(leases, data.epoch, data.items), loaded)

    def _pass(self, number: int) -> Iterable[Any]:
        loader, self.number = self._loader, number
        if _knows_its_samples(loader):
            return _remade(loader, self._chosen(loader, number))
        return DealtBatches(loader, self._part, self._seed, self._passes, number)

    def _chosen(self, loader: DataLoader[Any], number: int) -> dict[str, Any]:
        """The sampler, or batch sampler, of this trainer's part of a pass: arguments of a
        DataLoader.
        """
        part, batches = self._part, loader.batch_sampler
        if type(batches) is BatchSampler:
            size, drop_last = batches.batch_size, batches.drop_last
            order = self._drawn(loader, batches.sampler, number)
            if order is not None:
                return {"batch_sampler": JointBatches(order, size, part, drop_last)}
            windows = self._windows(batches.sampler, size * part.of, number)
            return {"batch_sampler": joint_batches_by_and_by(windows, size, part, drop_last)}
        if batches is not None:
            order = self._drawn(loader, batches, number)
            if order is not None:
                return {"batch_sampler": dealt(order, part)}
            windows = self._windows(batches, part.of, number)
            return {"batch_sampler": dealt_by_and_by(windows, part)}
        order = self._drawn(loader, loader.sampler, number)
        if order is None:
            draws = (draw for w in self._windows(loader.sampler, part.of, number) for draw in w)
            return {"batch_size": None, "sampler": singles(draws, part, number)}
        if order and isinstance(order[0], list | tuple):  # a sampler of batches
            return {"batch_size": None, "sampler": dealt(order, part)}
        return {"batch_size": None, "sampler": list(singles(order, part, number))}

    def _drawn(
        self, loader: DataLoader[Any], sampler: Iterable[Any], number: int
    ) -> Sequence[Any] | None:
        samples = len(loader.dataset)  # type: ignore[arg-type]  # it knows its samples
        return drawn(sampler, samples, self._seed, number, self._passes)

    def _draws(self, sampler: Iterable[Any], number: int) -> Sequence[Any] | None:
        assert isinstance(self._loader, DataLoader), "its samples are known"
        return self._drawn(self._loader, sampler, number)

    def _windows(self, sampler: Iterable[Any], many: int, number: int) -> Iterator[list[Any]]:
        return drawn_by_and_by(sampler, many, self._seed, number, self._passes)


def _knows_its_samples(loader: Iterable[Any]) -> TypeGuard[DataLoader[Any]]:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _remade(loader: DataLoader[Any], chosen: dict[str, Any]) -> DataLoader[Any]:
    """A loader like this one, with other samplers."""
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


class DealtBatches:
    """Batch ``part.index`` of each ``part.of`` consecutive ones, of any iterable; one pass.

    Every trainer reads all batches, with the same random numbers, and some are compared.

    Args:
        batches: that every trainer reads.
        part: this trainer's.
        seed: of the random numbers; None: that of a loader's generator, or 0.
        passes: over these batches; ``number``: of this pass.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        part: Part,
        seed: int | None,
        passes: LoaderPasses,
        number: int,
    ) -> None:
        self._batches, self._part, self._passes, self._number = batches, part, passes, number
        self._seed = base_seed(batches, seed) + number

    def __len__(self) -> int:
        return len(self._batches) // self._part.of  # type: ignore[arg-type]  # raises without a length

    def __iter__(self) -> Iterator[Any]:
        part, randomness = self._part, randomness_of(self._batches, self._seed)
        with randomness:
            batches = iter(self._batches)
        count, group = 0, list[Any]()
        while True:
            with randomness:
                batch = next(batches, _END)
            if batch is _END:
                break
            group.append(batch)
            if len(group) == part.of:
                count += 1
                self._compare(count, group)
                yield group[part.index]
                group = []
        if not count:
            part.expect(len(group), "batch")
        warn_left_out(len(group), part, self._number)

    def _compare(self, count: int, group: Sequence[Any]) -> None:
        if self._part.of == 1 or not is_compared(count):
            return
        first = (count - 1) * len(group)
        self._passes.compare(
            f"pass {self._number}, batches {first} to {first + len(group) - 1}",
            f"checksum {checksum_of_batch(group):08x}",
            SAME_BATCHES,
        )


def shard(
    loader: Iterable[Any],
    trainers: int,
    trainer_id: int,
    seed: int | None = None,
    passes: Passes | None = None,
    name: str = "",
    leases: Callable[[], SampleLeases | None] = lambda: None,
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

    Returns:
        An iterable of batches; each iteration is a pass.

    Raises:
        ValueError: the sampler gives one rank's part only, and is not torch's DistributedSampler.
    """
    part_of_one_rank = None
    if _knows_its_samples(loader):
        part_of_one_rank = _dividing(loader)
    if part_of_one_rank is not None:
        refuse_parts(part_of_one_rank)
    elif trainers == 1 and seed is None and not name:
        return loader
    own = (passes or Passes()).of(name)
    return Shard(loader, Part(trainer_id, trainers), seed, own, leases)


def _dividing(loader: DataLoader[Any]) -> Sampler[Any] | Iterable[Any] | None:
    """The loader's sampler, or batch sampler, that gives one rank's part; None if none does."""
    batches = loader.batch_sampler
    chosen = [loader.sampler]
    if batches is not None:
        chosen = [batches.sampler if type(batches) is BatchSampler else batches]
    return next((sampler for sampler in chosen if divides(sampler)), None)
