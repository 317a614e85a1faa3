"""The agreements of a job's trainers: the first one's text about each topic, on server 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pserver.job.barriers import check_room
from pserver.job.kept_texts import KeptTexts


class Store:
    """The agreements of one job.  The caller holds the job's lock.

    Args:
        texts: bounds the trainers' texts.

    Attributes:
        write: called with the first text, as JSON can hold it, before any trainer receives it: an
            entry for :meth:`restore_entry`.  None: nothing is written down.
    """

    def __init__(self, texts: KeptTexts | None = None) -> None:
        self._texts = texts or KeptTexts()
        self.write: Callable[..., None] | None = None
        self._said: dict[str, str] = {}

    def agree(self, topic: str, text: str, trainer: int = 0) -> str:
        """The first trainer's text about a topic: this one, if there is none yet; "" only asks.

        Args:
            trainer: the sender of the text.

        Raises:
            Refused: there are too many topics, or their texts take too much memory.
        """
        if not text or topic in self._said:
            return self._said.get(topic, "")
        check_room("topics", topic, self._said)
        self._texts.add(trainer, topic, text)
        self._said[topic] = text
        if self.write is not None:
            self.write("said", topic, text)
        return text

    # ---- see [Note: a coordinator that comes back] in pserver/job_log/coordinator.py ----

    def entries(self) -> list[list[Any]]:
        """The entries for :meth:`restore_entry` of its replacement."""
        return [["said", topic, text] for topic, text in self._said.items()]

    def restore_entry(self, kind: str, topic: str, text: str) -> None:
        """Restores another process's entries."""
        self._said[topic] = text
        self._texts.add(0, topic, text, checked=False)
