"""A dataset whose samples are in memory, where they can be shuffled."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from trainer.data.batches import Batch, tensors_of
from trainer.data.columns import Array, Column, bytes_of, joined, samples_of, taken
from trainer.data.exchange import NUMBER, SampleExchange, exchanged
from trainer.data.file_dataset import FileDataset
from trainer.data.load_bar import LoadBar
from trainer.data.pieces import Piece, files_of
from trainer.data.sample_hash import numbers_of, shuffled
from trainer.data.sample_places import (
    LOCAL,
    NEVER,
    SamplePlaces,
    SharedOrder,
    Shuffles,
    batch_bounds,
    receivers,
)
from trainer.data.trainers import Trainers

log = logging.getLogger(__name__)


class InMemoryDataset(FileDataset):
    """Samples in memory; each trainer has those of its files, and ``global_shuffle`` mixes them.

    Each iteration is a pass, and gives dicts of tensors: slot -> tensor, or ``(values, offsets)``
    of a ragged slot.  Where trainers share the files, all have equally many batches, none of more
    than ``batch_size`` samples, and no sample is left out.  A pass under ``torch.no_grad()``, an
    evaluation, is each trainer's own, of as many batches as its samples make.
    """

    def __init__(self, trainers: Trainers) -> None:
        super().__init__(trainers)
        self._columns: dict[str, Column] | None = None
        self._order: Array | None = None  # in which they are given; None: as they are
        self._exchange: SampleExchange | None = None
        self._counts: list[int] | None = None  # samples of each trainer
        self._read: dict[Piece, int] = {}  # of the loaded pieces, how many samples each had
        self._known: tuple[list[Piece], list[int]] | None = None  # of all trainers' pieces
        self._forget()

    def _forget(self) -> None:
        self._shuffles, self._global, self._local = 0, NEVER, NEVER
        self._given = self._resumed = 0
        self._counts = self._order = self._known = None
        self._loaded: tuple[str, ...] = ()
        self._shared: tuple[tuple[int, Shuffles], SharedOrder] | None = None

    def load_into_memory(self, progress: bool = True) -> None:
        """Reads this trainer's files.

        Args:
            progress: show a bar, on trainer 0's terminal.

        Raises:
            WrongLine: a line is wrong, with ``on_error="raise"``.
            ValueError: a file with bytes has no sample, or there is none at all.
            OSError: a file cannot be read.
        """
        began, pieces = time.perf_counter(), self._pieces()
        blocks, samples, read = [{slot.name: slot.empty() for slot in self.slots}], 0, []
        shown = progress and self._trainers.shows()
        with LoadBar("loading", len(pieces), shown) as bar:
            for done, parsed in enumerate(self._read_all(pieces), 1):
                blocks += [dict(block) for block in parsed.blocks]
                read.append(parsed.samples)
                samples += parsed.samples
                bar.at(done, samples)
        self._forget()
        self._read, self._loaded = dict(zip(pieces, read, strict=True)), self._files
        self._columns = joined(blocks)
        self._columns[NUMBER] = numbers_of(self.place[0], samples)
        log.info(
            "loaded %d samples of %d files, %.1f MB, in %.1f s",
            samples,
            len(self.get_filelist()),
            bytes_of(self._columns) / 1e6,
            time.perf_counter() - began,
        )

    def release_memory(self) -> None:
        """Lets the samples go."""
        self._columns = None
        self._forget()

    def get_memory_data_size(self, everywhere: bool = False) -> int:
        """How many samples are in memory: on this trainer, or on all, who then all call this.

        Raises:
            RuntimeError: nothing is loaded.
        """
        own = samples_of(self._held())
        return sum(self._all_counts()) if everywhere and self.shared else own

    # ---- orders ----

    def local_shuffle(self, epoch: int | None = None) -> None:
        """The samples of this trainer, in another order.

        Args:
            epoch: with the seed it says the order; None: the number of shuffles before this one.

        Raises:
            RuntimeError: nothing is loaded.
        """
        number = self._next(epoch)
        self._order = shuffled(np.asarray(self._held()[NUMBER]), self._seed, LOCAL, number)
        self._local = number

    def global_shuffle(self, epoch: int | None = None, progress: bool = True) -> None:
        """Samples change trainers: a hash of seed, epoch and sample says which trainer gets each,
        and their order there.  Every trainer calls this.

        Args:
            epoch: as in :meth:`local_shuffle`.
            progress: show a bar, on trainer 0's terminal.

        Raises:
            RuntimeError: nothing is loaded, or this trainer has not joined the others, or samples
                are missing, or have come twice.
            TrainerLost: another trainer is gone, and the job does not go on without it.  After an
                error all samples are as before.
        """
        held, number = self._held(), self._next(epoch)
        _, of = self.place
        if self.shared:
            to = receivers(np.asarray(held[NUMBER]), self._seed, number, of)
            shown, samples, group = progress and self._trainers.shows(), len(to), None
            with LoadBar("shuffling", samples, shown) as bar:
                if (group := self._trainers.elastic()) is None:
                    found = self._meet().exchange(held, to, lambda n: bar.at(n, samples))
                else:
                    found = dict(exchanged(group, held, to, lambda n: bar.at(n, samples)))
            self._columns = found
        self._counts = None
        numbers = np.asarray(self._held()[NUMBER])
        self._order = shuffled(numbers, self._seed, LOCAL, number)
        self._global, self._local = number, number

    def _next(self, epoch: int | None) -> int:
        number = self._shuffles if epoch is None else int(epoch)
        self._shuffles = number + 1
        return number

    def _held(self) -> dict[str, Column]:
        if self._columns is None:
            raise RuntimeError("expected load_into_memory() before this")
        return self._columns

    def _meet(self) -> SampleExchange:
        if self._exchange is None:
            self._exchange = SampleExchange(self._trainers.groups())
        return self._exchange

    def _all_counts(self) -> list[int]:
        if self._counts is None:
            if self._where() is None:
                self._counts = self._meet().gathered(samples_of(self._held()))[:, 0].tolist()
            else:
                self._counts = self.shared_order(self.place[1]).counts
        return self._counts

    # ---- what leases deal out ----

    @property
    def all_files(self) -> tuple[str, ...]:
        """See :attr:`FileDataset.all_files`; those of which some are in memory."""
        return self._loaded

    def counted(self, pieces: Iterable[Piece]) -> Generator[int]:
        """See :meth:`FileDataset.counted`; those that are loaded were counted then."""
        for piece in pieces:
            if piece in self._read:
                yield self._read[piece]
            else:
                yield from super().counted([piece])

    def _where(self) -> tuple[list[Piece], list[int]] | None:
        if self._known is None:
            self._known = self._trainers.counted(self)
        return self._known

    @property
    def where(self) -> tuple[list[Piece], list[int]]:
        """The pieces of all files, and how many samples each has."""
        found = self._where()
        assert found is not None, "leases deal its samples out"
        return found

    @property
    def shuffles(self) -> Shuffles:
        """Those that say where each sample is now."""
        return Shuffles(self._seed, self._global, self._local)

    def shared_order(self, trainers: int) -> SharedOrder:
        """Which samples each of so many trainers has, and in which order."""
        (pieces, counts), made = self.where, (trainers, self.shuffles)
        if self._shared is None or self._shared[0] != made:
            places = SamplePlaces(files_of(pieces, self._loaded), counts, trainers)
            self._shared = made, SharedOrder(places, self.shuffles)
        return self._shared[1]

    @property
    def held(self) -> Mapping[str, Column]:
        """The samples in memory, with their numbers.

        Raises:
            RuntimeError: nothing is loaded.
        """
        return self._held()

    def keep(self, columns: dict[str, Column]) -> None:
        """Takes samples into memory that were read again: ``columns`` has those in memory first,
        as they were.
        """
        self._columns = columns
        if self._order is not None:
            self._order = shuffled(np.asarray(columns[NUMBER]), self._seed, LOCAL, self._local)

    # ---- batches ----

    def __len__(self) -> int:
        return len(self._bounds()) - 1

    def batches(self, first: int = 0) -> Iterator[Batch]:
        """A pass, from this batch on."""
        held, order, bounds = self._held(), self._order, self._bounds()
        columns = {name: column for name, column in held.items() if name != NUMBER}

        def made() -> Iterator[Batch]:
            for begin, end in zip(bounds[first:-1], bounds[first + 1 :], strict=True):
                places = np.arange(begin, end) if order is None else order[begin:end]
                yield tensors_of(taken(columns, places))

        return self._counted(made, first)

    def _bounds(self) -> Array:
        """int64 [batches + 1]: where batches begin and end."""
        own, size = samples_of(self._held()), self._batch_size
        if not (self.shared and torch.is_grad_enabled()):
            return batch_bounds([own], size, self._drop_last)[0]
        counts, mine = self._all_counts(), self.place[0]
        bounds = batch_bounds(counts, size, self._drop_last)[mine]
        # other samples are in memory after a trainer was lost
        return bounds if own == counts[mine] else np.arange(len(bounds)) * own // len(bounds[1:])

    # ---- position ----

    def state_dict(self) -> dict[str, int]:
        """Where it is: the last shuffles, and the batches given in the pass under way."""
        return super().state_dict() | {
            "shuffles": self._shuffles,
            "global_shuffle": self._global,
            "local_shuffle": self._local,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where a dataset over the same files was: the samples are shuffled as they were
        there, and the next pass begins after the batches that it had given.

        Every trainer calls this, after ``load_into_memory``.

        Raises:
            ValueError: the batches have another size.
            RuntimeError, TrainerLost: see :meth:`global_shuffle`.
        """
        super().load_state_dict(state)
        if state["global_shuffle"] != NEVER:
            self.global_shuffle(state["global_shuffle"])
        if state["local_shuffle"] not in (NEVER, self._local):
            self.local_shuffle(state["local_shuffle"])
        self._shuffles = state["shuffles"]
