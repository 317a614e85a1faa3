"""Keys of a cluster for tests: one authority a process, made once."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from pserver.security.key_folder import KeyFolder
from pserver.security.keys import Keys
from pserver.transport.registry import Transport
from pserver.transport.stream import Handler, Listener, Stream


@cache
def key_folder() -> Path:
    """Keys of host "a", and of the operator.  Whoever changes files copies them first."""
    path = Path(tempfile.mkdtemp(prefix="pserver-keys-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    KeyFolder.create(path).add("a")
    return path


@cache
def foreign_folder() -> Path:
    """The same, of another cluster."""
    path = Path(tempfile.mkdtemp(prefix="pserver-foreign-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    KeyFolder.create(path).add("a")
    return path


def keys_of(role: str, folder: Path | None = None) -> Keys:
    """The keys of a process of that role."""
    folder = folder or key_folder()
    return Keys(folder / ("operator" if role == "operator" else "a"), (role,))


class SecuredTransport:
    """A transport whose two ends have keys.

    Args:
        transport: one that has them: tcp, grpc.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def listen(self, handle: Handler, host: str = "127.0.0.1", port: int = 0) -> Listener:
        return self._transport.listen(handle, host, port, keys=keys_of("server"))  # type: ignore[call-arg]

    def connect(
        self, host: str, port: int, *, timeout_seconds: float, keys: Keys | None = None
    ) -> Stream:
        return self._transport.connect(
            host, port, timeout_seconds=timeout_seconds, keys=keys or keys_of("trainer")
        )
