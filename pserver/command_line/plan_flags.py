"""The flags of ``pserver plan``."""

from __future__ import annotations

import argparse

HOSTS = ("one", "each")


def add_planning(sub: argparse.ArgumentParser) -> None:
    """Adds the job that is planned, and what is predicted of it."""
    add = sub.add_argument
    add("--servers", metavar="N", type=int, help="how many there would be")
    add("--trainers", metavar="N", type=int, help="how many there would be")
    add("--no-probe", action="store_true", help="show the split only, and run no step")
    add(
        "--window",
        metavar="SECONDS",
        type=float,
        help="of the steps that the probe measures (default: 6)",
    )
    add("--link", metavar="RATE", help="of each process's link, as 200Mbit or 10Gbit")
    add("--latency", metavar="TIME", help="of a link, one way, as 200us or 0.2ms")
    add(
        "--hosts",
        choices=HOSTS,
        help="'one': all processes share the cores of this machine; 'each': each has a machine "
        "like it (default: each with --link, otherwise one)",
    )
    add(
        "--search",
        action="store_true",
        help="compare update modes and numbers of servers, up to --servers, the best on top",
    )
    add("--memory", metavar="SIZE", help="with --search: that each server may have, as 8Gi")
    add(
        "--write",
        action="store_true",
        help="with --search: write the winner to SCRIPT's .plan.json, for strategy.auto_search",
    )
