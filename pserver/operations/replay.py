"""``pserver replay``: applies a recorded log to a checkpoint of its job.

[Note: two files of one server]  A server that was lost, and resumes from a checkpoint, begins
another file.  It has the loaded values, then the state of the log, then what is applied from there
on.  So that file alone determines what the server holds: what the one before it has besides the
checkpoint was lost with the server.  Up to the record at which the server has come back, the file
before it is what the server held.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from pserver.checkpoint import checkpoint
from pserver.checkpoint.checkpoint import Reader
from pserver.checkpoint.manifest import present, some, strangers
from pserver.client.observer import JobProgress
from pserver.config import ServerConfig
from pserver.dense.slices import PREFIX
from pserver.errors import FingerprintMismatch, Refused
from pserver.job.program import InstalledProgram, check_program
from pserver.job_log.files import Damaged, EntryPlace, EntryReader
from pserver.job_log.records import Decided, Joined, LogSnapshot, records_of
from pserver.job_log_pb2 import Entry
from pserver.lane.recorded_steps import arrays_of, hparams_of, update_of
from pserver.membership.decisions import Decisions
from pserver.membership.lifecycle import Lifecycle
from pserver.membership.members import Membership
from pserver.operations.save import HeldJob, write
from pserver.storage import plain_file
from pserver.storage.place import place_at
from transpiler.files import bounded_json
from transpiler.files.files import shown
from transpiler.ir.graph import Role
from transpiler.ir.slice_states import slice_states
from transpiler.program import Program

# ---- recorded part ----
#
# What one process of a server has recorded: a file, looked through once.


@dataclass(slots=True)
class RecordedPart:
    """The recording of one process of a server.

    Attributes:
        path: of the file.
        size: of it, in bytes.
        recording: its own name.
        program: the server's, without values.
        run: of trainer 0, or of the first one that joined: the same in all parts; "": none has.
        entries: how many are whole.
        returned: of a server that has come back: the number of the last record before that; None:
            it has not.  See [Note: two files of one server].
        last: the number of the last record.
        decided: that of the last one that decides a step; 0: none does.
        open: records that decide steps which the file does not have.
        damage: the first entry that is not what was written, and all after it; None: there is none.
        torn: it ends in the middle of an entry.
        end: why it ends; "": the job was over; None: not known.
    """

    path: Path
    size: int
    recording: str
    program: Program
    run: str = ""
    entries: int = 0
    returned: int | None = None
    last: int = 0
    decided: int = 0
    open: set[int] = field(default_factory=set)
    damage: Damaged | None = None
    torn: bool = False
    end: str | None = None

    @property
    def server(self) -> int:
        """The index of its server in the plan."""
        assert self.program.deployment is not None, "a pserver program"
        return self.program.deployment.server_index or 0

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the plan."""
        assert self.program.deployment is not None, "a pserver program"
        return self.program.deployment.plan.fingerprint()

    @property
    def whole_until(self) -> int:
        """The last record up to which it has every step."""
        return min(self.open) - 1 if self.open else self.last

    def places(self) -> Iterator[EntryPlace]:
        """Its entries, from the first.

        Raises:
            Damaged: see :class:`EntryReader`.
        """
        with closing(plain_file.reading(self.path)) as file:
            yield from EntryReader(self.path.name, file.read, Entry).entries()


def looked_through(path: Path) -> RecordedPart | None:
    """A part, read to its end, or to its first damage; None where nothing of it is whole.

    Raises:
        Refused: its beginning is damaged.
    """
    part: RecordedPart | None = None
    with plain_file.reading(path) as file:
        reader = EntryReader(path.name, file.read, Entry)
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


def standing_of(place: EntryPlace) -> LogSnapshot | None:
    """The state of the log when a server came back; None for another kind of entry."""
    records = place.entry.records
    return LogSnapshot.of(records.SerializeToString()) if records.HasField("standing") else None


def _begun(path: Path, place: EntryPlace) -> RecordedPart:
    if place.entry.WhichOneof("what") != "opening":
        raise Damaged(f"{path.name}: expected its beginning, got entry {place.number}")
    opening = place.entry.opening
    program = Program.from_proto(opening.program)
    return RecordedPart(path, path.stat().st_size, opening.recording, program)


def _look(part: RecordedPart, place: EntryPlace) -> None:
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


def _look_at_records(part: RecordedPart, place: EntryPlace) -> None:
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
            part.decided = record.number
            part.open.add(record.number)
        elif isinstance(record.what, Joined) and not part.run:
            part.run = record.what.process.incarnation


# ---- recorded log ----
#
# A recorded log: the files of all servers of one run of a job, looked through once.


@dataclass(frozen=True, slots=True)
class RecordedLog:
    """One run of a job.

    Attributes:
        chains: by server, the recordings of its processes, the first one first: more than one where
            the server has come back while its job continued.
    """

    chains: Sequence[Sequence[RecordedPart]]

    @property
    def parts(self) -> list[RecordedPart]:
        """By server, the recording of its last process."""
        return [chain[-1] for chain in self.chains]

    @property
    def until(self) -> int:
        """The last record up to which every server has every step that it has not lost."""
        return min(part.whole_until for part in self.parts)

    @property
    def decided(self) -> int:
        """The last record that decides a step, whether or not every server has it."""
        return max(part.decided for part in self.parts)

    def at(self, server: int, record: int, back: bool = False) -> int:
        """The process of a server that held the state as of a record: its place in the chain.

        Args:
            back: of a server that was lost after this very record, and has come back before the
                next one, the process that has come back.
        """
        before = record + 1 if back else record
        later = self.chains[server][1:]
        return sum(part.returned is not None and part.returned < before for part in later)

    def warnings(self) -> list[str]:
        """Warnings about servers that were lost, and about parts that do not end with the job, a
        sentence each.
        """
        found = [
            f"server {part.server} was lost after record {before.last}, and came back at record "
            f"{part.returned} with what its checkpoint had ({part.path.name})"
            for chain in self.chains
            for before, part in zip(chain, chain[1:], strict=False)
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
        recordings: of all servers: those of one run, where a directory has several.
        tell: called with the bytes of each part that was read.

    Raises:
        FileNotFoundError: there is none.
        Refused: there are several, or a server's part is missing, or a part's beginning is damaged.
    """
    files = sorted(folder.glob("server-*.log"))
    if not files:
        raise FileNotFoundError(f"{folder}: expected the files of a recorded log, server-*.log")
    runs: dict[tuple[str, str], list[RecordedPart]] = defaultdict(list)
    for path in files:
        part = looked_through(path)
        tell(path.stat().st_size)
        if part is not None and part.run:  # otherwise no trainer has joined
            runs[part.fingerprint, part.run].append(part)
    found = [
        run
        for run in runs.values()
        if not recordings or any(part.recording in recordings for part in run)
    ]
    if not found and recordings:
        raise Refused(
            f"{folder}: the checkpoint is of another run: expected the recording "
            f"{recordings[0]}, got {', '.join(path.name for path in files)}"
        )
    if len(found) != 1:
        listed = "; ".join(", ".join(part.path.name for part in run) for run in found)
        raise Refused(
            f"{folder}: expected the log of one run, got {listed or 'files without a trainer'}: "
            "keep each in a directory of its own"
        )
    return RecordedLog(_chains(folder, found[0]))


def _chains(folder: Path, parts: Sequence[RecordedPart]) -> list[list[RecordedPart]]:
    deployment = parts[0].program.deployment
    assert deployment is not None, "a pserver program"
    first = sorted((part for part in parts if part.returned is None), key=lambda part: part.server)
    if [part.server for part in first] != list(range(deployment.plan.servers)):
        raise Refused(
            f"{folder}: expected the parts of all {deployment.plan.servers} servers, each once, "
            f"got {', '.join(part.path.name for part in first) or 'none'}"
        )
    later = [part for part in parts if part.returned is not None]
    later.sort(key=lambda part: (part.returned, part.recording))
    return [[begun, *(each for each in later if each.server == begun.server)] for begun in first]


# ---- replayed server ----
#
# A server whose steps come from a recorded log: the arithmetic is that of a running one.


class ReplayedServer:
    """The replayed values of one server.  One thread uses it.

    It offers what :class:`~pserver.client.observer.Observer` does, so that what it holds is saved
    as that of a running server is.

    Args:
        part: what the server has recorded.
        scratch: the directory for rows of tables that do not fit in memory; None: the system's.

    Attributes:
        installed: the program, as a running server has it.
        endpoint: names it in messages.
        program, fingerprint: of the server.
        steps: by trainer, the number of applied steps, also of those by lost processes of this
            server.
        record: the last one that was applied.
    """

    def __init__(self, part: RecordedPart, scratch: str | None = None) -> None:
        plan, index = check_program(part.program)
        lifecycle, members = Lifecycle(), Membership(plan.trainers, 0.0)
        rounds = [lane.kind.waits_for_all for lane in plan.lanes]
        decisions = Decisions(1, 0, rounds, members, lambda *lost: None, lifecycle)
        limits = ServerConfig().limits
        self.installed = InstalledProgram(
            part.program, members, lifecycle, decisions, limits, scratch
        )
        self.endpoint, self.program, self.fingerprint = (
            f"server {index}",
            part.program,
            part.fingerprint,
        )
        self.steps: Counter[int] = Counter()
        self.record = 0
        self._last: Counter[int] = Counter()  # by trainer: the number of its last step

    # ---- from the log ----

    def apply(self, place: EntryPlace) -> None:
        """Applies an entry.

        Raises:
            Refused: it does not fit the program.
        """
        what = place.entry.WhichOneof("what")
        acts = {
            "applied": self._steps,
            "values": self._values,
            "rows": self._rows,
            "shrunk": self._shrunk,
            "records": self._stands,
        }
        if what not in acts:
            return
        try:
            acts[what](place)
        except (KeyError, IndexError, ValueError, RuntimeError) as error:
            raise Refused(
                f"{self.endpoint}: entry {place.number} does not fit the program: "
                f"{type(error).__name__}: {error}"
            ) from error

    def count(self, place: EntryPlace) -> None:
        """Counts the steps of an entry, which a process before the part's has applied."""
        if place.entry.WhichOneof("what") == "applied":
            self.steps.update(each.step.process.trainer for each in place.entry.applied.steps)

    def _steps(self, place: EntryPlace) -> None:
        update = update_of(place.entry, place.payload)
        self.installed.lane(update.lane).replay(update)
        self.record = max(self.record, update.record)
        self.count(place)
        for each in update.decided:
            self._last[each.process.trainer] = max(self._last[each.process.trainer], each.step)

    def _stands(self, place: EntryPlace) -> None:
        standing = standing_of(place)
        if standing is not None:  # the server has come back, and has loaded what is before this
            self.record = standing.last

    def _values(self, place: EntryPlace) -> None:
        values = place.entry.values
        named = {array.name: tensor for array, tensor in arrays_of(place.entry, place.payload)}
        self.installed.slices.load(named)
        if values.last:
            self.installed.discard_snapshots()
            self._begin_at(values.versions, hparams_of(values.hparams))

    def _begin_at(self, versions: Sequence[int], hparams: Mapping[int, Any]) -> None:
        for lane, version in zip(self.installed.lanes, versions, strict=True):
            lane.version = version
            lane.hparams = hparams or lane.hparams

    def _rows(self, place: EntryPlace) -> None:
        rows = place.entry.rows
        table = self.installed.tables[rows.table]
        if rows.replaced:
            table.restore(rows.metadata)
        chunk = {
            array.name: tensor.numpy() for array, tensor in arrays_of(place.entry, place.payload)
        }
        if chunk:
            table.load(chunk)

    def _shrunk(self, place: EntryPlace) -> None:
        shrunk = place.entry.shrunk
        threshold = shrunk.threshold if shrunk.HasField("threshold") else None
        self.installed.tables[shrunk.table].shrink(shrunk.days, threshold, now=shrunk.time)

    # ---- held values, as an Observer gives them ----

    @property
    def progress(self) -> JobProgress:
        """The progress of the replay."""
        lanes = self.installed.lanes
        hparams = {group: held for lane in lanes for group, held in lane.hparams.items()}
        step = max(self._last.values(), default=0)
        return JobProgress(tuple(lane.version for lane in lanes), step, hparams, "")

    def pause(self, pausing: bool) -> None:
        """Does nothing: values do not change while they are read."""

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Slices and optimizer states, by name; a state that no update has made is left out."""
        found = {name: self.installed.slices.read(name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def scan(self, table: str) -> Iterator[tuple[dict[str, torch.Tensor], Mapping[str, Any]]]:
        """Its rows of a table, chunk by chunk, each with what is known of the table besides."""
        held, cursor = self.installed.tables[table], 0
        while cursor >= 0:
            chunk, cursor = held.scan(cursor, 0, changed_since_save=False, materialized=False)
            arrays = {name: torch.from_numpy(column) for name, column in chunk.items()}
            yield arrays, bounded_json.loads(held.metadata())


# ---- starting point ----
#
# Where a replay begins: a checkpoint, and as of which entries of the recorded log it is.


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """A checkpoint of a job whose log is recorded.

    Attributes:
        path: of it.
        places: by server, its recording and the entry in it.
        readers: of the servers' own parts; one, of the whole, where a trainer has written it.
        whole: whether a trainer has.
    """

    path: str
    places: Sequence[Mapping[str, Any]]
    readers: Sequence[Reader]
    whole: bool

    @property
    def record(self) -> int:
        """The last record of the job's log that is in it."""
        return max(int(place["record"]) for place in self.places)

    def load(self, server: int, into: ReplayedServer) -> None:
        """Loads a server's part.

        Raises:
            FingerprintMismatch: it is of another plan.
            Refused: it does not fit the server, or lacks what the server had.
        """
        if self.whole:
            _load_whole(self, server, into)
        else:
            _load_part(self.readers[server], into)
        into.record = self.record


def starting_point(path: str) -> StartingPoint:
    """A checkpoint that ``fleet.save``, an automatic save, ``pserver save`` or the servers
    themselves have written.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file of it is torn.
        Refused: it does not say of which recorded log it is.
    """
    try:
        reader = checkpoint.reading(path)
    except FileNotFoundError:
        parts = sorted(Path(path).glob("server-*/checkpoint.json"), key=_number)
        if not parts:
            raise
        readers: Sequence[Reader] = [checkpoint.reading(part.parent) for part in parts]
    else:
        readers = reader.parts
        if not readers:
            places = reader.meta.get("log", {}).get("servers", [])
            return StartingPoint(path, _checked(path, places), [reader], True)
    return StartingPoint(path, _checked(path, [r.meta.get("log") for r in readers]), readers, False)


def _number(part: Path) -> int:
    text = part.parent.name.removeprefix("server-")
    return int(text) if text.isdecimal() else 2**32


def _checked(path: str, places: Iterable[Any]) -> list[Mapping[str, Any]]:
    found = list(places)
    if not found or not all(isinstance(e, dict) and e.get("recording") for e in found):
        raise Refused(
            f"{shown(path)}: expected a checkpoint of a job whose log was recorded (--record-log) "
            "when it was saved; this one does not say as of which entry of a log it is"
        )
    return found


def _load_part(reader: Reader, into: ReplayedServer) -> None:
    if reader.meta.get("fingerprint") != into.fingerprint:
        raise FingerprintMismatch(
            f"{shown(reader.saved.path)} is of a job with another plan than the log's"
        )
    installed = into.installed
    installed.slices.load(reader.tensors())
    for name, table in installed.tables.items():
        table.restore(reader.meta["tables"][name])
        for chunk in reader.chunks(name):
            table.load(chunk)
    for lane, version in zip(installed.lanes, reader.meta["versions"], strict=True):
        lane.version = version
    installed.discard_snapshots()


def _load_whole(start: StartingPoint, server: int, into: ReplayedServer) -> None:
    (reader,), place, installed = start.readers, start.places[server], into.installed
    for lane, version in zip(installed.lanes, place["versions"], strict=True):
        lane.version = version
    installed.slices.load(_slices(start.path, reader.tensors(), server, into))
    for name, table in installed.tables.items():
        if name not in reader.tables:
            raise FingerprintMismatch(f"{shown(start.path)} has no table {name!r}")
        table.restore(place["tables"][name])
        for chunk in reader.chunks(name):
            table.load(chunk)
    installed.discard_snapshots()


def _slices(
    path: str, tensors: Mapping[str, torch.Tensor], server: int, into: ReplayedServer
) -> dict[str, torch.Tensor]:
    """A server's slices and states, cut out of whole tensors.

    Raises:
        FingerprintMismatch: they are of another model.
        Refused: states are not there that the server had.
    """
    installed = into.installed
    states, found = slice_states(into.program.blocks), dict[str, torch.Tensor]()
    for placement in installed.plan.placements:
        whole, shape = tensors.get(f"model/{placement.name}"), tuple(placement.shape)
        if whole is None or tuple(whole.shape) != shape:
            raise FingerprintMismatch(
                f"{shown(path)}: expected {placement.name!r} of shape {list(shape)}, got "
                f"{'none' if whole is None else list(whole.shape)}"
            )
        stepped = installed.lanes[placement.lane].version
        for slice_ in placement.slices:
            if slice_.server != server:
                continue
            own = {f"model/{placement.name}": slice_.name}
            for state, variable in states.get(slice_.name, {}).items():
                own[f"state/{state}/{placement.name}"] = variable
            outer = installed.plan.lane_of(placement).kind.outer_optimizer
            for name, variable in own.items():
                of_server = tensors.get(f"{PREFIX}{variable}")
                if of_server is not None:
                    found[variable] = of_server
                elif outer and name.startswith("state/"):  # a state of that name is a trainer's
                    if stepped:
                        raise Refused(
                            f"{shown(path)}: expected {PREFIX}{variable}, the outer optimizer's "
                            "state: begin with another checkpoint, or with the log itself"
                        )
                elif name in tensors:
                    found[variable] = _cut(tensors[name], slice_.begin, slice_.end, shape)
    held = into.program.main.variables_of(Role.PARAMETER, Role.BUFFER, Role.STATE)
    shapes = {each.name: [int(extent) for extent in each.shape] for each in held}
    return {name: tensor.reshape(shapes[name]) for name, tensor in found.items()}


def _cut(whole: torch.Tensor, begin: int, end: int, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(whole.shape) != shape:
        return whole  # a number that every slice has: the count of steps
    return whole.reshape(-1)[begin:end]


# ---- replay ----


REPLAYED_BY = "pserver replay"
BEGINNING = "start"  # in place of a checkpoint: the log's own

Told = Callable[[str, int], None]  # what is done, and how many bytes of the log it has taken


@dataclass(frozen=True, slots=True)
class Target:
    """The place for the result.

    Attributes:
        path: of the checkpoint, a directory or a URL.
        overwrites: whether something may be there already.
    """

    path: str
    overwrites: bool = False

    def check(self) -> None:
        """Returns if the checkpoint may be written.

        Raises:
            Refused: something is there that may have to stay.
        """
        place = place_at(self.path)
        found = "a checkpoint" if present(place) is not None else some(strangers(place))
        if found and not self.overwrites:
            raise Refused(
                f"--to: expected a new directory or an empty one, and {shown(self.path)} has "
                f"{found}: --overwrite writes there all the same"
            )


def replay(
    folder: Path,
    console: Console,
    start: str | None = None,
    target: Target | None = None,
    until: int | None = None,
) -> list[ReplayedServer]:
    """Applies a log, prints what was applied, and may write the result.

    Args:
        folder: of the log.
        console: where progress is shown, if it is a terminal, and the result.
        start: the checkpoint to begin with; None, or "start": the log's own beginning.
        target: the checkpoint that is written; None: none is.
        until: the last record that is applied; None: all that the parts of all servers have.

    Returns:
        What each server held.

    Raises:
        FileNotFoundError: there is no log, or no checkpoint.
        PServerError, ValueError: they do not fit one another, or one is damaged, or something is
            at the target.
        OSError: the target cannot be written; the checkpoint that was there stays.
    """
    if target is not None:
        target.check()
    begin = None if start in (None, BEGINNING) else starting_point(str(start))
    names = () if begin is None else [str(place["recording"]) for place in begin.places]
    with _progress(console) as told:
        log = recorded_log(folder, names, lambda size: told("looking through the log", size))
        last = _last(log, until, begin)
        servers = [
            _replayed(log, index, begin, last, until is None, told)
            for index in range(len(log.chains))
        ]
        written = ""
        if target is not None:
            text = write(HeldJob(servers), target.path, REPLAYED_BY, lambda what: told(what, 0))
            written = f"; {text}: {target.path}"
    steps = max((server.steps for server in servers), key=Counter.total)  # one may have lost some
    began = "the log's beginning" if begin is None else f"record {begin.record}"
    for warning in log.warnings():
        _say(console, f"warning: {warning}")
    if last < log.decided and until is None:
        _say(console, f"warning: not every server has all steps behind record {last}")
    listed = ", ".join(f"trainer {trainer} {steps[trainer]}" for trainer in sorted(steps))
    _say(
        console,
        f"replayed from {began} to record {max(server.record for server in servers)}: "
        f"{sum(steps.values())} steps ({listed or 'none'}) on {len(servers)} servers{written}",
    )
    return servers


def _last(log: RecordedLog, until: int | None, begin: StartingPoint | None) -> int:
    """The last record whose steps are applied.

    Raises:
        Refused: an entry before it is damaged; or the log does not go so far, or does not go back
            so far.
    """
    last = log.until if until is None else until
    for index, chain in enumerate(log.chains):
        part = chain[log.at(index, last, until is None)]
        if part.damage is not None and (until is None or until > part.whole_until):
            raise Refused(f"{part.damage}; --until {log.until} applies what stands before it")
    if last > log.until:
        raise Refused(f"--until: expected a record up to {log.until}, the last one, got {last}")
    if begin is not None and last < begin.record:
        raise Refused(
            f"{shown(begin.path)} is as of record {begin.record}, and record {last} is before it"
        )
    return last


def _replayed(
    log: RecordedLog, index: int, begin: StartingPoint | None, last: int, ended: bool, told: Told
) -> ReplayedServer:
    """The values of one server, at the end or as of a record.  See [Note: two files of one server]
    in replay.py.
    """
    at, entry, begun = log.at(index, last, ended), 0, -1
    if begin is not None:
        begun, entry = _entry_of(log, index, begin)
        if begun > at:  # the checkpoint says that the server had come back
            at = log.at(index, last, True)
        if begun > at:
            raise Refused(
                f"{shown(begin.path)} is of server {index} as it had come back at record "
                f"{log.chains[index][begun].returned}, and record {last} is before it"
            )
    part, first = log.chains[index][at], max(begun, 0)
    server = ReplayedServer(part)
    if begin is not None and begun == at:
        entry = _reached(part, entry, begin)
        begin.load(index, server)
    what = f"server {index} of {len(log.chains)}"
    for number in range(first, at + 1):  # what was lost with an earlier process was steps, too
        taken = server.apply if number == at else server.count
        wanted = _Selection(entry if number == begun else 0, last)
        _take(log.chains[index][number], wanted, taken, partial(told, what))
    return server


def _take(
    part: RecordedPart,
    wanted: Callable[[EntryPlace], bool],
    taken: Callable[[EntryPlace], None],
    told: Callable[[int], None],
) -> None:
    read = 0
    with suppress(Damaged):  # behind all that is wanted
        for place in part.places():
            if wanted(place):
                taken(place)
            told(place.end - read)
            read = place.end
    told(part.size - read)


class _Selection:
    """The entries of a part to apply: steps up to a record, and loads and shrinks before the first
    later one.
    """

    def __init__(self, after: int, last: int) -> None:
        self._after, self._last, self._later = after, last, False

    def __call__(self, place: EntryPlace) -> bool:
        steps = place.entry.WhichOneof("what") == "applied"
        if steps and place.entry.applied.record > self._last:
            self._later = True
            return False
        return place.number > self._after and (steps or not self._later)


def _entry_of(log: RecordedLog, server: int, begin: StartingPoint) -> tuple[int, int]:
    """The place of a checkpoint in a server's chain: the part, and the entry of it.

    Raises:
        FingerprintMismatch: it is of another log.
    """
    if len(begin.places) != len(log.chains):
        raise FingerprintMismatch(
            f"{shown(begin.path)} is of a job with {len(begin.places)} servers, and the log of one "
            f"with {len(log.chains)}"
        )
    place, chain = begin.places[server], log.chains[server]
    names = [part.recording for part in chain]
    if place["recording"] not in names:
        raise FingerprintMismatch(
            f"{shown(begin.path)}: expected a checkpoint of {' or '.join(names)}, got one of the "
            f"recording {place['recording']}"
        )
    return names.index(place["recording"]), int(place["entry"])


def _reached(part: RecordedPart, entry: int, begin: StartingPoint) -> int:
    """The entry, which the part has.

    Raises:
        Refused: it does not go so far.
    """
    if entry > part.entries:
        raise Refused(
            f"{part.path.name} ends with entry {part.entries}, and {shown(begin.path)} is as of "
            f"entry {entry}"
        )
    return entry


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress(console: Console) -> Iterator[Told]:
    """Shows the progress on a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with ProgressBar(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        tasks: dict[str, int] = {}

        def told(what: str, size: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=None)
            bar.update(tasks[what], advance=size)  # type: ignore[arg-type]

        yield told
