"""Warnings that may come at every step, said less and less often."""

from __future__ import annotations

import logging

OFTEN = 8  # that many times each one is said; from there on the 16th, the 32nd, the 64th, ...


class RepeatedWarning:
    """Logs warnings of one kind.  One thread at a time uses it.

    Args:
        log: where they go.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: dict[object, int] = {}

    def warn(self, about: object, text: str) -> None:
        """Logs a warning, unless many like it have been logged.

        Args:
            about: warnings about the same are counted together.
        """
        count = self._counts[about] = self._counts.get(about, 0) + 1
        if count <= OFTEN:
            self._log.warning("%s", text)
        elif not count & (count - 1):
            self._log.warning("%s (the %dth time)", text, count)
