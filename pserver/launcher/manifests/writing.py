"""``pserver manifest``: writes the file, or prints it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from pserver.config import refuse_url
from pserver.launcher.manifests.compose import compose
from pserver.launcher.manifests.description import ClusterDescription
from pserver.launcher.manifests.jobset import jobset
from pserver.launcher.manifests.slurm import slurm
from transpiler.files.named_errors import naming

KINDS: dict[str, Callable[[ClusterDescription, Path], str]] = {
    "jobset": jobset,
    "compose": compose,
    "slurm": slurm,
}


def manifest(cluster: ClusterDescription, folder: Path) -> str:
    """The text of a manifest.

    Example::

        print(manifest(ClusterDescription("slurm", "train.py", (), 2, 4), Path(".")))

    Args:
        folder: where the file will be; paths in a file for Compose begin there.

    Raises:
        ValueError: the script cannot come along.
    """
    return KINDS[cluster.kind](cluster, folder)


def write(cluster: ClusterDescription, output: str | None, out: TextIO) -> None:
    """Writes a manifest.

    Args:
        output: the file; None: it goes to ``out``.

    Raises:
        ValueError: the script cannot come along; or ``output`` is a URL.
        OSError: the file cannot be written.
    """
    if output is None:
        out.write(manifest(cluster, Path(".")))
        return
    refuse_url("--output", output)
    with naming(output):
        Path(output).write_text(manifest(cluster, Path(output).parent), encoding="utf-8")
