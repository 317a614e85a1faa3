"""Traces: spans of one process, their messages, other processes' clocks, and the file of all."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, NamedTuple

from pserver.onlookers import look_again, onlooker
from transpiler.files import bounded_json

# ---- spans ----
#
# What one process has done, and when, by its own clock.


MOST_SPANS = 50_000  # of a process, in one trace
Fact = str | int | float


class Span(NamedTuple):
    """Something that began and ended.

    Attributes:
        name: what it was: "push".
        began, ended: in seconds of :func:`now`.
        track: the line that it is drawn on; spans of one track lie side by side or within one
            another.
        facts: of which step, lane, trainer, ... it was.
    """

    name: str
    began: float
    ended: float
    track: str
    facts: dict[str, Fact]


class Spans:
    """The spans of one process.  Any thread may add to them.

    ::

        began = now() if spans.on else 0.0
        ...
        if began:
            spans.add("lookup", began, now(), rows=12)

    Attributes:
        on: whether spans are wanted.  Callers check this before they add one.
        watcher: called after each step with its optimizer, or with None after that of a program;
            None: steps are not counted.
    """

    def __init__(self, most: int = MOST_SPANS) -> None:
        self.on = False
        self.watcher: Callable[[object], None] | None = None
        self._most = most
        self._spans: list[Span] = []
        self._dropped = 0
        self._names: dict[int, str] = {}  # of threads, by their idents

    def begin(self) -> None:
        """Forgets earlier spans, and begins to note new ones."""
        self._spans, self._dropped = [], 0
        look_again(self)
        self.on = True

    def end(self) -> None:
        """Stops noting spans."""
        self.on = False

    @onlooker("the trace", end=lambda spans: spans.end())
    def add(self, name: str, began: float, ended: float, track: str = "", /, **facts: Fact) -> None:
        """Notes a span; where there are too many, only that it was dropped.

        Args:
            name, began, ended, facts: see :class:`Span`.
            track: "": the present thread's.
        """
        if len(self._spans) < self._most:
            self._spans.append(Span(name, began, ended, track or self.track(), facts))
        else:
            self._dropped += 1

    def drain(self) -> tuple[list[Span], int]:
        """Takes the spans since the begin; also returns how many spans were dropped."""
        spans, self._spans = self._spans, []
        return spans, self._dropped

    @contextmanager
    def thread(self, name: str) -> Iterator[None]:
        """Names this thread's track while the block runs."""
        own = threading.get_ident()
        self._names[own] = name
        try:
            yield
        finally:
            del self._names[own]

    def track(self) -> str:
        """The track of the present thread."""
        known = self._names.get(threading.get_ident())
        if known is not None:
            return known
        thread = threading.current_thread()
        return "script" if thread is threading.main_thread() else thread.name


SPANS = Spans()
"""Those of a trainer: a process has one job at a time.  A server has its own, one for each of its
jobs: a test may have both in one process.
"""


def now() -> float:
    """Seconds of this process's clock, which never goes back."""
    return time.perf_counter()


def clock_ns() -> int:
    """The same clock in nanoseconds, as processes exchange it."""
    return time.perf_counter_ns()


# ---- recording ----
#
# The spans of one process, as they travel to the process that writes the file.


PART_BYTES = 2_000_000  # of a recording, in one message
MOST_PARTS = 16  # of one recording: more than MOST_SPANS spans take


@dataclass(slots=True)
class Recording:
    """The spans of one process.

    Attributes:
        kind: "trainer" or "server".
        number: of the process among those of its kind.
        spans: by the process's own clock.
        dropped: spans beyond the limit.
        offset_ns: what its clock shows, less what a clock of reference shows at the same moment.
        bound_ns: the offset is no further off than this.
        clock: the source of the offset, in words.
        notes: further sentences for the reader.
    """

    kind: str
    number: int
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0
    offset_ns: int = 0
    bound_ns: int = 0
    clock: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """As people call the process: "server 0"."""
        return f"{self.kind} {self.number}"

    def to_bytes(self) -> bytes:
        """JSON; where that is longer than ``MOST_PARTS`` parts, without its last spans."""
        limit = PART_BYTES * MOST_PARTS
        while len(data := self._json()) > limit:
            kept = len(self.spans) * limit // (len(data) + 1)
            self.dropped += len(self.spans) - kept
            self.spans = self.spans[:kept]
        return data

    def _json(self) -> bytes:
        head = {name: getattr(self, name) for name in _HEAD}
        return json.dumps({**head, "spans": self.spans}, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Recording:
        """Reads the bytes of :meth:`to_bytes`.

        Raises:
            ValueError: it is something else.
        """
        try:
            told = bounded_json.loads(data)
            made = cls(spans=[_span(*each) for each in told["spans"]], **_head(told))
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"expected the spans of a process, got {error}") from error
        if made.kind not in ("trainer", "server") or not all(
            isinstance(note, str) for note in made.notes
        ):
            raise ValueError(f"expected a trainer's or a server's spans, got {made.kind!r}'s")
        return made


# the fields besides the spans, and their types
_HEAD = {
    "kind": str,
    "number": int,
    "dropped": int,
    "offset_ns": int,
    "bound_ns": int,
    "clock": str,
    "notes": list,
}


def _head(told: dict[str, Any]) -> dict[str, Any]:
    for name, kind in _HEAD.items():
        if type(told[name]) is not kind:
            raise ValueError(f"{name}: expected {kind.__name__}, got {told[name]!r}")
    return {name: told[name] for name in _HEAD}


def _span(name: object, began: object, ended: object, track: object, facts: object) -> Span:
    times = [at for at in (began, ended) if isinstance(at, float | int) and math.isfinite(at)]
    named = isinstance(name, str) and isinstance(track, str) and isinstance(facts, dict)
    if len(times) != 2 or not named:
        raise ValueError(f"expected a span, got {(name, began, ended, track, facts)!r}")
    assert isinstance(name, str) and isinstance(track, str) and isinstance(facts, dict)
    plain = {str(key): fact for key, fact in facts.items() if isinstance(fact, str | int | float)}
    return Span(name, float(times[0]), float(times[1]), track, plain)


def parts_of(data: bytes) -> list[bytes]:
    """A recording in parts, at least one."""
    return [data[at : at + PART_BYTES] for at in range(0, max(len(data), 1), PART_BYTES)]


def whole(parts: Sequence[bytes]) -> bytes:
    """Joins the parts of :func:`parts_of`."""
    return b"".join(parts)


# ---- chrome ----
#
# The recordings of all processes as one file, in the format of Chrome's trace viewer, which
# Perfetto reads, too.
#
# A process of the job is a process of the file, and a track a thread.  An arrow leads from each
# push to what its server receives, and from the server's answer to what the trainer pulls.


FIRST_SERVER = 1001  # the pid of server 0; that of trainer 0 is 1
# an arrow's name, the span that it leaves, and the one that it reaches, which is on the other side
ARROWS = (("push", "push", "receive"), ("answer", "answer", "pull"))

Event = dict[str, Any]


def document(
    recordings: Sequence[Recording], missing: Mapping[str, str], facts: Mapping[str, object]
) -> dict[str, Any]:
    """The file's content, as JSON has it.

    Times are microseconds since the first span of all.

    Args:
        recordings: of the processes that gave theirs.  Spans of a server after the last span of a
            trainer are left out.
        missing: the other processes, each with the reason.
        facts: further facts of the file, by name.
    """
    trainers = [each for each in recordings if each.kind == "trainer"]
    last = max((_at(each, span.ended) for each in trainers for span in each.spans), default=inf)
    kept = [_until(each, last) for each in recordings]
    origin = min((_at(each, span.began) for each in kept for span in each.spans), default=0.0)
    events = [event for each in kept for event in _of_process(each, origin)]
    complete = [event for event in events if event["ph"] == "X"]
    names = [event for event in events if event["ph"] == "M"]
    timed = sorted([*complete, *_arrows(complete)], key=lambda event: (event["ts"], _order(event)))
    return {
        "traceEvents": names + timed,
        "displayTimeUnit": "ms",
        "otherData": {
            **facts,
            "clock_error_bound_us": max((e.bound_ns for e in kept), default=0) / 1e3,
            "processes": {each.name: _about(each) for each in kept},
            "missing": dict(missing),
        },
    }


def _at(recording: Recording, seconds: float) -> float:
    """A moment of a process, by the clock of reference."""
    return seconds - recording.offset_ns / 1e9


def _until(recording: Recording, last: float) -> Recording:
    """A trainer's recording; of a server's the spans that began before this moment."""
    if recording.kind == "trainer":
        return recording
    spans = [span for span in recording.spans if _at(recording, span.began) <= last]
    return replace(recording, spans=spans)


def _about(recording: Recording) -> dict[str, object]:
    return {
        "spans": len(recording.spans),
        "dropped": recording.dropped,
        "clock_offset_us": recording.offset_ns / 1e3,
        "clock_error_bound_us": recording.bound_ns / 1e3,
        "clock": recording.clock,
        **({"notes": recording.notes} if recording.notes else {}),
    }


def pid_of(recording: Recording) -> int:
    """The number of a process in the file; trainers stand above servers."""
    return recording.number + (1 if recording.kind == "trainer" else FIRST_SERVER)


def _of_process(recording: Recording, origin: float) -> list[Event]:
    """The names of a process and of its tracks, and its spans."""
    pid = pid_of(recording)
    spans = recording.spans
    tracks = sorted({span.track for span in spans}, key=lambda track: (track != "script", track))
    tids = {track: tid for tid, track in enumerate(tracks, 1)}
    names = [_name("process_name", pid, 0, recording.name)]
    names += [_name("thread_name", pid, tid, track) for track, tid in tids.items()]
    return names + [
        {
            "name": span.name,
            "cat": recording.kind,
            "ph": "X",
            "ts": _us(_at(recording, span.began) - origin),
            "dur": _us(span.ended - span.began),
            "pid": pid,
            "tid": tids[span.track],
            "args": {recording.kind: recording.number, **span.facts},
        }
        for span in spans
    ]


def _name(what: str, pid: int, tid: int, name: str) -> Event:
    return {"name": what, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}


def _us(seconds: float) -> float:
    return max(round(seconds * 1e6, 3), 0.0)


def _order(event: Event) -> tuple[int, float]:
    """The sort key of events of one moment: the longer span first, and arrows behind spans."""
    return (0, -event["dur"]) if event["ph"] == "X" else (1, 0.0)


def _arrows(complete: Iterable[Event]) -> list[Event]:
    """The two ends of each arrow whose two spans exist."""
    found: dict[tuple[str, tuple[object, ...]], Event] = {}
    for event in complete:
        place = tuple(event["args"].get(name) for name in ("trainer", "server", "lane", "step"))
        if None not in place:
            found.setdefault((event["name"], place), event)
    arrows: list[Event] = []
    for name, leaves, reaches in ARROWS:
        for (span, key), event in found.items():
            other = found.get((reaches, key)) if span == leaves else None
            if other is not None:
                shared = {"name": name, "cat": "arrow", "id": f"{name} {key}"}
                arrows.append(shared | {"ph": "s"} | _place(event))
                arrows.append(shared | {"ph": "f", "bp": "e"} | _place(other))
    return arrows


def _place(event: Event) -> Event:
    return {key: event[key] for key in ("ts", "pid", "tid")}


# ---- clock offset ----
#
# How far another process's clock is ahead of this one's.  See [Note: one clock].


MOST_ROUNDS = 1024


@dataclass(frozen=True, slots=True)
class Estimate:
    """Another clock's offset, as the best round has it.

    Attributes:
        offset_ns: what that clock shows, less what this one shows at the same moment.
        bound_ns: the offset is no further off than this.
        rounds: that were compared.
    """

    offset_ns: int
    bound_ns: int
    rounds: int


class ClockOffset:
    """Rounds of questions for another process's clock.  Any thread may call it.

    Example:
        >>> offset = ClockOffset()
        >>> offset.add_round(asked_ns=100, theirs_ns=1_150, answered_ns=300)
        >>> offset.add_round(asked_ns=400, theirs_ns=1_430, answered_ns=440)
        >>> offset.estimate()
        Estimate(offset_ns=1010, bound_ns=20, rounds=2)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the two below
        self._best: tuple[int, int] | None = None  # twice the bound, twice the offset
        self._rounds = 0

    def add_round(self, asked_ns: int, theirs_ns: int, answered_ns: int) -> None:
        """Adds a round.

        Args:
            asked_ns, answered_ns: of this process's clock.
            theirs_ns: of the other's, at some moment between.
        """
        found = answered_ns - asked_ns, 2 * theirs_ns - asked_ns - answered_ns
        with self._lock:
            self._rounds += 1
            self._best = found if self._best is None else min(self._best, found)

    def restart(self) -> None:
        """Forgets the rounds until now."""
        with self._lock:
            self._best, self._rounds = None, 0

    def estimate(self) -> Estimate | None:
        """The offset by the shortest round since the restart; None where there was none."""
        with self._lock:
            if self._best is None:
                return None
            width, twice = self._best
            return Estimate(twice // 2, width // 2 + 1, self._rounds)
