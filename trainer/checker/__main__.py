"""``python -m trainer.checker --seeds 2000``: many trials, and a table of their coverage."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter

from pserver.testing.stream_faults import ACTIONS
from trainer.checker.scenario import MODES, TRANSPORTS, Scenario, of_seed
from trainer.checker.trial import Result, play

PROGRESS_SECONDS = 10.0


def table(results: list[Result]) -> str:
    """Modes x faults: how many of each happened; and modes x transports: how many trials."""
    faults: Counter[tuple[str, str]] = Counter()
    for result in results:
        for (action, _, _), count in result.faults.items():
            faults[result.scenario.mode, action] += count
    trials = Counter((result.scenario.mode, result.scenario.transport) for result in results)
    lines = ["mode".ljust(18) + "".join(name.rjust(11) for name in (*ACTIONS, *TRANSPORTS))]
    for mode in MODES:
        counts = [
            *(faults[mode, action] for action in ACTIONS),
            *(trials[mode, transport] for transport in TRANSPORTS),
        ]
        lines.append(mode.ljust(18) + "".join(str(count).rjust(11) for count in counts))
    return "\n".join(lines)


def smallest(scenario: Scenario) -> Result | None:
    """A simpler trial of the same seed that fails too; None where no simpler one does."""
    found = None
    candidates = scenario.smaller()
    while candidates:
        result = play(candidates.pop(0))
        if result.failure:
            found, candidates = result, result.scenario.smaller()
    return found


def check(first: int, seeds: int, mode: str | None = None, transport: str | None = None) -> int:
    """Runs the trials of some seeds; prints the first that fails, or the table.

    Returns:
        The exit status.
    """
    began = printed = time.monotonic()
    results: list[Result] = []
    for seed in range(first, first + seeds):
        results.append(play(of_seed(seed, mode, transport)))
        if results[-1].failure:
            print(f"FAILED {results[-1]}", flush=True)
            simpler = smallest(results[-1].scenario)
            print(
                f"the smallest that fails too: {simpler}" if simpler else "no simpler trial fails",
                flush=True,
            )
            return 1
        if time.monotonic() - printed > PROGRESS_SECONDS:
            printed = time.monotonic()
            print(
                f"{len(results)} of {seeds} trials, every invariant held, {printed - began:.0f} s",
                flush=True,
            )
    print(table(results))
    seconds = time.monotonic() - began
    print(f"{seeds} trials from seed {first} on, every invariant held, {seconds:.0f} s")
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.checker", description="Is every step applied exactly once?"
    )
    parser.add_argument("--seeds", type=int, default=50, help="how many trials (default: 50)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--mode", choices=list(MODES), help="only this mode")
    parser.add_argument("--transport", choices=TRANSPORTS, help="only this transport")
    parser.add_argument("--verbose", action="store_true", help="show what servers and trainers log")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO if arguments.verbose else logging.CRITICAL)
    return check(arguments.first, arguments.seeds, arguments.mode, arguments.transport)


if __name__ == "__main__":
    sys.exit(main())
