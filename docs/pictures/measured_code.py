"""Which code a row of the benchmarks measures, and whether that has changed since.

[Note: old rows]  docs/benchmarks.json has for each row the commit at which it was measured.  A row
is *old* when a file in one of the folders that it measures differs from that commit's, be it by a
comment: who reads the page wants to know whether the figure is of this code.  ``make reference``
asks git for it, so a change of the code makes no page stale at once; where git does not know the
commit (a shallow clone, an archive) a row keeps the mark that it has on the page.
"""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_WIRE = (
    *("pserver/client", "pserver/dense", "pserver/job", "pserver/lane", "pserver/membership"),
    *("pserver/service", "pserver/telemetry", "pserver/transport"),
    *("trainer/communicator", "trainer/gradients", "trainer/senders"),
)
_TABLES = (*_WIRE, "pserver/table", "trainer/embedding")
_COLLECTIVE = ("trainer/collective", "trainer/gradients", "trainer/sharding")
MEASURES = {  # by how a row's name begins
    "wire/": _WIRE,
    "writes/": _WIRE,
    "table/": _TABLES,
    "sampled softmax/": _TABLES,
    "collective/": _COLLECTIVE,
    "mixed/": tuple(dict.fromkeys((*_TABLES, *_COLLECTIVE))),
    "survival/": (
        *(*_WIRE, "pserver/checkpoint", "pserver/job_log", "pserver/leases", "pserver/storage"),
        *("trainer/checkpoint", "trainer/data", "trainer/job", "trainer/samplers"),
    ),
    "overlap/": _TABLES,
    "data/": ("trainer/data",),
    "paddle/": _TABLES,
    "gpu/": _TABLES,
    "movielens/": (*_TABLES, "trainer/data", "trainer/examples"),
}
MARK = ", *old*"


def folders(name: str) -> tuple[str, ...]:
    """What a row of this name measures."""
    return next(found for begin, found in MEASURES.items() if name.startswith(begin))


def head(root: Path = ROOT) -> str:
    """The commit of a tree, of 12 digits; with "-changed" where a package differs from it, and ""
    where git does not know.
    """
    said = _git(root, "rev-parse", "--short=12", "HEAD")
    if said is None or said.returncode != 0:
        return ""
    changed = _git(root, "diff", "--quiet", "HEAD", "--", "pserver", "trainer", "transpiler")
    same = changed is not None and changed.returncode == 0
    return said.stdout.strip() + ("" if same else "-changed")


@functools.cache
def changed(commit: str, among: tuple[str, ...], root: Path = ROOT) -> bool | None:
    """Whether a file in these folders differs from a commit's; None where git does not know."""
    if not re.fullmatch(r"[0-9a-f]{7,40}(-changed)?", commit):
        return None
    if commit.endswith("-changed"):
        return True
    done = _git(root, "diff", "--quiet", commit, "--", *among)
    return None if done is None else {0: False, 1: True}.get(done.returncode)


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[str] | None:
    try:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    except FileNotFoundError:
        return None


def unmarked(page: str) -> str:
    """A page without its marks: they change with the code, and the page need not."""
    return page.replace(MARK, "")


def marked(page: str) -> set[str]:
    """The names of those rows that a page marks."""
    return {line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if MARK in line}
