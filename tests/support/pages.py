"""The documentation as its tests see it: the pages, their fences, and a reader who runs them."""

from __future__ import annotations

import doctest
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType

from markdown_it import MarkdownIt

from tests.support.fork_server import Forked, started
from tests.support.load import patiently

ROOT = Path(__file__).parent.parent.parent
SECONDS = 240.0  # for one fence
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "deploy/*.md", ".github/*.md")
    for path in ROOT.glob(pattern)
)
FILE = re.compile(r"# (\w+\.py)$")
# a cluster's variables, and the one that would let two processes mix their lines
FOREIGN = re.compile(
    "TRAINING_ROLE|TRAINER|CURRENT_ENDPOINT|PSERVER_|RANK|WORLD_SIZE|MASTER_|PYTHONUNBUFFERED"
)

# Runs the Python fences of a page in one namespace: a JSON line in and a JSON line out for each.
SESSION = """
import contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    fence = json.loads(line)
    printed, error = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile("\\n" * fence["line"] + fence["text"], fence["page"], "exec"), names)
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps({"printed": printed.getvalue(), "error": error}), flush=True)
"""


@dataclass(frozen=True)
class Fence:
    """One fenced block of a page.

    Attributes:
        line: of the opening fence, counted from 1.
        language: the word behind the opening fence.
    """

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{name(self.page)}:{self.line}"


def name(page: Path) -> str:
    """A page's path below the repository's root."""
    return page.relative_to(ROOT).as_posix()


def fences(page: Path) -> Iterator[Fence]:
    """The fenced blocks of a page, in order; an indented block has the language "indented"."""
    for token in MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block") and token.map is not None:
            language = token.info.strip() if token.type == "fence" else "indented"
            yield Fence(page, token.map[0] + 1, language, token.content)


class Reader:
    """Does what a page says, from top to bottom, in an empty folder.

    A ``python`` fence whose first line is ``# NAME.py`` becomes that file.  Any other one runs in
    the page's Python session.  A ``sh`` fence runs in a shell that stops at the first error.  An
    ``output`` fence must be what the fence before it printed, where ``...`` stands for any text.
    Fences of other languages are left alone.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._printed: str | None = None
        self._session: Forked | subprocess.Popen[str] | None = None
        self._groups: list[int] = []  # of processes, by shell fence

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            self._session.kill()
            patiently(self._session.wait, SECONDS)
            for pipe in (self._session.stdin, self._session.stdout):
                assert pipe is not None
                pipe.close()
        for group in self._groups:
            with suppress(ProcessLookupError):  # what a page that failed has not ended
                os.killpg(group, signal.SIGTERM)

    def read(self, fence: Fence) -> None:
        """Does what one fence says; an AssertionError names it where it fails."""
        if fence.language == "python" and (file := FILE.match(fence.text.partition("\n")[0])):
            (self.folder / file[1]).write_text(fence.text, encoding="utf-8")
            self._printed = None
        elif fence.language == "python":
            self._printed = self._python(fence)
        elif fence.language == "sh":
            self._printed = self._shell(fence)
        elif fence.language == "output":
            self._compare(fence)

    def _environment(self) -> dict[str, str]:
        """This process's variables: without foreign ones, with this checkout and its commands."""
        kept = {key: value for key, value in os.environ.items() if not FOREIGN.match(key)}
        commands = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**kept, "PATH": commands, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def _python(self, fence: Fence) -> str:
        if self._session is None:
            self._session = started(["-c", SESSION], self._environment(), self.folder, joined=False)
        assert self._session.stdin is not None and self._session.stdout is not None
        said = {"page": name(fence.page), "line": fence.line, "text": fence.text}
        self._session.stdin.write(json.dumps(said) + "\n")
        self._session.stdin.flush()
        answer = self._session.stdout.readline()
        assert answer, f"{fence}: the Python session has ended"
        result = json.loads(answer)
        assert not result["error"], f"{fence}\n{result['printed']}\n{result['error']}"
        return str(result["printed"])

    def _shell(self, fence: Fence) -> str:
        shell = subprocess.Popen(
            ["bash", "-e", "-u", "-o", "pipefail", "-c", fence.text],
            cwd=self.folder,
            env=self._environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._groups.append(shell.pid)
        printed, errors = patiently(partial(shell.communicate, None), SECONDS)
        said = f"{fence}: exit status {shell.returncode}\n{printed}\n{errors}"
        assert shell.returncode == 0, said
        return printed

    def _compare(self, fence: Fence) -> None:
        assert self._printed is not None, f"{fence}: expected a fence that prints before it"
        printed = "\n".join(line.rstrip() for line in self._printed.splitlines()) + "\n"
        same = doctest.OutputChecker().check_output(fence.text, printed, doctest.ELLIPSIS)
        assert same, f"{fence}: expected\n{fence.text}\ngot\n{printed}"
