"""The output of ``pserver status``: the running servers, their contents, and their transports."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from pserver import timeouts
from pserver.config import split_endpoint
from pserver.control.control_client import ControlClient
from pserver.control.rpc_errors import about
from pserver.errors import PServerError, Refused
from pserver.security import keys
from pserver.security.access import OPEN, Access, always_open
from pserver.telemetry.job_view import (
    JobState,
    JobView,
    Sample,
    ServerView,
    TableView,
    TrainerView,
    jsonable,
    size,
)
from pserver.wire_pb2 import StatusReply, StatusRequest

COLUMNS = ("server", "state", "mode", "holds", "steps", "in / out", "transports", "up")


@dataclass(frozen=True, slots=True)
class StatusAnswer:
    """The outcome of asking one server.

    Attributes:
        reply: None: it did not answer, or refused to.
        error: the error of the server or its job; "" where there is none.
        warnings: of errors to come.
        heard: when the outcome was known, by the monotonic clock.
    """

    endpoint: str
    reply: StatusReply | None
    error: str = ""
    refused: bool = False
    warnings: Sequence[str] = ()
    heard: float = field(default_factory=time.monotonic)

    @property
    def well(self) -> bool:
        """Whether nothing is wrong, and the job waits for no server."""
        return not (self.error or (self.reply is not None and self.reply.away))


def ask_each(
    endpoints: Sequence[str],
    variables: bool = False,
    access_of: Callable[[str], Access] = always_open,
) -> Iterator[StatusAnswer]:
    """Asks servers, one after the other.

    Args:
        endpoints: HOST:PORT of each.
        variables: ask for the bytes of each variable, too.
        access_of: by endpoint, what is proved to the server.
    """
    for endpoint in endpoints:
        try:
            access = access_of(endpoint)
            reply = ask(endpoint, variables, access)
            warnings = expiring(endpoint, access)
        except PServerError as error:  # it names the endpoint
            yield StatusAnswer(endpoint, None, str(error), isinstance(error, Refused))
            continue
        failed = reply.failure or reply.state == "failed"
        said = about(endpoint, failure_line(reply)) if failed else ""
        yield StatusAnswer(endpoint, reply, said, warnings=warnings)


def show(answers: Iterable[StatusAnswer], console: Console, view: JobView | None = None) -> int:
    """Prints a row for each server, then the job's progress and values, a line for each trainer,
    each table, each notice, each variable (the most bytes first) and each error.

    Args:
        view: of the answers before, with which there are rates; None: there were none.

    Returns:
        0 if all of them answered, none has failed, and none waits for another one to come back;
        otherwise 1.
    """
    answers = list(answers)
    state = (view or JobView([each.endpoint for each in answers])).add(sample_of(answers))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    for answer, server in zip(answers, state.servers, strict=True):
        if server.up:
            table.add_row(server.endpoint, *cells(server))
        else:
            table.add_row(server.endpoint, "refused" if answer.refused else server.state)
    console.print(table)
    for line in (*job_lines(state), *server_lines(answers)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return int(not all(answer.well for answer in answers))


def sample_of(answers: Sequence[StatusAnswer]) -> Sample:
    """The answers as one moment."""
    replies = {each.endpoint: each.reply for each in answers if each.reply is not None}
    heard = {each.endpoint: each.heard for each in answers if each.reply is not None}
    errors = {each.endpoint: each.error for each in answers if each.reply is None}
    return Sample(time.monotonic(), replies, heard, errors)


def show_json(answers: Iterable[StatusAnswer], console: Console) -> int:
    """Prints one line: ``{"servers": [...]}``, an object for each server with its endpoint, the
    fields of ``StatusReply``, its error ("error"), and coming errors ("warnings").

    Returns:
        As :func:`show`.
    """
    answers = list(answers)
    found = [
        {
            "endpoint": answer.endpoint,
            "error": answer.error,
            "warnings": list(answer.warnings),
            **({} if answer.reply is None else jsonable(answer.reply)),
        }
        for answer in answers
    ]
    text = json.dumps({"servers": found})
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return int(not all(answer.well for answer in answers))


def watch(
    seconds: float,
    asked: Callable[[], Iterable[StatusAnswer]],
    show: Callable[[Iterable[StatusAnswer], Console], int],
    console: Console,
) -> int:
    """Shows the answers repeatedly, on a terminal in one place, until it is interrupted.

    Args:
        seconds: between two times.
        asked: asks the servers.
        show: prints their answers, as :func:`show` does.

    Returns:
        What ``show`` has returned last.
    """
    status = 0
    try:
        while True:
            answers = list(asked())  # a dead server takes seconds: what is shown stays until then
            console.clear()  # on a terminal only
            status = show(answers, console)
            time.sleep(seconds)
    except KeyboardInterrupt:
        return status


def ask(endpoint: str, variables: bool = False, access: Access = OPEN) -> StatusReply:
    """One server's status.

    Args:
        variables: ask for the bytes of each variable.
        access: what is proved to the server.

    Raises:
        PServerError: it does not answer within a few seconds.
    """
    client = ControlClient(endpoint, timeouts.CALL_SECONDS, access=access)
    try:
        return client.status(StatusRequest(variables=variables))
    finally:
        client.close()


def expiring(endpoint: str, access: Access) -> list[str]:
    """A warning of the end of the server's certificate; empty until it is near."""
    if access.keys is None:
        return []
    host, port = split_endpoint(endpoint)
    try:
        with socket.create_connection((host, port), timeouts.CALL_SECONDS) as connection:
            shown = keys.bearer_in(keys.ask(connection, access.keys, host))
    except OSError:  # it has answered a moment ago
        return []
    warning = shown.warning(datetime.now(UTC))
    return [warning] if warning else []


def cells(server: ServerView) -> tuple[str, ...]:
    """The cells of a server's row, behind its endpoint."""
    return (
        server.state,
        server.mode,
        f"{server.slices} slices, {size(server.bytes_held)}",
        str(server.version),
        f"{size(server.bytes_in)} / {size(server.bytes_out)}",
        ", ".join(server.transports),
        f"{server.uptime_seconds:.0f} s",
    )


def job_lines(state: JobState) -> Iterator[str]:
    """The lines of a job, below the servers."""
    if state.progress is not None:
        yield f"pass {state.progress.number}  {state.progress.text}"
    if state.headline:
        yield "   ".join(state.headline)
    yield from map(trainer_line, state.trainers)
    yield from map(table_line, state.tables)
    yield from (each.text for each in state.notices)


def server_lines(answers: Iterable[StatusAnswer]) -> Iterator[str]:
    """The lines of single servers, below those of the job: variables, warnings, errors."""
    errors = []
    for answer in answers:
        errors += [answer.error] if answer.error else []
        yield from (f"{answer.endpoint}: {warning}" for warning in answer.warnings)
        variables = {} if answer.reply is None else answer.reply.variables
        for name, each in sorted(
            variables.items(), key=lambda item: (-item[1].bytes_in - item[1].bytes_out, item[0])
        ):
            yield f"{answer.endpoint}: {name}: {size(each.bytes_in)} / {size(each.bytes_out)}"
    yield from errors


def failure_line(reply: StatusReply) -> str:
    """The error that ended a server's job, since when, and for how long its values are kept."""
    text = f"failed {reply.failed_seconds:.0f} s ago: {reply.failure}"
    if reply.kept_seconds:
        text += f"; kept from other jobs for another {reply.kept_seconds:.0f} s (`pserver save`)"
    return text


def trainer_line(trainer: TrainerView) -> str:
    """One trainer in one line."""
    text = f"trainer {trainer.number} {trainer.state}, step {trainer.step}"
    text += "".join(f", {each}" for each in trainer.transports)
    if trainer.state == "joined":
        text += f", silent for {trainer.silence:.1f} s"
    if trainer.kept_seconds:
        text += f", its place is kept for another {trainer.kept_seconds:.0f} s"
    if trainer.steps_per_second is not None:
        text += f", {trainer.steps_per_second:.3g} steps/s"
    if trainer.behind:
        text += f", slow: {trainer.compute_seconds:.3g} s of its own a step, "
        text += f"{trainer.behind:.1f} times the others'"
    # what it says of itself lags behind the step that is applied: two numbers, so a name for each
    return text + (f"; last reported: {trainer.activity}" if trainer.activity else "")


def table_line(table: TableView) -> str:
    """One table over all servers, with its counters, in one line."""
    counted = "".join(
        f", {count} {name}" for name, count in sorted(table.counters.items()) if count
    )
    rows = table.memory_rows + table.disk_rows
    return f"table {table.name}: {rows} rows, {size(table.bytes_held)}{counted}"
