"""What a terminal shows of the bytes that a program has written to it."""

from __future__ import annotations

import re

_PART = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]+")


class Screen:
    """A terminal without an upper end, whose lines do not wrap: enough for rows that fit.

    Attributes:
        lines: that it shows.
        cursor: whether it is visible.
    """

    def __init__(self) -> None:
        self.lines = [""]
        self.cursor = True
        self._row = self._column = 0

    def write(self, text: str) -> None:
        """Obeys text with its codes; one that is not known is an error."""
        end = 0
        for part in _PART.finditer(text):
            assert part.start() == end, text[end : part.start()]
            end = part.end()
            if part[2]:
                self._obey(part[2], part[1])
            elif part[0] == "\r":
                self._column = 0
            elif part[0] == "\n":
                self._row += 1
                self.lines += [""] * (self._row + 1 - len(self.lines))
            else:
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = (
                    line[: self._column] + part[0] + line[self._column + len(part[0]) :]
                )
                self._column += len(part[0])
        assert end == len(text), text[end:]

    def _obey(self, code: str, number: str) -> None:
        if code == "A":
            self._row -= int(number or 1)
            assert self._row >= 0, "above the first line"
        elif code == "J":
            self.lines[self._row] = self.lines[self._row][: self._column]
            del self.lines[self._row + 1 :]
        elif code == "K":
            self.lines[self._row] = ""
        elif code in "hl":
            assert number == "?25", number
            self.cursor = code == "h"
        else:
            assert code == "m", code

    @property
    def shown(self) -> list[str]:
        """Its lines without what follows the last one."""
        return [line.rstrip() for line in self.lines]
