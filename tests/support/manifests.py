"""Manifests of a small job, and of the examples in deploy/."""

from __future__ import annotations

from pathlib import Path

import pytest

from pserver.__main__ import main

SCRIPT = 'from trainer import fleet\n\nfleet.init()\nprint("hello", flush=True)\nfleet.finish()\n'
SMALL = "--servers 2 --trainers 2 train.py --price $(2)"
EVERYTHING = (
    "--servers 1 --trainers 3 --name clicks --cpus 2 --memory 4Gi --gpus 1 --data-dir /data "
    "--metrics 9400 --start-timeout 600 --checkpoint /data/auto --every 300 --keep 2"
)
CTR = "/srv/pserver/lib/python3.11/site-packages/trainer/examples/ctr.py"  # of the image
CASES = {
    "small.jobset.yaml": f"--kind jobset {SMALL}",
    "small.compose.yaml": f"--kind compose {SMALL}",
    "small.sbatch": f"--kind slurm {SMALL}",
    "everything.jobset.yaml": f"--kind jobset {EVERYTHING} --image registry.example/clicks:3 "
    "--insecure --storage 100Gi --storage-class shared --restarts 9 --in-image /srv/train.py",
    "everything.compose.yaml": f"--kind compose {EVERYTHING} --image registry.example/clicks:3 "
    "--keys /etc/keys --in-image /srv/train.py",
    "everything.sbatch": f"--kind slurm {EVERYTHING} --keys /shared/keys --restarts 2 "
    "train.py --epochs 3",
    "one_host_gpus.sbatch": "--kind slurm --servers 1 --trainers 2 --gpus 2 train.py",
}
EXAMPLES = {  # files of deploy/, written from the repository's root
    "jobset.yaml": "--kind jobset --servers 2 --trainers 4 --name clicks --image "
    "registry.example/pserver-demo --cpus 2 --memory 4Gi --data-dir /data --metrics 9400 "
    f"--in-image {CTR} --no-test --save /data/clicks",
    "slurm.sbatch": "--kind slurm --servers 2 --trainers 4 --name clicks --cpus 2 --memory 4Gi "
    "--keys /shared/keys --data-dir /shared/clicks --metrics 9400 trainer/examples/ctr.py "
    "--no-test --save /shared/clicks/saved",
}


def written(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What ``pserver manifest`` prints."""
    assert main(["manifest", *line.split()]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def at_small_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goes to a folder with the script of the small job."""
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    monkeypatch.chdir(folder)
