"""A recorded log: the files of all servers of one run of a job, looked through once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from pserver.errors import Refused
from pserver.job_log.entries import Damaged, EntryReader, Place
from pserver.job_log.records import Decided, Joined, records_of
from transpiler.program import Program


@dataclass(slots=True)
class RecordedPart:
    """What one server has recorded.

    Attributes:
        path: of the file.
        size: of it, in bytes.
        recording: its own name.
        program: the server's, without values.
        run: of trainer 0, or who joined first: the same in all parts; "": nobody has.
        entries: how many are whole.
        first: the number of the first record; above 1 where the server has come back while its job
            went on; 0: there is none.
        last: the number of the last record.
        open: records that decide steps which the file does not have.
        steps: that it has, by trainer, in all lanes.
        damage: the first entry that is not what was written, and all behind it; None: there is
            none.
        torn: it ends in the middle of an entry.
        end: why it ends; "": the job was over; None: nothing says why.
    """

    path: Path
    size: int
    recording: str
    program: Program
    run: str = ""
    entries: int = 0
    first: int = 0
    last: int = 0
    open: set[int] = field(default_factory=set)
    steps: Counter[int] = field(default_factory=Counter)
    damage: Damaged | None = None
    torn: bool = False
    end: str | None = None

    @property
    def server(self) -> int:
        """Which server of the plan it is of."""
        assert self.program.deployment is not None, "a pserver program"
        return self.program.deployment.server_index or 0

    @property
    def fingerprint(self) -> str:
        """Of the plan."""
        assert self.program.deployment is not None, "a pserver program"
        return self.program.deployment.plan.fingerprint()

    @property
    def whole_until(self) -> int:
        """The last record up to which it has every step."""
        return min(self.open) - 1 if self.open else self.last

    def places(self) -> Iterator[Place]:
        """Its entries, from the first.

        Raises:
            Damaged: see :class:`EntryReader`.
        """
        with closing(self.path.open("rb")) as file:
            yield from EntryReader(self.path.name, file.read).entries()


@dataclass(frozen=True, slots=True)
class RecordedLog:
    """One run of a job.

    Attributes:
        parts: by server.
        later: of servers that have come back while the job went on: what they have recorded since.
    """

    parts: Sequence[RecordedPart]
    later: Sequence[RecordedPart] = ()

    @property
    def until(self) -> int:
        """The last record up to which every part has every step."""
        return min(part.whole_until for part in self.parts)

    def warnings(self) -> list[str]:
        """What is to be said of parts that do not end with the job, a sentence each."""
        found = [
            f"{part.path.name} begins with record {part.first}, as the server has come back while "
            "its job went on: it is left out"
            for part in self.later
        ]
        for part in self.parts:
            where = f"{part.path.name} ends with record {part.last}"
            if part.end:
                found.append(f"{where}, as the server could write no more: {part.end}")
            elif part.torn:
                found.append(f"{where}, in the middle of an entry: the server was killed")
            elif part.end is None and part.damage is None:
                found.append(f"{where}, and not with the end of its job")
        return found


def recorded_log(
    folder: Path, recordings: Sequence[str] = (), tell: Callable[[int], None] = lambda size: None
) -> RecordedLog:
    """The recorded log in a directory.

    Args:
        recordings: of all servers: which are wanted, where a directory has several runs.
        tell: told the bytes of each part that was looked through.

    Raises:
        FileNotFoundError: there is none.
        Refused: there are several, or a server's part is missing, or a part's beginning is damaged.
    """
    files = sorted(folder.glob("server-*.log"))
    if not files:
        raise FileNotFoundError(f"{folder}: expected the files of a recorded log, server-*.log")
    runs: dict[tuple[str, str], list[RecordedPart]] = {}
    later = []
    for path in files:
        part = _looked_through(path)
        tell(path.stat().st_size)
        if part is not None and part.first > 1:
            later.append(part)
            continue
        if part is None or not part.run:
            continue  # no trainer has come
        if not recordings or part.recording in recordings:
            runs.setdefault((part.fingerprint, part.run), []).append(part)
    if not runs and recordings:
        raise Refused(
            f"{folder}: the checkpoint is of another run: expected the recording "
            f"{recordings[0]}, got {', '.join(path.name for path in files)}"
        )
    if len(runs) != 1:
        listed = "; ".join(", ".join(part.path.name for part in run) for run in runs.values())
        raise Refused(
            f"{folder}: expected the log of one run, got {listed or 'files without a trainer'}: "
            "keep each in a directory of its own"
        )
    parts = _every_server(folder, next(iter(runs.values())))
    same = [part for part in later if part.fingerprint == parts[0].fingerprint]
    return RecordedLog(parts, same)


def _every_server(folder: Path, parts: Sequence[RecordedPart]) -> list[RecordedPart]:
    deployment = parts[0].program.deployment
    assert deployment is not None, "a pserver program"
    found = sorted(parts, key=lambda part: part.server)
    if [part.server for part in found] != list(range(deployment.plan.servers)):
        raise Refused(
            f"{folder}: expected the parts of all {deployment.plan.servers} servers, each once, "
            f"got {', '.join(part.path.name for part in found)}"
        )
    return found


def _looked_through(path: Path) -> RecordedPart | None:
    """A part, read to its end, or to where it is damaged; None where nothing of it is whole."""
    part: RecordedPart | None = None
    with path.open("rb") as file:
        reader = EntryReader(path.name, file.read)
        try:
            for place in reader.entries():
                if part is None:
                    part = _begun(path, place)
                _look(part, place)
        except ValueError as error:
            if part is None:
                raise Refused(str(error)) from error
            part.damage = error if isinstance(error, Damaged) else Damaged(str(error))
    if part is not None:
        part.torn = reader.torn
    return part


def _begun(path: Path, place: Place) -> RecordedPart:
    if place.entry.WhichOneof("what") != "opening":
        raise Damaged(f"{path.name}: expected its beginning, got entry {place.number}")
    opening = place.entry.opening
    program = Program.from_proto(opening.program)
    return RecordedPart(path, path.stat().st_size, opening.recording, program)


def _look(part: RecordedPart, place: Place) -> None:
    what = place.entry.WhichOneof("what")
    part.entries = place.number
    if what == "records":
        for record in records_of(place.entry.records.SerializeToString()):
            part.first = part.first or record.number
            if part.last and record.number != part.last + 1:
                raise Damaged(
                    f"{part.path.name}: expected record {part.last + 1}, got {record.number}"
                )
            part.last = record.number
            if isinstance(record.what, Decided):
                part.open.add(record.number)
            elif isinstance(record.what, Joined) and not part.run:
                part.run = record.what.process.incarnation
    elif what == "applied":
        applied = place.entry.applied
        if applied.record not in part.open:
            raise Damaged(
                f"{part.path.name}: entry {place.number} has steps that no record decides"
            )
        part.open.remove(applied.record)
        part.steps.update(each.step.process.trainer for each in applied.steps)
    elif what == "closing":
        part.end = place.entry.closing.failure
