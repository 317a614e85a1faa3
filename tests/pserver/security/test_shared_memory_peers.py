"""Who is at the other end of a socket of shared memory: a process of this user, or of root."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys

import pytest

from pserver.errors import Unreachable
from pserver.transport import shm

SECONDS = 20.0
STRANGER = """
import array, os, socket, sys
os.setuid(65534)
name, greeting = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(chr(0) + name)
    ends = [os.memfd_create("segment"), socket.socketpair()[0].detach()]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", ends))]
    try:
        connection.sendmsg([greeting.encode()], rights)
        print(connection.recv(1))
    except OSError as error:
        print(type(error).__name__)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.processes
def test_another_users_process_is_turned_away_unheard(caplog: pytest.LogCaptureFixture) -> None:
    """Its descriptors are not taken."""
    listener = shm.listen(lambda stream: pytest.fail("another user's stream"))
    with caplog.at_level(logging.INFO):
        name = f"pserver-{listener.port}"
        command = [sys.executable, "-S", "-c", STRANGER, name, shm.GREETING.decode()]
        said = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=True
        ).stdout
    listener.close(1.0)

    assert said.strip() in ("b''", "ConnectionResetError", "BrokenPipeError")
    assert "expected a process of user 0, got one of user 65534" in caplog.text


def test_another_users_listener_is_given_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has taken the name of a server's socket gets no segment."""
    listener = shm.listen(lambda stream: None)
    given = []
    monkeypatch.setattr(shm.socket, "send_fds", lambda *given_: given.append(given_))
    monkeypatch.setattr(shm, "_check_peer", other_user)
    with pytest.raises(Unreachable, match="expected a process of user 0, got one of user 1"):
        shm.connect("127.0.0.1", listener.port, timeout_seconds=SECONDS)
    listener.close(1.0)

    assert given == []


def other_user(connection: socket.socket) -> int:
    raise OSError("expected a process of user 0, got one of user 1")
