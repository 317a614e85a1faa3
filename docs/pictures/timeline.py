"""What happens in the picture of an update mode: a model of trainers and servers in time.

It follows the rules of the modes (transpiler/plan/modes.py), with times that are made up.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

FIRST, SERVERS, SECOND = 0, 1, 2  # rows of a picture
NAMES = {FIRST: "trainer 0", SERVERS: "servers", SECOND: "trainer 1"}
TRAVEL, UPDATE, ALLREDUCE = 0.45, 0.75, 0.9  # in units of time
END = 12.0  # of the time that a picture shows


@dataclass(frozen=True)
class Span:
    """Something that a row does for some time: "compute", "wait", "hold", "update", "corrected" or
    "reduce".
    """

    row: int
    begin: float
    end: float
    kind: str
    words: str = ""


@dataclass(frozen=True)
class Message:
    """What travels from one row to another; ``lands``: when the script takes it in, if later."""

    row: int
    sent: float
    to: int
    arrives: float
    lands: float | None = None


@dataclass
class Timeline:
    """What happens in one picture."""

    spans: list[Span] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    free: float = 0.0  # from when on the servers are

    def compute(self, row: int, begin: float, length: float, words: str) -> float:
        """A step of a trainer; gives its end."""
        self.spans.append(Span(row, begin, begin + length, "compute", words))
        return begin + length

    def send(self, row: int, sent: float) -> float:
        """A message to the servers; gives when it is there."""
        self.messages.append(Message(row, sent, SERVERS, sent + TRAVEL))
        return sent + TRAVEL

    def update(self, earliest: float, words: str, kind: str = "update") -> float:
        """An update of the servers, one after the other; gives its end."""
        begin = max(earliest, self.free)
        self.free = begin + UPDATE
        self.spans.append(Span(SERVERS, begin, self.free, kind, words))
        return self.free

    def answer(self, row: int, sent: float, lands: float | None = None) -> float:
        """What the servers send a trainer; gives when it is there."""
        self.messages.append(Message(SERVERS, sent, row, sent + TRAVEL, lands))
        return sent + TRAVEL

    def wait(self, row: int, begin: float, end: float, words: str) -> None:
        """A trainer waits."""
        if end > begin + 0.01:
            self.spans.append(Span(row, begin, end, "wait", words))


def together(line: Timeline, lengths: tuple[float, float], steps: int, words: str) -> None:
    """One update for all trainers, once the step, or k steps, of each has come."""
    free, number = {FIRST: 0.0, SECOND: 0.0}, 1
    while max(free.values()) < END:
        ends = {}
        for row, length in zip(free, lengths, strict=True):
            ends[row] = free[row]
            for step in range(steps):
                ends[row] = line.compute(row, ends[row], length, f"step {number + step}")
        came = {row: line.send(row, end) for row, end in ends.items()}
        if min(came.values()) < max(came.values()):
            line.spans.append(Span(SERVERS, min(came.values()), max(came.values()), "hold", "held"))
        done = line.update(max(came.values()), words)
        for row, end in ends.items():
            free[row] = line.answer(row, done)
            slower = max(ends.values()) > end
            other = NAMES[SECOND if row == FIRST else FIRST]
            line.wait(row, end, free[row], f"waits for {other}" if slower else "waits")
        number += steps


def one_by_one(
    line: Timeline,
    lengths: tuple[float, float],
    words: str,
    steps: int = 1,
    waits: bool = False,
    staleness: int | None = None,
    corrects: bool = False,
) -> None:
    """Each trainer's message is an update of its own, as it arrives.

    Args:
        steps: that a message brings.
        waits: a trainer waits for its own result.
        staleness: how many steps it may be ahead of the other.
        corrects: a gradient is corrected for what the other has changed since its trainer read.
    """
    duration = dict(zip((FIRST, SECOND), lengths, strict=True))
    due: list[tuple[float, int, int, float]] = []  # arrival, row, message, when it was sent
    held: list[tuple[int, int, float]] = []  # row, message, when it was sent: not answered
    applied, read = {FIRST: 0, SECOND: 0}, {FIRST: 0.0, SECOND: 0.0}
    ends: dict[int, list[float]] = {FIRST: [], SECOND: []}  # of steps

    def go_on(row: int, begin: float, number: int) -> None:
        end = begin
        for step in range(steps):
            end = line.compute(row, end, duration[row], f"step {steps * (number - 1) + step + 1}")
            ends[row].append(end)
        if end < END:
            heapq.heappush(due, (line.send(row, end), row, number, end))
            if not waits:
                go_on(row, end, number + 1)

    for row in duration:
        go_on(row, 0.0, 1)
    while due:
        came, row, number, sent = heapq.heappop(due)
        other = SECOND if row == FIRST else FIRST
        stale = corrects and any(
            s.row == SERVERS and s.words.endswith(NAMES[other][-1]) and s.end > read[row]
            for s in line.spans
        )
        kind = "corrected" if stale else "update"
        done = line.update(came, f"{words} {NAMES[row][-1]}", kind)
        applied[row] = number
        held.append((row, number, sent))
        for each in list(held):
            if staleness is not None and min(applied.values()) < each[1] - staleness:
                continue
            held.remove(each)
            back = read[each[0]] = line.answer(each[0], done, None if waits else -1.0)
            if waits:
                late = each[0] != row
                line.wait(each[0], each[2], back, f"waits for {NAMES[row]}" if late else "waits")
                go_on(each[0], back, each[1] + 1)
    land_between_steps(line, ends)


def land_between_steps(line: Timeline, ends: dict[int, list[float]]) -> None:
    """Values that nobody waits for are taken in between two steps."""
    for number, each in enumerate(line.messages):
        if each.lands is not None:
            later = (end for end in ends[each.to] if end >= each.arrives)
            line.messages[number] = replace(each, lands=next(later, each.arrives))


def averaged(line: Timeline, lengths: tuple[float, float], rows: bool) -> None:
    """Trainers average among themselves; with ``rows`` those of tables are on servers, async."""
    free, number = {FIRST: 0.0, SECOND: 0.0}, 1
    while max(free.values()) < END:
        ends = {}
        for row, length in zip(free, lengths, strict=True):
            begin = free[row]
            if rows:
                asked = line.send(row, begin)
                begin = line.answer(row, asked)
                line.wait(row, free[row], begin, "asks")
            ends[row] = line.compute(row, begin, length, f"step {number}")
        for _, row in sorted((end, row) for row, end in ends.items() if rows):
            line.update(line.send(row, ends[row]), "rows")
        meet = max(ends.values())
        for row, end in ends.items():
            other = NAMES[SECOND if row == FIRST else FIRST]
            line.wait(row, end, meet, f"waits for {other}")
            line.spans.append(Span(row, meet, meet + ALLREDUCE, "reduce", "mean"))
            free[row] = meet + ALLREDUCE
        number += 1
