"""The package's manual: its index of notes, and what it exports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pserver

PACKAGE = Path(pserver.__file__).parent
NOTE = re.compile(r"^ *\[Note: ([^\]]+)\](?:  |$)", re.MULTILINE)


def notes() -> list[str]:
    """The lines of the index: each note of the package with its file."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for title in NOTE.findall(path.read_text()):
            found.append((path.relative_to(PACKAGE).as_posix(), title))
    width = max(len(file) for file, _ in found)
    return [f"    {file:<{width}}  {title}" for file, title in found]


def test_the_index_lists_every_note() -> None:
    """File by file; a note that is added, renamed or moved changes the index."""
    assert pserver.__doc__ is not None
    index = pserver.__doc__.rpartition("it is about::\n\n")[2].rstrip("\n")

    assert index.splitlines() == notes()


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
