"""Stand-ins for Slurm's commands on one host: ``srun`` starts a step's processes here, ``scancel``
signals them, ``scontrol`` names the host.

They take the options that a batch script of ours gives, and no others, so a misspelt one fails.
Written as one program, which goes by the name that it is called by.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.pages import ROOT

NAMES = ("srun", "scancel", "scontrol")
HOST = "one"


def install(folder: Path) -> None:
    """Puts the commands into a folder, for the PATH."""
    for name in NAMES:
        command = folder / name
        command.write_text(
            f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
            "from tests.support.slurm_commands import main\n"
            f"sys.exit(main({name!r}))\n",
            encoding="utf-8",
        )
        command.chmod(0o755)


def environment(folder: Path, tasks: int) -> dict[str, str]:
    """The variables of a batch script, with the commands first on its PATH."""
    return {
        "PATH": os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.defpath)),
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": HOST,
        "SLURM_TASKS_PER_NODE": str(tasks),
        "SLURMD_NODENAME": HOST,
        "STEPS": str(folder / "steps"),
    }


def main(name: str) -> int:
    """One of the commands; returns its exit status."""
    parser = argparse.ArgumentParser(prog=name, allow_abbrev=False)
    add: Any = parser.add_argument
    if name == "scontrol":
        print(*sys.argv[1:], file=sys.stderr)
        assert sys.argv[1:] == ["show", "hostnames", HOST]
        print(HOST)
        return 0
    if name == "scancel":
        add("--signal", choices=("TERM",), required=True)
        add("job")
        assert parser.parse_args().job == os.environ["SLURM_JOB_ID"]
        for line in Path(os.environ["STEPS"]).read_text("ascii").split():
            try:
                os.kill(int(line), signal.SIGTERM)
            except ProcessLookupError:
                pass
        return 0
    for option in ("distribution", "ntasks", "nodes", "cpus-per-task", "output", "mem"):
        add(f"--{option}")
    add("--exact", action="store_true")
    add("--open-mode", choices=("append",), required=True)
    add("command", nargs=argparse.REMAINDER)
    return srun(parser.parse_args())


def srun(asked: argparse.Namespace) -> int:
    """Starts a step's processes and waits for them; the largest of their exit statuses."""
    hosts = Path(os.environ["SLURM_HOSTFILE"]).read_text("ascii").split()
    assert asked.distribution == "arbitrary" and hosts == [HOST] * int(asked.ntasks), hosts
    tasks = []
    for number in range(int(asked.ntasks)):
        with open(asked.output.replace("%t", str(number)), "ab") as log:
            variables = {**os.environ, "SLURM_PROCID": str(number)}
            task = subprocess.Popen(asked.command, env=variables, stdout=log, stderr=log)
        tasks.append(task)
        with open(os.environ["STEPS"], "a", encoding="ascii") as steps:
            steps.write(f"{task.pid}\n")
    statuses = [task.wait() for task in tasks]
    return max(status if status >= 0 else 128 - status for status in statuses)
