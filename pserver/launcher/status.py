"""The output of ``pserver status``: the running servers, their contents, and their transports."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from pserver import timeouts
from pserver.config import split_endpoint
from pserver.control.control_client import ControlClient
from pserver.control.rpc_errors import about
from pserver.errors import PServerError, Refused
from pserver.security import keys
from pserver.security.access import OPEN, Access, always_open
from pserver.security.keys import Bearer
from pserver.telemetry.counts import count_lines
from pserver.wire_pb2 import (
    EpochStatus,
    ReloadStatus,
    SaveStatus,
    StatusReply,
    StatusRequest,
    TableStatus,
    TrainerStatus,
    WaitStatus,
)

COLUMNS = ("server", "state", "mode", "holds", "steps", "in / out", "transports", "up")


@dataclass(frozen=True, slots=True)
class StatusAnswer:
    """The outcome of asking one server.

    Attributes:
        reply: None: it did not answer, or refused to.
        error: the error of the server or its job; "" where there is none.
        warnings: of errors to come.
    """

    endpoint: str
    reply: StatusReply | None
    error: str = ""
    refused: bool = False
    warnings: Sequence[str] = ()

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


def show(answers: Iterable[StatusAnswer], console: Console) -> int:
    """Prints a row for each server, then a line for each trainer, each table, each variable (the
    most bytes first) and each error.

    Returns:
        0 if all of them answered, none has failed, and none waits for another one to come back;
        otherwise 1.
    """
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    lines, errors, well = [], [], True
    for answer in answers:
        well = well and answer.well
        errors += [answer.error] if answer.error else []
        if answer.reply is None:
            table.add_row(answer.endpoint, "refused" if answer.refused else "unreachable")
            continue
        table.add_row(answer.endpoint, *cells(answer.reply))
        lines += [f"{answer.endpoint}: {line}" for line in (*answer.warnings, *more(answer.reply))]
    console.print(table)
    for line in (*lines, *errors):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return int(not well)


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
            **({} if answer.reply is None else plain(answer.reply)),
        }
        for answer in answers
    ]
    text = json.dumps({"servers": found})
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return int(not all(answer.well for answer in answers))


def plain(message: Message) -> dict[str, Any]:
    """A message's fields as JSON has them, numbers as numbers; those that JSON does not have are
    "nan", "inf" and "-inf".

    Example:
        >>> plain(TrainerStatus(trainer_id=1, state="joined", step=7))["step"]
        7
    """
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return value if isinstance(value, str | int | float) else [_plain(each) for each in value]


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
            shown = Bearer.of_pem(keys.ask(connection, access.keys, host))
    except OSError:  # it has answered a moment ago
        return []
    warning = shown.warning(datetime.now(UTC))
    return [warning] if warning else []


def cells(reply: StatusReply) -> tuple[str, ...]:
    """The cells of a server's row, behind its endpoint."""
    return (
        reply.state,
        reply.mode,
        f"{reply.slices} slices, {size(reply.bytes_held)}",
        str(reply.version),
        f"{size(reply.bytes_in)} / {size(reply.bytes_out)}",
        ", ".join(reply.transports),
        f"{reply.uptime_seconds:.0f} s",
    )


def failure_line(reply: StatusReply) -> str:
    """The error that ended a server's job, since when, and for how long its values are kept."""
    text = f"failed {reply.failed_seconds:.0f} s ago: {reply.failure}"
    if reply.kept_seconds:
        text += f"; kept from other jobs for another {reply.kept_seconds:.0f} s (`pserver save`)"
    return text


def more(reply: StatusReply) -> Iterator[str]:
    """The lines of a server, below the table."""
    yield from map(trainer_line, reply.trainers)
    yield from map(wait_line, reply.waits)
    yield from map(table_line, reply.tables)
    if reply.HasField("save"):
        yield save_line(reply.save)
    if reply.away:
        yield f"waits for server {', '.join(map(str, reply.away))} to come back"
    if reply.HasField("reload"):
        yield reload_line(reply.reload)
    if reply.recording.failure:
        yield f"the job's log is not recorded any more: {reply.recording.failure}"
    yield from map(epoch_line, reply.epochs)
    yield from count_lines(reply.trainers)
    busiest = sorted(
        reply.variables.items(),
        key=lambda item: (-item[1].bytes_in - item[1].bytes_out, item[0]),
    )
    for name, each in busiest:
        yield f"{name}: {size(each.bytes_in)} / {size(each.bytes_out)}"


def trainer_line(trainer: TrainerStatus) -> str:
    """One trainer in one line, as one server sees it."""
    text = f"trainer {trainer.trainer_id} {trainer.state}, step {trainer.step}"
    text += f", {trainer.transport}" if trainer.transport else ""
    if trainer.state == "joined":
        text += f", silent for {trainer.silence_seconds:.1f} s"
    if trainer.kept_seconds:
        text += f", its place is kept for another {trainer.kept_seconds:.0f} s"
    if trainer.behind:
        text += f", slow: {trainer.compute_seconds:.3g} s of its own a step, "
        text += f"{trainer.behind:.1f} times the others'"
    # what it says of itself lags behind the step that is applied: two numbers, so a name for each
    return text + (f"; last reported: {trainer.activity}" if trainer.activity else "")


def wait_line(wait: WaitStatus) -> str:
    """A wait, with the awaited trainers and its seconds, in one line."""
    whom = ", ".join(map(str, wait.for_whom)) or "(none)"
    what = f"trainer {wait.trainer_id} waits at {wait.what} for trainer {whom}"
    return f"{what}, for {wait.seconds:.1f} s (wait {wait.number})"


def table_line(table: TableStatus) -> str:
    """One table's part on a server, with its counters, in one line."""
    counted = "".join(
        f", {count} {name}"
        for name, count in sorted(table.counters.items())
        if count and name != "rows"
    )
    return f"table {table.name}: {table.rows} rows, {size(table.bytes_held)}{counted}"


def epoch_line(epoch: EpochStatus) -> str:
    """The progress of an epoch's samples, in one line."""
    total = f"{epoch.samples} {epoch.unit}" if epoch.samples else f"{epoch.unit}, length unknown"
    text = f"epoch {epoch.number}{', over' if epoch.over else ''}: {total}, {epoch.decided} decided"
    text += f", {epoch.leased} leased, {epoch.skipped} skipped, {epoch.handed_back} handed back"
    return text + (f", {epoch.left_out} left out" if epoch.left_out else "")


def save_line(save: SaveStatus) -> str:
    """The last save in the background, in one line."""
    how = f"{size(save.bytes)} in {save.seconds:.1f} s, steps waited {save.pause_seconds:.3f} s"
    if save.failure:
        return f"a save has failed: {save.failure}"
    return f"saved to {save.file}: {how}" if save.done else f"saves to {save.file}: {how}"


def reload_line(reload: ReloadStatus) -> str:
    """The losses of a server that has come back, in one line."""
    each = ", ".join(f"trainer {t}: {n}" for t, n in sorted(reload.steps_by_trainer.items()))
    return (
        f"came back from {reload.file}: {reload.steps} decided steps are lost here ({each}), with "
        f"up to {reload.rows} changes of rows"
    )


def size(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
