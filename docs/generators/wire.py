"""docs/reference/wire.md, from ``protos/pserver/wire.proto`` and its comments."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

from docs.generators.tables import table

PROTOS = Path(__file__).parent.parent.parent / "protos"
FILE = "pserver/wire.proto"
FIRST = """# Wire protocol

`make reference` writes this page from [its definition](../../protos/pserver/wire.proto).
[A program](../../protos/transpiler/program.proto) has a definition of its own.

"""
# the numbers by which a descriptor names its parts
SYNTAX, MESSAGES, ENUMS, SERVICES, FIELDS, VALUES = 12, 4, 5, 6, 2, 2
SECTION = re.compile(r"^ *-+ (\w+) -+$")
LITERAL = re.compile(r"\S {3,}\S")  # columns
Place = tuple[int, ...]


def pages() -> dict[str, str]:
    """The text of the page."""
    return {"reference/wire.md": Wire(compiled()).page()}


def compiled() -> FileDescriptorProto:
    """The definition, with its comments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "wire"
        flags = ("--include_source_info", f"-I{PROTOS}", f"--descriptor_set_out={out}")
        assert protoc.main(["protoc", *flags, FILE]) == 0
        return FileDescriptorSet.FromString(out.read_bytes()).file[0]


class Wire:
    """A page of one definition."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._lines = (PROTOS / FILE).read_text(encoding="utf-8").split("\n")
        self._places = {tuple(each.path): each for each in file.source_code_info.location}
        self._known = {each.name for each in (*file.message_type, *file.enum_type)}

    def page(self) -> str:
        """The protocol's description, its calls, and each message in the order of the file."""
        described = [(MESSAGES, index) for index in range(len(self._file.message_type))]
        described += [(ENUMS, index) for index in range(len(self._file.enum_type))]
        described.sort(key=lambda place: self._places[place].span[0])
        parts = [FIRST, *map(prose, self._places[SYNTAX,].leading_detached_comments), self._calls()]
        return "".join([*parts, *map(self._described, described)])

    def _calls(self) -> str:
        service = self._file.service[0]
        rows = [
            (f"`{call.name}`", *map(self._type, (call.input_type, call.output_type)))
            for call in service.method
        ]
        return f"\n## Calls\n\n{table(('call', 'request', 'reply'), rows)}"

    def _described(self, place: Place) -> str:
        """A message or an enumeration, with the heading of the section that it begins."""
        comments = self._places[place]
        before = "".join(map(_section, comments.leading_detached_comments))
        if place[0] == MESSAGES:
            found: DescriptorProto | EnumDescriptorProto = self._file.message_type[place[1]]
            rows = table(("field", "number", "type", "meaning"), self._fields(place))
        else:
            found = self._file.enum_type[place[1]]
            rows = table(("value", "number", "meaning"), self._values(place))
        said = prose(comments.leading_comments)
        parts = [f"### {found.name}\n", said, rows if rows.count("\n") > 2 else "It is empty.\n"]
        return f"{before}\n" + "\n".join(part for part in parts if part)

    def _fields(self, place: Place) -> Iterator[Sequence[str]]:
        message = self._file.message_type[place[1]]
        maps = {each.name: each for each in message.nested_type if each.options.map_entry}
        for index, field in enumerate(message.field):
            entry = maps.get(field.type_name.rpartition(".")[2])
            kind = self._kind(field)
            if entry is not None:
                key, value = map(self._kind, entry.field)
                kind = f"map of {key} to {value}"
            elif field.label == FieldDescriptorProto.LABEL_REPEATED:
                kind = f"repeated {kind}"
            elif field.proto3_optional:
                kind = f"optional {kind}"
            yield f"`{field.name}`", str(field.number), kind, self._said((*place, FIELDS, index))

    def _values(self, place: Place) -> Iterator[Sequence[str]]:
        for index, value in enumerate(self._file.enum_type[place[1]].value):
            yield f"`{value.name}`", str(value.number), self._said((*place, VALUES, index))

    def _kind(self, field: FieldDescriptorProto) -> str:
        if field.type_name:
            return self._type(field.type_name)
        return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()

    def _type(self, name: str) -> str:
        """A message's name: a link where it is on this page."""
        short = name.rpartition(".")[2]
        return f"[{short}](#{short.lower()})" if short in self._known else f"`{name[1:]}`"

    def _said(self, place: Place) -> str:
        """What stands beside a field, and goes on below that, for a cell."""
        span = self._places[place].span
        row, column = span[0], self._lines[span[0]].find("//", span[-1])
        words = []
        while column > 0:
            words += self._lines[row][column + 2 :].split()
            row += 1
            column = column if self._lines[row].lstrip().startswith("//") else -1
        return " ".join(words).replace("|", "\\|")


def _section(comment: str) -> str:
    """A comment that belongs to no message: a heading, where it begins with a ruled line."""
    first, _, rest = comment.partition("\n")
    ruled = SECTION.match(first)
    heading = f"\n## {ruled[1].capitalize()}\n" if ruled else ""
    return f"{heading}\n{prose(rest if ruled else comment)}"


def prose(comment: str) -> str:
    """A comment as Markdown: what stands in columns becomes a block."""
    lines = [line.removeprefix(" ") for line in comment.rstrip().split("\n")]
    blocks = re.split(r"\n(?: *\n)+", "\n".join(lines))
    return "\n".join(_block(block) for block in blocks if block.strip())


def _block(block: str) -> str:
    lines = block.split("\n")
    margin = min(len(line) - len(line.lstrip()) for line in lines)
    text = "\n".join(line[margin:] for line in lines)
    if margin and LITERAL.search(text):
        return f"```text\n{text}\n```\n"
    return f"{text}\n"
