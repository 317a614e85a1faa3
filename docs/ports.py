"""Writes docs/ports.md: every port that the system opens, from ``pserver/security/ports.py``.

::

    python docs/ports.py            writes docs/ports.md
    python docs/ports.py --print    prints it
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from pserver.security.ports import PORTS  # noqa: E402  # from this tree

PAGE = ROOT / "docs" / "ports.md"
FIRST = """# Ports

Every port that the system opens; no process opens another.
`python docs/ports.py` writes this page from
[pserver/security/ports.py](../pserver/security/ports.py).
A test holds it against the sockets of running jobs.
[Security](security.md) says how the ports are protected.

| port | opened by | number | at | carries | protected by |
|---|---|---|---|---|---|
"""


def page() -> str:
    """The page's text."""
    rows = [
        f"| {p.name} | {p.process} | {p.number} | {p.address} | {p.carries} | {p.protected} |\n"
        for p in PORTS
    ]
    return FIRST + "".join(rows)


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(page(), end="")
    else:
        PAGE.write_text(page(), encoding="utf-8")
