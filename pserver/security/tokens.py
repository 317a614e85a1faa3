"""A job's secret: its files, and the proof of both ends of a connection that they know it.

[Note: what the port is for]  All servers of a job have one secret.  A stranger who takes the port
of a server that is gone could pass the client's nonce on to a live one, and its answer back.  The
live server's code is over its own port, which is not the one that the client has dialled.

[Note: challenges that nobody keeps]  A stranger may ask for any number of challenges, so the server
keeps none of them.  A challenge has its time of expiry, and a code over that, made with a key that
never leaves this server.  Only used challenges are kept, until they expire: only a holder of the
job's secret can add one, and their number is bounded.

[Note: files of a launch that was killed]  ``launch`` removes its files when it ends.  As long as it
runs it holds locks (flock) on its directory and on each PORT.token, which the system releases
however it ends.  A file that no process holds belongs to no running job: commands ignore it, and
the next launch removes it.
"""

from __future__ import annotations

import enum
import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import select
import shutil
import stat
import struct
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path

from pserver.errors import NotAllowed, Refused
from transpiler.files.named_errors import naming

# ---- role ----
#
# What the holder of a key may do.


class Role(enum.IntEnum):
    """The rights of a caller; each role includes those before it.

    Attributes:
        NOBODY: holds no key.
        TRAINER: is a trainer of a job.
        OPERATOR: also ends a job, reads it from outside, and names files.
        SERVER: for frames that only servers send; no client has it.
    """

    NOBODY = 0
    TRAINER = 1
    OPERATOR = 2
    SERVER = 3

    @property
    def word(self) -> str:
        """As token files, messages and the wire spell it: "trainer"."""
        return self.name.lower()


# ---- secret ----
#
# A job's secret: 32 random bytes, and the trainers' key that is made of them.


SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Secret:
    """The key of one role in one job.

    The trainers' key is derived from the operator's, and reveals nothing about it.  So servers,
    which have the operator's, know both.  Neither ``repr`` nor ``str`` shows the bytes.

    Attributes:
        role: what its holder may do.
        key: the secret bytes.
    """

    role: Role
    key: bytes = field(repr=False)

    @classmethod
    def make(cls) -> Secret:
        """A new operator's secret."""
        return cls(Role.OPERATOR, secrets.token_bytes(SECRET_BYTES))

    @classmethod
    def parse(cls, text: str) -> Secret:
        """Reads a token file: ``operator:HEX``, or ``trainer:HEX``.

        Raises:
            ValueError: it holds something else; the message does not repeat it.
        """
        word, _, digits = text.strip().partition(":")
        roles = {role.word: role for role in (Role.OPERATOR, Role.TRAINER)}
        try:
            key = bytes.fromhex(digits)
        except ValueError:
            key = b""
        if word not in roles or len(key) != SECRET_BYTES:
            raise ValueError(
                f"expected operator: or trainer: and {2 * SECRET_BYTES} hexadecimal digits, got "
                f"{len(text)} other characters"
            )
        return cls(roles[word], key)

    @property
    def text(self) -> str:
        """As a token file holds it."""
        return f"{self.role.word}:{self.key.hex()}"

    def of(self, role: Role) -> Secret:
        """The key of a role, where this one gives it.

        Raises:
            ValueError: a trainer's key does not give an operator's.
        """
        if role is self.role:
            return self
        if self.role is Role.OPERATOR and role is Role.TRAINER:
            made = hmac.new(self.key, b"pserver trainer", hashlib.sha256).digest()
            return Secret(Role.TRAINER, made)
        raise ValueError(f"expected an operator's key, got a {self.role.word}'s")


# ---- proof ----
#
# What is proved: that one holds a job's secret, for one call, here and now.
#
# A code is HMAC-SHA256, with the key of the role that is named, over these parts, each behind its
# length (four bytes, little-endian)::
#
#   "pserver 1"                 the protocol
#   "server" or "client"        who proves
#   "trainer" or "operator"     which key
#   "6174"                      the server's control port
#   32 bytes                    the client's nonce
#   32 bytes                    the server's nonce
#   "Join", "HELLO", ...        client: what is asked; server: nothing
#   32 bytes                    client: SHA-256 of the request; server: nothing


PROTOCOL = b"pserver 1"
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Challenge:
    """The message that both codes of one exchange authenticate.

    Attributes:
        role: of the key for the proof.
        port: the server's control port.
        client_nonce, server_nonce: 32 bytes each.
    """

    role: Role
    port: int
    client_nonce: bytes
    server_nonce: bytes


@dataclass(frozen=True, slots=True)
class Proof:
    """A client's proof with a call, or with HELLO.

    Attributes:
        role: the word of the key's role.
        client_nonce, server_nonce: of the challenge.
        code: over all of it.
    """

    role: str
    client_nonce: bytes
    server_nonce: bytes
    code: bytes


def server_code(secret: Secret, challenge: Challenge) -> bytes:
    """The code that proves to a client that the server holds the job's secret.

    Args:
        secret: of the challenge's role.
    """
    return _code(secret, b"server", challenge, b"", b"")


def client_code(secret: Secret, challenge: Challenge, name: str, request: bytes) -> bytes:
    """The code that proves to a server that a request comes from a holder of the role's key.

    Args:
        secret: of the challenge's role.
        name: of the call, or "HELLO".
        request: its bytes on the wire; of HELLO what :func:`hello_bytes` makes.
    """
    digest = hashlib.sha256(request).digest()
    return _code(secret, b"client", challenge, name.encode(), digest)


def hello_bytes(session: str, trainer_id: int, lane: int, stream: int, tables: bool) -> bytes:
    """The authenticated bytes of HELLO: its fields, as text, with a line end behind each."""
    fields = session, trainer_id, lane, stream, int(tables)
    return "".join(f"{field}\n" for field in fields).encode()


def _code(secret: Secret, end: bytes, challenge: Challenge, name: bytes, digest: bytes) -> bytes:
    parts = (
        PROTOCOL,
        end,
        challenge.role.word.encode(),
        str(challenge.port).encode(),
        challenge.client_nonce,
        challenge.server_nonce,
        name,
        digest,
    )
    said = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return hmac.new(secret.key, said, hashlib.sha256).digest()


# ---- call proof ----
#
# A proof as the metadata of a control call.


ROLE = "pserver-role"
CLIENT_NONCE, SERVER_NONCE = "pserver-client-nonce-bin", "pserver-server-nonce-bin"
CODE = "pserver-proof-bin"

Metadata = tuple[tuple[str, str | bytes], ...]


def to_metadata(proof: Proof) -> Metadata:
    """The metadata beside the call's request."""
    return (
        (ROLE, proof.role),
        (CLIENT_NONCE, proof.client_nonce),
        (SERVER_NONCE, proof.server_nonce),
        (CODE, proof.code),
    )


def from_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> Proof | None:
    """The proof that came with a call; None where none did.

    Raises:
        Refused: a part of it is missing.
    """
    found = {
        key: value for key, value in metadata if key in (ROLE, CLIENT_NONCE, SERVER_NONCE, CODE)
    }
    if not found:
        return None
    role = found.get(ROLE)
    nonces_and_code = [found.get(key) for key in (CLIENT_NONCE, SERVER_NONCE, CODE)]
    parts = [each for each in nonces_and_code if isinstance(each, bytes)]
    if not isinstance(role, str) or len(parts) != len(nonces_and_code):
        raise Refused("expected a whole proof in the call's metadata, got a part of one")
    return Proof(role, *parts)


# ---- nonces ----
#
# A server's challenges: each is used once, within a short time.


NONCE_BYTES = 32
LASTING_SECONDS = 30.0  # from a challenge to the call that answers it
MOST_USED = 2**17  # calls that may be answered in that time
_RANDOM_BYTES, _CODE_BYTES = 8, 16
_BEGINNING = struct.Struct(f"<d{_RANDOM_BYTES}s")


class Stale(Exception):
    """A challenge has expired, or is another server's: the client asks for another."""


class Nonces:
    """Makes challenges and takes them back.  Any thread may call it.

    See [Note: challenges that nobody keeps].

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._key = secrets.token_bytes(NONCE_BYTES)
        self._lock = threading.Lock()  # guards the one below
        self._used: OrderedDict[bytes, float] = OrderedDict()  # until when it would have lasted

    def make(self) -> bytes:
        """A new challenge."""
        end = self._clock() + LASTING_SECONDS
        beginning = _BEGINNING.pack(end, secrets.token_bytes(_RANDOM_BYTES))
        return beginning + self._code(beginning)

    def check(self, nonce: bytes) -> None:
        """Returns if the challenge is this server's own and has not expired.

        Raises:
            Stale: it is not, or it has.
        """
        beginning, code = nonce[: _BEGINNING.size], nonce[_BEGINNING.size :]
        if not hmac.compare_digest(self._code(beginning), code):
            raise Stale("this server did not issue the challenge: ask for another")
        if _BEGINNING.unpack(beginning)[0] < self._clock():
            raise Stale("the challenge has expired: ask for another")

    def use(self, nonce: bytes) -> None:
        """Uses up a challenge that has been checked, and answered well.

        Raises:
            NotAllowed: it was used before, or too many calls were made.
        """
        now = self._clock()
        with self._lock:
            while self._used and next(iter(self._used.values())) < now:
                self._used.popitem(last=False)
            if nonce in self._used:
                raise NotAllowed("expected a new challenge, got one that was used before")
            if len(self._used) >= MOST_USED:
                raise NotAllowed(
                    f"expected at most {MOST_USED} calls in {LASTING_SECONDS:g} s, got more"
                )
            self._used[nonce] = now + LASTING_SECONDS

    def _code(self, beginning: bytes) -> bytes:
        return hmac.new(self._key, beginning, hashlib.sha256).digest()[:_CODE_BYTES]


# ---- question ----
#
# The end that asks: it sees the server's proof before it says anything.


class ProofRequest:
    """One call, or one HELLO, to a server that must prove itself first.

    Args:
        secret: of the client's role.
        port: the server's control port.
        server: its name, for messages.

    Attributes:
        nonce: of the question; it reveals nothing.
    """

    def __init__(self, secret: Secret, port: int, server: str) -> None:
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._secret, self._port, self._server = secret, port, server
        self._challenge: Challenge | None = None

    @property
    def role(self) -> str:
        """The word of the role whose key is to be proved."""
        return self._secret.role.word

    def answered(self, nonce: bytes, code: bytes) -> None:
        """Takes the server's answer.

        Args:
            nonce, code: the server's; empty at an open one.

        Raises:
            NotAllowed: the server does not hold the secret, or has none.
        """
        if not nonce and not code:
            raise NotAllowed(
                f"{self._server} is open and asks for no key, but this job has a secret: expected "
                "a server of this job (PSERVER_TOKEN_FILE, or what `pserver launch` has left, "
                "belongs to another one)"
            )
        challenge = Challenge(self._secret.role, self._port, self.nonce, nonce)
        if not compare_digest(server_code(self._secret, challenge), code):
            raise NotAllowed(
                f"{self._server} does not prove that it holds this job's secret: it is a server of "
                "another job, no server, or one behind a port that leads to another port"
            )
        self._challenge = challenge

    def proof(self, name: str, request: bytes) -> Proof:
        """The proof with the request, after :meth:`answered`.

        Args:
            name: of the call.
            request: its bytes on the wire.
        """
        assert self._challenge is not None, "the server has proved itself"
        nonce = self._challenge.server_nonce
        code = client_code(self._secret, self._challenge, name, request)
        return Proof(self.role, self.nonce, nonce, code)

    def hello_code(
        self, session: str, trainer_id: int, lane: int, stream: int, tables: bool
    ) -> bytes:
        """The code in HELLO, after :meth:`answered`."""
        return self.proof("HELLO", hello_bytes(session, trainer_id, lane, stream, tables)).code


# ---- token files ----
#
# Where secrets are kept: files that only their user can read.
#
# ``pserver launch`` writes them into ``$XDG_RUNTIME_DIR/pserver``, or where there is no such
# directory into ``pserver-UID`` in the directory for temporary files, or where another user has
# made that, into ``pserver-UID-RANDOM``::
#
#   job-RANDOM/operator.token     for the job's servers, and for launch itself
#   job-RANDOM/trainer.token      for its trainers
#   PORT.token                    the operator's again, by a server's port: for the commands of the
#                                 same user
#
# ``PSERVER_TOKEN_FILE`` names one to a process.  No secret stands on a command line, in the
# environment or in a log.


log = logging.getLogger(__name__)

MOST_BYTES = 1024  # of a token file that is read
PIPE_SECONDS = 5.0  # for what is written into one


def read(path: str) -> Secret:
    """The secret in a file that the user has named.

    Raises:
        ValueError: it cannot be read, or holds none; one sentence that names the file.
    """
    try:
        with open(path, encoding="ascii", opener=_opened) as file:
            others = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077
            text = file.read(MOST_BYTES)
        secret = Secret.parse(text)
    except OSError as error:
        raise ValueError(f"the token file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise ValueError(f"the token file {path} is not a text file") from None
    except ValueError as error:
        raise ValueError(f"the token file {path}: {error}") from None
    if others:
        log.warning("%s holds a secret, and other users may read it: chmod 600 it", path)
    return secret


def _opened(path: str, flags: int) -> int:
    """Opens a descriptor; that of a pipe, which a shell makes of ``<(command)``, can be read now:
    an ``open`` would wait for a writer without end.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        select.select([descriptor], [], [], PIPE_SECONDS)
    return descriptor


def write(path: Path, secret: Secret) -> None:
    """Writes a new file that only this user can read.

    Raises:
        OSError: it cannot be written, or exists already.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with naming(path), os.fdopen(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
        file.write(secret.text + "\n")


class LockedFiles:
    """Files and directories that are locked, and removed at the end.

    See [Note: files of a launch that was killed].

    Args:
        place: the directory in which they are.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._held: list[tuple[int, Path]] = []
        _tidy(place)

    def directory(self) -> Path:
        """Makes a directory for one job."""
        new = Path(tempfile.mkdtemp(prefix="new-", dir=self.place))
        return self._hold(new, self.place / new.name.replace("new-", "job-", 1))

    def file(self, name: str, secret: Secret) -> None:
        """Makes a file with a secret, in place of another one of this name."""
        new = self.place / f"new-{secrets.token_hex(8)}"
        write(new, secret)
        self._hold(new, self.place / name)

    def _hold(self, new: Path, path: Path) -> Path:
        """Locks a file or directory before it gets the name by which others find it."""
        descriptor = os.open(new, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        new.rename(path)
        self._held.append((descriptor, path))
        return path

    def remove(self) -> None:
        """Removes them all."""
        for descriptor, path in self._held:
            _remove(path)
            os.close(descriptor)
        self._held = []


def _tidy(place: Path) -> None:
    """Removes files that no process holds."""
    for path in (*place.glob("job-*"), *place.glob("*.token")):
        if not _is_held(path):
            _remove(path)


def _is_held(path: Path) -> bool:
    """Whether a running launch holds it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: unknown
        return True
    else:
        return False
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def folder(environ: Mapping[str, str]) -> Path:
    """This user's directory of token files; made where it is missing.

    Args:
        environ: the process's environment variables.

    Raises:
        OSError: there is none that is this user's alone; one sentence.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime:
        # another user's after `su`, or gone: then the other place
        with suppress(OSError):
            return _private(Path(runtime) / "pserver")
    first, *others = _temporaries()
    try:
        return _private(first)
    except OSError as error:  # another user has made it, by mistake or on purpose
        for place in others:
            with suppress(OSError):
                _check(place)
                return place
        own = Path(tempfile.mkdtemp(prefix=f"{first.name}-", dir=first.parent))
        log.warning("%s; taking %s", error, own)
        return own


def name_of(port: int) -> str:
    """The name of the file for a server's port."""
    return f"{port}.token"


def published(port: int, environ: Mapping[str, str]) -> Path | None:
    """The file that ``pserver launch`` of this user has left for a server's port, if there is one.

    Args:
        port: of the server's control endpoint, on this machine.
        environ: the process's environment variables.
    """
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    places = [Path(runtime) / "pserver"] if runtime else []
    for place in (*places, *_temporaries()):
        with suppress(OSError):
            _check(place)
            path = place / name_of(port)
            found = path.lstat()
            ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if ours and _is_held(path):
                return path
    return None


def _temporaries() -> list[Path]:
    """This user's directory among those for temporary files; then those that were made because
    another user had it.
    """
    first = Path(tempfile.gettempdir()) / f"pserver-{os.geteuid()}"
    return [first, *sorted(first.parent.glob(f"{first.name}-*"))]


def _private(path: Path) -> Path:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    _check(path)
    return path


def _check(path: Path) -> None:
    """Returns if a directory is this user's alone.

    Raises:
        OSError: it is not: others could put files there, or read them.
    """
    found = path.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    if not ours or stat.S_IMODE(found.st_mode) & 0o077:
        raise OSError(
            f"{path}: expected a directory of this user with mode 700, got "
            f"{stat.filemode(found.st_mode)} of user {found.st_uid}"
        )
