"""A unix socket that only this process can connect to, for a library that listens by itself.

A socket in the abstract namespace could be reached by every process of the host, a file in a folder
by those of its user, and would stay behind when the process is killed.  So the library binds one in
a folder of its own, and where the system can name a file by a descriptor (Linux: ``O_PATH`` and
``/proc/self/fd``) file and folder go at once: what is left is the descriptor.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from pathlib import Path


class PrivateSocket:
    """The place where a server of this process listens.

    The server binds :attr:`path`; then :meth:`bound` is called, then :meth:`connect` any number of
    times.

    Attributes:
        path: of the socket to bind.
    """

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="pserver-")  # of mode 0700
        self.path = str(Path(self._folder) / "grpc")
        self._descriptor = -1
        self._connected = 0

    def bound(self) -> None:
        """The server listens.

        Raises:
            OSError: it has bound no socket there.
        """
        if not hasattr(os, "O_PATH"):
            return
        self._descriptor = os.open(self.path, os.O_PATH | os.O_CLOEXEC)
        shutil.rmtree(self._folder)

    def connect(self) -> tuple[socket.socket, str]:
        """A connection to the server, not blocking, and the name that gRPC gives to its peer.

        Raises:
            OSError: nobody listens.
        """
        connection = socket.socket(socket.AF_UNIX)
        try:
            name = self._named(connection)
            connection.setblocking(False)
            connection.connect(
                self.path if self._descriptor < 0 else f"/proc/self/fd/{self._descriptor}"
            )
        except BaseException:
            connection.close()
            raise
        return connection, name

    def _named(self, connection: socket.socket) -> str:
        """Gives this end a name, so that the server can tell its connections apart."""
        if self._descriptor < 0:
            self._connected += 1
            own = Path(self._folder) / str(self._connected)
            connection.bind(str(own))
            own.unlink()
            return f"unix:{own}"
        connection.bind("")  # Linux chooses one
        return f"unix-abstract:{connection.getsockname()[1:].decode()}"

    def close(self) -> None:
        """Nobody connects from now on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        shutil.rmtree(self._folder, ignore_errors=True)
