"""Where secrets are kept: files that only their user can read.

``pserver launch`` writes them into ``$XDG_RUNTIME_DIR/pserver``, or where there is no such
directory into ``pserver-UID`` in the directory for temporary files, or where another user has made
that, into ``pserver-UID-RANDOM``::

    job-RANDOM/operator.token     for the job's servers, and for launch itself
    job-RANDOM/trainer.token      for its trainers
    PORT.token                    the operator's again, by a server's port: for the commands of the
                                  same user

``PSERVER_TOKEN_FILE`` names one to a process.  No secret stands on a command line, in the
environment or in a log.

[Note: files of a launch that was killed]  ``launch`` removes its files when it ends.  As long as it
runs it holds locks (flock) on its directory and on each PORT.token, which the system releases
however it ends.  What nobody holds is of no job any more: commands pass it by, and the next launch
removes it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import select
import shutil
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pserver.security.secret import Secret

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
    """A descriptor; of a pipe, which a shell makes of ``<(command)``, one that can be read now: an
    ``open`` would wait for a writer as long as it takes.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        select.select([descriptor], [], [], PIPE_SECONDS)
    return descriptor


def write(path: Path, secret: Secret) -> None:
    """Writes a new file that only this user can read.

    Raises:
        OSError: it cannot be written, or is there.
    """
    from transpiler.files.named_errors import naming

    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with naming(path), os.fdopen(os.open(path, flags, 0o600), "w", encoding="ascii") as file:
        file.write(secret.text + "\n")


class Held:
    """Files and directories that are removed at the end, and locked until then.

    See [Note: files of a launch that was killed].

    Args:
        place: the directory in which they are.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self._held: list[tuple[int, Path]] = []
        _tidy(place)

    def directory(self) -> Path:
        """A new one, for one job."""
        new = Path(tempfile.mkdtemp(prefix="new-", dir=self.place))
        return self._hold(new, self.place / new.name.replace("new-", "job-", 1))

    def file(self, name: str, secret: Secret) -> None:
        """A new one that holds a secret; it takes the place of another of this name."""
        new = self.place / f"new-{secrets.token_hex(8)}"
        write(new, secret)
        self._hold(new, self.place / name)

    def _hold(self, new: Path, path: Path) -> Path:
        """Locked before it has the name by which others find it."""
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
    """Removes what nobody holds."""
    for path in (*place.glob("job-*"), *place.glob("*.token")):
        if not _is_held(path):
            _remove(path)


def _is_held(path: Path) -> bool:
    """Whether a launch that runs has left it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks: nobody can say
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
    """This user's directory among those for temporary files; behind it those that were made because
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
