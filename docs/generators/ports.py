"""Writes docs/ports.md: every port that the system opens, from ``pserver/security/access.py``."""

from __future__ import annotations

from pserver.security.access import PORTS

FIRST = """# Ports

Every port that the system opens; no process opens another.
`make reference` writes this page from [its table](../pserver/security/access.py).
A test holds it against the sockets of running jobs.
[Security](security.md) says how the ports are protected.

| port | opened by | number | at | carries | protected by |
|---|---|---|---|---|---|
"""


def pages() -> dict[str, str]:
    """The text of the page."""
    rows = [
        f"| {p.name} | {p.process} | {p.number} | {p.address} | {p.carries} | {p.protected} |\n"
        for p in PORTS
    ]
    return {"ports.md": FIRST + "".join(rows)}
