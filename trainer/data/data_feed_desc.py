"""The original's text description of MultiSlot lines."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any

from trainer.data.pieces import Slot, opened
from transpiler.files.files import shown

DTYPES = {"uint64": "int64", "float": "float32"}  # by the description's types
TOKEN = re.compile(r'"[^"\n]*"|\w+|-\d+|[{}:]|\S')
COMMENT = re.compile(r'("[^"\n]*")|#.*')
FIELDS: dict[str, dict[str, type]] = {
    "": {"name": str, "batch_size": int, "multi_slot_desc": dict},
    "multi_slot_desc": {"slots": dict},
    "slots": {"name": str, "type": str, "is_dense": bool, "is_used": bool, "shape": int},
}
KINDS = {str: "a text in quotes", int: "a whole number", bool: "true or false", dict: "{"}


@dataclass
class _Described:
    """A slot of a line: ``width`` values where it is dense."""

    name: str
    type: str
    is_dense: bool
    is_used: bool
    width: int


class DataFeedDesc:
    """A description of the slots of MultiSlot lines, of which a dataset gives those that are used.

    A dense slot is a column [batch, width], as its ``shape`` says (1 without one), another one is
    ragged; the type is "uint64" (int64) or "float" (float32).

    Args:
        proto_file: path or URL of the description, as text.

    Attributes:
        name: "MultiSlotDataFeed".
        batch_size: 32 where the description says none.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such description; the message names the line, what was expected, and
            what was got.

    Example::

        with open("data.prototxt", "w") as file:
            file.write('multi_slot_desc { slots { name: "words" type: "uint64" } }')
        desc = DataFeedDesc("data.prototxt")
        desc.set_use_slots(["words"])
        dataset = fleet.QueueDataset()
        dataset.init(batch_size=desc.batch_size, parser=desc)
    """

    def __init__(self, proto_file: str | PathLike[str]) -> None:
        path = fspath(proto_file)
        with opened(path) as file:
            content = file.read().decode("utf-8", "replace")
        found = _Text(shown(path), content).message("")
        self.name: str = found.get("name", ["MultiSlotDataFeed"])[-1]
        self.set_batch_size(found.get("batch_size", [32])[-1])
        blocks = found.get("multi_slot_desc", [])
        self._slots = [_described(each, path) for block in blocks for each in block["slots"]]
        names = [slot.name for slot in self._slots]
        if len(set(names)) < len(names) or not names:
            raise ValueError(f"{shown(path)}: expected slots with names of their own, got {names}")

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots of a line, in its order."""
        return tuple(
            Slot(slot.name, DTYPES[slot.type], slot.width if slot.is_dense else None)
            for slot in self._slots
        )

    @property
    def used(self) -> frozenset[str]:
        """The names of the slots that a dataset gives."""
        return frozenset(slot.name for slot in self._slots if slot.is_used)

    def set_batch_size(self, batch_size: int) -> None:
        """Sets the number of samples of a batch.

        Raises:
            ValueError: it is below 1.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size: expected a whole number from 1, got {batch_size!r}")
        self.batch_size = batch_size

    def set_dense_slots(self, dense_slots_name: Iterable[str]) -> None:
        """Makes these slots dense, too.

        Raises:
            ValueError: there is none of this name.
        """
        for slot in self._named(dense_slots_name):
            slot.is_dense = True

    def set_use_slots(self, use_slots_name: Iterable[str]) -> None:
        """Makes a dataset give these slots, too.

        Raises:
            ValueError: there is none of this name.
        """
        for slot in self._named(use_slots_name):
            slot.is_used = True

    def desc(self) -> str:
        """The description as it is now, as text."""
        lines = [f'name: "{self.name}"', f"batch_size: {self.batch_size}", "multi_slot_desc {"]
        for slot in self._slots:
            lines += ["  slots {", f'    name: "{slot.name}"', f'    type: "{slot.type}"']
            lines += [
                f"    is_dense: {slot.is_dense}".lower(),
                f"    is_used: {slot.is_used}".lower(),
            ]
            lines += [*(["    shape: -1", f"    shape: {slot.width}"] * (slot.width > 1)), "  }"]
        return "\n".join([*lines, "}\n"])

    def _named(self, names: Iterable[str]) -> list[_Described]:
        if isinstance(names, str):
            raise TypeError(f"expected a list of slots, got {names!r}")
        known = {slot.name: slot for slot in self._slots}
        for name in (names := list(names)):
            if name not in known:
                raise ValueError(f"expected slots among {', '.join(known)}, got {name!r}")
        return [known[name] for name in names]


def _described(found: dict[str, list[Any]], path: str) -> _Described:
    last = {field: values[-1] for field, values in found.items()}
    name, kind = last.get("name", ""), last.get("type")
    if not name or kind not in DTYPES:
        raise ValueError(
            f"{shown(path)}: slot {name!r}: expected a name, and a type of uint64 or float, got "
            f"{kind!r}"
        )
    sizes = [size for size in found.get("shape", []) if size != -1]
    if any(size < 1 for size in sizes):
        raise ValueError(f"{shown(path)}: slot {name!r}: expected sizes from 1, got {sizes}")
    return _Described(
        name, kind, last.get("is_dense", False), last.get("is_used", False), math.prod(sizes)
    )


class _Text:
    """A protobuf message as text, word by word.

    Args:
        path: for messages.
    """

    def __init__(self, path: str, text: str) -> None:
        self._path, self._words = path, self._split(text)

    @staticmethod
    def _split(text: str) -> Iterator[tuple[int, str]]:
        """Words, each with the number of its line; "" at the end."""
        lines = text.splitlines()
        for number, line in enumerate(lines, 1):
            for word in TOKEN.findall(COMMENT.sub(r"\1", line)):
                yield number, word
        while True:
            yield len(lines), ""

    def message(self, kind: str) -> dict[str, list[Any]]:
        """The values of a message's fields, up to its end."""
        found: dict[str, list[Any]] = {"slots": []} if kind == "multi_slot_desc" else {}
        fields, end = FIELDS[kind], "}" if kind else ""
        while True:
            line, field = next(self._words)
            if field == end:
                return found
            if field not in fields:
                expected = ", ".join(fields) + (" or }" if kind else "")
                raise self._wrong(line, expected, field)
            found.setdefault(field, []).append(self._value(field, fields[field]))

    def _value(self, field: str, kind: type) -> Any:
        line, word = next(self._words)
        if word == ":":
            line, word = next(self._words)
        elif kind is not dict:
            raise self._wrong(line, f": after {field}", word)
        if kind is dict and word == "{":
            return self.message(field)
        if kind is str and word.startswith('"') and len(word) > 1:
            return word[1:-1]
        if kind is int and re.fullmatch(r"-?\d+", word):
            return int(word)
        if kind is bool and word in ("true", "false"):
            return word == "true"
        raise self._wrong(line, f"{KINDS[kind]} for {field}", word)

    def _wrong(self, line: int, expected: str, got: str) -> ValueError:
        return ValueError(f"{self._path}, line {line}: expected {expected}, got {got or 'the end'}")
