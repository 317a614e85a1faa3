"""Promises about what the trainer knows of the protocol, and about what importing it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imported(path: Path) -> set[str]:
    """Every module that a file imports, and every name that it imports from one."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update({f"{node.module}", *(f"{node.module}.{each.name}" for each in node.names)})
    return found


def test_the_trainer_imports_no_generated_message() -> None:
    """``pserver/client/`` owns the protocol: nothing in ``trainer/`` imports a ``*_pb2`` module."""
    files = sorted((ROOT / "trainer").rglob("*.py"))
    importing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in imported(path)
        if any(part.endswith(("_pb2", "_pb2_grpc")) for part in name.split("."))
    }

    assert files and not importing


@pytest.mark.processes
def test_importing_the_trainer_does_not_import_numba() -> None:
    """A job without tables does not wait for the compiler of their kernels."""
    code = "import sys, trainer; print('numba' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "False"
