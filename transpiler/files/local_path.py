"""What a caller's path is: a place on this machine, or a URL.

A URL that is taken for a path makes a folder named ``s3:`` in the working directory, and nobody
notices before the machine is gone.  So whoever takes a path asks here first.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

_FILE = re.compile(r"(file|local)://")
_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/(?!/)")  # two letters: C:/ is a disk
_NOWHERE = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/+\Z")
_USER = re.compile(r"://[^/@\s]*@")


class PathLike(Protocol):
    """What ``os.fspath`` takes, and gives text for."""

    def __fspath__(self) -> str: ...


def is_url(path: str | PathLike) -> bool:
    """Whether a path leads to another place than this machine's disks.

    Raises:
        TypeError: it is no path.
        ValueError: it was a URL before pathlib took a slash away, or it names nothing: it is empty,
            or a protocol only; or it has a zero in it.

    Example:
        >>> is_url("s3://bucket/job"), is_url("runs/job"), is_url("file:///tmp/job")
        (True, False, False)
    """
    text = path if isinstance(path, str) else getattr(path, "__fspath__", lambda: path)()
    if not isinstance(text, str):
        raise TypeError(f"expected a path as text, got {path!r}")
    if "\0" in text:
        raise ValueError(f"expected a path, or a URL, without a zero in it, got {text!r}")
    if not text or _NOWHERE.match(text):
        raise ValueError(f"expected a path, or a URL with a name behind its slashes, got {text!r}")
    if _ONE_SLASH.match(text):
        raise ValueError(
            f"expected a path, or a URL with two slashes, got {text!r}: pathlib takes a slash of a "
            "URL away, so give it as a str; where it is a folder, write './' before it"
        )
    return "://" in text and not _FILE.match(text)


def local_path(path: str | PathLike, what: str) -> Path:
    """A path on this machine.

    Args:
        what: the call or the flag, for messages.

    Raises:
        TypeError: it is no path.
        ValueError: it is a URL, or names nothing.

    Example:
        >>> local_path("runs/job", "draw").name
        'job'
    """
    try:
        url = is_url(path)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{what}: {error}") from None
    if url:
        raise ValueError(f"{what}: expected a path on this machine, got the URL {shown(path)!r}")
    return Path(_FILE.sub("", str(path), count=1))


def shown(path: str | PathLike) -> str:
    """A path or a URL as a message may have it: without a user and a password.

    Example:
        >>> shown("sftp://ann:sesame@host/job")
        'sftp://***@host/job'
    """
    return _USER.sub("://***@", str(path))
