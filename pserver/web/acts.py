"""What an operator does from the page: saves the job, drains its servers; one at a time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from pserver.errors import PServerError

log = logging.getLogger(__name__)

Act = Callable[[], str]  # does it, and says in a sentence what has come of it


class Acts:
    """The acts that a page offers.  Any thread may call it.

    Args:
        acts: by name: "save", "drain"; none where the page only shows.
        refusal: why there are none.
        told: called with the name and the result of each.
    """

    def __init__(
        self, acts: Mapping[str, Act], refusal: str, told: Callable[[str, str], None]
    ) -> None:
        self._acts, self._refusal, self._told = dict(acts), refusal, told
        self._lock = threading.Lock()  # held while one is done; guards the next
        self._last = ""

    def names(self) -> list[str]:
        """Of those that the page offers."""
        return sorted(self._acts)

    def state(self) -> dict[str, Any]:
        """For the page, JSON-able."""
        return {
            "names": self.names(),
            "refusal": self._refusal,
            "busy": self._lock.locked(),
            "last": self._last,
        }

    def begin(self, name: str) -> bool:
        """Begins an act, in a thread of its own.

        Returns:
            False: another one is not over.

        Raises:
            KeyError: the page does not offer it.
        """
        act = self._acts[name]
        if not self._lock.acquire(blocking=False):
            return False
        threading.Thread(target=self._do, args=(name, act), name=f"act {name}").start()
        return True

    def _do(self, name: str, act: Act) -> None:
        try:
            kind, said = ("saved" if name == "save" else name), act()
        except (PServerError, OSError, ValueError) as error:
            kind, said = "refused", f"{name}: {' '.join(str(error).split())}"
        finally:
            self._lock.release()
        self._last = said
        log.info("%s: %s", name, said)
        self._told(kind, said)
