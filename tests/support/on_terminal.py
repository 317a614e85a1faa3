"""A program on a terminal of its own, and what it shows there."""

from __future__ import annotations

import codecs
import os
import pty
import select
import signal
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.support.load import Deadline, patiently
from tests.support.screen import Screen

DEADLINE = 90.0


class OnTerminal:
    """A program that runs on a pseudo terminal; a context manager, which ends it.

    Attributes:
        written: all bytes that have come, as text.
        screen: what they show.
    """

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        size: tuple[int, int] = (24, 80),
        **variables: str,
    ) -> None:
        self._terminal, other = pty.openpty()
        termios.tcsetwinsize(other, size)
        environ: Mapping[str, str] = {
            **{name: value for name, value in os.environ.items() if name != "NO_COLOR"},
            "TERM": "xterm",
            **variables,
        }
        self.popen = subprocess.Popen(
            command, cwd=folder, env=environ, stdin=other, stdout=other, stderr=other
        )
        os.close(other)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.written, self.screen = "", Screen()

    def until(self, condition: Callable[[str], bool]) -> None:
        """Reads until what is written meets the condition, or the program has ended."""
        deadline = Deadline(DEADLINE)
        while not condition(self.written):
            ready, _, _ = select.select([self._terminal], [], [], deadline.left)
            if not ready and not deadline.over:
                continue
            assert ready, f"still waiting; so far:\n{self.written[-2000:]}"
            try:
                part = os.read(self._terminal, 1 << 16)
            except OSError:  # the other side is closed: the program has ended
                return
            self.written += self._decoder.decode(part)  # a read may end within a character

    def end(self) -> int:
        """The exit status, when the program has ended; ``screen`` is what is left of it."""
        self.until(lambda written: False)
        status = patiently(self.popen.wait, DEADLINE)
        self.screen.write(self.written)
        return status

    def __enter__(self) -> OnTerminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)
            patiently(self.popen.wait, DEADLINE)
        os.close(self._terminal)
