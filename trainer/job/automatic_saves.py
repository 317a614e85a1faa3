"""Checkpoints that a job writes by itself, and from which its script continues when it is
restarted.

See [Note: a script that is started again] in script_position.py, and due_saves.py for the places at
which the trainers of a job meet to save.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from pserver.checkpoint import manifest
from pserver.client.replies import PutOff
from pserver.storage.place import place_at
from trainer.checkpoint import resume
from trainer.checkpoint.checkpoint_folder import CheckpointFolder
from trainer.checkpoint.resume import jointly
from trainer.communicator.communicator import Communicator
from trainer.communicator.joint_calls import Apart
from trainer.environment.environment import Role
from trainer.job.checkpoint_settings import CheckpointSettings
from trainer.job.due_saves import DueSaves
from trainer.job.found_schedulers import scheduler_states
from trainer.job.job import Job
from trainer.job.position import Position, own_position
from trainer.job.random_states import restore_random_states
from trainer.job.save_load import position_of, read, write
from trainer.job.save_schedule import SaveSchedule
from trainer.job.script_position import ResumePlace, ScriptPosition
from trainer.samplers.pass_log import LoggedPass, SavedPasses
from transpiler.files import bounded_json

DELTAS = 8  # at most so many in a row have only the rows that changed

log = logging.getLogger(__name__)


class AutomaticSaves:
    """One trainer's part in the automatic saves of its job.  The script's thread calls it, while it
    asks for a batch or steps.

    Args:
        job: the job that saves.
        settings: the folder, and the interval.

    Raises:
        ValueError, OSError: the list of checkpoints is damaged, or cannot be read.
        InUse (an OSError): another job saves to the folder.

    Attributes:
        passes: the passes over the data of ``fleet.shard``.
        resumed: whether this trainer has loaded a checkpoint of the folder.
    """

    keeps = True

    def __init__(self, job: Job, settings: CheckpointSettings) -> None:
        self._job, self._settings = job, settings
        self.resumed = False
        self._folder: CheckpointFolder | None = None
        # only the leader writes and chooses; a trainer 0 that joins late may not be the leader
        if job.is_first and job.role.role is not Role.TRAINER:
            self._hold()
        self._script = ScriptPosition(job)
        self.passes = self._script.passes
        schedule = SaveSchedule(settings.every_seconds, self._agreed)
        self._due = DueSaves(schedule, self._taken, self._save_now)
        self._found: list[tuple[str, int]] | None = None  # checkpoints, and their optimizers
        self._chosen = False  # whether one was taken, by this object or by the script
        self._random: dict[str, Any] | None = None  # states of random sources at that place
        self._calls = 0  # joint calls at the job's start, which the script does not make

    def _hold(self) -> CheckpointFolder:
        """Takes the folder, which no other job uses from here on."""
        folder = self._folder = CheckpointFolder(self._settings.path, self._settings.keep)
        if (lock := folder.hold()) is not None:
            self._job.undo.callback(lock.release)
        return folder

    def _agreed(self, topic: str, text: str) -> str:
        said = self._job.agree(topic, text)
        assert said is not None, "the trainers are connected"
        return said

    # ---- trainers that join late ----

    def connected(self, communicator: Communicator) -> None:
        """Registers this part with a connection that has not been used yet."""
        self._script.connected(communicator)
        communicator.position.parts["saves"] = self._plain
        communicator.position.restorers["saves"] = self._take
        communicator.joint.meanwhile = self._due.follow

    def _plain(self) -> dict[str, Any]:
        return self._due.plain() | {"begun by": self._calls}

    def _take(self, plain: Mapping[str, Any] | None) -> None:
        there = self._job.communicator
        self._due.load(plain)
        if plain is not None and there is not None:
            there.joint.skip(plain["begun by"])

    # ---- continuing from a checkpoint ----

    def joined(self) -> None:
        """Called when an optimizer was distributed; with the last one of the checkpoint's
        optimizers, loads the checkpoint.

        Raises:
            ValueError: no checkpoint of the folder can be read, or the checkpoints are of another
                job.
        """
        job = self._job
        optimizer, there = job.optimizers[0], job.communicator
        self._calls -= 0 if there is None else there.joint.made
        if self._found is None and self._script.late:
            self._found, self._chosen = [], True
        elif self._found is None:
            if self._folder is None and job.is_first:
                self._hold()
            text = "" if self._folder is None else json.dumps(self._candidates(self._folder))
            told = optimizer.barrier("checkpoints to go on from", text)
            self._found = [(path, count) for path, count in bounded_json.loads(told[0])]
        fitting = [path for path, count in self._found if count == len(job.optimizers)]
        if fitting and not self._chosen:
            self._take_newest(fitting)
            self._chosen = True
        self._calls += 0 if there is None else there.joint.made
        self._due.begin()
        further = self._script.further()
        hooks = [each.register_step_pre_hook(lambda *_: self._stepping()) for each in further]
        if len(further) == len(job.optimizers):
            hooks += [m.register_forward_pre_hook(lambda *_: self._own_loop()) for m in job.models]
        for hook in hooks:
            job.undo.callback(hook.remove)
        self._script.joined()

    def _candidates(self, folder: CheckpointFolder) -> list[tuple[str, int]]:
        """The checkpoints, the newest first, with the number of optimizers of each.

        Raises:
            OSError, ValueError: there are checkpoints, but none can be read.
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
        """Adds to an error that no checkpoint is taken, and what to do."""
        failure.add_note(
            f"no checkpoint below {self._settings.path} can be taken; to begin anew, give another "
            "path, or remove it"
        )
        return failure

    def _take_newest(self, paths: list[str]) -> None:
        """Takes the newest checkpoint that is whole."""
        before = [dict(group) for each in self._job.optimizers for group in each.param_groups]
        failure: Exception | None = None
        for path in paths:
            try:
                found = read(self._job, path)
            except (OSError, ValueError) as error:
                failure = failure or error
                log.warning("%s cannot be taken: %s", path, error)
                continue
            position, role = Position.from_meta(found.meta), self._job.role
            self._job.samples.restored = position.leases
            there = position.passes(role.trainer_id, role.trainers)
            self._script.return_to(
                ResumePlace(there, position.drawn, found.meta["groups"], position.schedulers)
            )
            self._random = position.random(role.trainer_id)
            resume.load_groups(_without_parameters(before), self._job.optimizers)
            for each in self._job.optimizers:  # a scheduler that is made now asks for a step
                each._opt_called = True  # type: ignore[attr-defined]  # torch's own mark
            self.resumed = True
            log.warning("continues from %s, after %d steps", path, self._job.optimizers[0].steps)
            return
        assert failure is not None, "there was a path"
        raise self._explained(failure)

    def cancel(self) -> None:
        """Called when the script has loaded a checkpoint by itself, and knows its own place."""
        if self._chosen and self._script.late:
            return  # it goes to the others' place
        self._script.stay()
        self._chosen = True
        self._due.begin()

    def saved(self) -> SavedPasses:
        """See :class:`trainer.samplers.saves.Saves`."""
        return self._script.saved()

    def begin(self, loader: str) -> LoggedPass:
        """Begins a pass.

        Raises:
            PServerError: the job has failed.
        """
        return self._script.begin(loader)

    def ready(self, begun: LoggedPass) -> None:
        """Called before a pass gives its first batch.

        Raises:
            PServerError: the job has failed.
        """
        if self._script.ready(begun):
            random, self._random = self._random, None
            if random is not None:
                restore_random_states(random)
            self._due.arrived()

    # ---- saving ----

    def _own_loop(self) -> None:
        """Saves at a forward, if it is time, in a loop over the script's own data.  With
        fleet.shard the forward may be an evaluation after an epoch, with a scheduler's step to
        follow.
        """
        if not self.passes.any:
            self.between(None)

    def _stepping(self) -> None:
        """Called when a step begins.  The script may iterate over its own data, whose first batch
        has drawn its random numbers already.

        Raises:
            ValueError: the checkpoints are of a job with another number of optimizers.
        """
        if self._found and not self._chosen:
            path, count = self._found[0]
            raise ValueError(
                f"{path}: expected a job of {count} distributed optimizers, got "
                f"{len(self._job.optimizers)}; to begin anew, give another path, or remove it"
            )
        self._script.find()
        if self._script.arrive():
            self._due.arrived()
        self.between(None)

    def between(self, asked: LoggedPass | None) -> None:
        """Saves, if it is time, when the script asks for the next batch.

        Args:
            asked: the pass that is asked; None: none that has begun.  Only when the script asks the
                first of the passes under way has it done everything that follows a step.

        Raises:
            PServerError: the job has failed.
        """
        self._script.between()
        if self._script.returns or asked is not self.passes.first or not self._due.trained():
            return  # nothing was trained, or gradients are being accumulated
        self._due.between()

    def waits(self) -> None:
        """Joins a save while this trainer waits for samples that others may hand back: they may
        wait for it in the save.  If trainers do not step together, it also starts a save when it is
        time.

        Raises:
            PServerError: the job has failed.
        """
        if self._script.waits():
            self._due.arrived()
        if self._script.together or self._script.returns or not self._taken():
            self._due.follow()
        else:
            self._due.between(waits=True)

    def _save_now(self, name: str) -> None:
        """Saves with the others.

        Args:
            name: the save's name, the same on every trainer.

        Raises:
            PutOff: the save is put off for all trainers.
        """
        steps = self._taken()
        try:
            self._save(steps, name)
        except PutOff as why:
            log.info("no checkpoint after step %d, a later one is due: %s", steps, why)
            raise
        except (OSError, ValueError) as error:
            log.error("no checkpoint after step %d, the job continues: %s", steps, error)

    def _taken(self) -> int:
        """The number of steps of all optimizers."""
        return sum(each.steps for each in self._job.optimizers)

    def _save(self, steps: int, named: str) -> None:
        job = self._job
        optimizer = job.optimizers[0]
        page = None if job.communicator is None else job.communicator.page
        with nullcontext() if page is None else page.steps.save():
            optimizer.flush()
            meeting = optimizer if job.communicator is None else Apart(job.communicator.joint)
            said = json.dumps(own_position(self.saved()))
            told = meeting.barrier(f"automatic save {named}", said)
            with jointly(meeting, "an automatic save", f"automatically saved {named}"):
                if not job.is_first:
                    return
                # trainer 0 may have been preempted since the last save
                folder = self._folder or self._hold()
                optimizer.flush()  # includes the others' last steps
                position = position_of(job, told, scheduler_states(job.optimizers))
                if self._left_to_servers(folder, steps, position):
                    return
                base = folder.continued(job.saved, DELTAS) if job.tables is not None else ""
                name = folder.name_at(steps)
                write(job, folder.path_of(name), None, bool(base), position)
                folder.add(name, base)
                log.info("saved %s", folder.path_of(name))

    def _left_to_servers(self, folder: CheckpointFolder, steps: int, position: Position) -> bool:
        """Starts a save by the servers, if possible; tells whether the servers save, or still write
        an earlier save.
        """
        parts = self._job.parts
        if not parts.possible():
            return False
        if parts.under_way:
            log.warning("no checkpoint after step %d: the one before is being written", steps)
        else:
            parts.begin(folder, steps, position, DELTAS)
        return True

    def finish(self) -> None:
        """Waits for a save that is under way."""
        self._job.parts.finish()


def _without_parameters(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in g.items() if key != "params"} for g in groups]
