"""The state that server 0 alone has of its job, as it follows from the entries of its file: the
job's log, the lease table, and what trainers' meetings have led to.

[Note: state = fold(entries)]  Each part of the state changes by its entries alone: a change of this
process applies an entry, and then writes it; the process that replaces this one applies it again.
So both have the same state.  What is not in the file is not in the state: steps that are staged,
trainers that wait.  ``entries`` are a snapshot: entries from which the same state follows.

[Note: between a record and its samples]  A record names the samples that its steps consume, and the
lease table learns of them when the steps are applied.  A server that dies between the two has
written the record alone; so the samples of such records are given to the table at the end.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pserver import job_log_pb2 as message
from pserver import wire_pb2 as wire
from pserver.errors import Refused
from pserver.job_log.coordinator import Coordinator
from pserver.job_log.records import Process, read_consumed, read_process, write_process
from pserver.leases.epoch import Epoch, Lease
from pserver.leases.table import EpochRange, LeaseAsked, LeaseTable
from transpiler.files import bounded_json


class Folded(Protocol):
    """A state that follows from entries."""

    def apply(self, entry: message.OwnEntry) -> object:
        """Applies an entry: of this process, or of one before it.

        Raises:
            ValueError, KeyError, TypeError: it follows on no entry before it.
        """

    def entries(self) -> Iterable[message.OwnEntry]:
        """Entries from which the same state follows."""


def fold(state: Folded, entries: Iterable[message.OwnEntry]) -> None:
    """Applies entries, in their order.

    Raises:
        ValueError, KeyError, TypeError: see :meth:`Folded.apply`.
    """
    for entry in entries:
        state.apply(entry)


class OwnState:
    """The whole state: its parts, and the samples between them.  The caller holds the job's lock.

    Args:
        log, leases, meetings: its parts.

    Example:
        >>> from pserver.job_log_pb2 import KeptText, OwnEntry
        >>> def state():
        ...     log = Coordinator(1, [False], lambda lane: [])
        ...     return OwnState(log, RememberedLeases(1), RememberedMeetings())
        >>> known, another = state(), state()
        >>> fold(known, [OwnEntry(text=KeptText(key="rendezvous", trainer=1, text="host:1"))])
        >>> fold(another, known.entries())
        >>> another.meetings.store
        {'rendezvous': (1, 'host:1')}
    """

    def __init__(
        self, log: Coordinator, leases: RememberedLeases, meetings: RememberedMeetings
    ) -> None:
        self.log, self.leases, self.meetings = log, leases, meetings
        # by process: what its decided steps consume, and the lease table has not heard of
        self._unheard: dict[Process, deque[message.ProcessSamples]] = defaultdict(deque)

    def apply(self, entry: message.OwnEntry) -> None:
        """Applies an entry to the part that it is of.

        Raises:
            ValueError, KeyError, TypeError: it follows on no entry before it; or is of another
                version.
        """
        match entry.WhichOneof("what"):
            case "log" | "record":
                self.log.apply(entry)
            case "leases" | "lease":
                self.leases.apply(entry)
            case "barrier" | "put_off" | "round" | "text":
                self.meetings.apply(entry)
            case "unheard":
                pass
            case kind:
                raise ValueError(f"expected an entry of this version, got {kind}")
        self.follow(entry)

    def follow(self, entry: message.OwnEntry) -> None:
        """Follows an entry that a part has applied; see [Note: between a record and its samples].

        Raises:
            IndexError: samples are decided of a step that has no record.
        """
        decided = entry.record.record.decided
        for step, samples in zip(decided.steps, decided.consumed, strict=False):
            if samples.ranges:
                self._hear(message.ProcessSamples(process=step.process, consumed=samples))
        if entry.HasField("unheard"):
            self._hear(entry.unheard)
        if entry.lease.HasField("decided"):
            process = read_process(entry.lease.decided.process)
            self._unheard[process].popleft()
            if not self._unheard[process]:
                del self._unheard[process]

    def _hear(self, samples: message.ProcessSamples) -> None:
        self._unheard[read_process(samples.process)].append(samples)

    def settle(self) -> None:
        """Gives the samples of steps that no process applies any more to the lease table.

        Raises:
            ValueError: they are not leased.
        """
        for process in list(self._unheard):
            for samples in list(self._unheard[process]):
                lease = message.LeaseChange(decided=samples)
                self.apply(message.OwnEntry(lease=lease))

    def entries(self) -> Iterator[message.OwnEntry]:
        """Entries from which the same state follows."""
        for part in (self.log, self.leases, self.meetings):
            yield from part.entries()
        for steps in self._unheard.values():
            for samples in steps:
                yield message.OwnEntry(unheard=samples)


# ---- leases ----


class RememberedLeases:
    """The lease table of a job.

    Args:
        trainers: as for :class:`LeaseTable`.
    """

    def __init__(self, trainers: int) -> None:
        self.table = LeaseTable(trainers)

    def apply(self, entry: message.OwnEntry) -> Lease:
        """Applies an entry.

        Returns:
            The answer to a request for samples; of another change an empty one.

        Raises:
            ValueError, KeyError, TypeError: the table cannot have such a change, or is none.
        """
        if entry.WhichOneof("what") == "leases":
            self.table = LeaseTable.of_whole(bounded_json.loads(entry.leases))
            return Lease()
        change, table = entry.lease, self.table
        match change.WhichOneof("what"):
            case "lease":
                process, asked = read_process(change.lease.process), _asked(change.lease.request)
                return table.lease(process.trainer, process.incarnation, asked)
            case "decided":
                process = read_process(change.decided.process)
                ranges = read_consumed(change.decided.consumed)
                table.decided(process.trainer, process.incarnation, ranges)
            case "join":
                process = read_process(change.join.process)
                table.join(process.trainer, process.incarnation, change.join.again)
            case "remove":
                table.remove(change.remove.trainer, change.remove.incarnation)
            case "expect":
                consumed = {t: read_consumed(each) for t, each in change.expect.consumed.items()}
                table.expect(change.expect.trainer, consumed)
            case "give_up":
                table.give_up(change.give_up)
            case "wait_for":
                table.wait_for(change.wait_for)
            case kind:
                raise ValueError(f"expected a change of a lease table, got {kind}")
        return Lease()

    def entries(self) -> list[message.OwnEntry]:
        """The entry from which the same table follows."""
        return [leases_entry(self.table)]


def leases_entry(table: LeaseTable) -> message.OwnEntry:
    """The entry of a whole lease table."""
    return message.OwnEntry(leases=json.dumps(table.whole()))


def _asked(request: wire.LeaseRequest) -> LeaseAsked:
    return LeaseAsked(
        request.number,
        _epoch(request.epoch) if request.HasField("epoch") else None,
        max(1, request.most),
        request.unstepped if request.HasField("unstepped") else None,
        ranges_of(request.unused),
        ranges_of(request.skipped),
        tuple(request.stopped),
        tuple((each.epoch, each.segment, each.length) for each in request.ended),
    )


def _epoch(found: wire.LeaseEpoch) -> Epoch:
    return Epoch(
        found.number,
        found.loader,
        found.seed,
        found.samples,
        found.batch_size,
        found.stripes,
        found.drop_last,
        found.unit,
        found.whole,
        found.positions,
        found.segments,
        found.begun,
        found.uneven,
    )


def ranges_of(messages: Iterable[wire.LeaseRange]) -> tuple[EpochRange, ...]:
    """Ranges of positions, as they travel."""
    return tuple((each.epoch, each.start, each.stop) for each in messages)


# ---- meetings ----


# saves whose names are kept; at the barrier of an earlier one a trainer waits in vain once more
MOST_PUT_OFF = 256
PAST_BYTES = 2**22  # of the texts of barriers that are over
PAST_TEXT = 2**16  # characters of one such barrier: tensors are too long
MOST_OF_ONE = 2**25  # bytes of one trainer's texts: eight of the longest
OVERHEAD = 200  # bytes of a text besides its characters


class TextBudget:
    """The memory that texts take, by trainer.

    Args:
        left: gives the bytes that the server may still take (``--max-memory``).
        most: bytes of one trainer.

    Example:
        >>> texts = TextBudget()
        >>> texts.add(0, "1: epoch", "so far")
        >>> texts.bytes_held
        214
    """

    def __init__(self, left: Callable[[], int] | None = None, most: int = MOST_OF_ONE) -> None:
        self._left, self._most = left, most
        self._held: Counter[int] = Counter()

    @property
    def bytes_held(self) -> int:
        """The bytes of all trainers' texts."""
        return self._held.total()

    def add(self, trainer: int, key: str, text: str) -> None:
        """Adds a trainer's text under a key; one that has been taken is within any bound."""
        self._held[trainer] += _size(key, text)

    def remove(self, trainer: int, key: str, text: str) -> None:
        """Removes a text."""
        self._held[trainer] -= _size(key, text)

    def check(self, trainer: int, key: str, text: str) -> None:
        """Returns if there is room for a text.

        Raises:
            Refused: it is too much.
        """
        size, held = _size(key, text), self._held[trainer]
        if held + size > self._most:
            raise Refused(
                f"expected at most {self._most / 1e6:.1f} MB of texts that trainer {trainer} "
                "leaves at barriers and topics for the others, got "
                f"{(held + size) / 1e6:.1f} MB with {key!r}: wait at a barrier with all "
                "trainers before the next text, and send less there"
            )
        left = size if self._left is None else self._left()
        if size > left:
            raise Refused(
                f"expected a text for {max(left, 0) / 1e6:.1f} MB or less at {key!r}, got one for "
                f"{size / 1e6:.1f} MB: this server has no more memory (--max-memory)"
            )


def _size(key: str, text: str) -> int:
    return OVERHEAD + len(key.encode()) + len(text.encode())


class PastTexts:
    """The texts of barriers that are over, the newest of them, within :data:`PAST_BYTES`."""

    def __init__(self) -> None:
        self._texts: dict[str, dict[int, str]] = {}
        self.characters = 0

    def get(self, key: str) -> dict[int, str] | None:
        """The texts at a barrier, by trainer; None: they are forgotten."""
        return self._texts.get(key)

    def items(self) -> Iterable[tuple[str, dict[int, str]]]:
        """All of them, the oldest first."""
        return self._texts.items()

    def keep(self, key: str, texts: dict[int, str]) -> None:
        """Keeps the texts of a barrier; forgets older ones that they leave no room for."""
        self._forget(key)
        if _characters(key, texts) > PAST_TEXT:
            return
        self._texts[key] = texts
        self.characters += _characters(key, texts)
        while self.characters > PAST_BYTES:
            self._forget(next(iter(self._texts)))

    def _forget(self, key: str) -> None:
        if (texts := self._texts.pop(key, None)) is not None:
            self.characters -= _characters(key, texts)


def _characters(key: str, texts: Mapping[int, str]) -> int:
    return len(key) + sum(map(len, texts.values()))


@dataclass(slots=True, eq=False)
class Barrier:
    """A barrier.

    Attributes:
        texts: of the trainers that have arrived.
        passed: all have; it stays so for a trainer that joins later.
    """

    texts: dict[int, str] = field(default_factory=dict)
    passed: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """A completed round.

    Attributes:
        number: from 1.
        changes: of the members, until then.
        processes: that were in it.
        texts: theirs, by trainer.
    """

    number: int = 0
    changes: int = 0
    processes: frozenset[Process] = frozenset()
    texts: Mapping[int, str] = field(default_factory=dict)

    def entry(self) -> message.OwnEntry:
        """The entry from which it follows."""
        entry = message.OwnEntry()
        entry.round.number, entry.round.changes = self.number, self.changes
        for process in sorted(self.processes):
            write_process(entry.round.processes.add(), process)
        entry.round.texts.update(self.texts)
        return entry


class RememberedMeetings:
    """The results of trainers' meetings; and beside them the barriers at which trainers wait,
    which no file has.

    Args:
        texts: bounds the trainers' texts.

    Attributes:
        barriers: in the order of the first arrivals.  (Those that none has passed do not follow
            from entries.)
        passed: whether all trainers have passed a barrier, ever.
        past: the texts of barriers that no trainer waits at any more.
        put_off: saves, with the reasons.
        round: the last one: a trainer of a later one knows of this one.
        store: by key, the trainer that has set it, and its text.
    """

    def __init__(self, texts: TextBudget | None = None) -> None:
        self.texts = texts or TextBudget()
        self.barriers: dict[str, Barrier] = {}
        self.passed = False
        self.past = PastTexts()
        self.put_off: dict[str, str] = {}
        self.round = Round()
        self.store: dict[str, tuple[int, str]] = {}

    def apply(self, entry: message.OwnEntry) -> None:
        """Applies an entry.

        Raises:
            KeyError: it follows on no entry before it.
        """
        match entry.WhichOneof("what"):
            case "barrier":
                self._pass(entry.barrier)
            case "put_off":
                key = entry.put_off.key
                self.put_off[key] = entry.put_off.why
                if len(self.put_off) > MOST_PUT_OFF:
                    del self.put_off[next(iter(self.put_off))]
                if key in self.barriers:
                    self._drop(key)
            case "round":
                last = entry.round
                processes = frozenset(map(read_process, last.processes))
                self.round = Round(last.number, last.changes, processes, dict(last.texts))
            case _:
                self._set(entry.text)

    def arrive(self, trainer: int, key: str, text: str) -> Barrier:
        """Notes that a trainer has come to a barrier.

        Raises:
            Refused: its text takes too much memory.
        """
        barrier = self.barriers.get(key, Barrier())
        if trainer not in barrier.texts:
            self.texts.check(trainer, key, text)
            self._arrived(barrier, trainer, key, text)
        self.barriers[key] = barrier
        return barrier

    def _arrived(self, barrier: Barrier, trainer: int, key: str, text: str) -> None:
        barrier.texts[trainer] = text
        self.texts.add(trainer, key, text)

    def _pass(self, what: message.PassedBarrier) -> None:
        barrier = self.barriers.setdefault(what.key, Barrier())
        self.passed = barrier.passed = True
        for trainer in what.texts.keys() - barrier.texts.keys():  # of arrivals before this process
            self._arrived(barrier, trainer, what.key, what.texts[trainer])
        for key in what.past:
            self.past.keep(key, self._drop(key))

    def _drop(self, key: str) -> dict[int, str]:
        texts = self.barriers.pop(key).texts
        for trainer, text in texts.items():
            self.texts.remove(trainer, key, text)
        return texts

    def _set(self, what: message.KeptText) -> None:
        if (known := self.store.get(what.key)) is not None:
            self.texts.remove(known[0], what.key, known[1])
        self.store[what.key] = what.trainer, what.text
        self.texts.add(what.trainer, what.key, what.text)

    def entries(self) -> list[message.OwnEntry]:
        """Entries from which the same state follows, without the barriers that none has passed."""
        passed = sorted((key, each.texts) for key, each in self.barriers.items() if each.passed)
        put_off = (message.PutOffSave(key=k, why=why) for k, why in self.put_off.items())
        return [
            *(passed_entry(key, texts, [key]) for key, texts in self.past.items()),
            *(passed_entry(key, texts) for key, texts in passed),
            *(message.OwnEntry(put_off=each) for each in put_off),
            self.round.entry(),
            *(text_entry(key, *known) for key, known in self.store.items()),
        ]


def passed_entry(key: str, texts: Mapping[int, str], past: Iterable[str] = ()) -> message.OwnEntry:
    """The entry of a passed barrier.

    Args:
        past: barriers that no trainer waits at any more.
    """
    return message.OwnEntry(barrier=message.PassedBarrier(key=key, texts=texts, past=past))


def text_entry(key: str, trainer: int, text: str) -> message.OwnEntry:
    """The entry of a text that a trainer has set."""
    return message.OwnEntry(text=message.KeptText(key=key, trainer=trainer, text=text))
