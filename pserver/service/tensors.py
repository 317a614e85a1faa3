"""The server's end of one tensor stream: decode, check, call the job, encode.  No arithmetic.

One thread serves a stream.  It reads frames into the stream's gradient buffers, passes the complete
step to the job at COMMIT, and sends the new values and the outcome.  An error goes to the trainer
in a FAILURE frame, and the stream ends: a step that was not committed leaves no trace.

[Note: the later stream counts]  After a broken connection the trainer opens another stream, with a
greater number, and sends its request again.  The server may still serve the earlier stream, which
has frames under way or waits in a step.  The HELLO of the later stream breaks the earlier one, of
which no further frame is acted on.  Each stream has buffers of its own, so what the earlier one
left behind cannot mix with what the later one brings.  A step that the earlier stream had committed
continues, and the same step on the later stream joins it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch

from pserver.dense.compression import decode, layout, selected_layout
from pserver.dense.update import SliceUpdate
from pserver.errors import (
    CorruptFrame,
    JobFailed,
    PServerError,
    Refused,
    Unprepared,
    Unreachable,
)
from pserver.finite import is_finite
from pserver.job.job import Job
from pserver.job_log.own_state import ranges_of
from pserver.lane.lane import LaneExecutor
from pserver.lane.rounds import Clipping
from pserver.lane.step import Step
from pserver.lane.tasks import UpdateTask
from pserver.membership.decisions import process_of
from pserver.membership.members import Member
from pserver.membership.watermark import Outcome
from pserver.security.tokens import Role
from pserver.service.streams import (
    EXPECTED,
    StreamTimes,
    ValueFrames,
    WorkingStreams,
    done_of,
    kind_of,
    message_of,
    next_frame,
    nonfinite_rows,
    nonfinite_steps,
    norms_of,
)
from pserver.service.tables import TABLES, TableService
from pserver.table.gradient import RowGradient
from pserver.telemetry.memory import trim_memory
from pserver.telemetry.trace import now
from pserver.transport import frames
from pserver.transport.arrays import (
    ArrayAssembler,
    AssignmentAssembler,
    checksum,
    row_gradients,
    whole_values,
)
from pserver.transport.memory import ZONE_BYTES, ZoneMemory
from pserver.transport.stream import Buffer, Offer, SequencedStream, bytes_of
from pserver.wire_pb2 import Commit, Done, Frame, Hello, Kind, Norms, Part
from transpiler.formats.messages import hparams_from_proto

if TYPE_CHECKING:
    from pserver.table.changes import TableChanges

# ---- gradient assembler ----
#
# Assembles the gradients of one step from the parts that arrive over one stream, compressed or not.
# Pure bookkeeping.
#
# Buffers are kept from step to step, so that their pages stay mapped.  A stream that is opened
# again has buffers of its own.  Where the stream can, large buffers are shared with the trainer,
# which copies its gradients there: see [Note: free zones] in pserver/transport/zones.py.


log = logging.getLogger(__name__)

MOST_CHANGED = 2**18  # ids of changed rows in one DONE: half of what a header may have


@dataclass(frozen=True, slots=True)
class _Group:
    """Small tensors of one dtype that one frame brings, and that lie in one memory: they are read
    and looked at as one.

    Attributes:
        frame: with the parts that bring them.
        memory: theirs, in the order of the parts.
        sizes: bytes, by name on the wire.
    """

    frame: Frame
    memory: torch.Tensor
    sizes: Mapping[str, int]


class GradientAssembler:
    """The gradients of the step that arrives over one stream.  One thread uses it.

    Args:
        updates: the slices whose gradients may arrive, by slice name.
    """

    def __init__(self, updates: Mapping[str, SliceUpdate]) -> None:
        self._updates = updates
        layouts = {
            name: layout(name, update.value, update.compression) for name, update in updates.items()
        }
        # slice -> its tensors' names on the wire
        self._parts = {name: tuple(tensors) for name, tensors in layouts.items()}
        selected = {
            name: selected_layout(name, update.value, update.compression)
            for name, update in updates.items()
        }
        # the same for those of few elements, which come in the place of the others
        self._selected = {name: tuple(tensors) for name, tensors in selected.items() if tensors}
        # name on the wire -> dtype and the most elements
        self._sizes = {n: form for tensors in selected.values() for n, form in tensors.items()}
        # name on the wire -> dtype and shape
        self._layout = {
            name: form for tensors in layouts.values() for name, form in tensors.items()
        }
        # bytes of those that travel as they are, by slice
        self._plain = {n: each.value.nbytes for n, each in updates.items() if not each.compression}
        self._buffers: dict[str, torch.Tensor] = {}  # by name on the wire
        self._groups: dict[str, _Group] = {}  # by the first tensor's name on the wire
        self._grouped: set[str] = set()  # names on the wire
        self._gradients: dict[str, torch.Tensor] = {}  # decompressed, by slice
        self._received: dict[str, int] = {}  # bytes, by name on the wire
        self._odd: set[str] = set()  # names on the wire: a value is not finite
        self._step = 0  # the step that those belong to
        self._segment: ZoneMemory | None = None  # that the trainer may write to

    def share(self, offer: Offer | None) -> None:
        """Lets the trainer write large gradients to their buffers, where the stream and the system
        can.

        Args:
            offer: the stream's.

        Raises:
            Unreachable: the peer is gone.
        """
        sizes = {
            name: size
            for name, (dtype, shape) in self._layout.items()
            if (size := dtype.itemsize * torch.Size(shape).numel()) >= ZONE_BYTES
        }
        if offer is None or not sizes:
            return
        try:
            self._segment = ZoneMemory(sizes)
        except OSError as error:
            log.warning("gradients take the longer way: %s", error)
            return
        for name in sizes:
            self._buffers[name] = self._segment.tensor(name, *self._layout[name])
        offer(Kind.GRADIENT, self._segment)

    def free(self) -> None:
        """Frees the last step's gradients, which nothing reads any more."""
        if self._segment is not None:
            self._segment.counts += 1

    def begin(self, step: int) -> None:
        """Notes that a frame of a step has arrived.

        Raises:
            CorruptFrame: another step is in progress.
        """
        if self._received and step != self._step:
            raise CorruptFrame(
                f"gradients of step {step} among those of step {self._step}, which is not committed"
            )
        self._step = step

    def destination(self, part: Part) -> torch.Tensor:
        """The buffer that a part is copied into, of the whole tensor's dtype and shape.

        Raises:
            Unprepared: no such gradient is expected here.
            CorruptFrame: its shape fits no form of the slice.
        """
        if part.name in self._sizes:
            return self._selected_destination(part)
        if part.name not in self._layout:
            raise Unprepared(
                f"slice {part.name!r} is not updated in this lane of this server: a gradient for "
                "it belongs elsewhere"
            )
        if part.name not in self._buffers:
            dtype, shape = self._layout[part.name]
            self._buffers[part.name] = torch.empty(shape, dtype=dtype)
        return self._buffers[part.name]

    def _selected_destination(self, part: Part) -> torch.Tensor:
        """The same for a tensor that has another size in every step."""
        (dtype, most), shape = self._sizes[part.name], tuple(part.shape)
        buffer = self._buffers.get(part.name)
        if buffer is not None and shape == tuple(buffer.shape):
            return buffer
        if len(shape) != 1 or shape[0] > most or part.name in self._received:
            expected = f"up to {most}" if part.name not in self._received else "as many as before"
            raise CorruptFrame(
                f"gradient of {part.name!r}: expected one dimension of {expected} elements, got "
                f"shape {list(shape)}"
            )
        self._buffers[part.name] = torch.empty(shape, dtype=dtype)
        return self._buffers[part.name]

    def land(self, header: Frame, payload_bytes: int) -> list[memoryview] | None:
        """The memory for a frame's payload, before it is read; None where it is out of place."""
        if self._received and header.step != self._step:
            return None
        group = self._group(header)
        if group is not None and group.memory.nbytes == payload_bytes:
            return [frames.buffer_of(group.memory)]
        return frames.land(header, payload_bytes, self.destination)

    def take_in(self, header: Frame, payload: Buffer) -> None:
        """Copies a frame's parts to their destinations, unless they have landed there, counts them,
        and checks that they are finite, while they are in the cache.

        Raises:
            Unprepared, CorruptFrame: see :meth:`destination`; or a part does not begin where the
                one before it ended.
        """
        group = self._group(header)
        if group is not None and group.memory.nbytes == memoryview(payload).nbytes:
            frames.spread(memoryview(payload), [frames.buffer_of(group.memory)])
        else:
            frames.scatter(header, payload, self.destination)
        if group is not None and self._received.keys().isdisjoint(group.sizes):
            self._received.update(group.sizes)
            if is_finite(group.memory):
                return
        else:
            self._count(header)
        for part in header.parts:
            buffer = self._buffers[part.name]
            # an element that two parts share is looked at with the second one
            first, last = (
                part.offset // buffer.itemsize,
                (part.offset + part.size) // buffer.itemsize,
            )
            if not is_finite(buffer.view(-1)[first:last]):
                self._odd.add(part.name)
        if group is None:
            self._make_group(header)

    def _count(self, header: Frame) -> None:
        for part in header.parts:
            begin = self._received.get(part.name, 0)
            if part.offset != begin:
                raise CorruptFrame(
                    f"gradient of {part.name!r}: expected bytes from {begin} on, got them from "
                    f"{part.offset}"
                )
            self._received[part.name] = begin + part.size

    # ---- small tensors that come together ----

    def _group(self, header: Frame) -> _Group | None:
        """The group of the tensors in a frame, if the frame has just those."""
        group = self._groups.get(header.parts[0].name) if len(header.parts) > 1 else None
        return group if group is not None and group.frame.parts == header.parts else None

    def _make_group(self, header: Frame) -> None:
        """Gives tensors that arrived together, whole, one memory, where no other group has one of
        them.
        """
        names = [part.name for part in header.parts]
        buffers = [self._buffers[name] for name in names]
        whole = all(p.size == b.nbytes for p, b in zip(header.parts, buffers, strict=True))
        whole = whole and self._sizes.keys().isdisjoint(names)  # those have a size of their own
        one_dtype = len({buffer.dtype for buffer in buffers}) == 1
        if len(names) < 2 or not whole or not one_dtype or not self._grouped.isdisjoint(names):
            return
        memory = torch.cat([buffer.view(-1) for buffer in buffers])
        pieces = memory.split([each.numel() for each in buffers])  # type: ignore[no-untyped-call]  # torch's
        for name, buffer, piece in zip(names, buffers, pieces, strict=True):
            self._buffers[name] = piece.view(buffer.shape)
        self._grouped.update(names)
        sizes = {part.name: part.size for part in header.parts}
        self._groups[names[0]] = _Group(Frame(parts=header.parts), memory, sizes)

    # ---- the whole step ----

    def nonfinite(self) -> set[str]:
        """The slices whose gradients in the arriving step have a value that is not finite."""
        return {
            name
            for name, parts in self._parts.items()
            if not self._odd.isdisjoint((*parts, *self._selected.get(name, ())))
        }

    def complete(self, step: int, absent: Collection[str]) -> dict[str, torch.Tensor]:
        """The step's gradients by slice, in their slices' dtypes.  The next step may begin.

        Args:
            absent: the slices without a gradient in this step.

        Raises:
            Unprepared: a slice that is not updated here.
            CorruptFrame: a gradient is not whole, and not named as absent.
        """
        missing = set(absent)
        unknown = missing.difference(self._updates)
        if unknown:
            raise Unprepared(
                f"slice {min(unknown)!r}, absent in step {step}, is not updated in this lane of "
                "this server"
            )
        gradients = {}
        for name in self._updates:
            size = self._plain.get(name)
            whole = size and self._received.get(name) == size and self._step == step
            if whole and name not in missing:
                gradients[name] = self._buffers[name]
            elif self._has_arrived(name, parts := self._form(name), step, name in missing):
                gradients[name] = self._decoded(name, parts)
        self._received, self._odd = {}, set()
        return gradients

    def _form(self, name: str) -> tuple[str, ...]:
        """The tensors in which a slice's gradient has arrived, by their names on the wire.

        Raises:
            CorruptFrame: it has arrived in two forms.
        """
        selected = self._selected.get(name, ())
        if self._received.keys().isdisjoint(selected):
            return self._parts[name]
        if not self._received.keys().isdisjoint(self._parts[name]):
            raise CorruptFrame(
                f"gradient of {name!r}: expected it whole or its elements that are not 0, got both"
            )
        return selected

    def _has_arrived(self, name: str, parts: tuple[str, ...], step: int, absent: bool) -> bool:
        for part in parts:
            got = self._received.get(part)
            if absent and got is None:
                continue
            expected = self._bytes(part)
            if got != expected or absent or (self._step != step and self._received):
                raise CorruptFrame(
                    f"step {step}: expected {expected} bytes of the gradient of {part!r}, got "
                    f"{got or 0}"
                )
        return not absent

    def _bytes(self, part: str) -> int:
        if part in self._sizes:
            return self._buffers[part].nbytes if part in self._buffers else 0
        dtype, shape = self._layout[part]
        return dtype.itemsize * torch.Size(shape).numel()

    def _decoded(self, name: str, parts: tuple[str, ...]) -> torch.Tensor:
        update = self._updates[name]
        if not update.compression or (name in self._selected and parts == (name,)):
            return self._buffers[name]
        if name not in self._gradients:
            self._gradients[name] = torch.empty_like(update.value)
        came = {part: self._buffers[part] for part in parts}
        return decode(name, came, update.compression, self._gradients[name])


# ---- tensor service ----


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
        """The memory from which gradients are merged, or that requests about rows have, for a
        frame's payload; None: any memory.
        """
        if self._times.spans.on:
            self._times.got(header)
        if self._tables is not None:
            return self._tables.land(header, payload_bytes)
        if header.kind == Kind.ROWS:
            return self._rows.land(header, payload_bytes)
        if header.kind != Kind.GRADIENT or self._gradients is None:
            return None
        return self._gradients.land(header, payload_bytes)

    def _gradient(self, header: Frame, payload: memoryview) -> None:
        self._job.lifecycle.check_running()
        gradients = self._assembler()
        gradients.begin(header.step)
        gradients.take_in(header, payload)

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
        whole = self._step(step, header.commit)
        task = self._taken(step, lambda: executor.commit(self._member, whole))
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
            ):  # see [Note: answers begin early] in lane.py
                task.finish()
            self._answer(
                executor.updated_slices(*taken, buffers_only=header.commit.omit_values),
                outcome,
                step,
                in_place=True,
                changes_after=header.commit.changes_after,
            )
        finally:
            task.finish()

    def _taken(self, step: int, take: Callable[[], UpdateTask | Clipping]) -> UpdateTask | Clipping:
        """Takes a step.  Where this server fails in it, its progress is unknown, so no trainer is
        to wait for it.
        """
        try:
            return take()
        except PServerError:
            raise
        except Exception as error:
            text = f"the server failed in step {step}: {type(error).__name__}: {error}"
            self._job.lifecycle.fail(JobFailed(text))
            raise

    def _step(self, number: int, commit: Commit) -> Step:
        """The step that a COMMIT completes: every slice's gradient is whole, or named as absent."""
        assembler = self._assembler()
        odd = assembler.nonfinite()
        gradients = assembler.complete(number, commit.absent)
        rows = self._row_gradients()
        odd = {self._executor().updates[name].parameter for name in odd} | nonfinite_rows(rows)
        assigned = {} if self._assignments is None else self._assignments.assignments(number)
        return Step(
            process_of(self._member),
            number,
            gradients,
            {group.group: hparams_from_proto(group.values) for group in commit.hparams},
            commit.overflow,
            rows,
            {name: each for name, each in assigned.items() if name not in commit.buffers},
            dict(commit.written),
            nonfinite_steps(self._member.trainer, number, odd),
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
                outcome = self._job.loaded(self._member, header.commit.absent)
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
        self._answer(names, lambda: Outcome(executor.updates_started, 0), header.step)

    def _checksums(self, header: Frame) -> None:
        self._job.lifecycle.check_running()
        read = self._read_all(part.name for part in header.parts)
        found = {name: checksum(tensor) for name, tensor in read}
        done = Done(version=self._executor().updates_started, checksums=found)
        for name, changes in self._changes(header.commit.changes_after).items():
            done.changes[name].CopyFrom(message_of(changes))
        self._check_place()
        self._stream.send(Frame(kind=Kind.DONE, step=header.step, done=done))

    def _answer(
        self,
        names: Iterable[str],
        outcome: Callable[[], Outcome],
        step: int = 0,
        in_place: bool = False,
        changes_after: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Sends the values of these variables, each when the iterator names it, and then DONE with
        the outcome.

        Args:
            in_place: the trainer may read them where they are; otherwise it gets copies, which it
                cannot miss.
            changes_after: by table, the position since which the trainer wants to know of changes
                by others.
        """
        self._check_place()
        began = now() if self._times.spans.on else 0.0
        in_place = in_place and self._values.share(self._job.installed().slices.segment)
        for header, payload in self._values.frames(step, self._read_all(names, in_place)):
            self._stream.send(header, payload)
            self._job.sent[self._member.transport] += bytes_of(payload)
        result = outcome()
        changes = self._changes(changes_after) if changes_after else {}
        self._stream.send(Frame(kind=Kind.DONE, step=step, done=done_of(result, changes)))
        if began:
            self._times.answered(began, step)
        # 0, 1, 2, 4, ...: see [Note: holes] in telemetry/memory.py
        if not result.version & (result.version - 1):
            trim_memory()

    def _changes(self, after: Mapping[str, int]) -> dict[str, TableChanges]:
        """The changes of rows by other trainers, by table, where the server notes them."""
        tables, process = self._executor().tables, process_of(self._member)
        told: dict[str, TableChanges] = {}  # a name for type checkers: it would import numba
        left = MOST_CHANGED
        for name in after:
            changes = tables[name].changes_since(process, after[name]) if name in tables else None
            if changes is None:
                continue
            if changes.ids is not None and len(changes.ids) > left:
                changes = changes._replace(ids=None)
            left -= 0 if changes.ids is None else len(changes.ids)
            told[name] = changes
        return told

    def _read_all(
        self, names: Iterable[str], in_place: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The values that are held of these variables, each when the iterator names it."""
        read, values, member = self._job.installed().read, self._values, self._member
        apart = values.shared and not in_place
        for name in names:
            # delay compensation remembers what the trainer read: only on the stream that counts
            if self._watermark.stream != self._number:
                self._check_place()
            tensor = read(member, name, in_place and name in values)
            if tensor is not None:
                yield name, values.apart(name, tensor) if apart else tensor
