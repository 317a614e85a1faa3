"""What `pserver plan` predicts, beside what the job then takes.

`python tests/benchmarks/planner.py`: for each configuration the planner probes, the job runs for
real, and a line tells both.  With ``--only NAME`` those whose names begin so.  Configurations with
a link need root: each process is in a network namespace of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from links import hosts

HERE = Path(__file__).parent
JOB = str(HERE / "planner_job.py")
JOB_SECONDS = 10.0  # about, of each real job
# whole windows of k-step modes; the first quarter, which does not count, fills an async queue
LEAST_STEPS = 100
PATIENCE_SECONDS = 180.0
TOLERANCE = 0.25
PREDICTED = re.compile(r"predicted step ([\d.]+) (s|ms|us),.*bottleneck: (.*)")
STEP = re.compile(r"seconds of a step: ([\d.]+)")
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True, slots=True)
class Configuration:
    """A job.

    Attributes:
        model, mode: as planner_job takes them.
        link: of each process, for ``--link`` and tc; "": the loopback.
    """

    model: str
    mode: str
    servers: int
    trainers: int
    link: str = ""

    @property
    def name(self) -> str:
        """In one line."""
        link = f" {self.link}" if self.link else ""
        return f"{self.model} {self.mode} {self.servers}s{self.trainers}t{link}"


CONFIGURATIONS = (
    Configuration("1024x4", "sync", 1, 1),
    Configuration("1024x4", "sync", 2, 2),
    Configuration("1024x4", "async", 1, 2),
    Configuration("1024x4", "geo20", 2, 2),
    Configuration("64x150", "sync", 2, 2),
    Configuration("64x150", "async", 1, 2),
    Configuration("512x3", "geo20", 3, 1),
    Configuration("tables", "sync", 2, 2),
    Configuration("tables", "async", 2, 1),
    Configuration("tables", "geo20", 1, 2),
    Configuration("1024x4", "sync", 1, 1, "4Gbit"),
    Configuration("512x3", "sync", 2, 2, "200Mbit"),
    Configuration("512x3", "async", 1, 1, "200Mbit"),
    Configuration("tables", "sync", 1, 2, "50Mbit"),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one configuration: seconds of a step."""

    configuration: Configuration
    predicted: float
    measured: float
    bottleneck: str

    @property
    def ratio(self) -> float:
        """Predicted by measured."""
        return self.predicted / self.measured


def predicted(found: Configuration) -> tuple[float, str]:
    """What the planner says: seconds, and the bottleneck."""
    counts = ["--servers", str(found.servers), "--trainers", str(found.trainers)]
    link = ["--link", found.link, "--hosts", "one"] if found.link else []
    command = [sys.executable, "-m", "pserver", "plan", *counts, *link]
    done = subprocess.run(
        [*command, JOB, found.model, found.mode, "1000000"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    match = PREDICTED.search(done.stdout)
    assert match is not None, done.stdout
    print(done.stdout[match.start() :], file=sys.stderr)
    return float(match[1]) * UNITS[match[2]], match[3]


def measured(found: Configuration, steps: int) -> float:
    """Seconds of a step: the mean over the trainers of the real job."""
    work = [found.model, found.mode, str(steps)]
    said = _on_links(found, work) if found.link else _launched(found, work)
    seconds = [float(match) for match in STEP.findall(said)]
    assert len(seconds) == found.trainers, said
    return statistics.mean(seconds)


def _launched(found: Configuration, work: Sequence[str]) -> str:
    counts = ["--servers", str(found.servers), "--trainers", str(found.trainers)]
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            [sys.executable, "-m", "pserver", "launch", *counts, JOB, *work],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        ).stdout


def _on_links(found: Configuration, work: Sequence[str]) -> str:
    """The servers' hosts are the first ones."""
    count = found.servers + found.trainers
    rate = found.link.lower()
    burst = "1mb" if rate.endswith("gbit") else "32kb"
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    with ExitStack() as stack:
        prefixes = stack.enter_context(hosts(rate, count=count, burst=burst))
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        endpoints = [f"10.77.0.{number + 1}:6174" for number in range(found.servers)]
        serve = [sys.executable, "-m", "pserver", "serve", "--once", "--transport", "tcp"]
        for prefix, endpoint in zip(prefixes, endpoints, strict=False):
            command = [*prefix, *serve, "--endpoint", endpoint]
            server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            stack.callback(server.wait, 20)
            stack.callback(server.terminate)
        role = {"TRAINING_ROLE": "TRAINER", "TRAINERS": str(found.trainers)}
        role |= {"PSERVER_ENDPOINTS": ",".join(endpoints), "PSERVER_TRANSPORT": "tcp"}
        trainers = [
            subprocess.Popen(
                [*prefix, sys.executable, JOB, *work],
                env={**environment, **role, "TRAINER_ID": str(number)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for number, prefix in enumerate(prefixes[found.servers :])
        ]
        for trainer in trainers:
            stack.callback(trainer.kill)
        return "".join(each.communicate(timeout=PATIENCE_SECONDS)[0] for each in trainers)


def outcome(found: Configuration) -> Outcome:
    """Plans, runs, and compares."""
    seconds, bottleneck = predicted(found)
    steps = max(LEAST_STEPS, min(5000, int(JOB_SECONDS / seconds)))
    return Outcome(found, seconds, measured(found, steps - steps % LEAST_STEPS), bottleneck)


def main() -> None:
    """Prints a table in Markdown, and how many predictions are near."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    outcomes = [outcome(each) for each in CONFIGURATIONS if each.name.startswith(only)]
    print(
        "| model | mode | servers | trainers | link | predicted | measured | ratio | bottleneck |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for each in outcomes:
        job = each.configuration
        print(
            f"| {job.model} | {job.mode} | {job.servers} | {job.trainers} | {job.link or '-'} "
            f"| {each.predicted * 1e3:.3g} ms | {each.measured * 1e3:.3g} ms "
            f"| {each.ratio:.2f} | {each.bottleneck} |"
        )
    near = sum(1 - TOLERANCE <= each.ratio <= 1 + TOLERANCE for each in outcomes)
    print(f"\n{near} of {len(outcomes)} within 25 %")


if __name__ == "__main__":
    main()
