"""A part of a call that all trainers make: it succeeds on all of them, or raises on all of them.

A trainer that fails says so at the barrier that ends the part, instead of an exception that only it
sees while the others wait for ever.  So a script that catches the error on every trainer goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from transpiler.files import bounded_json

_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (FileNotFoundError, NotADirectoryError, PermissionError, OSError, ValueError)
} | {"TypeError": TypeError}


class Meeting(Protocol):
    """Where all trainers of a job meet."""

    def barrier(self, name: str, text: str = "") -> dict[int, str]:
        """Waits for every trainer that has not left; gives what they have told."""


class Part:
    """One trainer's share of a joint part.

    Attributes:
        fact: what this trainer has found; all trainers must have found the same.
    """

    def __init__(self) -> None:
        self.fact = ""


@contextmanager
def jointly(meeting: Meeting, call: str, barrier: str) -> Iterator[Part]:
    """What happens inside has succeeded on every trainer when this ends, and otherwise raises on
    every trainer.

    Args:
        meeting: of the job, such as its optimizer.
        call: the user's, for messages: "fleet.save".
        barrier: its name; all trainers come to it.

    Raises:
        Exception: what was raised inside, on the trainer where it was.  Elsewhere OSError,
            ValueError or TypeError where it was one, RuntimeError otherwise; the message names the
            trainer.
        ValueError: trainers have found different facts.

    Example::

        with jointly(optimizer, "fleet.save", "saved"):
            if trainer_id == 0:
                write()
    """
    part = Part()
    try:
        yield part
    except BaseException as failure:
        _tell(meeting, barrier, failure)
        raise
    texts = meeting.barrier(barrier, json.dumps({"fact": part.fact}))
    told = {trainer: bounded_json.loads(text) for trainer, text in sorted(texts.items())}
    for trainer, said in told.items():
        if "error" in said:
            raise _error(f"{call}: trainer {trainer}", said)
    facts = {said["fact"]: trainer for trainer, said in reversed(told.items())}
    if len(facts) > 1:
        (one, first), (other, second) = sorted(facts.items(), key=lambda item: item[1])[:2]
        raise ValueError(
            f"{call}: expected the same on every trainer, got {one} on trainer {first} and "
            f"{other} on trainer {second}"
        )


def _tell(meeting: Meeting, barrier: str, failure: BaseException) -> None:
    """Tells the others.  Where that fails, they learn from the job's end: the first error is the
    one that this trainer raises.
    """
    said: dict[str, object] = {
        "error": [each.__name__ for each in type(failure).__mro__],
        "errno": None,
        "message": str(failure),
        "file": "",
    }
    if isinstance(failure, OSError):
        said |= {
            "errno": failure.errno,
            "message": failure.strerror or str(failure),
            "file": str(failure.filename or ""),
        }
    try:
        meeting.barrier(barrier, json.dumps(said))
    except Exception as error:
        failure.add_note(f"the other trainers could not be told: {error}")


def _error(where: str, said: dict[str, object]) -> Exception:
    """Another trainer's failure, as this one raises it."""
    names = said["error"]
    assert isinstance(names, list)
    kind = next((_ERRORS[name] for name in names if name in _ERRORS), RuntimeError)
    text = f"{where}: {said['message'] or 'no message'}"
    if kind is RuntimeError:
        text = f"{where}: {names[0]}: {said['message']}"
    if said["file"]:
        text += f": {said['file']!r}"
    number = said["errno"]
    if issubclass(kind, OSError) and isinstance(number, int):
        return OSError(number, text)  # of the class of its number
    return kind(text)
