"""The script of a job: a file that exists, and whose imports of our packages find ours.

Python looks for ``trainer`` beside the script first.  A ``trainer.py`` of the user's there is found
in place of our package, and the import fails in every process of the job.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

from pserver.own_packages import PACKAGES, hiding

OURS = ("pserver", *PACKAGES)


def check_script(script: str) -> None:
    """Checks the script before any process is started.

    Raises:
        ValueError: there is no such file; or it imports from one of our packages what a module
            beside it does not have, which Python finds instead.
    """
    path = Path(script)
    if not path.is_file():
        raise ValueError(f"expected a script to run, and there is no file {script!r}")
    # the folder that Python looks in first: of the file itself, not of a link to it
    beside = {name: found for name in OURS if (found := hiding(path.resolve().parent, name))}
    if not beside:
        return
    try:
        with tokenize.open(path) as file:
            imports = list(_imports(ast.parse(file.read())))
    except (OSError, SyntaxError, ValueError):
        return  # running it says what is wrong
    for line, module, name in imports:
        hidden = module.partition(".")[0]
        if hidden in beside:
            if _has(beside[hidden], module, name):
                continue
        elif "pserver" in beside and beside["pserver"].name == "pserver.py":
            hidden = "pserver"  # which our other packages import
        else:
            continue
        where = beside[hidden]
        shown = f"{hidden}/" if where.name == "__init__.py" else where.name
        what = f"from {module} import {name}" if name else f"import {module}"
        instead = "" if hidden == "pserver" else "write from pserver import ..., or "
        raise ValueError(
            f"{script}, line {line}: {what}: {shown} beside the script hides our package "
            f"{hidden}: {instead}rename {shown}"
        )


def _imports(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """The line, module and name of each import from one of our packages; "": the module alone."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
            found = [(node.module, alias.name) for alias in node.names if alias.name != "*"]
        elif isinstance(node, ast.Import):
            found = [(alias.name, "") for alias in node.names]
        else:
            continue
        yield from ((node.lineno, *each) for each in found if each[0].partition(".")[0] in OURS)


def _has(where: Path, module: str, name: str) -> bool:
    """Whether the user's module may have what is imported: its text has the word, or its folder
    the file.
    """
    inside = [*module.split(".")[1:], *([name] if name else [])]
    if not inside:
        return True  # nothing but the module itself
    first = inside[0]
    if where.name == "__init__.py":
        folder = where.parent
        if (folder / f"{first}.py").is_file() or (folder / first).is_dir():
            return True
    elif len(module.split(".")) > 1:
        return False  # a file has no modules
    text = where.read_text(encoding="utf-8", errors="replace")
    return re.search(rf"\b({re.escape(first)}|__getattr__)\b|import \*", text) is not None
