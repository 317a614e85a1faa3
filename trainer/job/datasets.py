"""``fleet.InMemoryDataset`` and ``fleet.QueueDataset``: files, dealt out to the trainers of the
present job.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from trainer.collective.parallel_env import current_peers
from trainer.collective.process_groups import ProcessGroups
from trainer.data import in_memory, queue_dataset
from trainer.data.batches import Batch, Prefetched
from trainer.data.file_dataset import FileDataset, Parses
from trainer.data.pieces import Piece
from trainer.environment.connection import Connection
from trainer.environment.role import CloudRoleMaker
from trainer.job.collective_job import CollectiveJob
from trainer.job.current import present
from trainer.job.job import Job
from trainer.job.leased_files import LeasedFiles, epoch_of
from trainer.job.leased_pass import LeasedPass, leased_batches
from trainer.job.lockstep_batches import LockstepBatches
from trainer.job.progress_bar import counted
from trainer.job.sample_counts import SampleCounts
from trainer.job.sample_leases import SampleLeases
from trainer.job.saved_batches import SavedBatches
from trainer.job.shared_values import met
from trainer.job.striped_files import StripedFiles, striped_epoch

_groups: weakref.WeakKeyDictionary[Job, ProcessGroups] = weakref.WeakKeyDictionary()
# the datasets of which a job has begun a pass, in the order in which a restarted script begins them
_begun: weakref.WeakKeyDictionary[Job, int] = weakref.WeakKeyDictionary()
_counts: weakref.WeakKeyDictionary[Job, weakref.WeakKeyDictionary[FileDataset, SampleCounts]] = (
    weakref.WeakKeyDictionary()
)


class JobTrainers:
    """The trainers of the present job; see :class:`trainer.data.trainers.Trainers`."""

    def part(self) -> tuple[int, int]:
        """Which part of the files this trainer reads; without a job the environment says it."""
        job = _job()
        if job is not None:
            return job.place_in_data()
        role = CloudRoleMaker()
        return role.trainer_id, role.trainers

    def groups(self) -> ProcessGroups:
        """The trainers, connected with one another."""
        job = present()
        if job not in _groups:
            _groups[job] = _connected(job)
        return _groups[job]

    def shows(self) -> bool:
        """Whether this process shows bars."""
        return self.part()[0] == 0 and not Connection.from_environment().panel


class InMemoryDataset(in_memory.InMemoryDataset):
    """Samples in memory, of the files of the present job's trainers.

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


class QueueDataset(queue_dataset.QueueDataset):
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
    """A dataset as the job follows it; see :class:`trainer.job.saved_batches.Resumable`.

    Args:
        leases: gives the job's, where they deal out the samples of this dataset.
        begin: counts a pass of the job.
        counts: of the dataset's samples.
    """

    def __init__(
        self,
        dataset: FileDataset,
        leases: Callable[[], SampleLeases | None],
        begin: Callable[[], int],
        counts: SampleCounts,
    ) -> None:
        self._dataset, self._leases, self._begin, self._counts = dataset, leases, begin, counts
        self._number: int | None = None  # of the last pass, where leases deal it out

    @property
    def number(self) -> int:
        return self._dataset.number if self._number is None else self._number

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]  # what has no length says so

    def __iter__(self) -> Iterator[Batch]:
        leases = self._leases()
        if leases is None:
            return self._dataset.begin_pass()
        return self._leased(leases, self._dataset.next_leased(self._begin))

    def after(self, batches: int, number: int) -> Iterator[Batch]:
        leases = self._leases()
        if leases is None:
            return self._dataset.batches(batches)
        # the servers know which batches were trained on, unless the job before had no leases
        return self._leased(leases, number, batches)

    def skip(self) -> None:
        pass

    def _leased(self, leases: SampleLeases, number: int, after: int = 0) -> Iterator[Batch]:
        dataset, self._number = self._dataset, number
        pieces = dataset.all_pieces()
        if not pieces:
            return iter(())
        if leases.stripes:
            return self._striped(leases, number, pieces, after)
        size, drop_last, prefetch = dataset.batching
        epoch = epoch_of(number, self._counts.name, pieces, size, drop_last)
        leases.begin(dataset, epoch)

        def batches(parses: Parses) -> Generator[Batch]:
            mine = LeasedFiles(leases, epoch, pieces, parses)
            return leased_batches(mine, lambda draws: iter(Prefetched(lambda: draws, prefetch)))

        return dataset.leased(number, batches)

    def _striped(
        self, leases: SampleLeases, number: int, pieces: Sequence[Piece], after: int
    ) -> Iterator[Batch]:
        """A pass of trainers that step together.

        Args:
            after: so many batches of each trainer, in a job without leases.
        """
        dataset, (size, drop_last, prefetch) = self._dataset, self._dataset.batching
        counts = self._counts.of(dataset, pieces, *dataset.place)
        if not any(counts):
            return iter(())
        batching, name = (size, drop_last), self._counts.name
        epoch = striped_epoch(number, name, pieces, counts, batching, leases.stripes)
        epoch = replace(epoch, begun=after * size)
        leases.begin(dataset, epoch)

        def batches(parses: Parses) -> Generator[Batch]:
            items = StripedFiles(epoch, pieces, counts, parses)

            def made(draws: Iterator[Any]) -> Iterator[Batch]:
                return iter(Prefetched(lambda: items.batches(draws), prefetch))

            return leased_batches(LeasedPass(leases, epoch, items), made)

        return dataset.leased(number, batches)


def _followed(dataset: FileDataset) -> Iterator[Batch]:
    """A pass that the job counts, and goes on with after a restart."""
    job = _job()
    if job is None or not dataset.divided_by_job:
        return dataset.begin_pass()
    known = _counts.setdefault(job, weakref.WeakKeyDictionary())
    _begun[job] = _begun.get(job, 0) + (dataset not in known)
    counts = known.setdefault(dataset, SampleCounts(f"dataset {_begun[job]}", _agree(job)))
    mine: Any = _Passes(dataset, lambda: _leases(job, dataset), job.passes.begin, counts)
    if isinstance(job, CollectiveJob) and isinstance(dataset, QueueDataset) and dataset.shared:
        mine = LockstepBatches(mine, job.role.trainers, job.role.trainer_id)
    if job.saves is not None:
        mine = SavedBatches(mine, counts.name, job.saves)
    return iter(counted(mine, job, False))


def _leases(job: Job, dataset: FileDataset) -> SampleLeases | None:
    """What deals out the pieces of a dataset's files; None: each trainer has files of its own, as
    in a pass without gradients, which is an evaluation.
    """
    if not (isinstance(dataset, QueueDataset) and job.splits_data and torch.is_grad_enabled()):
        return None
    return job.samples.leases(job.communicator, job.strategy, job.saves)


def _agree(job: Job) -> Callable[[str, str], str | None]:
    """:meth:`Job.agree`, which does not keep the job."""
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
            "the trainers meet by way of the servers: expected fleet.distributed_optimizer before "
            "samples change trainers, or are divided among them"
        )
    groups = met(job.communicator).groups
    assert groups is not None, "there are other trainers"
    return groups
