"""The line of the user's code that is running, for messages and for the ``location`` of ops.

A line is the user's when it lies outside torch and outside this package.  A line in another
installed package (a model from transformers, say) is shown with the line of the script that called
it.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_STANDARD = sysconfig.get_path("stdlib")
# frames outside of this function of ours belong to capture's caller, not to the step
_CALL_STEP = "call_step"


def is_torch(filename: str) -> bool:
    """Whether the file is torch's."""
    return filename.startswith(_TORCH)


def _is_user(filename: str) -> bool:
    if filename.startswith("<") or is_torch(filename) or filename.startswith(_OURS):
        return False
    return filename.startswith(_INSTALLED) or not filename.startswith(_STANDARD)


def _describe(lines: list[tuple[str, int]]) -> str:
    """Lines, innermost first, as ``"model.py:7"`` or ``"modeling.py:7 (called from train.py:12)"``;
    "" for none.
    """
    if not lines:
        return ""
    own = [line for line in lines if not line[0].startswith(_INSTALLED)]
    shown = [f"{Path(name).name}:{number}" for name, number in [lines[0], *own[:1]]]
    return (
        shown[0]
        if len(shown) == 1 or shown[0] == shown[1]
        else f"{shown[0]} (called from {shown[1]})"
    )


def _lines(frame: FrameType | None) -> list[tuple[str, int]]:
    found = []
    while frame is not None and not (
        frame.f_code.co_name == _CALL_STEP and frame.f_code.co_filename.startswith(_OURS)
    ):
        if _is_user(frame.f_code.co_filename):
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found if frame is not None else []


def call_step(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a step.  Lines outside this call are not the step's."""
    return function(*arguments)


def here() -> str:
    """The innermost line of the step that is running, ``"train.py:12"``; "" outside a step (in its
    backward pass, for one).
    """
    return _describe(_lines(sys._getframe(1)))


def short() -> str:
    """The innermost line of :func:`here` alone."""
    return here().partition(" ")[0]


def of_error(error: BaseException) -> str:
    """The line of the step in which an exception arose."""
    lines: list[tuple[str, int]] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == _CALL_STEP and code.co_filename.startswith(_OURS):
            lines = []
        elif _is_user(code.co_filename):
            lines.append((code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return _describe(lines[::-1])


def deciding_file() -> str:
    """The file of the code that looks at a size right now: the innermost frame outside the
    machinery of symbolic sizes.
    """
    machinery = tuple(
        f"{_TORCH}/{part}" for part in ("__init__.py", "fx/", "utils/_sympy/", "utils/_stats.py")
    )
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(
            (*machinery, _OURS, _STANDARD + "/functools", _STANDARD + "/contextlib", "<")
        ):
            return name
        frame = frame.f_back
    return ""
