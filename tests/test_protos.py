"""The committed protobuf code is what the .proto files generate."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.floors import floors, requirements

ROOT = Path(__file__).parents[1]


@pytest.mark.processes
def test_the_committed_code_is_what_the_proto_files_generate(tmp_path: Path) -> None:
    """``protos/generate`` changes nothing: each generated file is committed, and no other one
    is.
    """
    pytest.importorskip(
        "grpc_tools", reason="grpcio-tools, a development dependency, is not installed"
    )
    subprocess.run(
        [ROOT / "protos" / "generate", tmp_path],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHON": sys.executable},
    )
    generated = {
        path.relative_to(tmp_path): path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    packages = ("transpiler", "pserver", "trainer")
    committed = {
        path.relative_to(ROOT)
        for package in packages
        for path in (ROOT / package).rglob("*_pb2*.py*")
        if path.suffix != ".pyc"
    }

    assert committed == set(generated)
    assert [
        str(path) for path, code in generated.items() if (ROOT / path).read_text() != code
    ] == []


def test_the_generated_code_asks_for_no_newer_library_than_pyproject_does() -> None:
    """``make check-lowest`` runs it with the oldest ones; protoc's own checks would refuse them."""
    stub = (ROOT / "pserver" / "wire_pb2_grpc.py").read_text()
    texts = [
        path.read_text()
        for package in ("transpiler", "pserver")
        for path in (ROOT / package).glob("*_pb2.py")
    ]

    assert len(texts) == 4 and not [text for text in texts if "runtime_version" in text.lower()]
    assert f"GRPC_GENERATED_VERSION = '{floors(requirements())['grpcio']}'" in stub


def test_the_generated_imports_resolve() -> None:
    """The service's messages use the program's: both are the same classes in one process."""
    from pserver import wire_pb2
    from transpiler import program_pb2

    assert type(wire_pb2.InstallRequest().program) is program_pb2.Program
