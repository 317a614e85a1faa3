"""``pserver replay``: applies a recorded log to a checkpoint of its job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pserver.checkpoint.manifest import present, some, strangers
from pserver.errors import FingerprintMismatch, Refused
from pserver.job_log.files import Damaged, Place
from pserver.operations.held_job import HeldJob
from pserver.operations.recorded_log import RecordedLog, recorded_log
from pserver.operations.recorded_part import RecordedPart
from pserver.operations.replayed_server import ReplayedServer
from pserver.operations.save import write
from pserver.operations.starting_point import StartingPoint, starting_point
from pserver.storage.place import place_at
from transpiler.files.local_path import shown

REPLAYED_BY = "pserver replay"
BEGINNING = "start"  # in place of a checkpoint: the log's own

Told = Callable[[str, int], None]  # what is done, and how many bytes of the log it has taken


@dataclass(frozen=True, slots=True)
class Target:
    """Where what comes out is written.

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
    """Applies a log, says what was applied, and may write what comes out.

    Args:
        folder: of the log.
        console: where progress is shown, if it is a terminal, and the result.
        start: the checkpoint to begin with; None, or "start": what the log itself begins with.
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
    if last < max(part.last for part in log.parts) and until is None:
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
        Damaged: an entry before it is.
        Refused: the log does not go so far, or does not go back so far.
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
    """What one server held, in the end or as of a record.  See [Note: a server that comes back] in
    recorded_part.py.
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
        wanted = _Wanted(entry if number == begun else 0, last)
        _take(log.chains[index][number], wanted, taken, partial(told, what))
    return server


def _take(
    part: RecordedPart,
    wanted: Callable[[Place], bool],
    taken: Callable[[Place], None],
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


class _Wanted:
    """Which entries of a part are applied: steps up to a record, and what was loaded or shrunk
    before the first later one.
    """

    def __init__(self, after: int, last: int) -> None:
        self._after, self._last, self._later = after, last, False

    def __call__(self, place: Place) -> bool:
        steps = place.entry.WhichOneof("what") == "applied"
        if steps and place.entry.applied.record > self._last:
            self._later = True
            return False
        return place.number > self._after and (steps or not self._later)


def _entry_of(log: RecordedLog, server: int, begin: StartingPoint) -> tuple[int, int]:
    """As of what the checkpoint is: which part of a server's chain, and which entry of that.

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
    """Shows how far it is, on a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        tasks: dict[str, int] = {}

        def told(what: str, size: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=None)
            bar.update(tasks[what], advance=size)  # type: ignore[arg-type]

        yield told
