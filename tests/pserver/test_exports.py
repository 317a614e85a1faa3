"""The package's lazy exports."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.processes
def test_the_package_exports_the_server_lazily() -> None:
    """``import pserver`` and the parser of the command line import neither torch nor gRPC."""
    code = (
        "import pserver, sys, pserver.__main__ as m; m.parser(); "
        "print(*{'torch', 'grpc'} & set(sys.modules)); "
        "print(pserver.Server.__name__, pserver.ServerConfig.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split("\n")[:2] == ["", "Server ServerConfig"]
