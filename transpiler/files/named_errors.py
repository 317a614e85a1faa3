"""The name of the file in the errors of writing it.

The system names a file that cannot be opened; of one that cannot be written, as where its disk is
full, it gives a descriptor's error, which names nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Inside, an OSError that names no file names this one.

    Example:
        >>> with naming("saved/server-0"):
        ...     raise OSError(28, "No space left on device")
        Traceback (most recent call last):
        OSError: [Errno 28] No space left on device: 'saved/server-0'
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
