"""``fleet.InMemoryDataset`` and ``fleet.QueueDataset``: files, dealt out to the trainers of the
present job.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pserver.leases.epoch import Epoch
from trainer.collective.elastic_group import ElasticGroup
from trainer.collective.process_groups import ProcessGroups
from trainer.collective.world import current_peers
from trainer.data import datasets
from trainer.data.batches import Batch, Columns, Prefetched, tensors_of
from trainer.data.datasets import FileDataset, Parses
from trainer.data.pieces import Piece, files_of
from trainer.environment.environment import CloudRoleMaker, Connection
from trainer.job.collective import CollectiveJob
from trainer.job.job import Job, present
from trainer.job.report import counted
from trainer.job.shared_values import gathered, groups_of_trainers, present_values
from trainer.samplers.file_samples import (
    CountedFiles,
    FilePieces,
    epoch_of_pieces,
    epoch_of_samples,
)
from trainer.samplers.leased_part import LeasedPart, leased_batches
from trainer.samplers.lockstep_batches import LockstepBatches
from trainer.samplers.memory_samples import Division, HeldSamples, Loaded, MemoryBatches
from trainer.samplers.read_ahead import ReadAhead
from trainer.samplers.sample_counts import SampleCounts
from trainer.samplers.sample_leases import SampleLeases
from trainer.samplers.sample_pass import Pass, Source
from trainer.samplers.saved_batches import SavedBatches

log = logging.getLogger(__name__)

# a pass, and a function from a parser of pieces to the pass's source
LeasedSource = tuple[Epoch, Callable[[Parses], Source[LeasedPart]]]

# pieces for each trainer.  Fewer are divided by samples: a pass ends sooner, as all have equally
# much to do, and each trainer parses nearly all pieces, and counts some before
FEW = 3

_groups: weakref.WeakKeyDictionary[Job, ProcessGroups] = weakref.WeakKeyDictionary()
# the number of datasets of which a job has begun a pass; a restarted script begins them in the same
# order
_begun: weakref.WeakKeyDictionary[Job, int] = weakref.WeakKeyDictionary()
_counts: weakref.WeakKeyDictionary[Job, weakref.WeakKeyDictionary[FileDataset, SampleCounts]] = (
    weakref.WeakKeyDictionary()
)


class JobTrainers:
    """The trainers of the present job; see :class:`trainer.data.pieces.Trainers`."""

    def part(self) -> tuple[int, int]:
        """This trainer's part of the files, and the number of parts; without a job, from the
        environment.
        """
        job = _job()
        if job is not None:
            return job.place_in_data()
        role = CloudRoleMaker()
        return role.trainer_id, role.trainers

    def groups(self) -> ProcessGroups:
        """The process groups of the trainers, connected with one another."""
        job = present()
        if job not in _groups:
            _groups[job] = _connected(job)
        return _groups[job]

    def elastic(self) -> ElasticGroup | None:
        """The group of the live trainers, in a job that continues without lost ones; otherwise
        None.
        """
        there = present().communicator
        if there is None or not there.plan.outlives_trainers:
            return None
        return gathered(there)

    def counted(self, dataset: FileDataset) -> tuple[list[Piece], list[int]] | None:
        """The pieces of a dataset's files, and their sample counts, if leases deal these out."""
        job = _job()
        if job is None or not dataset.divided_by_job or _job_leases(job) is None:
            return None
        pieces = dataset.all_pieces()
        return pieces, _known(job, dataset).of(dataset, pieces, *dataset.place)

    def leave_out(self, lines: int) -> None:
        """Counts wrong lines that a dataset has left out, for the job's status."""
        job = _job()
        if job is not None:
            job.reported.leave_out(lines)

    def gathered(self, told: Any) -> list[Any]:
        """Each trainer's object; see :func:`~trainer.job.shared_values.all_gather_object`."""
        return present_values().all_gather_object(told)

    def shows(self) -> bool:
        """Whether this process shows progress bars."""
        return self.part()[0] == 0 and not Connection.from_environment().panel


class InMemoryDataset(datasets.InMemoryDataset):
    """Samples in memory, from the files of the present job's trainers.

    Example::

        fleet.init()
        dataset = fleet.InMemoryDataset()
        dataset.init(batch_size=512, thread_num=4, parser="criteo")
        dataset.set_filelist(["day_0.gz", "day_1.gz"])
        dataset.load_into_memory()
        for epoch in range(3):
            dataset.global_shuffle()
            for batch in dataset:
                batch["label"], batch["numbers"], batch["ids"]
    """

    def __init__(self) -> None:
        super().__init__(JobTrainers())

    def __iter__(self) -> Iterator[Batch]:
        return _followed(self)


class QueueDataset(datasets.QueueDataset):
    """Samples as they come from the files of the present job's trainers.

    Example::

        fleet.init()
        dataset = fleet.QueueDataset()
        dataset.init(batch_size=512, thread_num=4, parser="criteo")
        dataset.set_filelist(["day_0.gz", "day_1.gz"])
        for batch in dataset:
            batch["label"], batch["numbers"], batch["ids"]
    """

    def __init__(self) -> None:
        super().__init__(JobTrainers())

    def __iter__(self) -> Iterator[Batch]:
        return _followed(self)


class _Passes:
    """A dataset whose passes the job follows; see
    :class:`trainer.samplers.saved_batches.Resumable`.

    Args:
        leases: gives the job's leases, if they deal out the samples of this dataset.
        begin: counts a pass of the job.
        counts: of the dataset's samples.
        ahead: reads the batches of a pass ahead of the script, where the job does that.
    """

    def __init__(
        self,
        dataset: FileDataset,
        leases: Callable[[], SampleLeases | None],
        begin: Callable[[], int],
        counts: SampleCounts,
        ahead: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
    ) -> None:
        self._dataset, self._leases, self._begin, self._counts = dataset, leases, begin, counts
        self._ahead = ahead
        self._number: int | None = None  # of the last pass, if leases deal it out

    @property
    def number(self) -> int:
        return self._dataset.number if self._number is None else self._number

    @property
    def size(self) -> int:
        return self._dataset.batching[0]

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # what has no length says so

    def __iter__(self) -> Iterator[Batch]:
        leases = self._leases()
        if leases is None:
            return self._ahead(self._dataset.begin_pass())
        return self._leased(leases, self._dataset.next_leased(self._begin))

    def after(self, batches: int, number: int) -> Iterator[Batch]:
        leases = self._leases()
        if leases is None:
            return self._ahead(self._dataset.batches(batches))
        # the servers know which batches were trained on, unless the job before had no leases
        return self._leased(leases, number, batches)

    def skip(self) -> None:
        pass

    def _leased(self, leases: SampleLeases, number: int, after: int = 0) -> Iterator[Batch]:
        """The batches of a pass that leases deal out.

        Args:
            after: the number of batches of each trainer to skip, after a job without leases.
        """
        dataset, self._number = self._dataset, number
        found = self._source(leases, number, after)
        if found is None:
            return iter(())
        epoch, source = found
        *_, prefetch = dataset.batching
        leases.begin(dataset, epoch)

        def batches(parses: Parses) -> Generator[Batch]:
            mine = Pass(source(parses), LeasedPart(leases, epoch))
            return leased_batches(
                mine, lambda d: self._ahead(iter(Prefetched(lambda: _tensors(d), prefetch)))
            )

        return dataset.leased(number, batches)

    def _source(self, leases: SampleLeases, number: int, after: int) -> LeasedSource | None:
        """A pass, and a function that makes its source; None: there is nothing in it."""
        dataset, (size, drop_last, _) = self._dataset, self._dataset.batching
        if isinstance(dataset, InMemoryDataset):
            return self._in_memory(leases, number, dataset, after)
        pieces, name = dataset.all_pieces(), self._counts.name
        if not pieces:
            return None
        # with another number of trainers a pass continues as it began
        by_samples = bool(leases.stripes) or leases.counts(number)
        if by_samples is None:
            by_samples = _are_few(pieces, dataset.place[1])
        if not by_samples:
            epoch = epoch_of_pieces(number, name, pieces, size, drop_last)
            return epoch, partial(FilePieces, epoch, pieces)
        counts = self._counts.of(dataset, pieces, *dataset.place)
        if not any(counts):
            return None
        batching = size, drop_last
        epoch = epoch_of_samples(number, name, pieces, counts, batching, leases.stripes)
        epoch = replace(epoch, begun=after * size if leases.stripes else 0)
        return epoch, lambda parses: CountedFiles(
            epoch, pieces, files_of(pieces, dataset.all_files), counts, parses
        )

    def _in_memory(
        self, leases: SampleLeases, number: int, dataset: InMemoryDataset, after: int
    ) -> LeasedSource | None:
        """See :meth:`_source`: of samples in memory."""
        held, (pieces, counts) = dataset.held, dataset.where
        (_, trainers), (size, drop_last, _) = dataset.place, dataset.batching

        def divided(stripes: int) -> Division:
            return Division(dataset.shared_order(stripes), size, drop_last)

        division = divided(trainers)
        if not division.batches:
            return None
        known = Loaded(pieces, counts, dataset.shuffles, size, drop_last)
        name, together = self._counts.name, bool(leases.stripes)
        epoch = known.epoch(number, name, trainers, division.batches, together)

        def source(parses: Parses) -> MemoryBatches:
            places = dataset.shared_order(trainers).places
            return MemoryBatches(divided, HeldSamples(held, places, known, parses, dataset.keep))

        return replace(epoch, begun=after), source


def _tensors(draws: Generator[Columns]) -> Iterator[Batch]:
    """The tensors of drawn samples; the draws end with it."""
    with closing(draws):
        for columns in draws:
            yield tensors_of(columns)


def _are_few(pieces: Sequence[Piece], trainers: int) -> bool:
    """Whether trainers that do not wait for one another get samples of these pieces, not pieces: of
    few some would have a piece more than others, which is much, and pieces may differ in size.
    """
    return 1 < trainers and len(pieces) < FEW * trainers


def _followed(dataset: FileDataset) -> Iterator[Batch]:
    """The batches of a pass that the job counts, and continues after a restart."""
    job = _job()
    if job is None or not dataset.divided_by_job:
        return dataset.begin_pass()
    counts = _known(job, dataset)
    ahead = ReadAhead(job.look_ahead)
    mine: Any = _Passes(dataset, lambda: _leases(job), job.passes.begin, counts, ahead)
    if isinstance(job, CollectiveJob) and isinstance(dataset, QueueDataset) and dataset.shared:
        mine = LockstepBatches(mine, job.role.trainers, job.role.trainer_id)
    if job.saves is not None:
        mine = SavedBatches(mine, counts.name, job.saves)
    return iter(counted(mine, job, False))


def _leases(job: Job) -> SampleLeases | None:
    """The leases that deal out the samples of a dataset; None: each trainer has its own samples, as
    in a pass without gradients, which is an evaluation.
    """
    if torch.is_grad_enabled():
        return _job_leases(job)
    _warn_of_lost_parts(job)
    return None


def _warn_of_lost_parts(job: Job) -> None:
    """Warns of an evaluation that leaves out the parts of trainers that are not there."""
    there = job.communicator
    if there is not None and job.splits_data and there.live.count < job.role.trainers:
        log.warning(
            "%d of %d trainers are live: this pass, without gradients, leaves out the others' "
            "parts of the data; set_filelist(files, 0, 1) gives every trainer all files",
            *(there.live.count, job.role.trainers),
        )


def _job_leases(job: Job) -> SampleLeases | None:
    """The leases of a job; None: each trainer has a fixed part, or all samples."""
    if not job.splits_data:
        return None
    return job.samples.leases(job.communicator, job.first, job.saves)


def _known(job: Job, dataset: FileDataset) -> SampleCounts:
    """The sample counts of a dataset, under a name that is the same on every trainer."""
    known = _counts.setdefault(job, weakref.WeakKeyDictionary())
    _begun[job] = _begun.get(job, 0) + (dataset not in known)
    return known.setdefault(dataset, SampleCounts(f"dataset {_begun[job]}", _agree(job)))


def _agree(job: Job) -> Callable[[str, str], str | None]:
    """A function that calls :meth:`Job.agree`, and does not keep the job alive."""
    there = weakref.ref(job)

    def agree(topic: str, text: str) -> str | None:
        found = there()
        assert found is not None, "a pass of it is under way"
        return found.agree(topic, text)

    return agree


def _job() -> Job | None:
    """The present job, if there is one."""
    try:
        return present()
    except RuntimeError:
        return None


def _connected(job: Job) -> ProcessGroups:
    if isinstance(job, CollectiveJob):
        return ProcessGroups(current_peers())
    if job.communicator is None:
        raise RuntimeError(
            "the trainers connect through the servers: expected fleet.distributed_optimizer before "
            "samples change trainers, or are divided among them"
        )
    groups = groups_of_trainers(job.communicator).groups
    assert groups is not None, "there are other trainers"
    return groups
