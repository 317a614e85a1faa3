"""``python -m tests.fuzz --seconds 60``: wrong inputs, first on jobs in this process, in each of
their states, and then on all ports of a server whose job runs.

Afterwards the jobs hold what they would hold without, and the server has kept within bounds of
memory, time and log.  A failure names the seed and the input; the same seed tries the same inputs.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from tests.fuzz import inprocess, sockets
from tests.fuzz.sandbox import Bug
from tests.fuzz.victim import GUARDS

WARM_UP_SECONDS = 3.0  # until this process's memory is what it stays
IN_PROCESS_MB = 32
LEAST_SHARE = 0.005  # of the inputs: each kind of frame, each call, each state


def table(counts: Counter[str], total: int) -> str:
    """The inputs by kind, a line each."""
    lines = [f"  {name:24}{count:9}{count / total:8.1%}" for name, count in sorted(counts.items())]
    return "\n".join(lines)


def rare(counts: Counter[str], total: int) -> list[str]:
    """What was tried too seldom."""
    return [
        f"{name}: expected {LEAST_SHARE:.1%} of the inputs, got {count / total:.2%}"
        for name, count in sorted(counts.items())
        if count < LEAST_SHARE * total and not name.endswith("UNKNOWN")  # it is not written
    ]


def in_process(seed: int, seconds: float, first: int) -> list[str]:
    """The first part; says what was beyond its bounds."""
    inprocess.fuzz(seed + 1, min(WARM_UP_SECONDS, seconds), say=lambda text: None)
    before, began = inprocess.resident(), time.monotonic()
    progress = inprocess.fuzz(seed, seconds, first)
    grown = (inprocess.resident() - before) / 2**20
    took, total = time.monotonic() - began, progress.total
    print(f"in process: {total} inputs in {took:.0f} s, memory {grown:+.1f} MB afterwards")
    print(table(progress.counts, total))
    found = rare(progress.counts, total) if total > 10_000 else []
    if grown > IN_PROCESS_MB:
        found.append(f"memory: expected {IN_PROCESS_MB} MB more at most, got {grown:.1f} MB")
    return found


def over_sockets(seed: int, seconds: float, guard: str) -> list[str]:
    """The second part; says what was beyond its bounds."""
    found = sockets.fuzz(seed, seconds, guard)
    total = found.counts.total()
    print(
        f"over sockets, {guard}: {total} inputs in {seconds:.0f} s; "
        f"memory {found.grown / 2**20:+.1f} MB afterwards, {found.peak / 2**20:+.1f} MB at most; "
        f"the slowest heartbeat {found.slowest_beat:.2f} s, joining {found.join:.2f} s; "
        f"{found.log_per_minute / 2**20:.3f} MB of log a minute"
    )
    print(table(found.counts, total))
    return found.excesses()


def main() -> int:
    """The exit status: 0 where all is well."""
    parser = argparse.ArgumentParser(prog="tests.fuzz", description=__doc__, allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=60.0, help="for both parts together")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the inputs")
    parser.add_argument("--first", type=int, default=0, help="the first input, in process")
    parser.add_argument("--only", choices=("in-process", "sockets"), help="one of the two parts")
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    seconds = arguments.seconds if arguments.only else arguments.seconds / 2
    print(f"fuzz: --seed {arguments.seed}, {arguments.seconds:g} s", flush=True)
    found: list[str] = []
    try:
        if arguments.only != "sockets":
            found += in_process(arguments.seed, seconds, arguments.first)
        if arguments.only != "in-process":
            for guard in GUARDS:
                found += over_sockets(arguments.seed, seconds / len(GUARDS), guard)
    except (Bug, AssertionError) as error:
        found.append(f"{type(error).__name__}: {error}")
    for each in found:
        print(f"fuzz: {each}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
