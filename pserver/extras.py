"""The packages of extras, which are imported where they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, need: str) -> Iterator[None]:
    """Names the extra in an ImportError of the block, and what has failed: the package itself, or
    one that it imports.

    Example::

        with extra("disk", "rows on disk (memory_bytes) need rocksdict"):
            import rocksdict

    Args:
        name: of the extra in pyproject.toml.
        need: what needs the package, as a sentence without its end.

    Raises:
        ImportError: of the same class as the block's, which is its cause.
    """
    try:
        yield
    except ImportError as error:
        text = f"{need}: pip install '.[{name}]' in a checkout of pserver brings it ({error})"
        raise type(error)(text, name=error.name, path=error.path) from error
