"""Lines of the log: as JSON, and limits for repeated ones."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from datetime import UTC, datetime
from typing import TextIO

# ---- json log ----
#
# Log lines as JSON, each with the labels that the process's metrics have.


Labels = Callable[[], Mapping[str, str]]
FACTS = "facts"  # an attribute of a record


class JsonLines(logging.Formatter):
    """An object a line: "time" (ISO 8601, UTC), "level", "logger", "message", the labels of the
    process, the facts of :func:`announce`, and "exception", a traceback, where there is one.

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
            **getattr(record, FACTS, {}),
        }
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)


# logging is the process's, and so is this; its labels come when the process has a job
JSON_LINES = JsonLines()


def write_json(level: int = logging.NOTSET, out: TextIO | None = None) -> None:
    """Makes the process's log lines JSON on standard error, unless its script has set up its own
    logging.

    Args:
        level: of the root logger, from which on lines are written; 0: unchanged.
        out: None: standard error.
    """
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler(out or sys.stderr)
    handler.setFormatter(JSON_LINES)
    root.addHandler(handler)
    if level:
        root.setLevel(level)


def announce(logger: str, text: str, **facts: str) -> None:
    """Prints a line for other programs on standard output: as JSON where log lines are.

    Args:
        logger: its name.
        text: the line.
        facts: members of the object besides.
    """
    if any(each.formatter is JSON_LINES for each in logging.getLogger().handlers):
        said = {"name": logger, "levelno": logging.INFO, "levelname": "INFO", "msg": text}
        text = JSON_LINES.format(logging.makeLogRecord({**said, FACTS: facts}))
    print(text, flush=True)


# ---- repeated lines ----
#
# Lines of the log that may come again and again: at every step, or at a stranger's will.


LINES, SECONDS = 8, 60.0  # of one kind of refusal, so many lines in so many seconds
WIDTH = 500  # characters of such a line
MOST_SAID = 64  # things that are known to have been said just now
OFTEN = 8  # that many times each one is logged; after that the 16th, the 32nd, the 64th, ...


class RepeatedWarning:
    """Logs warnings of one kind.  One thread at a time uses it.

    Args:
        log: the logger that takes them.
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


class LimitedLog:
    """Logs events that strangers can cause, a few lines a minute of each kind.  Any thread may call
    it.

    Args:
        log: the logger that takes them.
        clock: seconds that never go back.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()  # guards the next
        # by kind: since when lines are counted, and how many there were
        self._counts: dict[str, tuple[float, int]] = {}

    def log(
        self,
        kind: str,
        text: str,
        level: int = logging.WARNING,
        error: BaseException | None = None,
    ) -> None:
        """Logs a line, unless many of its kind have been logged just now.

        Args:
            kind: one of a few words, none of which comes from the peer.
            text: one line, which may hold what the peer has sent.
            level: of the logging module.
            error: whose traceback follows.
        """
        count, silent = self._count(kind)
        if count > LINES:
            return
        if len(text) > WIDTH:
            text = f"{text[:WIDTH]} ..."
        more = f" ({silent} more like this one before)" if silent > 0 else ""
        self._log.log(level, "%s%s", " ".join(text.splitlines()), more, exc_info=error)

    def filter(self, record: logging.LogRecord) -> bool:
        """As a filter of another logger: its lines are limited, too, and have no traceback."""
        record.exc_info = None
        return self._count(str(record.msg))[0] <= LINES

    def _count(self, kind: str) -> tuple[int, int]:
        """The number of lines of a kind in the present interval; and of those left out in the
        previous one, if another begins.
        """
        with self._lock:
            now = self._clock()
            since, count = self._counts.get(kind, (now, 0))
            silent = 0
            if now - since > SECONDS:
                since, count, silent = now, 0, max(0, count - LINES)
            self._counts[kind] = since, count + 1
        return count + 1, silent


class RecentLines:
    """The lines of the last minute, which are not logged again: about callers that repeat a request
    until it is answered.  Any thread may call it.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards the next
        self._said: OrderedDict[Hashable, float] = OrderedDict()  # when, the oldest first

    def is_new(self, about: Hashable) -> bool:
        """Whether a line was not logged in the last minute; notes it."""
        with self._lock:
            now = self._clock()
            while self._said and now - next(iter(self._said.values())) > SECONDS:
                self._said.popitem(last=False)
            if about in self._said:
                return False
            self._said[about] = now
            while len(self._said) > MOST_SAID:
                self._said.popitem(last=False)
            return True
