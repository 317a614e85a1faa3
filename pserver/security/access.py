"""The credentials of a process, and those that it asks for: none, a job's secret, keys, or both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any

from pserver.errors import NotAllowed, Refused, Untrusted
from pserver.security import tokens
from pserver.security.bearer import CLIENTS, ROLES, Bearer
from pserver.security.keys import Keys
from pserver.security.tokens import (
    NONCE_BYTES,
    Challenge,
    Nonces,
    Proof,
    Role,
    Secret,
    client_code,
    server_code,
)

# ---- access ----


@dataclass(frozen=True, slots=True)
class Access:
    """The credentials that a server asks for, and that a client gives and asks for.

    Example::

        access = Access.of_file("job.token")  # or OPEN

    Attributes:
        secret: None: none is asked for, and none proved.
        keys: of this process, for TLS with certificates of both ends; None: without TLS.
    """

    secret: Secret | None = None
    keys: Keys | None = None

    @classmethod
    def of(cls, token_file: str | None, keys: str | None, *roles: str) -> Access:
        """With the secret of a token file, and the keys of a folder, where they are given.

        Args:
            roles: this process's; the first one with a key in the folder counts.

        Raises:
            ValueError: a file cannot be read, or holds something else; one sentence.
        """
        if not (token_file or keys):
            return OPEN
        found = None
        if keys:
            try:
                found = Keys(keys, roles)
            except ValueError as error:
                raise ValueError(f"keys: {error}") from error
        return cls(tokens.read(token_file) if token_file else None, found)

    @classmethod
    def of_file(cls, path: str | None) -> Access:
        """With the secret of a token file; open where there is no path.

        Raises:
            ValueError: the file cannot be read, or holds none; one sentence.
        """
        return cls.of(path, None)

    @property
    def is_open(self) -> bool:
        """Whether no credentials are asked for, and none proved."""
        return self.secret is None and self.keys is None

    @property
    def role(self) -> Role:
        """The rights of the secret's holder at a server of the job: all, where there is none."""
        return Role.OPERATOR if self.secret is None else self.secret.role


OPEN = Access()


def always_open(endpoint: str) -> Access:
    """The access of those who hold no secret, whatever the endpoint."""
    return OPEN


# ---- guard ----
#
# The end that answers: whom a server lets in, and what they may ask.


NEEDED = (
    "this server asks for its job's key: set PSERVER_TOKEN_FILE to the job's token file, or, for "
    "the commands of `pserver`, be the user who has started the job"
)


class Guard:
    """A server's admission of callers.  Any thread may call it.

    Args:
        access: the server's; its secret is an operator's.
        port: the server's control port, which proofs name.
        clock: seconds that never go back.

    Raises:
        ValueError: the secret is a trainer's: with it operators cannot be distinguished.
    """

    def __init__(
        self, access: Access, port: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = access.keys
        self._secrets: dict[str, Secret] = {}
        if access.secret is not None:
            if access.role is not Role.OPERATOR:
                raise ValueError(
                    f"a server needs the operator's token file of its job, got a "
                    f"{access.role.word}'s"
                )
            roles = Role.TRAINER, Role.OPERATOR
            self._secrets = {role.word: access.secret.of(role) for role in roles}
        self._port, self._nonces = port, Nonces(clock)

    @property
    def is_open(self) -> bool:
        """Whether every caller may make every call."""
        return not self._secrets and self._keys is None

    def answer(self, role: str, client_nonce: bytes) -> tuple[bytes, bytes]:
        """A challenge, and this server's own proof; both empty where it has no secret.

        Args:
            role: the word of the role that the client has a key of.
            client_nonce: 32 bytes.

        Raises:
            Refused: there is no such role, or the nonce has another size.
        """
        if not self._secrets:
            return b"", b""
        nonce = self._nonces.make()
        challenge, secret = self._challenge(role, client_nonce, nonce)
        return nonce, server_code(secret, challenge)

    def admit(
        self,
        name: str,
        request: bytes,
        proof: Proof | None,
        bearer: Bearer | None = None,
        here: bool = False,
        of_peer: bool = False,
    ) -> Role:
        """The role of a request's sender: where both are asked for, the lesser of the roles of the
        secret and the certificate.

        Args:
            name: of the call, or "HELLO".
            request: its bytes.
            proof: that came with it, if any.
            bearer: of the connection's certificate, under TLS.
            here: it came over shared memory, from a process of this user, which has no certificate.
            of_peer: the request is a server's to another: a server's certificate counts as an
                operator's.

        Raises:
            NotAllowed: there is no proof, it is wrong, or it has been shown before.
            Untrusted: there is no certificate, or it is not valid any more.
            Stale: its challenge has expired.
        """
        role = self._certified(bearer, here, ROLES if of_peer else CLIENTS)
        return min(role, self._proved(name, request, proof))

    def _certified(self, bearer: Bearer | None, here: bool, roles: tuple[str, ...]) -> Role:
        if self._keys is None or (here and bearer is None):
            return Role.OPERATOR
        if bearer is None:
            raise Untrusted("expected a certificate, got none (--keys, PSERVER_KEYS)")
        return min(Role.OPERATOR, Role[self._keys.check(bearer, *roles).role.upper()])

    def _proved(self, name: str, request: bytes, proof: Proof | None) -> Role:
        if not self._secrets:
            return Role.OPERATOR
        if proof is None:
            raise NotAllowed(NEEDED)
        challenge, secret = self._challenge(proof.role, proof.client_nonce, proof.server_nonce)
        self._nonces.check(proof.server_nonce)
        if not compare_digest(client_code(secret, challenge, name, request), proof.code):
            raise NotAllowed(f"the proof that came with {name} is wrong: expected this job's key")
        self._nonces.use(proof.server_nonce)
        return secret.role

    def _challenge(self, role: str, client: bytes, server: bytes) -> tuple[Challenge, Secret]:
        if role not in self._secrets or len(client) != NONCE_BYTES or len(server) != NONCE_BYTES:
            raise Refused(
                f"expected a key of {' or '.join(self._secrets)} and nonces of {NONCE_BYTES} "
                "bytes, got others"
            )
        secret = self._secrets[role]
        return Challenge(secret.role, self._port, client, server), secret


def check(role: Role, needed: Role, what: str) -> None:
    """Returns if a role is enough.

    Raises:
        NotAllowed: it is not.
    """
    if role < needed:
        has = "no key" if role is Role.NOBODY else f"the {role.word}'s"
        raise NotAllowed(f"{what} needs the {needed.word}'s key, got {has}")


OPEN_GUARD = Guard(OPEN, 0)


# ---- permissions ----
#
# The one table of rights: every call and every kind of frame of wire.proto, and the role
# that it needs.
#
# A call or a kind without a row is refused to everybody; a test holds the table against wire.proto.


CALLS: Mapping[str, Role] = {
    "Challenge": Role.NOBODY,
    "Join": Role.TRAINER,
    "Install": Role.TRAINER,
    "Heartbeat": Role.TRAINER,
    "Announce": Role.TRAINER,
    "Finish": Role.TRAINER,
    "Leave": Role.TRAINER,
    "Meet": Role.TRAINER,
    "Save": Role.TRAINER,
    "Load": Role.TRAINER,
    "Shrink": Role.TRAINER,
    "Status": Role.TRAINER,
    "Drain": Role.OPERATOR,
    "Observe": Role.OPERATOR,
    "Reset": Role.OPERATOR,
    "Trace": Role.TRAINER,
    "Follow": Role.OPERATOR,  # or a server's certificate, see PEERS
    "Lease": Role.TRAINER,
    "Exchange": Role.NOBODY,  # its frames are in the table below
}

# Calls of trainers that need an operator's key where the request says more.
OPERATOR_WHERE: Mapping[str, Callable[[Any], bool]] = {
    # a path of the caller's choice; without one the server's own directory is meant, and a save
    # in the background is a part of the trainers' checkpoint, below what the operator allows
    "Save": lambda request: bool(request.path) and not request.background,
    "Load": lambda request: bool(request.path),
    # the end of a process that does not speak for itself
    "Announce": lambda request: bool(request.failure) and not request.incarnation,
}

# What servers of a job ask each other.  Each holds the operator's secret.  A server's certificate
# counts as an operator's for these calls and for the HELLO of a link's stream, for nothing else.
PEERS = frozenset({"Follow"})

FRAMES: Mapping[str, Role] = {
    "UNKNOWN": Role.SERVER,
    "HELLO": Role.NOBODY,  # with it a client proves its role
    "VALUE": Role.TRAINER,
    "GRADIENT": Role.TRAINER,
    "COMMIT": Role.TRAINER,
    "NORMS": Role.SERVER,
    "SCALE": Role.TRAINER,
    "PULL": Role.TRAINER,
    "DONE": Role.SERVER,
    "FAILURE": Role.SERVER,
    "DRAIN": Role.SERVER,
    "BYE": Role.TRAINER,
    "PROBE": Role.TRAINER,
    "ROWS": Role.TRAINER,
    "LOOKUP": Role.TRAINER,
    "REFRESH": Role.TRAINER,
    "SCAN": Role.TRAINER,
    "ASSIGN": Role.TRAINER,
    "CHECKSUM": Role.TRAINER,
    "STAGED": Role.OPERATOR,
    "RECORD": Role.SERVER,
}


def role_for_call(name: str, request: Any) -> Role:
    """The role that a call needs.

    Args:
        name: of the call: "Join".
        request: its message.
    """
    more = OPERATOR_WHERE.get(name)
    if more is not None and more(request):
        return Role.OPERATOR
    return CALLS.get(name, Role.SERVER)


def is_logged(name: str, request: Any) -> bool:
    """Whether a call is an operator's, and is logged; an observer's only when it begins, as it is
    repeated each second.
    """
    begins = name != "Observe" or not request.session
    return begins and role_for_call(name, request) is Role.OPERATOR


def asks_for(name: str, request: Any) -> str:
    """Names the request that a caller repeats until it is answered: it is logged once.  "": each
    call of this name is a new one.
    """
    return f"server {request.server_index}, {request.incarnation}" if name == "Follow" else ""


def role_for_frame(kind: str) -> Role:
    """The role that a frame of this kind needs: "GRADIENT"."""
    return FRAMES.get(kind, Role.SERVER)


# ---- ports ----
#
# Every port that the system opens: the table of docs/ports.md.
#
# A test holds it against the sockets of running jobs.


@dataclass(frozen=True, slots=True)
class Port:
    """One port, or a kind of them.

    Attributes:
        name: in these pages.
        process: the one that opens it.
        number: its port number.
        address: the host's address at which it listens.
        carries: the data that travel there.
        protected: its protection, where keys or a secret are used.
    """

    name: str
    process: str
    number: str
    address: str
    carries: str
    protected: str


PORTS = (
    Port(
        "control",
        "server",
        "`--endpoint`; 0 is any free one",
        "`--endpoint`'s; 127.0.0.1 unless given",
        "control calls and health checks; with transport `grpc` tensors and links of servers too; "
        "checksums without TLS",
        "TLS with keys; a proof of the job's secret",
    ),
    Port(
        "tensors",
        "server",
        "`--data-port`; any free one unless given",
        "`--endpoint`'s",
        "tensors over transport `tcp`; links between the servers of a job; checksums for other "
        "hosts without TLS",
        "TLS 1.3 with keys; a proof of the job's secret",
    ),
    Port(
        "shared memory",
        "server",
        "none: an abstract unix socket `@pserver-NUMBER`",
        "this host (this network namespace)",
        "tensors over transport `shm`; links between the servers of a job; no checksums",
        "the user id of the other process; a proof of the job's secret",
    ),
    Port(
        "metrics",
        "server or trainer",
        "`--metrics`, `PSERVER_METRICS`; none unless given",
        "`--endpoint`'s, a trainer's 127.0.0.1, unless given",
        "counts, durations, names of tables; no values",
        "TLS 1.3 with keys; on loopback nothing; beyond it otherwise only with `--insecure`",
    ),
    Port(
        "web",
        "`pserver web`, `pserver launch --web`",
        "`--port`, `--web`; any free one unless given",
        "127.0.0.1, unless `--host` is given",
        "a page for people: names, counts, the script's own numbers, lines of logs; no tensors",
        "a token in the address; beyond this host TLS 1.3 with keys, or only with `--insecure`",
    ),
    Port(
        "rendezvous",
        "trainer 0 of trainers that exchange tensors among themselves; torchrun's agent",
        "`MASTER_PORT`, a program's first endpoint, or any free one",
        "`MASTER_ADDR`'s",
        "the processes, and what each runs",
        "nothing: beyond loopback only with `--insecure-collective`",
    ),
    Port(
        "gloo",
        "each of these trainers",
        "any free ones",
        "of `GLOO_SOCKET_IFNAME`, or of the host's name",
        "tensors on CPUs",
        "nothing: beyond loopback only with `--insecure-collective`",
    ),
    Port(
        "NCCL",
        "each of these trainers, on GPUs",
        "any free ones",
        "of `NCCL_SOCKET_IFNAME`",
        "tensors on GPUs",
        "nothing: beyond loopback only with `--insecure-collective`",
    ),
    Port(
        "enrolment",
        "`pserver keys enrol`",
        "`--listen`; any free one unless given",
        "`--listen`'s; this host's name unless given",
        "one code, and the certificates for it",
        "TLS 1.3 with the certificate that the code names; ends when the code has been used",
    ),
)
