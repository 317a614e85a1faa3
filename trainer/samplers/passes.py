"""The passes over shared data that a job has begun, counted alike on every trainer.

The count seeds each pass's order, so that two passes differ; a checkpoint carries it, so that a
resumed job goes on with orders that it has not had.  What the trainers have drawn is compared: the
first one to say something about a topic is right, and another that has drawn something else raises.
Nobody waits for that.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from transpiler.files import bounded_json

Agree = Callable[[str, str], "str | None"]


def _nobody(topic: str, text: str) -> str | None:
    return None


class Passes:
    """How many passes this trainer has begun, and what it has drawn in them.

    Args:
        trainer_id: this trainer.
        agree: takes a topic and a text and gives the text of the first trainer that said something
            about that topic; None while nobody can be asked.
    """

    def __init__(self, trainer_id: int = 0, agree: Agree = _nobody) -> None:
        self.count = 0  # passes begun, those before a resumed checkpoint included
        self._trainer_id, self._agree = trainer_id, agree
        self._unasked: list[tuple[str, str, str]] = []

    def begin(self) -> int:
        """Counts a pass.

        Returns:
            Its number, from 0.
        """
        self.count += 1
        return self.count - 1

    def compare(self, topic: str, drawn: str, advice: str) -> None:
        """Compares what this trainer has drawn with what the others have, now or when the trainers
        are joined.

        Args:
            topic: "pass 3".
            drawn: in words; equal words are equal draws.
            advice: what to write where they differ.

        Raises:
            ValueError: another trainer has drawn something else.
        """
        self._unasked.append((topic, drawn, advice))
        self.ask()

    def of(self, loader: str) -> LoaderPasses:
        """The passes over one loader."""
        return LoaderPasses(self, loader)

    def ask(self) -> None:
        """Compares what could not be compared before.

        Raises:
            ValueError: another trainer has drawn something else.
        """
        while self._unasked:
            topic, drawn, advice = self._unasked[0]
            first = self._agree(topic, json.dumps([self._trainer_id, drawn]))
            if first is None:
                return
            del self._unasked[0]
            trainer, expected = bounded_json.loads(first)
            if expected != drawn:
                raise ValueError(
                    f"fleet.shard, {topic}: expected trainer {trainer}'s {expected}, got {drawn} "
                    f"on trainer {self._trainer_id}: {advice}"
                )


class LoaderPasses:
    """The passes over one loader, numbered among those of the job.

    Args:
        passes: of the job.
        loader: its name, the same on every trainer; "": topics name no loader.
    """

    def __init__(self, passes: Passes, loader: str) -> None:
        self._passes, self.loader = passes, loader

    def begin(self) -> int:
        """See :meth:`Passes.begin`."""
        return self._passes.begin()

    def compare(self, topic: str, drawn: str, advice: str) -> None:
        """See :meth:`Passes.compare`.

        Raises:
            ValueError: another trainer has drawn something else.
        """
        where = f"{topic} of the loader at {self.loader}" if self.loader else topic
        self._passes.compare(where, drawn, advice)
