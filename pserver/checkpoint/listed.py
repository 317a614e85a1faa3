"""``checkpoints.json``: the checkpoints of a folder that are complete, the newest last."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pserver.storage.place import Place
from transpiler.files import bounded_json

LIST = "checkpoints.json"


@dataclass(frozen=True, slots=True)
class Kept:
    """A complete checkpoint of the folder.

    Attributes:
        name: of its directory.
        base: the name of the checkpoint that it continues; "" for one that has all rows of tables.
    """

    name: str
    base: str = ""


def listed_in(place: Place) -> tuple[bytes | None, list[Kept]]:
    """The list of a folder: its bytes, None where it has none, and what they say.

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
    if place.size(LIST) is None:
        return None, []
    content = place.read(LIST)
    return content, _parsed(content, f"{place}/{LIST}")


def list_bytes(kept: list[Kept]) -> bytes:
    """A list as its file has it."""
    entries = [{"name": each.name, "base": each.base} for each in kept]
    return json.dumps({"format": 1, "checkpoints": entries}, indent=1).encode()


def _parsed(content: bytes, where: str) -> list[Kept]:
    try:
        said: dict[str, Any] = bounded_json.loads(content)
        kept = [Kept(str(each["name"]), str(each["base"])) for each in said["checkpoints"]]
        names = {each.name for each in kept}
        if said["format"] != 1 or any(each.base and each.base not in names for each in kept):
            raise ValueError(said["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{where}: expected a list of checkpoints, got something else") from error
    return kept
