"""The passes over shared data that a job has begun, counted alike on every trainer.

The count seeds each pass's order, so that two passes differ; a checkpoint has it, so that a resumed
job continues with new orders.  The draws of the trainers are compared: the first text about a topic
is the reference, and a trainer that has drawn something else raises.  No trainer waits for that.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from transpiler.files import bounded_json

Agree = Callable[[str, str], "str | None"]
Compare = Callable[[str, str, str], None]  # see Passes.compare


def _nobody(topic: str, text: str) -> str | None:
    return None


class Passes:
    """The passes that this trainer has begun, and its draws.

    Args:
        trainer_id: this trainer.
        agree: takes a topic and a text, and returns the first trainer's text about that topic; None
            while the trainer is not connected.
    """

    def __init__(self, trainer_id: int = 0, agree: Agree = _nobody) -> None:
        self.count = 0  # passes begun, including those before a loaded checkpoint
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
        """Compares this trainer's draws with the others', now or once the trainer is connected.

        Args:
            topic: "pass 3".
            drawn: a text; equal texts are equal draws.
            advice: for the message, where they differ.

        Raises:
            ValueError: another trainer has drawn something else.
        """
        self._unasked.append((topic, drawn, advice))
        self.ask()

    def ask(self) -> None:
        """Compares draws that could not be compared before.

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
