"""The tables of flags in docs/command_line.md, from the parsers of ``pserver`` and its commands."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from docs.generators.tables import filled, table
from pserver.cli.flags import parser

PAGE = "command_line.md"
MARK = "flags of pserver "
ABOUT = {  # where more is said of a flag
    "--checkpoint": "restarts.md",
    "--data-dir": "checkpoints.md",
    "--grace": "elasticity.md",
    "--insecure-collective": "security.md#ports",
    "--keys": "security.md#keys",
    "--log-json": "metrics.md#logs",
    "--max-connections": "limits.md",
    "--max-memory": "limits.md",
    "--max-program": "limits.md",
    "--max-restarts": "restarts.md",
    "--max-trainers": "limits.md",
    "--metrics": "metrics.md",
    "--min-trainers": "restarts.md#hosts-that-come-later",
    "--no-panel": "terminal.md",
    "--program": "programs.md#go-on-with-what-servers-have-left",
    "--record-log": "replay.md",
    "--search": "planner.md#searching",
    "--straggler-factor": "elasticity.md#a-trainer-that-is-slow",
    "--tensorboard": "loggers.md#tensorboard",
    "--trace": "trace.md",
    "--web": "web.md",
}
CODE = re.compile(
    r"(?<![`\w-])(--[a-z][a-z0-9-]*|PSERVER_\w+(?:=1)?|(?:fleet|strategy)\.[a-z_]+)(?![\w`-])"
)


def pages() -> dict[str, str]:
    """The page with its tables."""
    return {PAGE: filled(PAGE, lambda mark: flags(mark.removeprefix(MARK)))}


def flags(command: str) -> str:
    """The table of a command."""
    shown = (action for action in below(parser())[command]._actions if action.dest != "help")
    rows = [cells for action in shown for cells in _cells(action)]
    return table(("argument", "meaning"), rows)


def below(found: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers below one, by the names of their commands."""
    choices = (each.choices for each in found._actions if each.dest in ("command", "act"))
    return dict(next(iter(choices)) or {})


def _cells(action: argparse.Action) -> Iterator[tuple[str, str]]:
    if isinstance(action, argparse._SubParsersAction):
        yield from map(_act, action.choices.values(), action._choices_actions)
        return
    name = action.option_strings[0] if action.option_strings else ""
    forms = ", ".join(f"`{f'{name} {value}'.strip()}`" for value in _values(action))
    yield f"[{forms}]({ABOUT[name]})" if name in ABOUT else forms, _meaning(action)


def _values(action: argparse.Action) -> list[str]:
    """How what follows a flag may be written."""
    if action.nargs == 0:
        return [""]
    if action.choices is not None:
        return ["{" + ",".join(map(str, action.choices)) + "}"]
    values = str(action.metavar).split("|")
    return [f"[{each}]" if action.nargs == "?" else each for each in values]


def _act(found: argparse.ArgumentParser, said: argparse.Action) -> tuple[str, str]:
    """The row of an act of ``pserver keys``: how it is called, and what each flag means."""
    usage = " ".join(found.format_usage().split()).partition("[-h] ")[2]
    flags = [action for action in found._actions[1:] if action.option_strings]
    meanings = (f"`{each.option_strings[0]}`: {_meaning(each)}" for each in flags)
    return f"`{said.dest} {usage}`", "; ".join([said.help or "", *meanings])


def _meaning(action: argparse.Action) -> str:
    return CODE.sub(r"`\1`", action.help or "")
