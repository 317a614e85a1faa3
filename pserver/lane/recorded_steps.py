"""Decided steps as entries of a recorded log, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from pserver.job_log.files import Damaged
from pserver.job_log.records import Process, ProcessStep
from pserver.job_log_pb2 import AppliedStep, AppliedSteps, Array, Entry, RecordedHparams
from pserver.lane.recorder import PendingEntry
from pserver.lane.step import Hparams, LaneUpdate, Step
from pserver.table.gradient import RowGradient, RowsBefore
from pserver.transport import frames
from pserver.transport.arrays import Assignment
from transpiler.formats.messages import hparams_from_proto, hparams_to_proto

ALONE_BYTES = 2**18  # from so many on an array is copied by itself
MOST_LAYOUTS = 256  # that are kept

Named = tuple[Array, torch.Tensor]


class StepEntries:
    """Makes entries of steps.  Any thread may call it.

    [Note: layouts]  Most steps of a trainer have gradients of the same slices.  The entry's
    description of them is serialized once.
    """

    def __init__(self) -> None:
        self._layouts: dict[tuple[object, ...], bytes] = {}

    def entry(self, update: LaneUpdate) -> PendingEntry:
        """An entry with copies of all that an update reads, but for coefficients."""
        message, tensors = b"", list[torch.Tensor]()
        rest: list[Named] = []
        for trainer, step in update.steps.items():
            message += self._layout(update.lane, trainer, step.gradients)
            tensors += step.gradients.values()
            rest += _others(trainer, step)
        for name, values in update.buffers.items():
            rest += [
                (_array(Array.BUFFER, trainer, name, value), value)
                for trainer, value in values.items()
                if value is not None
            ]
        message += Entry(arrays=[array for array, _ in rest]).SerializeToString()
        applied = AppliedSteps(
            record=update.record,
            time=update.time,
            lane=update.lane,
            steps=[_step(each, update.steps[each.process.trainer]) for each in update.decided],
        )
        payload = copied([*tensors, *(tensor for _, tensor in rest)])
        size = len(message) + sum(piece.nbytes for piece in payload)
        return PendingEntry(Entry(applied=applied), message, payload, size)

    def _layout(self, lane: int, trainer: int, gradients: Mapping[str, torch.Tensor]) -> bytes:
        key = (lane, trainer, *gradients)
        found = self._layouts.get(key)
        if found is None:
            arrays = [_array(Array.GRADIENT, trainer, *named) for named in gradients.items()]
            found = Entry(arrays=arrays).SerializeToString()
            if len(self._layouts) < MOST_LAYOUTS:
                self._layouts[key] = found
        return found


def entry_of_arrays(entry: Entry, named: Mapping[str, torch.Tensor]) -> PendingEntry:
    """An entry with copies of these arrays."""
    arrays = [_array(Array.VALUE, 0, name, tensor) for name, tensor in named.items()]
    message = Entry(arrays=arrays).SerializeToString()
    payload = copied(list(named.values()))
    return PendingEntry(
        entry, message, payload, len(message) + sum(each.nbytes for each in payload)
    )


def copied(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """The bytes of tensors on the CPU, one behind the other: copies; small ones are joined."""
    found: list[memoryview] = []
    small: list[memoryview] = []
    for tensor in tensors:
        if tensor.nbytes < ALONE_BYTES:
            small.append(frames.buffer_of(tensor.contiguous()))
            continue
        if small:
            found.append(memoryview(b"".join(small)))
            small = []
        copy = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
        found.append(frames.buffer_of(copy))
    return [*found, memoryview(b"".join(small))] if small else found


def arrays_of(entry: Entry, payload: memoryview) -> Iterator[Named]:
    """The arrays of an entry, each in memory of its own.

    Raises:
        Damaged: they do not match its description.
    """
    begin = 0
    for array in entry.arrays:
        if array.dtype not in frames.DTYPES:
            raise Damaged(f"{array.name!r}: expected a dtype, got {array.dtype!r}")
        count = 1
        for extent in array.shape:
            count *= extent
        end = begin + count * frames.DTYPES[array.dtype].itemsize
        if end > payload.nbytes:
            raise Damaged(f"{array.name!r}: expected {end} bytes, got {payload.nbytes}")
        tensor = torch.empty(tuple(array.shape), dtype=frames.DTYPES[array.dtype])
        frames.copy_bytes(frames.buffer_of(tensor), payload[begin:end])
        yield array, tensor
        begin = end
    if begin != payload.nbytes:
        raise Damaged(f"expected {begin} bytes of arrays, got {payload.nbytes}")


def update_of(entry: Entry, payload: memoryview) -> LaneUpdate:
    """The update in an entry of :meth:`StepEntries.entry`.

    Raises:
        Damaged: the entry's parts do not fit one another.
        ValueError: an hparam has no value.
    """
    applied = entry.applied
    steps = {
        each.step.process.trainer: Step(
            Process(each.step.process.trainer, each.step.process.incarnation),
            each.step.step,
            {},
            hparams_of(each.hparams),
            each.overflow,
            written=dict(each.written),
            refused="recorded" if each.refused else "",  # why is not recorded
        )
        for each in applied.steps
    }
    found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for array, tensor in arrays_of(entry, payload):
        found.setdefault((array.trainer, array.kind), {})[array.name] = tensor
    for trainer, step in steps.items():
        _fill(step, {kind: found.get((trainer, kind), {}) for kind in Array.Kind.values()})
    return LaneUpdate(
        applied.lane,
        applied.record,
        applied.time,
        tuple(ProcessStep(each.process, each.number) for each in steps.values()),
        steps,
        _buffers(found, steps),
        dict(applied.coefficients),
    )


def hparams_message(hparams: Hparams) -> list[RecordedHparams]:
    """Hyper-parameters as an entry has them."""
    return [
        RecordedHparams(group=group, values=hparams_to_proto(values))
        for group, values in hparams.items()
    ]


def hparams_of(message: Sequence[RecordedHparams]) -> Hparams:
    """Reads a message of :func:`hparams_message`.

    Raises:
        ValueError: one has no value.
    """
    return {each.group: hparams_from_proto(each.values) for each in message}


# ---- a step's arrays ----


def _others(trainer: int, step: Step) -> Iterator[Named]:
    """All arrays of a step but its gradients of slices."""

    def named(kind: Array.Kind, name: str, tensor: torch.Tensor) -> Named:
        return _array(kind, trainer, name, tensor), tensor

    for name, before in step.before.items():
        yield named(Array.BEFORE, name, before)
    for name, rows in step.row_gradients.items():
        yield named(Array.IDS, name, rows.ids)
        yield named(Array.ROWS, name, rows.rows)
        if rows.statistics is not None:
            yield named(Array.STATISTICS, name, rows.statistics)
    for name, then in step.rows_before.items():
        yield named(Array.THEN, name, then.rows)
        yield named(Array.KNOWN, name, then.known)
    for name, assignment in step.assignments.items():
        if assignment.elements is None:
            yield named(Array.WHOLE, name, assignment.values)
        else:
            yield named(Array.ELEMENTS, name, assignment.elements)
            yield named(Array.ELEMENT_VALUES, name, assignment.values)


def _fill(step: Step, kinds: Mapping[int, dict[str, torch.Tensor]]) -> None:
    """Puts the arrays of one trainer, by kind, into its step.

    Raises:
        Damaged: one is missing.
    """
    step.gradients, step.before = kinds[Array.GRADIENT], kinds[Array.BEFORE]
    statistics = kinds[Array.STATISTICS]
    try:
        step.row_gradients = {
            name: RowGradient(ids, kinds[Array.ROWS][name], statistics.get(name))
            for name, ids in kinds[Array.IDS].items()
        }
        step.rows_before = {
            name: RowsBefore(rows, kinds[Array.KNOWN][name])
            for name, rows in kinds[Array.THEN].items()
        }
        step.assignments = {
            name: Assignment(values) for name, values in kinds[Array.WHOLE].items()
        } | {
            name: Assignment(kinds[Array.ELEMENT_VALUES][name], elements)
            for name, elements in kinds[Array.ELEMENTS].items()
        }
    except KeyError as error:
        raise Damaged(f"an array of {error} is missing") from error


def _buffers(
    found: Mapping[tuple[int, int], Mapping[str, torch.Tensor]],
    steps: Mapping[int, Step],
) -> dict[str, dict[int, torch.Tensor | None]]:
    """The buffers, by slice and trainer; a trainer of the step that has sent none has the
    server's.
    """
    buffers: dict[str, dict[int, torch.Tensor | None]] = {}
    for (trainer, kind), named in found.items():
        for name, value in named.items() if kind == Array.BUFFER else ():
            buffers.setdefault(name, dict.fromkeys(steps))[trainer] = value
    for trainer, step in steps.items():
        own = {name: values.get(trainer) for name, values in buffers.items()}
        step.buffers = {n: value for n, value in own.items() if value is not None}
    return buffers


def _array(kind: Array.Kind, trainer: int, name: str, tensor: torch.Tensor) -> Array:
    return Array(
        name=name,
        dtype=frames.NAMES[tensor.dtype],
        shape=tensor.shape,
        kind=kind,
        trainer=trainer,
    )


def _step(name: ProcessStep, step: Step) -> AppliedStep:
    return AppliedStep(
        step={
            "process": {
                "trainer": name.process.trainer,
                "incarnation": name.process.incarnation,
            },
            "step": name.step,
        },
        hparams=hparams_message(step.hparams),
        overflow=step.overflow,
        refused=bool(step.refused),
        written=step.written,
    )
