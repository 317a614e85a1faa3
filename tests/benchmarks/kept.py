"""Takes measured rows into the documentation: docs/benchmarks.json, its page and its pictures."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from gate import taken

ROOT = Path(__file__).parent.parent.parent
sys.path.append(str(ROOT))

from docs.pictures.measured_code import head  # noqa: E402

DOCUMENTED = ROOT / "docs" / "benchmarks.json"

Facts = Mapping[str, Any]  # a row, as it stands in the file


def merged(old: Sequence[Facts], new: Sequence[Facts]) -> list[Facts]:
    """The rows of ``new`` in the place of those of the same name; others stay, and rows that are
    new stand behind the last one whose name begins with the same word.

    Raises:
        ValueError: a row of ``new`` was measured at a tiny size, which shows nothing.
    """
    result = list(old)
    for row in new:
        if row.get("tiny"):
            raise ValueError(f"{row['name']}: expected a whole measurement, got one of --tiny")
        names = [each["name"] for each in result]
        if row["name"] in names:
            result[names.index(row["name"])] = row
        else:
            word = row["name"].partition("/")[0] + "/"
            alike = [place for place, name in enumerate(names) if name.startswith(word)]
            result.insert(alike[-1] + 1 if alike else len(result), row)
    return result


def keep(file: Path, only: str) -> list[str]:
    """Takes those rows of ``make bench``'s file that ``only`` takes and that could be measured;
    returns their names.  A row that was measured where there is no git gets this tree's commit.
    """
    new = [
        {**row, "commit": row.get("commit") or head()}
        for row in json.loads(file.read_text(encoding="utf-8"))
        if taken(row["name"], only) and not row["skipped"]
    ]
    old = json.loads(DOCUMENTED.read_text(encoding="utf-8"))
    write(DOCUMENTED, merged(old, new))
    for made in (["docs/pictures/benchmarks.py"], ["-m", "docs.generators"]):
        subprocess.run([sys.executable, *made], cwd=ROOT, check=True)
    return [row["name"] for row in new]


def now() -> dict[str, str]:
    """When, and at which commit, a row is measured."""
    return {"date": date.today().isoformat(), "commit": head(ROOT)}


def write(file: Path, rows: Sequence[Facts]) -> None:
    """One fact a line, so that a commit shows what has changed."""
    file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def draw(file: Path) -> None:
    """The picture of a file of rows, beside it."""
    command = [sys.executable, ROOT / "docs" / "pictures" / "benchmarks.py", "--rows", file]
    subprocess.run([*command, "--out", file.with_suffix(".svg")], check=True)
