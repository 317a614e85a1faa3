"""Files of clicks with strings: MovieLens-100K as clicks, and the columns of Criteo's and Avazu's.

The Python package ``recbole`` ships MovieLens-100K (Harper and Konstan: The MovieLens datasets,
2015), so that it comes by pip::

    pip download --no-deps --dest build/movielens recbole==1.2.1
    python -m trainer.examples.click_files build/movielens

writes ``train.tsv`` and ``test.tsv`` into that folder: ratings, joined with what is known of people
and films.  A rating of 4 or 5 is a click; every fifth rating is held out, by a fixed draw.
"""

from __future__ import annotations

import random
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pserver import CsvLines, fleet

HEAD = ["click", "user", "movie", "age", "gender", "occupation", "zip", "year", "genres"]
INSIDE = "recbole/dataset_example/ml-100k/ml-100k."
CLICKED = 4.0  # stars
HELD_OUT = 5  # one rating in so many


# ---- formats ----


@dataclass(frozen=True)
class Format:
    """The columns of a file: the click, strings, and numbers; ``head`` where its first line does
    not name them.
    """

    click: str
    strings: Sequence[str]
    numbers: Sequence[str] = ()
    head: Sequence[str] = ()
    delimiter: str = "\t"

    def lines(self) -> CsvLines:
        """The parser of such a file; a missing number is 0, a missing string one of its own."""
        slots = [fleet.Slot("click", "float32"), fleet.Slot("ids", "string", len(self.strings))]
        groups = {"click": [self.click], "ids": self.strings}
        fill: dict[str, float | str] = {"ids": ""}
        if self.numbers:
            slots.append(fleet.Slot("numbers", "float32", len(self.numbers)))
            groups["numbers"] = self.numbers
            fill["numbers"] = 0.0
        quote = '"' if self.delimiter == "," else None
        return CsvLines(slots, self.head, self.delimiter, groups, fill, quote)


NUMBERS, CATEGORIES = [f"I{n}" for n in range(1, 14)], [f"C{n}" for n in range(1, 27)]
AVAZU = (
    "site_id site_domain site_category app_id app_domain app_category device_id device_ip "
    "device_model device_type device_conn_type banner_pos hour"
).split()
FORMATS = {
    "movielens": Format("click", HEAD[1:]),
    "criteo": Format("click", CATEGORIES, NUMBERS, ["click", *NUMBERS, *CATEGORIES]),
    "avazu": Format("click", [*AVAZU, "C1", *(f"C{n}" for n in range(14, 22))], delimiter=","),
}


# ---- MovieLens as clicks ----


def rows_of(wheel: zipfile.ZipFile, kind: str) -> list[list[str]]:
    """The fields of one of the data set's files, without its head."""
    lines = wheel.read(INSIDE + kind).decode().splitlines()
    return [line.split("\t") for line in lines[1:]]


def write(folder: Path) -> None:
    """Joins and writes the files, from the package in the folder.

    Raises:
        SystemExit: there is none.
    """
    found = sorted(folder.glob("recbole-*.whl"))
    if not found:
        sys.exit(
            f"expected recbole's wheel in {folder}, found none: "
            f"pip download --no-deps --dest {folder} recbole==1.2.1"
        )
    with zipfile.ZipFile(found[-1]) as wheel:
        users = {user: about for user, *about in rows_of(wheel, "user")}
        movies = {movie: [year, genres] for movie, _, year, genres in rows_of(wheel, "item")}
        ratings = rows_of(wheel, "inter")
    random.Random(0).shuffle(ratings)
    lines = [
        "\t".join([str(int(float(stars) >= CLICKED)), user, movie, *users[user], *movies[movie]])
        for user, movie, stars, _ in ratings
    ]
    held_out = len(lines) // HELD_OUT
    for name, part in ("test", lines[:held_out]), ("train", lines[held_out:]):
        path = folder / f"{name}.tsv"
        path.write_text("\n".join(["\t".join(HEAD), *part, ""]), encoding="utf-8")
        print(f"{path}: {len(part)} ratings")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) == 2 else sys.exit(__doc__)))
