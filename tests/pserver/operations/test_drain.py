"""``pserver drain`` ends servers from anywhere, and says what it could not end."""

from __future__ import annotations

import io

from rich.console import Console

from pserver.config import ServerConfig
from pserver.operations.save import drain
from pserver.service.server import Server


def test_a_drained_server_ends_and_an_absent_one_is_named() -> None:
    """Each server has its line; the exit status is 1 where one of them is not there."""
    with Server(ServerConfig()) as gone:
        absent = gone.endpoint
    shown = io.StringIO()
    with Server(ServerConfig()) as server:
        status = drain([server.endpoint, absent], Console(file=shown, width=200))

        assert server.draining
    drained, missing = shown.getvalue().splitlines()
    assert status == 1
    assert drained == f"{server.endpoint}: drains, and then ends"
    assert missing.startswith("not drained: ") and absent in missing
