"""A script says which trainer of how many it is; a program knows."""

from __future__ import annotations

from transpiler.program import Program


def check_numbers(
    who: str, program: Program, num_trainers: int | None, trainer_id: int | None
) -> None:
    """Checks the numbers that a script gives against the program's.

    Args:
        who: calls, for messages.
        num_trainers, trainer_id: None: not said.

    Raises:
        TypeError: a number is none.
        ValueError: it is not the program's.
    """
    deployment = program.deployment
    trainers = 1 if deployment is None else deployment.plan.trainers
    own = 0 if deployment is None else deployment.trainer_id
    whose = "a program that was not transpiled" if deployment is None else "the program"
    for what, number, wanted in (
        ("num_trainers", num_trainers, trainers),
        ("trainer_id", trainer_id, own),
    ):
        if number is None:
            continue
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{who}: {what}: expected a whole number, got {number!r}")
        if wanted is None:
            raise ValueError(f"{who}: {what}: expected none for a server's program, got {number}")
        if number != wanted:
            raise ValueError(f"{who}: {what}: expected that of {whose}, {wanted}, got {number}")
