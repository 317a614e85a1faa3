"""A server that was lost comes back while its job goes on: it reads what a save has of it, and
follows server 0 again.

[Note: what is lost]  A job whose servers wait for one another's return (``--await-servers``) stops
to decide steps while one is away.  The one that comes back has the values of its last save.  Steps
that were decided since are in the others, and are lost in it: they are counted, by trainer, and
said.  From there on each trainer's next step counts on all servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from pserver import wire_pb2 as wire
from pserver.checkpoint import manifest
from pserver.errors import PServerError, Refused
from pserver.job import job_files
from pserver.job.coordination import Coordination
from pserver.job.filing import Filing
from pserver.job.installed_program import InstalledProgram
from pserver.job.lifecycle import JobState
from pserver.job.membership import Member, MemberState
from pserver.job.reload import Reload
from pserver.job_log.standing import Applied, Loss, Standing
from pserver.storage.place import place_at
from transpiler.files.local_path import shown


class Reloading(Filing):
    """The part of a :class:`~pserver.job.job.Job` with which a server comes back.  Any thread may
    call it.
    """

    _coordination: Coordination | None = None  # of the present job

    def _has_installed(self, request: wire.InstallRequest) -> bool:
        """Whether a call has come late, to a server that has come back and serves by now."""
        return self.reload is not None and self.reload.done and self.reload.asks(request.session)

    def _check_installs(self, request: wire.InstallRequest) -> Reload | None:
        """Who may install; gives what is known of a server that comes back.

        Raises:
            Refused: another trainer, or it is not the time for it.
            PServerError: what has ended the job meanwhile.
        """
        reload = None if self.reload is None or self.reload.done else self.reload
        if reload is not None:
            reload.check(request.session)
        installs = reload is not None or self.member(request.session).trainer == 0
        if self.failure is not None:
            raise self.failure
        if not installs or self.lifecycle.state is not JobState.INSTALLING:
            raise Refused("only trainer 0 installs, and only a server that is not yet installed")
        return reload

    def _read_save(self, reload: Reload, installed: InstalledProgram) -> bool:
        """A program takes over what the save has of this server.

        Returns:
            Whether this was the first call.

        Raises:
            Refused, FingerprintMismatch: it is none of this program, or is torn; the server ends.
        """
        with self.condition:
            first, reload.began = not reload.began, True
            if first:
                self._record(installed)
        if not first:
            return False
        try:
            job_files.load(reload.path, installed, self._members, _root(reload.path))
            reload.read(manifest.read(place_at(reload.path)).meta)
        except PServerError as error:
            self._cannot(error)
        except Exception as error:  # it has begun, so nobody else brings the program
            self._cannot(Refused(f"the save at {shown(reload.path)}: {error!r}"))
        return True

    def _write_ahead(self, installed: InstalledProgram) -> None:
        """Server 0 writes down what it alone knows, where it may come back; it takes what the
        process before it has written.  The caller holds the job's lock.
        """
        decisions, path = installed.decisions, self.config.write_ahead_log
        if path is None or not (decisions.awaits and decisions.decides):
            return
        self._coordination = coordination = Coordination(path, installed)
        if self.reload is not None:
            try:
                coordination.restore()
            except Exception as error:  # whatever it holds
                self._cannot(Refused(f"the log that server 0 has written: {error!r}"))
            decisions.came_back()
        coordination.begin()

    def _write_nothing(self) -> None:
        """The job is over."""
        if self._coordination is not None:
            self._coordination.close()
        self._coordination = None

    def _goes_on_as_it_was(self, installed: InstalledProgram) -> None:
        """A server that comes back asks server 0 where the log stands; server 0 knows it."""
        decisions = installed.decisions
        if decisions.coordinator is not None and self.reload is not None and not self.reload.done:
            if self._coordination is None:
                self._cannot(Refused("server 0 has written no log from which it could come back"))
            self._stands(decisions.coordinator.standing(0))
        decisions.link()

    def _cannot(self, error: PServerError) -> NoReturn:
        """It does not come back: the server ends."""
        self.lifecycle.fail(error)
        self.ended.set()
        raise error

    def _stands(self, standing: Standing) -> None:
        """Server 0 says where the log stands: this server serves.  The caller holds the job's
        lock.
        """
        reload, installed = self.reload, self.program
        assert reload is not None and installed is not None, "a server that comes back"
        found = reload.stands(standing)
        installed.lost = reload.lost
        installed.recording.stands(standing)
        for lane in installed.lanes:
            lane.record = standing.last
        self._take_part(standing)
        self.lifecycle.state = JobState.SERVING
        self.log.say("reloaded", _said(reload.path, found))
        self.lifecycle.wake_all()

    def _take_part(self, standing: Standing) -> None:
        """The trainers of the job, as server 0 knows them."""
        members, installed = self._members, self.program
        assert installed is not None, "it has begun its log"
        members.since = self._clock()
        members.changes = standing.last + len(standing.processes)  # more than anybody has heard of
        for each in standing.processes:
            process = each.process
            installed.calls.stands(process, each.calls)
            members.counted[process] = list(map(Applied, each.decided, each.rows))
            members.by_trainer.pop(process.trainer, None)  # an earlier process's place
            if each.lost:
                members.fence(process, each.lost)
            elif each.left:
                gone = Member(process.trainer, process.incarnation, "", members.since)
                members.add(gone, each.decided)
                if each.preempted_after is not None:
                    members.preempt(gone, each.preempted_after)
                gone.state = MemberState.LEFT
            else:
                members.away[process.trainer] = process
                installed.decisions.joined[process] = each.decided


def _root(path: str) -> str:
    """Below which all has to be that a save of a server continues."""
    return place_at(path).path.rsplit("/", 2)[0]


def _said(path: str, lost: Mapping[int, Loss]) -> str:
    """What is lost, as a sentence."""
    steps = sum(loss.steps for loss in lost.values())
    rows = sum(loss.rows for loss in lost.values())
    each = ", ".join(f"trainer {t}: {loss.steps}" for t, loss in sorted(lost.items()))
    return (
        f"goes on from {shown(path)}: {steps} decided steps since then are lost here ({each}), "
        f"with up to {rows} changes of rows"
    )
