"""The memory that trainers' texts for one another take on server 0: at barriers and gatherings, and
about topics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from pserver.errors import Refused

MOST_OF_ONE = 2**25  # bytes of one trainer: eight of the longest texts
OVERHEAD = 200  # bytes of a text besides its characters


class KeptTexts:
    """The bytes that texts take, by trainer.  The caller holds the job's lock.

    Args:
        left: gives the bytes that the server may still take (``--max-memory``).
        most: bytes of one trainer.

    Example:
        >>> texts = KeptTexts()
        >>> texts.add(0, "1: epoch", "so far")
        >>> texts.bytes_held
        214
    """

    def __init__(self, left: Callable[[], int] | None = None, most: int = MOST_OF_ONE) -> None:
        self._left, self._most = left, most
        self._held: Counter[int] = Counter()

    @property
    def bytes_held(self) -> int:
        """The bytes of all trainers' texts."""
        return self._held.total()

    def add(self, trainer: int, name: str, text: str, checked: bool = True) -> None:
        """Adds a trainer's text under a name.

        Args:
            checked: it may be refused; otherwise another process has taken it already.

        Raises:
            Refused: it is too much.
        """
        size = _size(name, text)
        if checked:
            self._check(trainer, name, size)
        self._held[trainer] += size

    def remove(self, trainer: int, name: str, text: str) -> None:
        """Removes a text."""
        self._held[trainer] -= _size(name, text)

    def _check(self, trainer: int, name: str, size: int) -> None:
        held = self._held[trainer]
        if held + size > self._most:
            raise Refused(
                f"expected at most {self._most / 1e6:.1f} MB of texts that trainer {trainer} "
                "leaves at barriers and topics for the others, got "
                f"{(held + size) / 1e6:.1f} MB with {name!r}: wait at a barrier with all "
                "trainers before the next text, and send less there"
            )
        left = size if self._left is None else self._left()
        if size > left:
            raise Refused(
                f"expected a text for {max(left, 0) / 1e6:.1f} MB or less at {name!r}, got one for "
                f"{size / 1e6:.1f} MB: this server has no more memory (--max-memory)"
            )


def _size(name: str, text: str) -> int:
    return OVERHEAD + len(name.encode()) + len(text.encode())
