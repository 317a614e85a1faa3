"""The key with which a command asks a server: the one that the user names, or the one that
``pserver launch`` of the same user has left.
"""

from __future__ import annotations

from collections.abc import Mapping

from pserver.config import split_endpoint
from pserver.security import token_files
from pserver.security.access import Access
from pserver.transport.endpoint import is_here

VARIABLE = "PSERVER_TOKEN_FILE"


def access_of(endpoint: str, environ: Mapping[str, str]) -> Access:
    """The access to the server of an endpoint.

    Args:
        endpoint: HOST:PORT.
        environ: the process's environment variables.

    Raises:
        ValueError: the token file cannot be read, or holds no key.
    """
    if named := environ.get(VARIABLE):
        return Access.of_file(named)
    host, port = split_endpoint(endpoint)
    left = token_files.published(port, environ)
    return Access.of_file(str(left) if left is not None and is_here(host) else None)
