"""Log lines as JSON, each with the labels that the process's metrics have."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TextIO

Labels = Callable[[], Mapping[str, str]]


class JsonLines(logging.Formatter):
    """An object a line: "time" (ISO 8601, UTC), "level", "logger", "message", the labels of the
    process, and "exception", a traceback, where there is one.

    Attributes:
        labels: called for each line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.labels: Labels = dict

    def format(self, record: logging.LogRecord) -> str:
        """See :class:`logging.Formatter`."""
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self.labels(),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)


# logging is the process's, and so is this; its labels come when the process has a job
LINES = JsonLines()


def write_json(level: int = logging.NOTSET, out: TextIO | None = None) -> None:
    """From here on the process's log lines are JSON on standard error, unless its script has
    arranged for its own.

    Args:
        level: of the root logger, from which on lines are written; 0: as it is.
        out: None: standard error.
    """
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler(out or sys.stderr)
    handler.setFormatter(LINES)
    root.addHandler(handler)
    if level:
        root.setLevel(level)
