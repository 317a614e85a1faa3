"""``python -m tests.checker --seeds 2000``: many trials, and what has happened in them."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections import Counter
from pathlib import Path

from tests.checker import tally
from tests.checker.scenario import TRANSPORTS
from tests.checker.trials import KINDS, Numbered, numbered, run, smallest, warm_up

PROGRESS_SECONDS = 10.0


def check(trials: list[Numbered], record: Path | None = None) -> list[tally.Played]:
    """Runs trials; prints those that fail, and how far it is.

    Args:
        record: a file that gets a line for each of them.

    Returns:
        What they have shown.
    """
    began = printed = time.monotonic()
    results: list[tally.Played] = []
    for trial in trials:
        results.append(played := run(trial))
        if record is not None:
            tally.keep(record, played)
        if played.failure:
            first = not any(each.failure for each in results[:-1])
            print(f"FAILED seed {trial.seed}: {played.failure}", flush=True)
            if first:
                said = smallest(trial)
                print(f"a smaller one that fails too: {said}" if said else "no smaller one fails")
        if time.monotonic() - printed > PROGRESS_SECONDS:
            printed = time.monotonic()
            failed = sum(bool(each.failure) for each in results)
            print(
                f"{len(results)} of {len(trials)} trials, {failed} failed, {printed - began:.0f} s",
                flush=True,
            )
    print(tally.markdown(results))
    print(f"{len(results)} trials in {time.monotonic() - began:.0f} s")
    return results


def _summary(results: list[tally.Played]) -> int:
    """Prints which seeds failed.

    Returns:
        The exit status.
    """
    failed = [each for each in results if each.failure]
    kinds = Counter(each.world for each in results)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    if failed:
        print("FAILED seeds:", " ".join(str(each.seed) for each in failed))
        return 1
    print("every law held")
    return 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.checker",
        description="Is every step applied exactly once?",
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=int, default=50, help="how many trials (default: 50)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--kind", choices=KINDS, help="only this kind of trial, by its own seeds")
    parser.add_argument("--mode", help="this mode, in kinds of trials that have it")
    parser.add_argument("--transport", choices=TRANSPORTS, help="this transport")
    parser.add_argument("--record", type=Path, help="a file to which each trial adds a line")
    parser.add_argument("--table", type=Path, help="a page that is made of that file's lines")
    parser.add_argument("--verbose", action="store_true", help="show what servers and trainers log")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO if asked.verbose else logging.CRITICAL)
    try:
        trials = [
            numbered(seed, asked.kind, asked.mode, asked.transport)
            for seed in range(asked.first, asked.first + asked.seeds)
        ]
    except ValueError as error:
        parser.error(f"{error}")
    warm_up()
    results = check(trials, asked.record)
    if asked.table is not None:
        asked.table.write_text(tally.markdown(tally.kept(asked.record or Path())) + "\n")
    return _summary(results)


if __name__ == "__main__":
    sys.exit(main())
