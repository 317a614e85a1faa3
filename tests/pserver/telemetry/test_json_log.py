"""Log lines as JSON."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime

import pytest

from pserver.config import ServerConfig
from pserver.service.server import Server
from pserver.telemetry.logs import JSON_LINES, JsonLines, announce, write_json


@contextmanager
def bare() -> Iterator[logging.Logger]:
    """The root logger of a process that has arranged for nothing."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []
    try:
        yield root
    finally:
        root.handlers = handlers
        root.setLevel(level)


def record(
    message: str, *arguments: object, error: BaseException | None = None
) -> logging.LogRecord:
    """One line's."""
    info = None if error is None else (type(error), error, None)
    return logging.LogRecord("a.b", logging.WARNING, "f.py", 1, message, arguments, info)


def test_a_line_is_an_object_with_the_processes_labels() -> None:
    """Whatever is in the message; the labels are those of the moment."""
    lines = JsonLines()
    lines.labels = lambda: {"job": "clicks", "process": "server 0"}
    text = lines.format(record('said "%s"\nand more', "\x00é"))
    found = json.loads(text)

    assert "\n" not in text
    assert datetime.fromisoformat(found.pop("time")).tzinfo is not None
    assert found == {
        "level": "WARNING",
        "logger": "a.b",
        "message": 'said "\x00é"\nand more',
        "job": "clicks",
        "process": "server 0",
    }


def test_a_traceback_is_a_field() -> None:
    """With the error's name and its words."""
    found = json.loads(JsonLines().format(record("failed", error=ValueError("of no use"))))
    assert found["exception"].endswith("ValueError: of no use")


def test_lines_are_written() -> None:
    """From the level on that is asked for; a second call changes nothing."""
    out, other = io.StringIO(), io.StringIO()
    with bare():
        write_json(logging.INFO, out)
        write_json(logging.DEBUG, other)
        logging.getLogger("a").info("one")
        logging.getLogger("a").debug("two")

    assert [json.loads(line)["message"] for line in out.getvalue().splitlines()] == ["one"]
    assert other.getvalue() == ""


def test_a_script_keeps_the_handlers_that_it_has() -> None:
    """And its level."""
    own, out = logging.NullHandler(), io.StringIO()
    with bare() as root:
        root.addHandler(own)
        write_json(logging.DEBUG, out)
        assert root.handlers == [own] and root.level != logging.DEBUG


def test_a_servers_lines_have_its_job() -> None:
    """From its start on; which server it is when a job has told it."""
    with Server(ServerConfig(job="clicks")):
        labels = JSON_LINES.labels()
        assert (labels["job"], labels["run"], labels["process"]) == ("clicks", "", "server")


def test_an_announcement_is_json_where_lines_are(capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output, for other programs; with facts of its own."""
    announce("a", "ready at h:1", endpoint="h:1")
    with bare():
        write_json(logging.INFO, io.StringIO())
        announce("a", 'ready at "h:1"', endpoint="h:1")
    plain, line = capsys.readouterr().out.splitlines()
    found = json.loads(line)

    assert plain == "ready at h:1"
    assert found["message"] == 'ready at "h:1"' and found["endpoint"] == "h:1"
    assert (found["level"], found["logger"]) == ("INFO", "a") and "time" in found


def test_a_line_waits_for_no_lock_of_the_job() -> None:
    """Threads log while they hold the job's lock, and wait for the one that writes: the labels of
    its line must not need that lock.
    """
    with Server(ServerConfig(job="clicks")) as server, ThreadPoolExecutor(1) as pool:
        with server.job.condition:
            line = pool.submit(JSON_LINES.format, record("free"))
            assert json.loads(line.result(timeout=10))["message"] == "free"
