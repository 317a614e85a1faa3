"""Standard output of ``launch``: the lines of all processes, and a panel below them.

[Note: who owns the terminal]  Lines are prefixed with the process's name and written whole.  On a
real terminal one process may own it: that process writes to a pseudo terminal, and its bytes pass
through unchanged, so that a live progress display works.  Other processes' lines first clear the
line of the display, which the display draws again below.  The log file holds the display's final
text, without control codes.

Where a panel is shown, it stands below everything else, and the owner's whole lines pass through
above it, in their colours; a line that it has not ended yet is the panel's first row.  An owner
that draws a display of its own (a carriage return that begins a line again, a backspace, a code
that moves the cursor or erases) needs the last lines for itself: the panel goes, for good, and the
bytes pass through as they would have without it.
"""

from __future__ import annotations

import math
import re
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO

MOST_UNENDED = 1 << 16  # bytes of a line of the owner: what has more is no text in lines
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor
CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-Z\\-_]")
# a carriage return that no line's end follows, a backspace, and all codes but colours
_DRAWS = re.compile(rb"\r(?![\r\n]|\Z)|\x08|\x1b\[[0-9;?]*[ -/]*[@-ln-~]|\x1b[78]")

# a row of the panel as it is written, and the cells that it fills
Row = tuple[str, int]


class Terminal:
    """The output of all processes, line by line.  Any thread may write.

    See [Note: who owns the terminal].

    Args:
        out: standard output.
        width: characters of the longest process name.
        environ: the variables that say what kind of terminal it is.

    Attributes:
        interactive: whether ``out`` is a real terminal that can clear its lines.
        panel: whether a panel is, or may be, shown.
    """

    def __init__(self, out: TextIO, width: int, environ: Mapping[str, str] | None = None) -> None:
        self._out = out
        self._width = width
        self._lock = threading.Lock()  # guards all below; writing happens under it, nothing else
        self.interactive = out.isatty() and (environ or {}).get("TERM") not in ("dumb", "unknown")
        self.panel = False
        self._rows: Sequence[Row] = ()
        self._drawn: Sequence[int] = ()  # the cells of the rows that stand there
        self._unended = b""  # of the owner: what has come of its last line

    def line(self, name: str, text: str) -> None:
        """Writes one line of a process."""
        clear = "\r\x1b[2K" if self.interactive else ""
        with self._lock:
            self._write(f"{'' if self._drawn else clear}{name:<{self._width}} | {text}\n")

    def through(self, data: bytes) -> None:
        """Passes on what the owner of the terminal wrote."""
        with self._lock:
            if not self.panel:
                self._write(data.decode(errors="replace"))
                return
            self._unended += data
            if _DRAWS.search(self._unended) or len(self._unended) > MOST_UNENDED:
                self._end_panel()
                return
            lines, end, self._unended = self._unended.rpartition(b"\n")
            self._write((lines + end).decode(errors="replace"))

    def show(self, rows: Sequence[Row]) -> None:
        """Draws the panel anew, where there still is one: as many rows as have room."""
        with self._lock:
            if self.panel:
                self._rows = rows
                self._write("")

    def end_panel(self) -> None:
        """Removes the panel for good; harmless where there is none."""
        with self._lock:
            self._end_panel()

    def _end_panel(self) -> None:
        if self.panel:
            self.panel = False
            unended, self._unended = self._unended, b""
            self._write(unended.decode(errors="replace"))

    def size(self) -> tuple[int, int]:
        """Lines and columns of a real terminal."""
        try:
            lines, columns = termios.tcgetwinsize(self._out.fileno())
        except termios.error:  # it has been closed: the log files go on
            lines, columns = 0, 0
        return lines or 24, columns or 80  # one that does not know says 0

    def restore(self) -> None:
        """Shows the cursor, which a display that was killed may have hidden."""
        if self.interactive:
            with self._lock:
                self._write(SHOW)

    def _write(self, text: str) -> None:
        """Writes text in the panel's place, and the panel below it.  The caller holds the lock."""
        # the reader of the pipe has ended (`| head`); the logs and the job go on
        with suppress(BrokenPipeError):
            self._out.write(self._erased() + text + self._drawn_anew())
            self._out.flush()

    def _erased(self) -> str:
        """What removes the panel: a terminal that has become narrower has wrapped its rows."""
        if not self._drawn:
            return ""
        _, columns = self.size()
        lines = sum(max(1, math.ceil(cells / columns)) for cells in self._drawn)
        self._drawn = ()
        return "\r" + (f"\x1b[{lines - 1}A" if lines > 1 else "") + "\x1b[J" + SHOW

    def _drawn_anew(self) -> str:
        if not (self.panel and self._rows):
            return ""
        lines, columns = self.size()
        rows = list(self._rows)
        if self._unended:
            from rich.cells import set_cell_size  # here: a probe of readiness imports no rich

            text = CONTROL.sub("", self._unended.decode(errors="replace")).rstrip("\r")
            text = set_cell_size(text.expandtabs(), columns - 1)
            rows.insert(0, (text, columns - 1))
        rows = rows[: max(1, lines - 1)]
        self._drawn = [cells for _, cells in rows]
        return HIDE + "\n".join(text for text, _ in rows)
