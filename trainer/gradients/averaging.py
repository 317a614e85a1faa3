"""The part of a step that trainers average among themselves, beside what servers do of it.

[Note: a step of both]  Where trainers come and go, the averaged part of a step counts only when the
servers have decided the rest of it, and for the same trainers::

    a lane is sync    average, commit, wait for the servers; if fewer trainers are in the step than
                      were in the average, it is made again over those; then apply
    otherwise         average, commit, apply while the servers work, wait for them
    nobody may go     commit, average, apply while the servers work, wait for them

Nobody commits before it has the average.  So a step of a sync lane that is decided is one of which
all have the average; and who waits in an average for a new process has committed as many steps as
it has averages, which that process goes on from.  In lanes that are not sync each trainer's step is
decided by itself: of the last step of one that dies the average may count, and the rest not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from pserver.telemetry.trace import SPANS, now
from trainer.collective.elastic_means import DenseSteps
from trainer.collective.gradient_means import GradientMeans
from trainer.gradients.division import Gradients

if TYPE_CHECKING:  # which brings the transports
    from trainer.communicator.communicator import Communicator


class Stepped(Protocol):
    """A distributed optimizer.

    Attributes:
        steps: taken by the job.
        lanes: those of the plan that take its steps.
    """

    steps: int
    lanes: tuple[int, ...]

    def trained(self) -> dict[str, Tensor]:
        """The parameters, by name."""

    def hparams(self) -> dict[int, dict[str, Any]]:
        """The present hyper-parameters, by the group's number in the plan."""


class AveragedStep:
    """One step of some parameters, as far as the trainers average it among themselves.

    Args:
        trained: gives the parameters, by name.
        lanes: of the plan, that take such steps.
        communicator: to the servers.

    Attributes:
        due: whether the trainers average anything.
        first: whether the average comes before the step is closed.
        decided: whether it counts when the servers have decided the step.
    """

    def __init__(
        self,
        trained: Callable[[], Mapping[str, Tensor]],
        lanes: Iterable[int],
        communicator: Communicator,
    ) -> None:
        self._trained, self._plan = trained, communicator.plan
        self._among = communicator.dense_allreduce
        self.due = bool(self._plan.averaged) and self._among is not None
        self.first = self.due and isinstance(self._among, DenseSteps)
        kinds = (self._plan.lanes[lane].kind for lane in lanes)
        self.decided = self.first and any(kind.merges_gradients for kind in kinds)

    @property
    def answers(self) -> bool:
        """Whether others may be told where the script is while this trainer waits for servers: not
        where a new process has the values after the step already.
        """
        return self.decided or not self.first

    def average(self, gradients: Gradients, overflow: bool) -> GradientMeans:
        """The mean gradients over the trainers."""
        mine = self._trained()
        parameters = [mine[name] for name in self._plan.averaged if name in mine]
        own = {p: gradients[p] for p in parameters if p in gradients}
        began = now() if SPANS.on else 0.0
        assert self._among is not None, "they average something"
        means = self._among.average(parameters, own, overflow, self.decided)
        if began:
            SPANS.add("all-reduce", began, now())
        return means

    def settle(self, committed: int) -> GradientMeans:
        """What counts with so many trainers in the step, which the servers have decided."""
        assert isinstance(self._among, DenseSteps), "servers decide the step"
        return self._among.settle(committed)


def _applied(means: GradientMeans, step_here: Callable[[Gradients], None]) -> bool:
    """Steps the parameters by their means; gives whether the step overflowed."""
    found = means.land()
    if found and not means.overflow:
        step_here({p: p.grad for p in found if p.grad is not None})
    return means.overflow


def close_and_finish(
    optimizer: Stepped,
    communicator: Communicator,
    overflow: bool,
    gradients: Callable[[], Gradients],
    step_here: Callable[[Gradients], None],
) -> bool:
    """Closes an optimizer's step, with what the trainers average of it, and waits for the servers;
    counts it.  See [Note: a step of both].

    Args:
        overflow: a gradient of this trainer is not finite.
        gradients: gives those of the step, by parameter.
        step_here: steps the parameters of these gradients.

    Returns:
        Whether the step overflowed on some trainer, and was nobody's.
    """
    step = AveragedStep(optimizer.trained, optimizer.lanes, communicator)
    means = step.average(gradients(), overflow) if step.first else None
    if means is not None and step.decided:
        overflow = means.overflow
    communicator.close_step(optimizer.hparams(), overflow, optimizer.lanes)
    early = step.due and not step.decided
    if early:
        overflow = _applied(means or step.average(gradients(), overflow), step_here)
        optimizer.steps += 0 if overflow else 1  # a process that comes now is told so
    communicator.position.quiet = not step.answers
    done = communicator.finish_step()  # None: the trainers average all of its gradients
    communicator.position.quiet = False
    if step.decided:
        assert done is not None, "a lane whose steps need all trainers"
        overflow = _applied(step.settle(done.committed), step_here)
    overflow = overflow or (done is not None and done.overflow)
    if not early:
        optimizer.steps += 0 if overflow else 1
    return overflow
