"""The key with which a command asks a server: the one that the user names, or the one that
``pserver launch`` of the same user has left.
"""

from __future__ import annotations

from collections.abc import Mapping

from pserver.config import split_endpoint
from pserver.security import tokens
from pserver.security.access import Access
from pserver.transport.endpoint import is_here

VARIABLE, KEYS = "PSERVER_TOKEN_FILE", "PSERVER_KEYS"
ROLES = ("operator", "trainer")  # the first one with a key counts


def access_of(endpoint: str, environ: Mapping[str, str], keys: str | None = None) -> Access:
    """The access to the server of an endpoint.

    Args:
        endpoint: HOST:PORT.
        environ: the process's environment variables.
        keys: ``--keys``; None: what PSERVER_KEYS says.

    Raises:
        ValueError: the token file, or the folder of keys, cannot be read, or holds no key.
    """
    keys = keys or environ.get(KEYS)
    if (named := environ.get(VARIABLE)) is not None:  # an empty one: without a key
        return Access.of(named, keys, *ROLES)
    host, port = split_endpoint(endpoint)
    left = tokens.published(port, environ)
    token = str(left) if left is not None and is_here(host) else None
    return Access.of(token, keys, *ROLES)
