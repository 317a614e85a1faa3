"""The flags of ``pserver keys``, and those of other commands that have to do with keys."""

from __future__ import annotations

import argparse
from typing import Any

DAYS = 365
KEYS_HELP = (
    "this host's folder of keys, for TLS on every port; needed beyond this host (PSERVER_KEYS)"
)
INSECURE_HELP = (
    "endpoints beyond this host without keys, on a network that nobody else reaches "
    "(PSERVER_INSECURE=1)"
)


def add_keys(sub: argparse.ArgumentParser) -> None:
    """Adds the acts of ``pserver keys``; the namespace's ``act`` names one of them."""
    acts = sub.add_subparsers(dest="act", required=True, metavar="ACT", parser_class=type(sub))
    init = acts.add_parser("init", help="an authority, and keys for hosts")
    _folder(init)
    _hosts(init, "names or addresses, as endpoints have them", required=True)
    _days(init)
    enrol = acts.add_parser("enrol", help="a code for a host that comes later; waits for it")
    _folder(enrol)
    enrol.add_argument("--host", metavar="HOST", required=True, help="the new host")
    _roles(enrol, "of its keys (default: server,trainer)")
    enrol.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="where to wait, as the new host can reach it (default: this host's name, any port)",
    )
    enrol.add_argument(
        "--minutes", metavar="N", type=float, default=15.0, help="the code counts (default: 15)"
    )
    redeem = acts.add_parser("redeem", help="on the new host: asks for the code, gets keys")
    redeem.add_argument("directory", metavar="DIR", help="where this host's keys are written")
    renew = acts.add_parser("renew", help="new certificates for the keys that there are")
    _folder(renew)
    _hosts(renew, "whose (default: all, and the operator's)", required=False)
    _days(renew)
    revoke = acts.add_parser("revoke", help="a host's keys count no more")
    _folder(revoke)
    revoke.add_argument("--host", metavar="HOST", required=True, help="whose, or operator")
    _roles(revoke, "which of its keys (default: all)")
    show = acts.add_parser("show", help="the certificates of a folder, and when they expire")
    show.add_argument("directory", metavar="DIR", help="the operator's folder, or a host's")


def add_protection(sub: argparse.ArgumentParser, default: Any = None) -> None:
    """Adds ``--keys`` and ``--insecure``.

    Args:
        default: of both, where they are not typed.
    """
    sub.add_argument("--keys", metavar="DIR", default=default, help=KEYS_HELP)
    sub.add_argument("--insecure", action="store_true", default=default, help=INSECURE_HELP)


def add_collective_protection(sub: argparse.ArgumentParser) -> None:
    """Adds ``--insecure-collective``."""
    sub.add_argument(
        "--insecure-collective",
        action="store_true",
        help="trainers of several hosts may exchange tensors among themselves, which is not "
        "encrypted (PSERVER_INSECURE_COLLECTIVE=1)",
    )


def _folder(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("directory", metavar="DIR", help="the operator's folder of keys")


def _hosts(sub: argparse.ArgumentParser, use: str, required: bool) -> None:
    sub.add_argument("--hosts", metavar="A,B,...", required=required, default="", help=use)


def _roles(sub: argparse.ArgumentParser, use: str) -> None:
    sub.add_argument("--roles", metavar="ROLE,...", default="", help=use)


def _days(sub: argparse.ArgumentParser) -> None:
    text = f"until the certificates expire (default: {DAYS})"
    sub.add_argument("--days", metavar="N", type=int, default=DAYS, help=text)
