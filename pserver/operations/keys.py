"""``pserver keys``: an operator's actions on the keys of a cluster."""

from __future__ import annotations

import argparse
import getpass
import socket
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from pserver.security.bearer import ROLES
from pserver.security.certificates import bearer_in_pem
from pserver.security.enrolment import MOST_MINUTES, Enrolment, redeem
from pserver.security.key_folder import HOST_ROLES, OPERATOR, KeyFolder, check_host


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Does what was typed; returns the exit status.

    Raises:
        ValueError: the command line is wrong.
        PServerError, OSError: it could not be done.
    """
    path, act = Path(arguments.directory), arguments.act
    if (days := getattr(arguments, "days", 1)) < 1:
        raise ValueError(f"--days: expected 1 or more, got {days}")
    hosts = _names(getattr(arguments, "hosts", ""))
    roles = _names(getattr(arguments, "roles", ""))
    if unknown := set(roles) - set(ROLES):
        raise ValueError(f"--roles: expected some of {', '.join(ROLES)}, got {', '.join(unknown)}")
    if act == "init":
        init(path, hosts, days, console)
    elif act == "enrol":
        listen = arguments.listen or f"{socket.gethostname()}:0"
        enrol(path, arguments.host, roles, listen, arguments.minutes, console)
    elif act == "redeem":
        redeem_code(path, console)
    elif act == "renew":
        renew(path, hosts, days, console)
    elif act == "revoke":
        revoke(path, arguments.host, roles, console)
    else:
        show(path, console)
    return 0


def _names(text: str) -> list[str]:
    return [name for part in text.split(",") if (name := part.strip())]


def init(path: Path, hosts: Sequence[str], days: int, console: Console) -> None:
    """Makes an authority, an operator's key, and the keys of each host that has none yet."""
    for host in hosts:
        check_host(host)
    folder = KeyFolder.create(path)
    for host in hosts:
        made = folder.add(host, days)
        _say(console, f"{path / host}: {'for host ' + host if made else 'was there'}")
    _say(console, f"{path / OPERATOR}: for the user who runs `pserver save`, `reset` and `drain`")
    _say(console, f"{path / 'authority'}: signs all keys; it never leaves this machine")


def enrol(
    path: Path, host: str, roles: Sequence[str], listen: str, minutes: float, console: Console
) -> None:
    """Prints a code, and waits for the host that brings it."""
    if not 0 < minutes <= MOST_MINUTES:
        raise ValueError(
            f"--minutes: expected a number above 0 and up to {MOST_MINUTES:g}, got {minutes:g}"
        )
    with Enrolment(KeyFolder.open(path), host, roles or HOST_ROLES, listen) as enrolment:
        _say(console, f"on {host}, within {minutes:g} minutes: pserver keys redeem DIR")
        _say(console, f"code: {enrolment.code}")
        enrolment.wait(60 * minutes)
    _say(console, f"{host} has its keys")


def redeem_code(path: Path, console: Console) -> None:
    """Reads a code from the terminal, or a line of standard input, and gets this host's keys."""
    code = getpass.getpass("code: ") if sys.stdin.isatty() else sys.stdin.readline()
    host = redeem(code, path)
    _say(console, f"{path}: the keys of {host}")


def renew(path: Path, hosts: Sequence[str], days: int, console: Console) -> None:
    """Makes new certificates for the existing keys."""
    for bearer in KeyFolder.open(path).renew(hosts, days):
        file = path / bearer.host / f"{bearer.role}.pem"
        _say(console, f"{file}: until {bearer.until:%Y-%m-%d}; copy it to where the key is")


def revoke(path: Path, host: str, roles: Sequence[str], console: Console) -> None:
    """Revokes a host's keys, wherever the list is copied to."""
    found = KeyFolder.open(path).revoke(host, roles)
    _say(console, f"revoked: the keys of {host} as {', '.join(found)}")
    _say(console, f"copy {path / 'authority' / 'revoked.pem'} into the folder of each host")


def show(path: Path, console: Console) -> None:
    """Lists the certificates below a folder, and when they expire."""
    found = sorted(each for each in path.rglob("*.pem") if each.with_suffix(".key").exists())
    if not found:
        raise ValueError(f"expected a folder with keys, got {path}")
    now = datetime.now(UTC)
    for file in found:
        bearer = bearer_in_pem(file.read_bytes())
        warning = f"  {bearer.warning(now)}" if bearer.warning(now) else ""
        _say(console, f"{file}: until {bearer.until:%Y-%m-%d}{warning}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
