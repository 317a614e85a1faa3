"""``make bench [ONLY=wire]``: measures, prints one table of ratios, and writes build/bench.json and
a picture, build/bench.svg.  ``python tests/benchmarks --keep`` takes these rows into docs/.
ONLY=gate takes the rows of tests/benchmarks/gate.py.

Each group of rows runs in a process of its own, with an end to its patience; what could not be
measured says why.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gate import GATE, RUNS, taken
from harness import Promise, Row
from kept import draw, keep, now, write
from rich.console import Console
from rich.table import Table

GROUPS = (
    *(
        "transports",
        "blocks",
        "steps",
        "metrics",
        "fan_in",
        "leases",
        "writes",
        "resources",
        "links",
        "tables",
        "saves",
        "recordings",
        "losses",
        "sampled",
        "ctr",
        "movielens",
        "overlap",
        "parsing",
        "sharded",
        "gpus",
    ),
)
PATIENCE_SECONDS = 900.0
HERE = Path(__file__).parent
OUTPUT = HERE.parent.parent / "build" / "bench.json"
LOG = OUTPUT.with_suffix(".log")  # what torch and the servers say meanwhile


def promises(group: str, only: str) -> list[Promise]:
    """The rows of a group that ``--only`` takes."""
    return [
        promise for promise in importlib.import_module(group).PROMISES if taken(promise.name, only)
    ]


def measured(group: str, arguments: argparse.Namespace) -> list[Row]:
    """A group's rows, from a process of its own."""
    wanted = promises(group, arguments.only)
    if not wanted:
        return []
    LOG.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile() as file, open(LOG, "a") as log:
        command = [
            sys.executable,
            str(HERE),
            "--group",
            group,
            "--output",
            file.name,
            "--only",
            arguments.only,
        ]
        command += ["--runs", str(arguments.runs), *(["--tiny"] if arguments.tiny else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, env=environment, stderr=log, start_new_session=True)
        why = ""
        try:
            status = process.wait(PATIENCE_SECONDS)
            why = f"the measurement ended with status {status}: see {LOG.name}" if status else ""
        except subprocess.TimeoutExpired:
            why = f"the measurement did not end within {PATIENCE_SECONDS:g} s"
        finally:
            _end(process)
        found = {
            facts.pop("name"): facts
            for facts in map(json.loads, Path(file.name).read_text().splitlines())
        }
    missing = Row(wanted[0], skipped=why or "nothing was measured")
    return [
        Row(p, **found[p.name]) if p.name in found else replace(missing, promise=p) for p in wanted
    ]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Whatever a group has started ends with it: they all are of its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def run_group(arguments: argparse.Namespace) -> None:
    """The process of one group: a line for each row."""
    module = importlib.import_module(arguments.group)
    with open(arguments.output, "a") as file:
        for row in module.measure(
            promises(arguments.group, arguments.only), arguments.runs, arguments.tiny
        ):
            facts = {
                "value": row.value,
                "baseline": row.baseline,
                "runs": row.runs,
                "skipped": row.skipped,
            }
            print(json.dumps({"name": row.promise.name, **facts}), file=file, flush=True)


def table(rows: Sequence[Row]) -> Table:
    """One line a row."""
    drawn = Table("row", "ours", "baseline", "compared with", "ratio", "target", "")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        target = (
            ""
            if row.promise.target is None
            else f"{'<=' if row.promise.most else '>='} {row.promise.target:g}"
        )
        verdict = {True: "[green]met", False: "[red]missed", None: ""}[row.met]
        against = f"not measured: {row.skipped}" if row.skipped else row.promise.against
        values = [
            f"{value:.4g} {row.promise.unit}" if value is not None else ""
            for value in (row.value, row.baseline)
        ]
        drawn.add_row(row.promise.name, *values, against, ratio, target, verdict)
    return drawn


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description="Measures, and prints one table of ratios.", allow_abbrev=False
    )
    parser.add_argument("--only", default="", help=f"rows whose names begin so; or {GATE}")
    parser.add_argument(
        "--runs", type=int, help=f"of each contender; 9 unless said otherwise, of {GATE} {RUNS}"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that show only that the benchmark itself works"
    )
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the JSON file")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="measure nothing: take the rows of the JSON file into docs/benchmarks.json",
    )
    arguments = parser.parse_args(argv)
    if arguments.runs is None:
        arguments.runs = RUNS if arguments.only == GATE else 9
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """The whole benchmark; 0 whatever the figures are."""
    arguments = parsed(argv)
    if arguments.group:
        run_group(arguments)
        return 0
    if arguments.keep:
        print(f"kept: {', '.join(keep(arguments.output, arguments.only)) or 'none'}")
        return 0
    rows = [row for group in GROUPS for row in measured(group, arguments)]
    settings = {row.promise.setting: None for row in rows if row.promise.setting}
    console = Console() if sys.stdout.isatty() else Console(width=180)
    console.print(table(rows))
    for setting in settings:
        names = ", ".join(row.promise.name for row in rows if row.promise.setting == setting)
        console.print(f"- {setting}: {names}", highlight=False)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    more = {"tiny": True} if arguments.tiny else {}
    write(arguments.output, [{**row.plain(), **now(), **more} for row in rows])
    draw(arguments.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
