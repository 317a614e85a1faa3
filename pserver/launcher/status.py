"""What ``pserver status`` shows: which servers are up, what they hold, and their transports."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from rich.console import Console
from rich.table import Table

from pserver.config import split_endpoint
from pserver.control.control_client import ControlClient
from pserver.control.rpc_errors import about
from pserver.errors import PServerError, Refused
from pserver.security import tls
from pserver.security.access import OPEN, Access, always_open
from pserver.security.certificates import Bearer
from pserver.wire_pb2 import StatusReply, StatusRequest, TableStatus, TrainerStatus

COLUMNS = ("server", "state", "mode", "holds", "steps", "in / out", "transports", "up")
ASK_SECONDS = 5.0


def show(
    endpoints: Sequence[str],
    console: Console,
    variables: bool = False,
    access_of: Callable[[str], Access] = always_open,
) -> int:
    """Prints a row for each server, then a line for each trainer, each table and each error.

    Args:
        endpoints: HOST:PORT of each server.
        console: where to print.
        variables: print a line for each variable, too: its bytes in and out, the most bytes first.
        access_of: by endpoint, what is proved to the server.

    Returns:
        0 if all of them answered and none has failed, otherwise 1.
    """
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column, no_wrap=True)
    lines, errors = [], []
    for endpoint in endpoints:
        try:
            access = access_of(endpoint)
            reply = ask(endpoint, variables, access)
            lines += [f"{endpoint}: {text}" for text in expiring(endpoint, access)]
        except PServerError as error:
            said_no = isinstance(error, Refused)
            table.add_row(endpoint, "refused" if said_no else "unreachable")
            errors.append(str(error))  # which names the endpoint
            continue
        table.add_row(endpoint, *cells(reply))
        lines += [f"{endpoint}: {trainer_line(trainer)}" for trainer in reply.trainers]
        lines += [f"{endpoint}: {table_line(part)}" for part in reply.tables]
        if refused := reply.steps_refused_nonfinite:
            lines.append(f"{endpoint}: {refused} steps refused because of a NaN or an infinity")
        busiest = sorted(
            reply.variables.items(),
            key=lambda item: (-item[1].bytes_in - item[1].bytes_out, item[0]),
        )
        lines += [
            f"{endpoint}: {name}: {size(b.bytes_in)} / {size(b.bytes_out)}" for name, b in busiest
        ]
        if reply.failure or reply.state == "failed":
            errors.append(about(endpoint, failure_line(reply)))
    console.print(table)
    for line in (*lines, *errors):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 1 if errors else 0


def ask(endpoint: str, variables: bool = False, access: Access = OPEN) -> StatusReply:
    """One server's status.

    Args:
        variables: ask for the bytes of each variable.
        access: what is proved to the server.

    Raises:
        PServerError: it does not answer within a few seconds.
    """
    client = ControlClient(endpoint, ASK_SECONDS, access=access)
    try:
        return client.status(StatusRequest(variables=variables))
    finally:
        client.close()


def expiring(endpoint: str, access: Access) -> list[str]:
    """What is to be said of the end of the server's certificate: nothing until it is near."""
    if access.keys is None:
        return []
    host, port = split_endpoint(endpoint)
    try:
        with socket.create_connection((host, port), ASK_SECONDS) as connection:
            shown = Bearer.of_pem(tls.ask(connection, access.keys, host))
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
    """What has ended a server's job, since when, and for how long it keeps what it holds."""
    text = f"failed {reply.failed_seconds:.0f} s ago: {reply.failure}"
    if reply.kept_seconds:
        text += f"; kept from other jobs for another {reply.kept_seconds:.0f} s (`pserver save`)"
    return text


def trainer_line(trainer: TrainerStatus) -> str:
    """One trainer in one line, as one server sees it."""
    text = f"trainer {trainer.trainer_id} {trainer.state}, step {trainer.step}"
    for more in (trainer.transport, trainer.activity):
        text += f", {more}" if more else ""
    return text + (
        f", silent for {trainer.silence_seconds:.1f} s" if trainer.state == "joined" else ""
    )


def table_line(table: TableStatus) -> str:
    """One table's part on a server, with its counters, in one line."""
    counted = "".join(
        f", {count} {name}"
        for name, count in sorted(table.counters.items())
        if count and name != "rows"
    )
    return f"table {table.name}: {table.rows} rows, {size(table.bytes_held)}{counted}"


def size(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
