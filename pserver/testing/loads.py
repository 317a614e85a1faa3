"""Loads of saves, server by server, as a checkpoint's reader asks for them."""

from __future__ import annotations

from pserver.client.client import Client
from pserver.wire_pb2 import LoadRequest


def load(client: Client, path: str, seconds: float) -> None:
    """Has a server read what servers of its place have written.

    Args:
        path: below the server's directory.
        seconds: for its answer.

    Raises:
        PServerError: it cannot.
    """
    client._control.load(LoadRequest(session=client._reply.session, path=path), seconds)
