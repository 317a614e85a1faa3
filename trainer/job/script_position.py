"""Where a job's script is: its passes over data, its schedulers, its steps.

A script that begins anew in the middle of its job is brought back to such a place: after a restart
to that of a checkpoint, on a trainer that joins late to that of the others.

[Note: a script that is started again]  The script runs from its first line, and knows nothing of
the run before.  ``fleet.distributed_optimizer`` gives it the job's values.  Its loops begin anew,
so those iterations over ``fleet.shard`` that were over give no batch, and the one that was under
way gives the batches that no step had counted.  What the script does between two iterations it does
once more, a step of its scheduler for instance.  Therefore the rest is put back only where the
script is again where it was: hyper-parameters, schedulers, and counts, just before the first batch
that is given.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.checkpoint import resume
from trainer.communicator.communicator import Communicator
from trainer.job.found_schedulers import schedulers_of
from trainer.job.job import Job
from trainer.optimizer import DistributedOptimizer
from trainer.samplers.pass_log import NOTHING, Pass, PassLog, SavedPasses

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a script is to come back to.

    Attributes:
        passes: of this trainer.
        drawn: passes of the job whose order was drawn.
        groups: the hyper-parameters of all groups, of one optimizer after the other.
        schedulers: their states, by optimizer and type.
        steps: of each optimizer; none: as they are.
        scales: the loss scaling of each optimizer; none: as they are.
        calls: joint calls in iterations, by loader and number.
    """

    passes: SavedPasses
    drawn: int
    groups: Sequence[Mapping[str, Any]]
    schedulers: Mapping[str, Any]
    steps: Sequence[int] = ()
    scales: Sequence[Any] = ()
    calls: Mapping[tuple[str, int], int] = field(default_factory=dict)


class ScriptPosition:
    """One trainer's script.  The script's thread calls it, while it asks for a batch or steps.

    Args:
        job: of the script.

    Attributes:
        passes: over the data of ``fleet.shard``.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.passes = PassLog()
        self._began, self._followed = False, 0
        self._place: Place | None = None  # to which the script has not come back yet
        self._missing: set[tuple[str, int]] = set()  # passes that were under way there
        self._late = False  # that is where the others were when this trainer joined

    # ---- for others, and from them ----

    def connected(self, communicator: Communicator) -> None:
        """There is a connection: from :meth:`joined` on others may ask where this script is."""
        position = communicator.position
        position.settled = lambda: self._began and self._place is None
        position.parts["script"] = self._plain
        position.taken["script"] = self._take
        communicator.joint.replays = True
        communicator.joint.noticed = self.passes.called

    def joined(self) -> None:
        """Optimizers were distributed: their steps are followed from here on."""
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
        """Whether this trainer joins a job under way, and does not know yet where the others
        are.
        """
        there = self._job.communicator
        return there is not None and there.position.late

    def _plain(self) -> dict[str, Any]:
        """Where the script is, as JSON can hold it."""
        job = self._job
        schedulers, problem = dict[str, Any](), ""
        try:
            schedulers = {name: packed(name, s.state_dict()) for name, s in self.found().items()}
        except ValueError as error:
            problem = str(error)
        meta = resume.described(job.optimizers, None, job.passes.count)
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
        """The others are there."""
        if plain is None:
            return
        self._late = True
        if plain["problem"]:
            log.warning(
                "this trainer joins a job under way, and its schedulers begin anew: %s",
                plain["problem"],
            )
        self.return_to(
            Place(
                SavedPasses.of(plain["passes"]),
                plain["drawn"],
                plain["groups"],
                {name: resume.unpacked(state) for name, state in plain["schedulers"].items()},
                plain["steps"] if self.together else (),  # elsewhere it counts its own
                plain["scales"],
                {(loader, number): count for loader, number, count in plain["calls"]},
            )
        )
        log.warning("joins the others after %d steps of theirs", plain["steps"][0])

    @property
    def together(self) -> bool:
        """Whether the trainers take their steps together, so that one number is all trainers'."""
        there = self._job.communicator
        return there is not None and (
            bool(there.plan.averaged) or any(lane.kind.waits_for_all for lane in there.plan.lanes)
        )

    # ---- the way back ----

    def return_to(self, place: Place) -> None:
        """The script is to come back there."""
        self._place = place
        self._missing = {(each.loader, each.number) for each in place.passes.under_way}

    def stay(self) -> None:
        """The script knows by itself where it is."""
        self._place = None

    def saved(self) -> SavedPasses:
        """The passes that a checkpoint is to have."""
        return self.passes.saved() if self._place is None else self._place.passes

    @property
    def returns(self) -> bool:
        """Whether the script is not yet where it is to come back to."""
        return self._place is not None or self.late

    def find(self) -> None:
        """On a trainer that joins late: waits until it knows where the others are.

        Raises:
            PServerError: the job has failed.
        """
        there = self._job.communicator
        if there is not None:
            there.position.find()

    def between(self) -> None:
        """The script asks for a batch: says where it is, if somebody asks."""
        there = self._job.communicator
        if there is not None:
            there.position.answer()

    def begin(self, loader: str) -> Pass:
        """A pass begins.

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

    def ready(self, begun: Pass) -> bool:
        """A pass is about to give its first batch.  With the last one of those that were under way,
        and with any new one, the script is where it was.

        Returns:
            Whether it has come there now.
        """
        if self._place is None or begun.skipped is None or (begun.live and self._missing):
            return False
        return self.arrive()

    def waits(self) -> bool:
        """The script waits for samples, in the pass in which it is to come back: where it has come
        late, it is where the others are, although there may be no batch for it.

        Returns:
            Whether it has come there now.
        """
        return self._late and not self._missing and self.arrive()

    def stepping(self) -> None:
        """A step begins: the script may iterate over data of its own."""
        self.find()
        self.arrive()

    def arrive(self) -> bool:
        """The script is where it was.

        Returns:
            Whether it has come there now.
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
        found = self.found()
        for name in sorted(found.keys() ^ place.schedulers.keys()):
            log.warning(
                "only one of the script and the place that it goes on from has the scheduler %s, "
                "which goes on as it is",
                name,
            )
        for name in found.keys() & place.schedulers.keys():
            found[name].load_state_dict(place.schedulers[name])
        if job.communicator is not None:
            job.communicator.joint.arrive()
        return True

    def found(self) -> Mapping[str, Any]:
        """The schedulers of the job's optimizers, by optimizer and type.

        Raises:
            ValueError: an optimizer has two of one type.
        """
        pairs = [each for made in self._job.optimizers for each in (made, made.inner)]
        return schedulers_of(pairs)


def packed(name: str, state: Any) -> Any:
    """A scheduler's state, as JSON can hold it.

    Raises:
        ValueError: it cannot.
    """
    try:
        found = resume.packed(state)
        json.dumps(found)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"expected numbers, words, lists and mappings in the state of the scheduler {name}, "
            f"got another: {error}"
        ) from error
    return found
