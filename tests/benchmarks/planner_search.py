"""What a search of `pserver plan` chooses, beside the fastest of all that it compared.

`python tests/benchmarks/planner_search.py`: for each of six models the search puts its best on top;
then every candidate runs for real, and a line tells both.  With ``--only NAME`` those whose names
begin so.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from planner import JOB, LEAST_STEPS, PATIENCE_SECONDS, TOLERANCE, UNITS, Configuration, measured

MODELS = ("128x2", "512x3", "1024x2", "64x30", "tables", "images")
SERVERS, TRAINERS = 2, 2
JOB_SECONDS = 5.0  # about, of each real job
ROW = re.compile(r"(\d+)  (a_sync = \S+(?: a_sync_configs = {.*?})?) +([\d.]+) (s|ms|us) ")
K_STEPS = re.compile(r"'k_steps': (\d+)")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A row of the search's table.

    Attributes:
        predicted: seconds of a step.
    """

    job: Configuration
    predicted: float


def searched(model: str) -> list[Candidate]:
    """The search's table for a model, its best first."""
    counts = ["--servers", str(SERVERS), "--trainers", str(TRAINERS)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pserver",
            "plan",
            "--search",
            *counts,
            JOB,
            model,
            "sync",
            "1000000",
        ],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    found = [
        Candidate(
            Configuration(model, _mode(row[2]), int(row[1]), TRAINERS),
            float(row[3]) * UNITS[row[4]],
        )
        for row in map(ROW.match, done.stdout.splitlines())
        if row
    ]
    assert found, done.stdout
    return found


def _mode(setting: str) -> str:
    if setting == "a_sync = False":
        return "sync"
    k_steps = K_STEPS.search(setting)
    return f"geo{k_steps[1]}" if k_steps else "async"


def run(found: Sequence[Candidate]) -> list[float]:
    """What each takes for real: seconds of a step."""
    seconds = []
    for each in found:
        steps = max(2 * LEAST_STEPS, min(5000, int(JOB_SECONDS / each.predicted)))
        seconds.append(measured(each.job, steps - steps % LEAST_STEPS))
        print(f"{each.job.name}: {each.predicted:.6f} {seconds[-1]:.6f}", file=sys.stderr)
    return seconds


def main() -> None:
    """Prints a table in Markdown, and how many choices are near the best."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    print("| model | chosen | its step | fastest of all | its step | ratio |")
    print("|---|---|---|---|---|---|")
    near = []
    for model in (each for each in MODELS if each.startswith(only)):
        found = searched(model)
        seconds = run(found)
        best = min(range(len(found)), key=seconds.__getitem__)
        near.append(seconds[0] <= (1 + TOLERANCE) * seconds[best])
        print(
            f"| {model} | {found[0].job.mode}, {found[0].job.servers} servers "
            f"| {seconds[0] * 1e3:.3g} ms | {found[best].job.mode}, {found[best].job.servers} "
            f"servers | {seconds[best] * 1e3:.3g} ms | {seconds[0] / seconds[best]:.2f} |",
            flush=True,
        )
    print(f"\n{sum(near)} of {len(near)} within 25 % of the fastest")


if __name__ == "__main__":
    main()
