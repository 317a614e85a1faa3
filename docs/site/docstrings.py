"""Our docstrings for mkdocstrings, which reads Markdown: literal blocks become fences, roles code.

::

    Example::                            Examples:
                                             ```python
        optimizer.step()                     optimizer.step()
                                             ```
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from typing import Any

from griffe import Extension, Object

ROLE = re.compile(r":\w+:`[~.]?([^`]+)`")


class Docstrings(Extension):
    """What mkdocs.yml names."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Changes the docstring of each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """The same with fences, and with the names of sections that mkdocstrings knows."""
    return "\n".join(_lines(ROLE.sub(r"`\1`", docstring).split("\n")))


def _lines(lines: list[str]) -> Iterator[str]:
    while lines:
        line = lines.pop(0)
        text, width = line.strip(), _indent(line)
        if text == "Example:":
            yield line.replace("Example:", "Examples:")
        elif text.endswith("::"):
            block = list(takewhile(partial(_is_within, width), lines))
            del lines[: len(block)]
            yield from _fenced(line, block)
        else:
            yield line


def _fenced(line: str, block: list[str]) -> Iterator[str]:
    """A literal block, with the line that begins it."""
    code = "\n".join(block).strip("\n").split("\n")
    margin = min(_indent(each) for each in code if each.strip())
    code = [each[margin:] for each in code]
    example = line.strip() == "Example::"
    pad = " " * (margin if example else _indent(line))
    first = [line.replace("Example::", "Examples:")] if example else [line[:-1], ""]
    language = "python" if _is_python("\n".join(code)) else "text"
    yield from [*first, f"{pad}```{language}", *(pad + each for each in code), f"{pad}```", ""]


def _is_within(width: int, line: str) -> bool:
    return not line.strip() or _indent(line) > width


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _is_python(code: str) -> bool:
    try:
        return bool(ast.parse(code).body)
    except SyntaxError:
        return False
