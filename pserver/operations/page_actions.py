"""An operator's actions as ``pserver web`` offers them: save and drain."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from rich.console import Console

from pserver.errors import Refused
from pserver.operations.save import drain, save
from pserver.security.access import Access, always_open


def actions(
    endpoints: Sequence[str],
    save_dir: str,
    access_of: Callable[[str], Access] = always_open,
) -> Mapping[str, Callable[[], str]]:
    """By name, an operator's actions; each returns a sentence about its outcome, or raises.

    Args:
        endpoints: of every server of the job.
        save_dir: a folder, or a URL; each save is a checkpoint below it, named by its time.
        access_of: by endpoint, what is proved to the server.
    """

    def save_all() -> str:
        now = datetime.now(UTC)
        said = _SentenceConsole()
        save(endpoints, f"{save_dir.rstrip('/')}/{now:%Y%m%d-%H%M%S}", said.console, access_of)
        return said.text

    def drain_all() -> str:
        said = _SentenceConsole()
        if drain(endpoints, said.console, access_of):
            raise Refused(said.text)
        return said.text

    return {"save": save_all, "drain": drain_all}


class _SentenceConsole:
    """A console whose lines become one sentence."""

    def __init__(self) -> None:
        self._lines = io.StringIO()
        self.console = Console(file=self._lines, width=1000)

    @property
    def text(self) -> str:
        """The printed text."""
        return "; ".join(line.strip() for line in self._lines.getvalue().splitlines() if line)
