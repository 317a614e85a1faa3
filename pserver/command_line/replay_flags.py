"""The flags of ``pserver replay``."""

from __future__ import annotations

import argparse


def add_replaying(sub: argparse.ArgumentParser) -> None:
    """Adds the log, where to begin, and what to write."""
    add = sub.add_argument
    add("log", metavar="LOG", help="the directory that --record-log named")
    add(
        "--from",
        dest="start",
        metavar="CHECKPOINT",
        help="the checkpoint to begin with, of the recorded job (default: the log's beginning)",
    )
    add("--to", metavar="PATH", help="where to write what comes out, a checkpoint")
    add("--overwrite", action="store_true", help="write it even if something is there already")
    add(
        "--until",
        metavar="RECORD",
        type=int,
        help="the last record of the job's log that is applied (default: all)",
    )
