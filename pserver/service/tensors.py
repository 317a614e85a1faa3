"""The server's end of one tensor stream: decode, check, call the job, encode.  No arithmetic.

One thread serves a stream.  It reads frames into the stream's gradient buffers, passes the complete
step to the job at COMMIT, and sends the new values and the outcome.  An error goes to the trainer
in a FAILURE frame, and the stream ends: a step that was not committed leaves no trace.

[Note: the later stream counts]  After a broken connection the trainer opens another stream, with a
greater number, and sends its request again.  The server may still serve the earlier stream, which
has frames under way or waits in a step.  The HELLO of the later stream breaks the earlier one, of
which no further frame is acted on.  Each stream has buffers of its own, so what the earlier one
left behind cannot mix with what the later one brings.  A step that the earlier stream had committed
goes on, and the same step on the later stream joins it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager

import torch

from pserver.errors import (
    JobFailed,
    PServerError,
    Refused,
    Unreachable,
)
from pserver.job.job import Job
from pserver.job.job_leases import ranges_of
from pserver.job.lane_executor import LaneExecutor
from pserver.job.membership import Member
from pserver.job.outcome import Outcome
from pserver.job.sync_round import Clipping, Contribution
from pserver.job.update_task import UpdateTask
from pserver.memory.malloc import trim_memory
from pserver.security.role import Role
from pserver.service.answers import done_of, nonfinite_rows, nonfinite_steps, norms_of
from pserver.service.first_frame import EXPECTED, kind_of, next_frame
from pserver.service.gradient_assembler import GradientAssembler
from pserver.service.stream_times import StreamTimes
from pserver.service.table_service import TABLES, TableService
from pserver.service.value_frames import ValueFrames
from pserver.service.working_streams import WorkingStreams
from pserver.table.gradient import RowGradient
from pserver.tracing.spans import now
from pserver.transport import frames
from pserver.transport.arrays import (
    ArrayAssembler,
    AssignmentAssembler,
    checksum,
    row_gradients,
    whole_values,
)
from pserver.transport.stream import SequencedStream
from pserver.wire_pb2 import Commit, Done, Frame, Hello, Kind, Norms
from transpiler.formats.plan_message import hparams_from_proto


class TensorService:
    """Serves one trainer's stream of one lane, or of the tables, after its HELLO.

    One thread uses it.  The job's lock guards the watermark, which earlier and later streams of the
    same trainer and lane share.
    """

    def __init__(
        self,
        stream: SequencedStream,
        job: Job,
        member: Member,
        hello: Hello,
        role: Role,
        working: WorkingStreams,
    ) -> None:
        self._stream = stream
        self._role = role
        self._working = working
        self._job = job
        self._member = member
        self._lane = hello.lane
        self._watermark = member.watermark(TABLES if hello.tables else hello.lane)
        self._tables = (
            TableService(stream, job, member, self._check_place) if hello.tables else None
        )
        self._times = StreamTimes(job.tracing.spans, member.trainer, hello.lane)
        # row gradients of the step in progress
        self._rows = ArrayAssembler(job.has, job.config.limits.memory_bytes)
        self._number = hello.stream
        self._gradients: GradientAssembler | None = None  # from the first step on
        self._values = ValueFrames(stream)
        # from the first step on that brings what a script has written
        self._assignments: AssignmentAssembler | None = None

    def serve(self) -> None:
        """Answers frames until BYE.

        Raises:
            Unreachable: the stream ended without BYE.
            PServerError: the error that the peer is to be sent.
        """
        self._begin()
        while (received := self._receive()) is not None:
            header, payload = received
            if self._times.spans.on:
                self._times.got(header)
            if header.kind == Kind.BYE:
                return
            if self._tables is not None:
                self._tables.act(header, payload)
            elif header.kind == Kind.GRADIENT:
                self._gradient(header, payload)
            elif header.kind == Kind.ROWS:
                self._job.lifecycle.check_running()
                self._rows.take_in(header, payload)
            elif header.kind == Kind.ASSIGN:
                self._assign(header, payload)
            elif header.kind == Kind.COMMIT:
                self._commit(header)
            elif header.kind == Kind.VALUE:
                self._value(header, payload)
            elif header.kind == Kind.PULL:
                self._pull(header)
            elif header.kind == Kind.CHECKSUM:
                self._checksums(header)
            elif header.kind == Kind.SCALE and header.step <= self._watermark.applied:
                pass  # sent again with a step that was applied meanwhile
            else:
                raise Refused(f"expected {EXPECTED}, got {kind_of(header)}")
        raise Unreachable("it ended without BYE")

    def _begin(self) -> None:
        """Replaces the trainer's earlier stream of this lane.

        See [Note: the later stream counts].
        """
        with self._job.condition:
            self._number = self._number or self._watermark.stream + 1
            if self._number <= self._watermark.stream:
                raise Unreachable(
                    f"it is stream {self._number} of lane {self._lane}, and came after stream "
                    f"{self._watermark.stream}"
                )
            self._watermark.stream, end_earlier = self._number, self._watermark.end_stream
            self._watermark.end_stream = self._stream.cancel
            self._working.works(self._stream)
            self._wait_for_upload()
        if end_earlier is not None:
            end_earlier()

    def _check_place(self) -> None:
        if self._watermark.stream != self._number:
            raise Unreachable(
                f"stream {self._watermark.stream} of lane {self._lane} has replaced stream "
                f"{self._number}"
            )

    def _receive(self) -> tuple[Frame, memoryview] | None:
        """The next frame but PROBE, which it answers; None at the end."""
        while (received := self._next()) is not None:
            header, payload = received
            size = frames.received_bytes(header, payload)
            self._job.received[self._member.transport] += size
            self._member.last_heard = self._job.now()
            self._check_place()
            if header.kind != Kind.PROBE:
                return received
            self._stream.send(Frame(kind=Kind.PROBE))
        return None

    def _next(self) -> tuple[Frame, memoryview] | None:
        self._working.rests(self._stream)
        try:
            return next_frame(self._stream, self._role, self._land)
        finally:
            self._working.works(self._stream)

    def _land(self, header: Frame, payload_bytes: int) -> list[memoryview] | None:
        """Gradients are read to where they are merged."""
        if self._times.spans.on:
            self._times.got(header)
        if header.kind != Kind.GRADIENT or self._gradients is None:
            return None
        return self._gradients.land(header, payload_bytes)

    def _gradient(self, header: Frame, payload: memoryview) -> None:
        self._job.lifecycle.check_running()
        gradients = self._assembler()
        gradients.begin(header.step)
        frames.scatter(header, payload, gradients.destination)
        gradients.received(header)

    def _assembler(self) -> GradientAssembler:
        if self._gradients is None:
            self._gradients = GradientAssembler(self._executor().updates)
            self._gradients.share(self._stream.offer)
        return self._gradients

    def _assign(self, header: Frame, payload: memoryview) -> None:
        self._job.lifecycle.check_running()
        if self._assignments is None:
            self._assignments = AssignmentAssembler(self._executor().variables)
        self._assignments.take_in(header, payload)

    def _executor(self) -> LaneExecutor:
        return self._job.installed().lane(self._lane)

    def _commit(self, header: Frame) -> None:
        if header.step == 0:
            self._loaded(header)
            return
        executor, step = self._executor(), header.step
        contribution = self._contribution(step, header.commit)
        task = self._taken(step, lambda: executor.commit(self._member, step, contribution))
        if isinstance(task, Clipping):
            self._stream.send(Frame(kind=Kind.NORMS, step=step, norms=Norms(squared=task.norms)))
            task = executor.scale(task, self._coefficients(step))
        taken = self._member, step, task

        def outcome() -> Outcome:
            applied = executor.outcome(*taken)
            self._assembler().free()
            return applied

        try:
            if not self._values.share(
                self._job.installed().slices.segment
            ):  # see [Note: answers begin early] in lane_executor.py
                task.finish()
            self._answer(
                executor.updated_slices(*taken, buffers_only=header.commit.omit_values),
                outcome,
                step,
                in_place=True,
            )
        finally:
            task.finish()

    def _taken(self, step: int, take: Callable[[], UpdateTask | Clipping]) -> UpdateTask | Clipping:
        """Takes a step.  Where this server fails in it, nobody knows how far it has come, so no
        trainer is to wait for it.
        """
        try:
            return take()
        except PServerError:
            raise
        except Exception as error:
            text = f"the server failed in step {step}: {type(error).__name__}: {error}"
            self._job.lifecycle.fail(JobFailed(text))
            raise

    def _contribution(self, step: int, commit: Commit) -> Contribution:
        """The step that a COMMIT completes: every slice's gradient is whole, or named as absent."""
        assembler = self._assembler()
        odd = assembler.nonfinite()
        gradients = assembler.complete(step, commit.absent)
        rows = self._row_gradients()
        odd = {self._executor().updates[name].parameter for name in odd} | nonfinite_rows(rows)
        assigned = {} if self._assignments is None else self._assignments.assignments(step)
        return Contribution(
            gradients,
            {group.group: hparams_from_proto(group.values) for group in commit.hparams},
            commit.overflow,
            rows,
            {name: each for name, each in assigned.items() if name not in commit.buffers},
            dict(commit.written),
            nonfinite_steps(self._member.trainer, step, odd | set(commit.nonfinite)),
            norms=norms_of(commit, self._job.installed().plan),
            buffers=whole_values(commit.buffers, assigned),
            last=commit.last,
            leases=ranges_of(commit.leases),
            steps=commit.steps or 1,
        )

    def _row_gradients(self) -> dict[str, RowGradient]:
        """The row gradients of this step, by table, checked so that no update of them can fail."""
        arrays, tables = self._rows.take_out(), self._executor().tables
        found = row_gradients(arrays, [table.table for table in tables.values()]) if arrays else {}
        self._job.installed().check_rows(found)
        return found

    def _coefficients(self, step: int) -> Mapping[str, float]:
        received = self._receive()
        if received is None:
            raise Unreachable("it ended before SCALE")
        header, _ = received
        if header.kind != Kind.SCALE or header.step != step:
            raise Refused(
                f"expected SCALE of step {step}, got {kind_of(header)} of step {header.step}"
            )
        return dict(header.commit.scale)

    def _value(self, header: Frame, payload: memoryview) -> None:
        self._job.check_loads(self._member, "values")
        slices = self._job.installed().slices
        with self._upload(header, last=False) as new:
            if not new:
                return
            with slices.writing([part.name for part in header.parts]):
                frames.scatter(
                    header,
                    payload,
                    lambda part: slices.destination(part.name, part.dtype, tuple(part.shape)),
                )

    def _loaded(self, header: Frame) -> None:
        """Ends an upload, which counts once."""
        with self._upload(header, last=True) as new:
            if new:
                outcome = self._job.loaded(self._member)
            else:
                outcome = Outcome(self._job.installed().version, 0)
        self._answer((), lambda: outcome)

    def _upload(self, header: Frame, last: bool) -> AbstractContextManager[bool]:
        return self._watermark.upload(self._job.condition, self._check_place, header.request, last)

    def _wait_for_upload(self) -> None:
        """Waits while an earlier stream's thread copies values.  The caller holds the lock."""
        lifecycle = self._job.lifecycle

        def check() -> None:
            self._check_place()
            lifecycle.check_running()

        lifecycle.waits.wait(lifecycle.changed, lambda: not self._watermark.loading, check=check)

    def _pull(self, header: Frame) -> None:
        self._job.lifecycle.check_running()
        names = [part.name for part in header.parts] or list(self._job.installed().slices.values)
        executor = self._executor()
        # asked when all values have been read: none of them is of a later version
        self._answer(names, lambda: Outcome(executor.begun, 0), header.step)

    def _checksums(self, header: Frame) -> None:
        self._job.lifecycle.check_running()
        read = ((part.name, self._read(part.name)) for part in header.parts)
        found = {name: checksum(tensor) for name, tensor in read if tensor is not None}
        done = Done(version=self._executor().begun, checksums=found)
        self._check_place()
        self._stream.send(Frame(kind=Kind.DONE, step=header.step, done=done))

    def _answer(
        self,
        names: Iterable[str],
        outcome: Callable[[], Outcome],
        step: int = 0,
        in_place: bool = False,
    ) -> None:
        """Sends the values of these variables, each when the iterator names it, and then DONE with
        the outcome.

        Args:
            in_place: the trainer may read them where they are; otherwise it gets copies, which it
                cannot miss.
        """
        self._check_place()
        began = now() if self._times.spans.on else 0.0
        in_place = in_place and self._values.share(self._job.installed().slices.segment)
        tensors = ((name, self._read(name, in_place)) for name in names)
        held = ((name, tensor) for name, tensor in tensors if tensor is not None)
        for header, payload in self._values.frames(step, held):
            self._stream.send(header, payload)
            size = sum(memoryview(buffer).nbytes for buffer in payload)
            self._job.sent[self._member.transport] += size
        result = outcome()
        self._stream.send(Frame(kind=Kind.DONE, step=step, done=done_of(result)))
        if began:
            self._times.answered(began, step)
        # 0, 1, 2, 4, ...: see [Note: holes] in malloc.py
        if not result.version & (result.version - 1):
            trim_memory()

    def _read(self, name: str, in_place: bool = False) -> torch.Tensor | None:
        # delay compensation remembers what the trainer read: only on the stream that counts
        self._check_place()
        tensor = self._job.installed().read(self._member, name, in_place and name in self._values)
        return tensor if in_place or tensor is None else self._values.apart(name, tensor)
