"""A prefix behind a URL, through fsspec: an object store, HDFS, SFTP, ``memory://``.

[Note: replacing an object]  An object store has no rename and no lock, but it replaces one object
in one moment, and some replace it only if it is still the one that the writer has read.  S3 does so
(``If-Match``, ``If-None-Match``).  Elsewhere the object is read again just before it is replaced:
two writers whose reads and writes cross within that moment are not noticed.  File systems behind
URLs, like HDFS and SFTP, get the file under another name, and a rename.
"""

from __future__ import annotations

import inspect
import posixpath
import re
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import fsspec
import safetensors.torch
import torch

from pserver.extras import extra
from pserver.storage.local import BLOCK_BYTES, NewFile, Upload, digest_of
from transpiler.files.files import shown, write_pieces
from transpiler.files.named_errors import naming

# ---- login ----
#
# This process's login at a file system behind a URL: a user and a password, and the URLs for them.
#
# A login acts on every URL below its own, in every place that is opened while it is there.  Drivers
# of fsspec name these two differently; what they say in errors may quote them, so :func:`hidden`
# takes them out.


_USERS = ("user", "username", "key", "account_name")
_PASSWORDS = ("password", "passwd", "secret", "account_key")
_OWN_LOGIN = re.compile(r"(?<=://)[^/@\s:]*:([^/@\s]+)(?=@)")


@dataclass(frozen=True, slots=True)
class Login:
    """A user and a password for the URLs below one.

    Attributes:
        uri: "sftp://host", "s3://bucket/folder".
        user, password: "" for none.

    Raises:
        ValueError: ``uri`` is no URL, fsspec knows no such protocol, or its driver takes no user or
            no password.
        ImportError: the package that reaches the URL is not installed.
    """

    uri: str = field(repr=False)
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        protocol, separator, _ = self.uri.partition("://")
        if not separator:
            raise ValueError(f"expected a URL (PROTOCOL://HOST), got {shown(self.uri)!r}")
        for what, value, names in (
            ("user", self.user, _USERS),
            ("password", self.password, _PASSWORDS),
        ):
            if value and _name(protocol, names) is None:
                raise ValueError(f"the file system of {protocol}:// takes no {what}")

    def covers(self, url: str) -> bool:
        """Whether a URL is this one, or below it."""
        uri = self.uri.rstrip("/")
        return url == uri or url.startswith(f"{uri}/")

    def options(self) -> dict[str, str]:
        """As the driver takes them."""
        protocol = self.uri.partition("://")[0]
        pairs = ((_name(protocol, _USERS), self.user), (_name(protocol, _PASSWORDS), self.password))
        return {str(name): value for name, value in pairs if value}


_lock = threading.Lock()  # guards _logins; nothing waits under it
_logins: list[Login] = []


def log_in(login: Login) -> None:
    """Logs this process in as a user; the latest login for a URL counts."""
    with _lock:
        _logins.append(login)


def log_out(login: Login) -> None:
    """Forgets a login; a missing one is no error."""
    with _lock:
        if login in _logins:
            _logins.remove(login)


def options_of(url: str) -> dict[str, str]:
    """The options with which fsspec opens a URL; empty without a login."""
    with _lock:
        found = next((each for each in reversed(_logins) if each.covers(url)), None)
    return {} if found is None else found.options()


def hidden(text: str, url: str = "") -> str:
    """A text for messages: without users and passwords.

    Args:
        url: what the text is about; drivers may quote the user and the password that it has.

    Example:
        >>> hidden("cannot open sftp://ann:sesame@host/job")
        'cannot open sftp://***@host/job'
    """
    text = shown(text)
    with _lock:
        known = [each.password for each in _logins if each.password]
    if own := _OWN_LOGIN.search(url):
        known += [own[0], own[1]]
    for secret in sorted(known, key=len, reverse=True):
        text = text.replace(secret, "***").replace(quote(secret, safe=""), "***")
    return text


def _name(protocol: str, names: tuple[str, ...]) -> str | None:
    """A driver's name of the option; None: it takes none.

    Raises:
        ValueError: fsspec knows no such protocol.
        ImportError: its package is not installed.
    """
    parameters = inspect.signature(fsspec.get_filesystem_class(protocol).__init__).parameters
    found = next((name for name in names if name in parameters), None)
    if found is None and "host" in parameters and not {*_USERS, *_PASSWORDS} & set(parameters):
        # it passes what it does not know on to a client of ssh; others read nothing of it
        return "username" if names is _USERS else "password"
    return found


# ---- drivers ----


_KINDS = (FileNotFoundError, FileExistsError, PermissionError, TimeoutError)


def store_of(path: str) -> tuple[Any, str]:
    """The file system of fsspec's that has a path or a URL, and the path there.

    Raises:
        ValueError: fsspec knows no such protocol.
        ImportError: the package that reaches it is not installed; the message says which.
        OSError: the store cannot be reached.
    """
    is_s3 = path.startswith(("s3://", "s3a://"))
    try:
        with extra("s3", "it needs s3fs") if is_s3 else nullcontext():
            store, place = fsspec.core.url_to_fs(path, **options_of(path))
    except ImportError as error:
        raise ImportError(f"{shown(path)}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{shown(path)}: {hidden(str(error), path)}") from _quotable(error, path)
    except Exception as error:  # as many kinds as there are drivers
        raise os_error(path, error) from _quotable(error, path)
    return store, str(place)


@contextmanager
def driven(path: str) -> Iterator[None]:
    """Translates the exceptions of a driver.

    Raises:
        OSError: it has raised one, of any class; the message names the path or URL.
    """
    try:
        yield
    except Exception as error:
        raise os_error(path, error) from _quotable(error, path)


def os_error(path: str, error: Exception) -> OSError:
    """A driver's error as an OSError that names the path or URL, without a password."""
    kind, said = next((each for each in _KINDS if isinstance(error, each)), OSError), str(error)
    if not isinstance(error, OSError):
        said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    named = kind(f"{shown(path)}: {hidden(said, path)}")
    named.errno = getattr(error, "errno", None)
    return named


def _quotable(error: Exception, path: str) -> Exception | None:
    """A driver's error as a cause that a traceback prints; None where that has a password."""
    link: BaseException | None = error
    while link is not None:
        if hidden(str(link), path) != str(link):
            return None
        link = link.__cause__ or link.__context__
    return error


# ---- remote place ----


_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "memory"})
_CONDITIONS = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412", "409"})

T = TypeVar("T")


class RemotePlace:
    """A prefix.  Every method raises OSError where the store refuses or cannot be reached,
    FileNotFoundError where there is no such file.

    Args:
        url: of the prefix.

    Attributes:
        path: the URL.

    Raises:
        ValueError: fsspec knows no such protocol.
        ImportError: the package that reaches it is not installed; the message says which.
        OSError: the store cannot be reached.
    """

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        self.path = f"{scheme}://{rest.rstrip('/')}"
        self._store, self._root = store_of(self.path)
        kinds = self._store.protocol
        self._kinds = frozenset((kinds,) if isinstance(kinds, str) else kinds)

    def __str__(self) -> str:
        return shown(self.path)

    def __repr__(self) -> str:
        return f"RemotePlace({shown(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePlace) and (self._kinds, self._root, self._store) == (
            other._kinds,
            other._root,
            other._store,
        )

    def __hash__(self) -> int:
        return hash((self._kinds, self._root))

    def at(self, relative: str) -> RemotePlace:
        """The place at a path relative to this one."""
        scheme, _, rest = self.path.partition("://")
        return RemotePlace(f"{scheme}://{posixpath.normpath(posixpath.join(rest, relative))}")

    def relative(self, other: RemotePlace) -> str:
        """The path of another place relative to this one.

        Raises:
            ValueError: it is in another store.
        """
        if self._kinds != other._kinds or self._store != other._store:
            raise ValueError(f"expected a place in the store of {self}, got {other}")
        mine, theirs = (place.path.partition("://")[2] for place in (self, other))
        return posixpath.relpath(f"/{theirs}", f"/{mine}")

    def lock(self) -> None:
        """Does nothing, as stores have no locks: see [Note: replacing an object]."""

    def writable(self) -> bool:
        """Whether files can be written here, as far as is known."""
        return True

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if name else str(self._root)

    def _call(self, call: Callable[[], T]) -> T:
        """Calls the store, and translates the exceptions of its driver."""
        with driven(self.path):
            return call()

    # ---- reading ----

    def names(self) -> list[str]:
        """The files that are here."""
        return self._listed("file")

    def directories(self) -> list[str]:
        """The directories that are here; in an object store, what stands before a / in names."""
        return self._listed("directory")

    def _listed(self, kind: str) -> list[str]:
        self._store.invalidate_cache()
        with suppress(FileNotFoundError):
            listed = self._call(lambda: self._store.ls(self._root, detail=True))
            names = [each["name"].rstrip("/") for each in listed if each["type"] == kind]
            return [posixpath.basename(name) for name in names if name != self._root]
        return []

    def size(self, name: str) -> int | None:
        """The size in bytes; None where there is no such file."""
        self._store.invalidate_cache()
        try:
            found = self._call(lambda: self._store.info(self._at(name)))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def read(self, name: str, begin: int = 0, size: int = -1) -> bytes:
        """A file, or so many bytes of it from ``begin`` on; fewer, where it ends before."""
        part = {} if (begin, size) == (0, -1) else {"start": begin, "end": begin + size}
        found: bytes = self._call(lambda: self._store.cat_file(self._at(name), **part))
        return found

    def checksums(self, name: str, sizes: Iterable[int]) -> list[str]:
        """BLAKE2b, 16 bytes in hexadecimal, of parts of a file that follow one another.

        Args:
            sizes: of the parts, in bytes.
        """

        def read() -> list[str]:
            with self._store.open(self._at(name), "rb") as file:
                return [digest_of(file, size) for size in sizes]

        return self._call(read)

    def fetch(self, name: str, target: Path) -> None:
        """Copies a file to this machine."""
        self._call(lambda: self._store.get_file(self._at(name), str(target)))

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of a safetensors file."""
        with tempfile.TemporaryDirectory() as folder:
            self.fetch(name, Path(folder) / "tensors")
            return safetensors.torch.load_file(Path(folder) / "tensors")

    # ---- writing ----

    def _prepare(self) -> None:
        if not self._kinds & _OBJECTS:  # an object store has no directories
            self._call(lambda: self._store.makedirs(self._root, exist_ok=True))

    def write(self, name: str, content: bytes) -> None:
        """Makes a new file."""
        self._prepare()
        self._call(lambda: self._store.pipe_file(self._at(name), content))

    def store(self, source: Path, name: str) -> None:
        """Copies a file from this machine, in place of the one that may be there."""
        self._prepare()
        if self._kinds & _OBJECTS:
            self._call(lambda: self._store.put_file(str(source), self._at(name)))
            return
        partial = f"{name}.{secrets.token_hex(8)}"
        try:
            self._call(lambda: self._store.put_file(str(source), self._at(partial)))
            self._call(lambda: self._store.mv(self._at(partial), self._at(name)))
        except BaseException:
            self.remove(partial)
            raise

    def create(self, name: str) -> NewFile:
        """Begins a new file, to be written piece by piece."""
        self._prepare()
        return Upload(
            lambda: self._store.open(self._at(name), "wb", block_size=BLOCK_BYTES), self._call
        )

    def write_tensors(
        self,
        name: str,
        tensors: MutableMapping[str, torch.Tensor],
        wrote: Callable[[int], None] = lambda size: None,
    ) -> tuple[int, str]:
        """Makes a new safetensors file of contiguous tensors on the CPU; gives its size and its
        checksum.

        Args:
            tensors: taken out as they are written.
            wrote: called with the number of bytes written to this machine so far.
        """
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / name
            with naming(source), source.open("wb") as file:
                written = write_pieces(tensors, file.write, wrote)
            self.store(source, name)
            return written

    def replace(self, name: str, content: bytes, before: bytes | None = None) -> bool:
        """Puts a file in place of the one that is there.  See [Note: replacing an object].

        Args:
            before: what the file has now; None: there is none.

        Returns:
            False if it has something else; nothing is changed.
        """
        self._store.invalidate_cache()
        condition: dict[str, Any] = {"mode": "create"}
        try:
            tag = self._call(lambda: self._store.info(self._at(name))).get("ETag")
            if self.read(name) != before:
                return False
            condition = {"IfMatch": tag} if "s3" in self._kinds and tag else {}
        except FileNotFoundError:
            if before is not None:
                return False
        try:
            self._replace(name, content, condition)
        except OSError as error:
            if _refused_condition(error):
                return False
            raise
        return True

    def _replace(self, name: str, content: bytes, condition: dict[str, Any]) -> None:
        self._prepare()
        if self._kinds & _OBJECTS:
            self._call(lambda: self._store.pipe_file(self._at(name), content, **condition))
            return
        partial = f"{name}.{secrets.token_hex(8)}"
        try:
            self._call(lambda: self._store.pipe_file(self._at(partial), content))
            self._call(lambda: self._store.mv(self._at(partial), self._at(name)))
        except BaseException:
            self.remove(partial)
            raise

    def flush(self) -> None:
        """Does nothing: a store keeps what it has confirmed."""

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""
        with suppress(FileNotFoundError):
            self._call(lambda: self._store.rm_file(self._at(name)))

    def tidy(self) -> None:
        """Does nothing: stopped writers leave only files."""


def _refused_condition(error: OSError) -> bool:
    """Whether a store has refused a write because the object has changed."""
    cause = error.__cause__ and error.__cause__.__cause__
    response = getattr(cause, "response", None) or {}
    code = str(response.get("Error", {}).get("Code", ""))
    return isinstance(error, FileExistsError) or code in _CONDITIONS
