"""The common command line of the recommenders, each with its own defaults."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

HELP = {
    "data": "folder of the files, which trainer 0 writes",
    "samples": "to learn from in an epoch; a quarter as many are held out",
    "batch": "samples of a step, of all trainers together",
    "epochs": "passes over all samples",
    "dim": "columns of an embedding",
    "rate": "learning rate; that of the tables, where they have their own",
}


def parsed(
    description: str | None, arguments: Sequence[str] | None, **defaults: str | int | float
) -> argparse.Namespace:
    """The flags that an example has defaults for, and ``--mode``.

    Args:
        description: the example's docstring.
        arguments: None: those of the process.
        defaults: of some of ``HELP``; a flag has its default's type.
    """
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--mode", choices=("sync", "async"), default="sync", help="of updates; default: sync")
    for name, default in defaults.items():
        add(
            f"--{name}",
            type=type(default),
            default=default,
            metavar=name[0].upper(),
            help=f"{HELP[name]}; default: {default}",
        )
    return parser.parse_args(arguments)
