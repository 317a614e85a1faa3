"""The updates of one lane that have begun: each is a task of batches, during which no save, load or
shrink runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pserver.job.lane_updates import Taken
from pserver.job.lifecycle import Lifecycle
from pserver.job.quiesce import Quiesce
from pserver.job.update_batches import UpdateBatches
from pserver.job.update_task import Batch, UpdateTask
from pserver.job.workers import Workers
from pserver.metrics.job_steps import LaneSteps
from pserver.tracing.spans import now
from pserver.undone import or_undone


class UpdateTasks:
    """Begins the updates of one lane.  Any thread may call it.

    Args:
        batches: of every update.
        job: for its lock, and its end where an update fails.
        quiesce: keeps steps from changing values during a save or a load.
        workers: the threads that update large steps.
        steps: what is measured of the lane's.

    Attributes:
        running: updates that have begun and not ended; the job's lock guards it.
    """

    def __init__(
        self,
        batches: UpdateBatches,
        job: Lifecycle,
        quiesce: Quiesce,
        workers: Workers,
        steps: LaneSteps,
    ) -> None:
        self.running = 0
        self._batches, self._job, self._quiesce = batches, job, quiesce
        self._workers, self._steps = workers, steps

    def begin(
        self,
        version: int,
        update: Callable[[Batch], None],
        applied: Callable[[], None],
        assigned: Iterable[str],
        after: UpdateTask | None = None,
        taken: Taken | None = None,
    ) -> UpdateTask:
        """A task that updates every batch and then calls ``applied``, which moves watermarks.  A
        large one begins in the workers; others run in the threads that wait for them.  See [Note:
        answers begin early] in lane_executor.py.

        No save, load or shrink runs from here until it ends.

        Args:
            version: of the lane, before it.
            assigned: the slices that the step assigns; those that are never updated are a batch.
            after: the update before, if they come one by one.
            taken: what it applies, which is told when no save, load or shrink can come before it
                any more, under the job's lock.

        Raises:
            PServerError: the job ended while a save, a load or a shrink ran.
        """
        update = self._steps.traced("update", update, version + 1)
        with self._job.lock:
            self._quiesce.begin_step(0 if taken is None else taken.record)
        began = now()

        def end(failure: BaseException | None) -> None:
            self.running -= 1
            self._steps.updated(began)
            if failure is None:
                applied()
            else:
                self._job.wake_all()  # who waits for the end of it

        def on_end(failure: BaseException | None) -> None:
            try:
                self._job.or_fail(lambda: end(failure))
            finally:  # the step ends, whatever happens here
                self._quiesce.end_step()

        def task() -> UpdateTask:
            if taken is not None:
                taken.begins()
            task = UpdateTask(
                self._job.waits,
                self._batches.with_held(assigned),
                lambda batch: self._job.or_fail(lambda: update(batch)),
                on_end,
                after,
            )
            if self._workers.threads > 1 and self._batches.large:
                task.in_workers = True
                self._workers.start(task.advance_all, self._batches.sizes)
            self.running += 1  # a worker ends it under the lock, so later
            return task

        with self._job.lock, or_undone(self._quiesce.end_step):
            return self._job.or_fail(task)  # it is decided: it is applied, or the job ends
