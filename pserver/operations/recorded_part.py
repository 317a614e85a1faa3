"""What one process of a server has recorded: a file, looked through once.

[Note: a server that comes back]  A server that was lost, and goes on from a checkpoint, begins
another file.  It has what was loaded, then where the log stands, then what is applied from there
on.  So that file says all by itself what the server holds: what the one before it has besides the
checkpoint was lost with the server.  Up to the record at which the server has come back, the file
before it is what the server held.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from pserver.errors import Refused
from pserver.job_log.files import Damaged, EntryReader, Place
from pserver.job_log.records import Decided, Joined, Standing, records_of
from pserver.storage import plain_file
from transpiler.program import Program


@dataclass(slots=True)
class RecordedPart:
    """What one process of a server has recorded.

    Attributes:
        path: of the file.
        size: of it, in bytes.
        recording: its own name.
        program: the server's, without values.
        run: of trainer 0, or who joined first: the same in all parts; "": nobody has.
        entries: how many are whole.
        returned: of a server that has come back: the number of the last record before that; None:
            it has not.  See [Note: a server that comes back].
        last: the number of the last record.
        open: records that decide steps which the file does not have.
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
    returned: int | None = None
    last: int = 0
    open: set[int] = field(default_factory=set)
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
        with closing(plain_file.reading(self.path)) as file:
            yield from EntryReader(self.path.name, file.read).entries()


def looked_through(path: Path) -> RecordedPart | None:
    """A part, read to its end, or to where it is damaged; None where nothing of it is whole.

    Raises:
        Refused: its beginning is damaged.
    """
    part: RecordedPart | None = None
    with plain_file.reading(path) as file:
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


def standing_of(place: Place) -> Standing | None:
    """Where the log stood when a server came back; None where an entry says something else."""
    records = place.entry.records
    return Standing.of(records.SerializeToString()) if records.HasField("standing") else None


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
        _look_at_records(part, place)
    elif what == "applied":
        applied = place.entry.applied
        if applied.record not in part.open:
            raise Damaged(
                f"{part.path.name}: entry {place.number} has steps that no record decides"
            )
        part.open.remove(applied.record)
    elif what == "closing":
        part.end = place.entry.closing.failure


def _look_at_records(part: RecordedPart, place: Place) -> None:
    standing = standing_of(place)
    if standing is not None:
        part.returned = part.last = standing.last
        part.run = standing.processes[0].process.incarnation if standing.processes else ""
        return
    for record in records_of(place.entry.records.SerializeToString()):
        if record.number != part.last + 1:
            raise Damaged(f"{part.path.name}: expected record {part.last + 1}, got {record.number}")
        part.last = record.number
        if isinstance(record.what, Decided):
            part.open.add(record.number)
        elif isinstance(record.what, Joined) and not part.run:
            part.run = record.what.process.incarnation
