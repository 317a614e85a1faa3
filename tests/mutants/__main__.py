"""Which small faults of the product do the tests not see?  ::

    python -m tests.mutants --files 'pserver/leases/*.py' --tests tests/pserver/leases --count 300
    python -m tests.mutants --compare OLD.json NEW.json

A mutant is a source file with one small change (see ``points.py``); it is killed where a test fails
or takes too long.  One that survives is a promise that no test holds, or a change that changes
nothing.  The same seed gives the same mutants, so two versions of a test can be compared: the
second form prints what the old one killed and the new one does not, and ends with 1 if there is
any.  What follows ``--`` goes to pytest: ``-- --tier all``.

No file is changed: each mutant is a process, forked from one that has collected the tests, and runs
those that execute the changed lines.  Processes that a test starts by itself run the source as it
is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.mutants.points import Mutant, mutants, sample
from tests.mutants.runs import NOT_EXECUTED, SURVIVED, Run, Verdict

ALIVE = (SURVIVED, NOT_EXECUTED)


def files_of(patterns: Iterable[str]) -> list[str]:
    """The Python files of globs and folders, as paths from here."""
    found: set[Path] = set()
    for pattern in patterns:
        for path in Path().glob(pattern):
            found.update(path.rglob("*.py") if path.is_dir() else [path])
    return sorted(path.as_posix() for path in found if "_pb2" not in path.name)


def summary(verdicts: Sequence[Verdict]) -> str:
    """Counts by file, and who survived."""
    counts: dict[str, Counter[str]] = {}
    for each in verdicts:
        counts.setdefault(each.mutant.path, Counter())[each.outcome] += 1
    lines = [f"{each.outcome}: {each.mutant.name}" for each in verdicts if each.outcome in ALIVE]
    lines.append("")
    for path, count in (*counts.items(), ("in all", sum(counts.values(), Counter()))):
        killed = sum(count[outcome] for outcome in count if outcome not in ALIVE)
        parts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items()))
        lines.append(f"{path}: {killed} of {count.total()} ({killed / count.total():.1%}); {parts}")
    return "\n".join(lines)


def compare(old: Path, new: Path) -> int:
    """Prints what one run killed and the other did not; the exit status."""
    before, after = (json.loads(path.read_text())["mutants"] for path in (old, new))
    both = [name for name in before if name in after]
    lost, won = (
        [name for name in both if mine[name][0] not in ALIVE and other[name][0] in ALIVE]
        for mine, other in ((before, after), (after, before))
    )
    for name in lost:
        print(f"lost: {name}")
    print(f"{len(both)} mutants in both: {len(lost)} lost, {len(won)} won")
    return 1 if lost or not both else 0


def main(words: Sequence[str]) -> int:
    """The exit status: 0 where the run has come to its end."""
    own, rest = list(words), []
    if "--" in own:
        own, rest = own[: own.index("--")], own[own.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="tests.mutants", description=__doc__, allow_abbrev=False)
    parser.add_argument("--files", nargs="+", default=[], help="globs or folders: what is mutated")
    parser.add_argument("--tests", nargs="+", default=[], help="as pytest takes them")
    parser.add_argument("--count", type=int, default=300, help="of mutants, at most")
    parser.add_argument("--seed", type=int, default=0, help="of their choice")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that one may hang")
    parser.add_argument("--json", type=Path, help="the file for --compare")
    parser.add_argument("--list", action="store_true", help="the mutants' names only")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    options = parser.parse_args(own)
    if options.compare:
        return compare(*options.compare)
    files = files_of(options.files)
    found = [each for path in files for each in mutants(Path(path).read_text("utf-8"), path)]
    chosen = sample(found, options.count, options.seed)
    if options.list or not chosen:
        print(*(each.name for each in chosen), f"{len(found)} in all", sep="\n")
        return 0 if chosen else 1
    print(f"{len(chosen)} of {len(found)} mutants in {len(files)} files", flush=True)
    began, verdicts = time.monotonic(), []
    run = Run(chosen, [*options.tests, *rest], options.jobs, options.timeout)
    for each in run.verdicts():
        verdicts.append(each)
        done = f"{len(verdicts)}/{len(chosen)}"
        print(f"{done} {each.outcome} {each.seconds:.2f}s {each.mutant.name}", flush=True)
    took = time.monotonic() - began
    place: dict[Mutant, int] = {mutant: i for i, mutant in enumerate(chosen)}
    verdicts.sort(key=lambda each: place[each.mutant])
    print(f"\n{summary(verdicts)}\n{took:.0f} s, {took / len(chosen):.2f} s each")
    if options.json:
        said = {each.mutant.name: [each.outcome, round(each.seconds, 2)] for each in verdicts}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"words": words, "mutants": said}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
