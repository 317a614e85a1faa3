"""Checkpoints that a job writes by itself, and from which its script goes on when it is started
again.

[Note: a script that is started again]  The script runs from its first line, and knows nothing of
the run before.  ``fleet.distributed_optimizer`` gives it the values of the newest checkpoint.  Its
loops begin anew, so those iterations over ``fleet.shard`` that were over give no batch, and the one
that was under way gives the batches that no step had counted.  What the script does between two
iterations it does once more, a step of its scheduler for instance.  Therefore the rest is put back
only where the script is again where it was: hyper-parameters, schedulers, and random sources, just
before the first batch that is given.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from pserver.checkpoint import manifest
from pserver.config import check_seconds
from pserver.storage.place import place_at
from trainer.checkpoint import resume
from trainer.checkpoint.checkpoint_folder import CheckpointFolder
from trainer.checkpoint.joint_call import jointly
from trainer.environment.connection import Connection
from trainer.job.found_schedulers import schedulers_of
from trainer.job.job import Job
from trainer.job.part_saves import PartSaves
from trainer.job.pass_log import NOTHING, Pass, PassLog, SavedPasses
from trainer.job.random_states import random_states, restore_random_states
from trainer.job.save_load import read, write
from trainer.job.save_schedule import SaveSchedule

DELTAS = 8  # at most so many in a row have only the rows that changed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Where and how often a job saves by itself.

    Attributes:
        path: the folder of checkpoints, or its URL.
        every_seconds: between two of them.
        keep: how many of the newest stay.

    Raises:
        ValueError: a number is out of range.
    """

    path: str
    every_seconds: float
    keep: int

    def __post_init__(self) -> None:
        check_seconds("every", self.every_seconds)
        if self.keep < 1:
            raise ValueError(f"keep: expected 1 checkpoint or more, got {self.keep}")

    @classmethod
    def of(
        cls, path: str | None, every: float | None, keep: int | None, connection: Connection
    ) -> CheckpointSettings | None:
        """What the script says, otherwise what the environment says; None where neither names a
        path.

        Raises:
            ValueError: a number is out of range, or one is given without a path.
        """
        chosen = path if path is not None else connection.checkpoint
        if not chosen:
            for name, value in (("every", every), ("keep", keep)):
                if value is not None:
                    raise ValueError(f"{name}: has no effect without checkpoint=")
            return None
        if connection.plan_only or connection.probe:
            return None  # it ends before its first step, or it is a trial
        return cls(
            str(chosen),
            connection.checkpoint_every_seconds if every is None else every,
            connection.checkpoint_keep if keep is None else keep,
        )


@dataclass(frozen=True, slots=True)
class ScriptPlace:
    """Where a script is when its job saves.

    Attributes:
        drawn: passes of the job whose order was drawn; of some nobody has asked for more than their
            length.
        schedulers: their states, by optimizer and type.
        trainers: by trainer, what :func:`_own_place` says of it.
        leases: who trains on which samples, as server 0 keeps it; "": nobody asked.
    """

    drawn: int
    schedulers: Mapping[str, Any]
    trainers: Mapping[int, Mapping[str, Any]]
    leases: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it.

        Raises:
            ValueError: a scheduler's state cannot be held.
        """
        return {
            "drawn": self.drawn,
            "schedulers": {name: _packed(name, state) for name, state in self.schedulers.items()},
            "trainers": [[trainer, place] for trainer, place in self.trainers.items()],
            "leases": self.leases,
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> ScriptPlace:
        """What :meth:`plain` gave."""
        return cls(
            plain["drawn"],
            {name: resume.unpacked(state) for name, state in plain["schedulers"].items()},
            dict(plain["trainers"]),
            plain.get("leases", ""),
        )

    def passes(self, trainer: int, trainers: int) -> SavedPasses:
        """A trainer's passes.  Where there were more trainers, or fewer, those that were under way
        begin at the joint batch where they were, or the one before.
        """
        found = SavedPasses.of(self.trainers.get(trainer, self.trainers[0])["passes"])
        if len(self.trainers) != trainers:
            for each in found.under_way:
                each.skipped = (each.skipped or 0) * len(self.trainers) // trainers
                each.given = each.trained = each.skipped
                log.warning(
                    "%d trainers had saved, and there are %d: the pass that was under way goes on "
                    "behind batch %d of this trainer",
                    len(self.trainers),
                    trainers,
                    each.skipped,
                )
        return found


def _packed(name: str, state: Any) -> Any:
    """A scheduler's state, as JSON can hold it.

    Raises:
        ValueError: it cannot.
    """
    try:
        packed = resume.packed(state)
        json.dumps(packed)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"automatic checkpoints: expected numbers, words, lists and mappings in the state of "
            f"the scheduler {name}, got another: {error}"
        ) from error
    return packed


def _own_place(passes: PassLog) -> dict[str, Any]:
    """Where one trainer is: its passes, and the states of its random sources."""
    return {"passes": passes.saved().plain(), "random": random_states()}


class AutomaticSaves:
    """One trainer's part in the saves of its job.  The script's thread calls it, while it asks for
    a batch or steps.

    Args:
        job: that saves.
        settings: where, and how often.

    Raises:
        ValueError, OSError: the list of checkpoints is damaged, or cannot be read.
        InUse (an OSError): another job saves there.

    Attributes:
        passes: over the data of ``fleet.shard``.
    """

    def __init__(self, job: Job, settings: CheckpointSettings) -> None:
        self._job, self._settings = job, settings
        self._folder: CheckpointFolder | None = None
        self._parts: PartSaves | None = None
        if job.is_first:  # the others neither write nor choose, while it is there
            self._hold()
        self.passes = PassLog()
        self._schedule = SaveSchedule(settings.every_seconds, self._agreed)
        self._steps = 0  # at the last place where the trainers could have saved
        self._found: list[tuple[str, int]] | None = None  # checkpoints, and their optimizers
        self._chosen = False  # one was taken, by this object or by the script
        self._place: ScriptPlace | None = None  # to which the script has not come back yet
        self._groups: list[dict[str, Any]] = []  # hyper-parameters there
        self._there = NOTHING  # this trainer's passes until then
        self._missing: set[tuple[str, int]] = set()  # passes that were under way there

    def _hold(self) -> CheckpointFolder:
        """The folder, which no other job uses from here on."""
        folder = self._folder = CheckpointFolder(self._settings.path, self._settings.keep)
        self._parts = PartSaves(self._job, folder, self._settings.path)
        if (lock := folder.hold()) is not None:
            self._job.undo.callback(lock.release)
        return folder

    def _agreed(self, topic: str, text: str) -> str:
        said = self._job.agree(topic, text)
        assert said is not None, "the trainers are connected"
        return said

    # ---- going on from a checkpoint ----

    def joined(self) -> None:
        """An optimizer was distributed: with the last one of the checkpoint's the job takes its
        values.

        Raises:
            ValueError: no checkpoint of the folder can be read, or they are of another job.
        """
        job = self._job
        optimizer = job.optimizers[0]
        if self._found is None:
            text = "" if self._folder is None else json.dumps(self._candidates(self._folder))
            told = optimizer.barrier("checkpoints to go on from", text)
            self._found = [(path, count) for path, count in json.loads(told[0])]
        fitting = [path for path, count in self._found if count == len(job.optimizers)]
        if fitting and not self._chosen:
            self._take_newest(fitting)
            self._chosen = True
        self._steps = self._taken()
        self._schedule.begin(self._steps)
        last = job.optimizers[-1]
        hooks = [
            last.register_step_pre_hook(lambda *_: self._stepping()),
            last.register_step_post_hook(lambda *_: self.passes.stepped()),
        ]
        if len(job.optimizers) == 1:
            hooks += [m.register_forward_pre_hook(lambda *_: self._own_loop()) for m in job.models]
        for hook in hooks:
            job.undo.callback(hook.remove)

    def _candidates(self, folder: CheckpointFolder) -> list[tuple[str, int]]:
        """The checkpoints, the newest first, with the number of optimizers of each.

        Raises:
            OSError, ValueError: there are some, and none can be read.
        """
        found: list[tuple[str, int]] = []
        failure: Exception | None = None
        for path in folder.paths():
            try:
                meta = manifest.read(place_at(path)).meta
            except (OSError, ValueError) as error:
                failure = failure or error
                log.warning("%s cannot be read: %s", path, error)
                continue
            found.append((path, len(meta.get("optimizers", [None]))))
        if failure is not None and not found:
            raise self._explained(failure)
        return found

    def _explained(self, failure: Exception) -> Exception:
        """Why no checkpoint is taken, and what to do."""
        failure.add_note(
            f"no checkpoint below {self._settings.path} can be taken; to begin anew, give another "
            "path, or remove it"
        )
        return failure

    def _take_newest(self, paths: list[str]) -> None:
        """Takes the newest one that is whole."""
        before = [dict(group) for each in self._job.optimizers for group in each.param_groups]
        failure: Exception | None = None
        for path in paths:
            try:
                found = read(self._job, path)
            except (OSError, ValueError) as error:
                failure = failure or error
                log.warning("%s cannot be taken: %s", path, error)
                continue
            self._place = ScriptPlace.of(found.meta["place"])
            self._job.samples.restored = self._place.leases
            self._there = self._place.passes(self._job.role.trainer_id, self._job.role.trainers)
            self._missing = {(each.loader, each.number) for each in self._there.under_way}
            self._groups = found.meta["groups"]
            resume.load_groups(_without_parameters(before), self._job.optimizers)
            for each in self._job.optimizers:  # a scheduler that is made now asks for a step
                each._opt_called = True  # type: ignore[attr-defined]  # torch's own mark
            log.warning("goes on from %s, after %d steps", path, self._job.optimizers[0].steps)
            return
        assert failure is not None, "there was a path"
        raise self._explained(failure)

    def cancel(self) -> None:
        """The script has loaded a checkpoint by itself, and knows where it is."""
        self._place, self._chosen = None, True
        self._steps = self._taken()
        self._schedule.begin(self._steps)

    def begin(self, loader: str) -> Pass:
        """A pass begins."""
        begun = self.passes.begin(loader, NOTHING if self._place is None else self._there)
        self._missing.discard((begun.loader, begun.number))
        return begun

    def ready(self, begun: Pass) -> None:
        """A pass is about to give its first batch.  With the last one of those that were under way,
        and with any new one, the script is where it was.
        """
        place = self._place
        if place is None or begun.skipped is None or (begun.live and self._missing):
            return
        self._be_there(place)
        mine = place.trainers.get(self._job.role.trainer_id)
        if mine is not None:  # there may be more trainers than before
            restore_random_states(mine["random"])

    def _be_there(self, place: ScriptPlace) -> None:
        """The script is where it was."""
        self._place = None
        self.passes.restore(self._there)
        self._job.passes.count = place.drawn
        resume.load_groups(self._groups, self._job.optimizers)
        found = self._schedulers()
        for name in sorted(found.keys() ^ place.schedulers.keys()):
            log.warning(
                "automatic checkpoints: only one of the script and its checkpoint has the "
                "scheduler %s, which goes on as it is",
                name,
            )
        for name in found.keys() & place.schedulers.keys():
            found[name].load_state_dict(place.schedulers[name])

    def _schedulers(self) -> Mapping[str, Any]:
        pairs = [each for made in self._job.optimizers for each in (made, made.inner)]
        return schedulers_of(pairs)

    # ---- saving ----

    def _own_loop(self) -> None:
        """A forward begins, in a loop over data of the script's own.  Where it iterates over
        fleet.shard this may be an evaluation behind an epoch, and a scheduler's step follows.
        """
        if not self.passes.any:
            self.between(None)

    def _stepping(self) -> None:
        """A step begins; the script may iterate over data of its own, of which the first batch has
        drawn its random numbers already.

        Raises:
            ValueError: the checkpoints are of a job with another number of optimizers.
        """
        if self._found and not self._chosen:
            path, count = self._found[0]
            raise ValueError(
                f"{path}: expected a job of {count} distributed optimizers, got "
                f"{len(self._job.optimizers)}; to begin anew, give another path, or remove it"
            )
        if self._place is not None:
            self._be_there(self._place)
        self.between(None)

    def between(self, asked: Pass | None) -> None:
        """The script asks for the next batch: saves, where it is time.

        Args:
            asked: the pass; None: none that has begun.  Only where the first one of those that are
                under way is asked has the script done all that follows a step.

        Raises:
            PServerError: the job has failed.
        """
        steps = self._taken()
        if self._place is not None or steps == self._steps:
            return  # nothing was trained, or gradients are being added up
        if asked is not self.passes.first:
            return
        self._steps = steps
        self._save_if_due(steps, waits=False)

    def waits(self) -> None:
        """This trainer waits for samples that others may hand back: saves, where it is time.

        Raises:
            PServerError: the job has failed.
        """
        if self._place is None and self._taken():
            self._save_if_due(self._taken(), waits=True)

    def _save_if_due(self, steps: int, waits: bool) -> None:
        if self._schedule.due(steps, waits):
            try:
                self._save(steps)
            except (OSError, ValueError) as error:
                log.error("no checkpoint after step %d, the job goes on: %s", steps, error)
            self._schedule.saved()

    def _taken(self) -> int:
        """Steps of all optimizers."""
        return sum(each.steps for each in self._job.optimizers)

    def _save(self, steps: int) -> None:
        job = self._job
        optimizer = job.optimizers[0]
        page = None if job.communicator is None else job.communicator.page
        with nullcontext() if page is None else page.steps.save():
            optimizer.flush()
            told = optimizer.barrier("automatic save", json.dumps(_own_place(self.passes)))
            with jointly(optimizer, "an automatic save", "automatically saved"):
                if not job.is_first:
                    return
                # trainer 0 may have been preempted since the last save
                folder = self._folder or self._hold()
                optimizer.flush()  # the others' last steps too
                states = {name: each.state_dict() for name, each in self._schedulers().items()}
                trainers = {trainer: json.loads(text) for trainer, text in told.items()}
                place = ScriptPlace(job.passes.count, states, trainers, job.samples.kept())
                if self._left_to_servers(steps, place):
                    return
                base = folder.continued(job.saved, DELTAS) if job.tables is not None else ""
                name = folder.name_at(steps)
                write(job, folder.path_of(name), None, bool(base), place.plain())
                folder.add(name, base)
                log.info("saved %s", folder.path_of(name))

    def _left_to_servers(self, steps: int, place: ScriptPlace) -> bool:
        """Whether the servers save, or a save of theirs is still under way."""
        parts = self._parts
        if parts is None or not parts.possible():
            return False
        if parts.under_way:
            log.warning("no checkpoint after step %d: the one before is being written", steps)
        else:
            parts.begin(steps, place.plain(), DELTAS)
        return True

    def finish(self) -> None:
        """Waits for a save that is under way."""
        if self._parts is not None:
            self._parts.finish()


def _without_parameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in g.items() if key != "params"} for g in groups]
