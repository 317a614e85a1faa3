"""The flags of a job that saves by itself, and goes on from there when it is started again."""

from __future__ import annotations

import argparse


def add_checkpoints(sub: argparse.ArgumentParser) -> None:
    """Adds where, and how often."""
    add = sub.add_argument
    add(
        "--checkpoint",
        metavar="DIR|URL",
        default="",
        help="the folder where the job saves as it goes, and from whose newest checkpoint it goes "
        "on (default: nowhere)",
    )
    add(
        "--every",
        metavar="SECONDS",
        type=float,
        help="between two checkpoints (default: 600)",
    )
    add(
        "--keep",
        metavar="K",
        type=int,
        help="how many of the newest checkpoints stay (default: 3)",
    )


def add_restarts(sub: argparse.ArgumentParser) -> None:
    """Adds how often ``launch`` starts processes again."""
    sub.add_argument(
        "--max-restarts",
        metavar="N",
        type=int,
        default=0,
        help="how often processes are started again when one has failed: that trainer alone where "
        "the others go on, otherwise the whole job (default: 0)",
    )
