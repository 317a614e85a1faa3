"""gRPC's channels and credentials, with a process's keys or without."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import grpc

from pserver.errors import Unreachable, Untrusted
from pserver.security import keys as tls
from pserver.security.bearer import Bearer
from pserver.security.keys import Keys
from pserver.transport.endpoint import reach, reason_of, spell

Options = Sequence[tuple[str, Any]]


def open_channel(
    host: str, port: int, options: Options, timeout_seconds: float, keys: Keys | None
) -> grpc.Channel:
    """A channel to the address that the host's name has now, where a server has answered.

    See [Note: asked before gRPC] in ``pserver/security/keys.py``.

    Args:
        keys: this process's; None: without TLS.

    Raises:
        Unreachable: no address of the host accepts a connection within the timeout.
        Untrusted: the process there is not a server of ours, or does not take our certificate.
    """
    options = [*options, ("grpc.default_authority", spell(host, port))]
    if keys is None:
        address = reach(host, port, timeout_seconds)
        return grpc.insecure_channel(spell(address, port), options=options)
    try:
        with socket.create_connection((host, port), timeout=timeout_seconds) as connection:
            address = str(connection.getpeername()[0])
            certificate = tls.ask(connection, keys, host)
    except Untrusted as error:
        raise Untrusted(f"{spell(host, port)}: {error}") from error
    except OSError as error:
        raise Unreachable(f"{spell(host, port)}: {reason_of(error, timeout_seconds)}") from error
    credentials = grpc.ssl_channel_credentials(certificate, *keys.pair)
    options = [*options, ("grpc.ssl_target_name_override", host)]
    return grpc.secure_channel(spell(address, port), credentials, options=options)


def listen_on(server: grpc.Server, address: str, keys: Keys | None) -> int:
    """Makes a gRPC server listen; with keys every client shows a certificate of the authority.

    Returns:
        The port.

    Raises:
        RuntimeError: it cannot.
    """
    if keys is None:
        return int(server.add_insecure_port(address))
    used = _configured(keys)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        """The credentials for the next handshake; None where nothing has changed."""
        nonlocal used
        present = _configured(keys)
        if present == used:
            return None
        used = present
        return _configuration(used)

    credentials = grpc.dynamic_ssl_server_credentials(
        _configuration(used), changed, require_client_authentication=True
    )
    return int(server.add_secure_port(address, credentials))


def bearer_of(context: grpc.ServicerContext) -> Bearer | None:
    """The bearer of the caller's certificate; None without TLS."""
    certificates = context.auth_context().get("x509_pem_cert")
    return _bearer(certificates[0]) if certificates else None


@lru_cache(maxsize=1024)
def _bearer(pem: bytes) -> Bearer:
    return tls.bearer_in(pem)


def _configured(keys: Keys) -> tuple[bytes, bytes, bytes]:
    return (*keys.pair, keys.authority)


def _configuration(used: tuple[bytes, bytes, bytes]) -> grpc.ServerCertificateConfiguration:
    key, certificate, authority = used
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)
