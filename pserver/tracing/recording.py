"""The spans of one process, as they travel to the process that writes the file."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pserver.tracing.spans import Span
from transpiler.files import bounded_json

PART_BYTES = 2_000_000  # of a recording, in one message
MOST_PARTS = 16  # of one recording: more than MOST_SPANS spans take


@dataclass(slots=True)
class Recording:
    """What one process has done.

    Attributes:
        kind: "trainer" or "server".
        number: of the process among those of its kind.
        spans: by the process's own clock.
        dropped: spans beyond the limit.
        offset_ns: what its clock shows, less what a clock of reference shows at the same moment.
        bound_ns: the offset is no further off than this.
        clock: how the offset is known, in words.
        notes: what the reader should know besides, in sentences.
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
        """What :meth:`to_bytes` wrote.

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
    """What :func:`parts_of` has divided."""
    return b"".join(parts)
