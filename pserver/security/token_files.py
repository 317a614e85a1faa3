"""Where secrets are kept: files that only their user can read.

``pserver launch`` writes them into ``$XDG_RUNTIME_DIR/pserver``, or where there is no such
directory into ``pserver-UID`` in the directory for temporary files::

    job-RANDOM/operator.token     for the job's servers, and for launch itself
    job-RANDOM/trainer.token      for its trainers
    PORT.token                    the operator's again, by a server's port: for the commands of the
                                  same user

``PSERVER_TOKEN_FILE`` names one to a process.  No secret stands on a command line, in the
environment or in a log.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pserver.security.secret import Secret

log = logging.getLogger(__name__)

MOST_BYTES = 1024  # of a token file that is read


def read(path: str) -> Secret:
    """The secret in a file that the user has named.

    Raises:
        ValueError: it cannot be read, or holds none; one sentence that names the file.
    """
    try:
        with open(path, encoding="ascii") as file:
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


def write(path: Path, secret: Secret) -> None:
    """Writes a new file that only this user can read.

    Raises:
        OSError: it cannot be written, or is there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
        file.write(secret.text + "\n")


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
    return _private(_temporary())


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
    for place in (*places, _temporary()):
        with suppress(OSError):
            _check(place)
            path = place / name_of(port)
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                return path
    return None


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"pserver-{os.geteuid()}"


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
