"""The position of a job's script: its passes over data, its schedulers, its steps.

A script that begins anew in the middle of its job is brought back to such a place: after a restart
to a checkpoint's place, on a trainer that joins late to the others' place.

[Note: a script that is started again]  The script runs from its first line, and knows nothing of
the run before.  ``fleet.distributed_optimizer`` gives it the job's values.  Its loops begin anew,
so iterations over ``fleet.shard`` that were over give no batch, and the one that was under way
gives the batches that no step had counted.  The script repeats its actions between two iterations,
for instance a step of its scheduler.  Therefore the rest is restored only when the script is back
at its place: hyper-parameters, schedulers, and counts, just before the first batch that is given.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.checkpoint import resume
from trainer.communicator.communicator import Communicator
from trainer.job.found_schedulers import scheduler_states, schedulers_of_job
from trainer.job.job import Job
from trainer.optimizer import DistributedOptimizer
from trainer.samplers.pass_log import NOTHING, LoggedPass, PassLog, SavedPasses

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResumePlace:
    """The place that a script is to be brought back to.

    Attributes:
        passes: of this trainer.
        drawn: the number of the job's passes whose order was drawn.
        groups: the hyper-parameters of all groups, one optimizer after the other.
        schedulers: see :class:`trainer.job.position.Position`.
        steps: of each optimizer; empty: unchanged.
        scales: the loss scaling of each optimizer; empty: unchanged.
        calls: the number of joint calls in each pass, by loader and number.
    """

    passes: SavedPasses
    drawn: int
    groups: Sequence[Mapping[str, Any]]
    schedulers: Mapping[str, Any]
    steps: Sequence[int] = ()
    scales: Sequence[Any] = ()
    calls: Mapping[tuple[str, int], int] = field(default_factory=dict)


class ScriptPosition:
    """The position of one trainer's script.  The script's thread calls it, while it asks for a
    batch or steps.

    Args:
        job: the script's job.

    Attributes:
        passes: the passes over the data of ``fleet.shard``.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.passes = PassLog()
        self._began, self._followed = False, 0
        self._place: ResumePlace | None = None  # which the script has not reached yet
        self._missing: set[tuple[str, int]] = set()  # passes that were under way at that place
        self._late = False  # whether it is the others' place, as this trainer joined late

    # ---- exchange with others ----

    def connected(self, communicator: Communicator) -> None:
        """Registers this part with a connection: from :meth:`joined` on others may ask for the
        position.
        """
        position = communicator.position
        position.settled = lambda: self._began and self._place is None
        position.parts["script"] = self._plain
        position.restorers["script"] = self._take
        communicator.joint.replays = True
        communicator.joint.noticed = self.passes.called

    def joined(self) -> None:
        """Follows the steps of newly distributed optimizers from here on."""
        self._began = True
        for made in self.further():
            if self.late:  # a scheduler that is made now asks for a step
                made._opt_called = True  # type: ignore[attr-defined]  # torch's own mark
            for hook in (
                made.register_step_pre_hook(lambda *_: self.stepping()),
                made.register_step_post_hook(lambda *_: self.passes.stepped()),
            ):
                self._job.undo.callback(hook.remove)
        self._followed = len(self._job.optimizers)

    def further(self) -> Sequence[DistributedOptimizer]:
        """The optimizers whose steps are not followed yet."""
        return self._job.optimizers[self._followed :]

    @property
    def late(self) -> bool:
        """Whether this trainer joins a job under way, and does not know the others' position
        yet.
        """
        there = self._job.communicator
        return there is not None and there.position.late

    def _plain(self) -> dict[str, Any]:
        """The script's position, as JSON can hold it."""
        job = self._job
        schedulers, problem = dict[str, Any](), ""
        try:
            schedulers = scheduler_states(job.optimizers)
        except ValueError as error:
            problem = str(error)
        meta = resume.described(job.optimizers)
        window = 0 if job.communicator is None else job.communicator.window
        return {
            "passes": self.passes.trained().plain(),
            "drawn": job.passes.count,
            "groups": meta["groups"],
            "schedulers": schedulers,
            "steps": [max(0, each.steps - window) for each in job.optimizers],
            "scales": meta.get("loss_scaling", []),
            "calls": [[*key, count] for key, count in self.passes.calls.items()],
            "problem": problem,
        }

    def _take(self, plain: Mapping[str, Any] | None) -> None:
        """Takes the others' position."""
        if plain is None:
            return
        self._late = True
        if plain["problem"]:
            log.warning(
                "this trainer joins a job under way, and its schedulers begin anew: %s",
                plain["problem"],
            )
        self.return_to(
            ResumePlace(
                SavedPasses.of(plain["passes"]),
                plain["drawn"],
                plain["groups"],
                plain["schedulers"],
                plain["steps"] if self.together else (),  # elsewhere it counts its own
                plain["scales"],
                {(loader, number): count for loader, number, count in plain["calls"]},
            )
        )
        log.warning("joins the others after %d steps of theirs", plain["steps"][0])

    @property
    def together(self) -> bool:
        """Whether the trainers take their steps together, so that they share one step number."""
        there = self._job.communicator
        return there is not None and (
            bool(there.plan.averaged) or any(lane.kind.waits_for_all for lane in there.plan.lanes)
        )

    # ---- return to a place ----

    def return_to(self, place: ResumePlace) -> None:
        """Sets the place that the script is to be brought back to."""
        self._place = place
        self._missing = {(each.loader, each.number) for each in place.passes.under_way}

    def stay(self) -> None:
        """Drops the place: the script knows its own."""
        self._place = None

    def saved(self) -> SavedPasses:
        """The passes for a checkpoint."""
        return self.passes.saved() if self._place is None else self._place.passes

    @property
    def returns(self) -> bool:
        """Whether the script has not yet reached the place that it is to be brought back to."""
        return self._place is not None or self.late

    def find(self) -> None:
        """Waits, on a trainer that joins late, until it knows the others' position.

        Raises:
            PServerError: the job has failed.
        """
        there = self._job.communicator
        if there is not None:
            there.position.find()

    def between(self) -> None:
        """Sends the position, if another trainer has asked; called when the script asks for a
        batch.
        """
        there = self._job.communicator
        if there is not None:
            there.position.answer()

    def begin(self, loader: str) -> LoggedPass:
        """Begins a pass.

        Raises:
            PServerError: the job has failed.
        """
        self.find()
        place, there = self._place, self._job.communicator
        begun = self.passes.begin(loader, NOTHING if place is None else place.passes)
        known = begun.loader, begun.number
        self._missing.discard(known)
        if place is not None and there is not None and begun.skipped is None:
            there.joint.skip(place.calls.get(known, 0))
        return begun

    def ready(self, begun: LoggedPass) -> bool:
        """Called before a pass gives its first batch.  With the last of the passes that were under
        way, and with any new one, the script has reached its place.

        Returns:
            Whether it has reached the place now.
        """
        if self._place is None or begun.skipped is None or (begun.live and self._missing):
            return False
        return self.arrive()

    def waits(self) -> bool:
        """Called while the script waits for samples.  On a trainer that has joined late, in the
        pass of its place, the script has then reached the others' place, although there may be no
        batch for it.

        Returns:
            Whether it has reached the place now.
        """
        return self._late and not self._missing and self.arrive()

    def stepping(self) -> None:
        """Called when a step begins: the script may iterate over its own data."""
        self.find()
        self.arrive()

    def arrive(self) -> bool:
        """Restores the state of the place, which the script has reached.

        Returns:
            Whether it has reached the place now.
        """
        place, self._place, job = self._place, None, self._job
        if place is None:
            return False
        self.passes.restore(place.passes)
        job.passes.count = place.drawn
        resume.load_groups(place.groups, job.optimizers)
        for each, steps in zip(job.optimizers, place.steps, strict=False):
            each.steps = steps
        for each, scale in zip(job.optimizers, place.scales, strict=False):
            if each.loss_scaling is not None and scale:
                each.loss_scaling.load(scale)
        found = schedulers_of_job(job.optimizers)
        for name in sorted(found.keys() ^ place.schedulers.keys()):
            log.warning(
                "only one of the script and the place that it continues from has the scheduler %s, "
                "which stays as it is",
                name,
            )
        for name in found.keys() & place.schedulers.keys():
            found[name].load_state_dict(resume.unpacked(place.schedulers[name]))
        if job.communicator is not None:
            job.communicator.joint.arrive()
        return True
