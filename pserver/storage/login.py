"""Who this process is at a file system behind a URL: a user and a password, and who gets them.

A login acts on every URL below its own, in every place that is opened while it is there.  Drivers
of fsspec name these two differently; what they say in errors may quote them, so :func:`hidden`
takes them out.
"""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, field
from urllib.parse import quote

import fsspec

from transpiler.files.local_path import shown

_USERS = ("user", "username", "key", "account_name")
_PASSWORDS = ("password", "passwd", "secret", "account_key")


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
    """From now on the process is this user there; the latest login for a URL counts."""
    with _lock:
        _logins.append(login)


def log_out(login: Login) -> None:
    """Forgets a login; none there is no error."""
    with _lock:
        if login in _logins:
            _logins.remove(login)


def options_of(url: str) -> dict[str, str]:
    """The options with which fsspec opens a URL; empty where nobody has logged in."""
    with _lock:
        found = next((each for each in reversed(_logins) if each.covers(url)), None)
    return {} if found is None else found.options()


def hidden(text: str) -> str:
    """A text as a message may have it: without users and passwords.

    Example:
        >>> hidden("cannot open sftp://ann:sesame@host/job")
        'cannot open sftp://***@host/job'
    """
    text = shown(text)
    with _lock:
        passwords = [each.password for each in _logins if each.password]
    for password in sorted(passwords, key=len, reverse=True):
        text = text.replace(password, "***").replace(quote(password, safe=""), "***")
    return text


def _name(protocol: str, names: tuple[str, ...]) -> str | None:
    """How a driver names the option; None: it takes none.

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
