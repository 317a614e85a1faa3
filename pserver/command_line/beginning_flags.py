"""Flags of ``pserver serve``: when a job's trainers and its other servers are there."""

from __future__ import annotations

import argparse

UNSET = argparse.SUPPRESS  # as in flags.py


def add_beginning(sub: argparse.ArgumentParser) -> None:
    """Adds them.

    Args:
        sub: the parser of ``serve``.
    """
    add = sub.add_argument
    add(
        "--start-timeout",
        metavar="SECONDS",
        dest="start_timeout_seconds",
        type=float,
        default=UNSET,
        help="how long after the first trainer the last one may join (default: 300)",
    )
    add(
        "--await-servers",
        action="store_true",
        default=UNSET,
        help="a job of an async mode waits for a server that is lost, and is started again",
    )
    add(
        "--reload",
        metavar="PATH",
        default=UNSET,
        help="of what a lost server has saved: take its place in the job that goes on",
    )
    add(
        "--write-ahead-log",
        metavar="FILE",
        default=UNSET,
        help="where server 0 writes what a process in its place has to know (--await-servers)",
    )
    add(
        "--min-trainers",
        metavar="N",
        type=int,
        default=UNSET,
        help="with how many trainers a job begins that others join later (default: all)",
    )
