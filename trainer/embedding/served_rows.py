"""Whether a ``state_dict`` has the rows that servers hold.

Imports no numba: jobs without tables ask too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_wanted = ContextVar("_wanted", default=True)


def are_wanted() -> bool:
    """Whether ``state_dict()`` pulls them."""
    return _wanted.get()


@contextmanager
def without_served_rows() -> Iterator[None]:
    """While it lasts, ``state_dict()`` leaves them out."""
    token = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(token)
