"""What a job holds, as files: Save and Load."""

from __future__ import annotations

import time
from pathlib import Path

from pserver import wire_pb2 as wire
from pserver.errors import Refused, UnknownSession, Unprepared
from pserver.job import job_files
from pserver.job.attendance import Attendance
from pserver.job.background_saves import BackgroundSaves
from pserver.job.installed_program import InstalledProgram
from pserver.job.membership import Member
from pserver.job.recorder import Recorder
from pserver.tracing.spans import now
from pserver.undone import or_undone
from transpiler.files.local_path import shown

SAVE = "save"  # the kind of such calls in the job's log


class Filing(Attendance):
    """The part of a :class:`~pserver.job.job.Job` that answers Save and Load.  Any thread may call
    it.

    Attributes:
        saves: in the background.
        recorders: of recorded logs that are not written to their ends.
    """

    saves: BackgroundSaves
    recorders: list[Recorder]

    def _record(self, installed: InstalledProgram) -> None:
        """Records the job's log, where the server was told to."""
        if self.config.record_log is not None:
            self.recorders = [each for each in self.recorders if not each.wait(0.0)]
            recorder = Recorder(self.config.record_log, self._identity.server_index, self.log)
            self.recorders.append(recorder)
            installed.recording.begin(recorder, installed.program.to_proto())

    def end_recording(self, seconds: float) -> bool:
        """Nothing more is recorded; waits until all is written.

        Returns:
            Whether it is.
        """
        end = time.monotonic() + seconds
        for recorder in self.recorders:
            recorder.close()
        return all([each.wait(max(0.0, end - time.monotonic())) for each in self.recorders])

    def installed(self) -> InstalledProgram:
        """What the present job has installed.

        Raises:
            UnknownSession: this server comes back, and nobody has joined it again.
            Unprepared: no program has been installed.
            PServerError: what has ended the job before one was.
        """
        if self.program is None and self.failure is not None:
            raise self.failure
        if self.program is None and self.reload is not None:
            raise UnknownSession("this server has come back, and knows no session yet: join first")
        if self.program is None:
            raise Unprepared("the server has not been installed yet")
        return self.program

    def save(self, request: wire.SaveRequest) -> wire.SaveReply:
        """Writes everything held here, atomically, below the server's data directory."""
        member = self.member(request.session)
        installed = self.installed()
        if request.withdraw:
            with self.condition:
                installed.calls.withdraw(member, SAVE, request.number)
            return wire.SaveReply()
        path = self._directory(request.path)
        if request.background:
            return self._save_in_background(request, member, installed, path)
        if request.base or request.number:
            raise Refused("a save that has a number or a base is one in the background")
        began = now()
        try:
            job_files.save(path, installed, self._members)
        finally:
            installed.steps.saved(now() - began)
        self.lifecycle.events.add("saved", f"saved to {shown(path)}")
        return wire.SaveReply(file=shown(path), bytes=installed.slices.bytes_held, done=True)

    def _save_in_background(
        self, request: wire.SaveRequest, member: Member, installed: InstalledProgram, path: str
    ) -> wire.SaveReply:
        base = self._directory(request.base) if request.base else ""

        def begin() -> job_files.Saving:
            saving = job_files.Saving(path, installed, self._members, base, continues=True)
            with or_undone(saving.close):
                cut = installed.calls.carry_out(member, SAVE, request.number, saving.cut)
                if cut is None:
                    raise Refused("this save began before the server came back")
            return saving

        progress = self.saves.begin(
            request.session,
            request.number,
            path,
            begin,
            installed.steps.saved,
        )
        return wire.SaveReply(
            file=shown(path),
            bytes=progress.bytes,
            done=progress.done,
            failure=progress.failure,
            seconds=progress.seconds,
            pause_seconds=progress.pause_seconds,
            identity=progress.identity,
        )

    def load(self, request: wire.LoadRequest) -> wire.LoadReply:
        """Reads what :meth:`save` wrote, for the same plan."""
        self.member(request.session)
        path, root = self._directory(request.path), self._root
        job_files.load(path, self.installed(), self._members, root)
        self.lifecycle.events.add("loaded", f"loaded from {shown(path)}")
        return wire.LoadReply(file=shown(path), bytes=self.installed().slices.bytes_held)

    @property
    def _root(self) -> str:
        """Where this server keeps its files."""
        if self.config.store is not None:
            return self.config.store
        return str(Path(str(self.config.data_dir)).resolve())

    def _directory(self, path: str) -> str:
        index = self._identity.server_index
        return job_files.directory(self.config.data_dir, path, index, self.config.store)
