"""What ``fleet.report`` is told, as files that TensorBoard reads."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pserver.onlookers import onlooker
from trainer.environment.environment import Connection, Role

if TYPE_CHECKING:
    from trainer.job.job import Job

NAME = "the event files of TensorBoard"
FLUSH_SECONDS = 5  # until others can read what was written


class EventFiles:
    """The event files of one trainer, in a folder of its own.

    Args:
        folder: of the job; the trainer's is ``trainer-N`` in it.
        trainer_id: N.
        step: the job's step count.

    Raises:
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, folder: str, trainer_id: int, step: Callable[[], int]) -> None:
        try:
            with warnings.catch_warnings():  # of the packages that it imports
                warnings.simplefilter("ignore")
                from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                f"PSERVER_TENSORBOARD={folder}: expected TensorBoard to be installed, and it is "
                f"not ({error}): pip install '.[tensorboard]' in a checkout of pserver"
            ) from error
        path = str(Path(folder) / f"trainer-{trainer_id}")
        self._writer = SummaryWriter(path, flush_secs=FLUSH_SECONDS)
        self._step = step
        atexit.register(self.close)  # a script that fails has no finish()

    @onlooker(NAME, end=lambda files: files._end())
    def add(self, values: Mapping[str, float]) -> None:
        """Writes values, at the step that the job has come to."""
        step = self._step()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    @onlooker(NAME)
    def close(self) -> None:
        """Writes what is left; harmless when called twice."""
        self._end()

    def _end(self) -> None:
        atexit.unregister(self.close)
        self._writer.close()


def write_events(job: Job) -> None:
    """Writes what a job's trainer reports until the job's end, where PSERVER_TENSORBOARD says so.

    Raises:
        ImportError: TensorBoard is not installed.
    """
    given = Connection.from_environment()
    if not given.tensorboard or given.plan_only or job.role.role is Role.PSERVER:
        return

    def step() -> int:
        return max((each.steps for each in job.optimizers), default=0)

    files = EventFiles(given.tensorboard, job.role.trainer_id, step)
    job.reported.heard = files.add
    job.undo.callback(files.close)
