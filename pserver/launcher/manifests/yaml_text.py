"""Plain dicts and lists as YAML that people read: in the order of the dicts, with texts of several
lines as blocks, and short lists and dicts on one line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no annotations
    """Writes lists indented, and every value where it stands: no anchors."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(comment: str, documents: Sequence[dict[str, Any]]) -> str:
    """A file of some documents.

    Args:
        comment: its first lines, without ``#``.
    """
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    written = [
        yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=100, default_flow_style=None)
        for document in documents
    ]
    return head + "---\n".join(written)
