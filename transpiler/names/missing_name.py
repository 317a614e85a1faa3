"""The error of a name that a package lacks: it says what to write.

A package raises it where Python asks for a name that is not there::

    def __getattr__(name):
        raise missing(__name__, name, __all__)

``transpiler.fc`` is then an AttributeError and ``from transpiler import fc`` an ImportError, and
both say what to write.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from opcode import opmap
from types import FrameType

from transpiler.names.index import names, suggestion

PACKAGES = (
    *("transpiler", "trainer", "trainer.fleet", "trainer.metrics", "trainer.lr"),
    *("trainer.nn", "trainer.nn.functional", "trainer.row_optimizers"),
)
_IMPORT_FROM = opmap["IMPORT_FROM"]


class MissingName(AttributeError):
    """A package has no such name.  The message says what to write.

    ``hasattr``, and the import of a submodule, ask for names that are not there and drop the error:
    so the index is read by the message and not before.

    Attributes:
        module: where it is missing.
        wanted: the name; ``name`` is lost where an error is pickled.
        known: the names that the package has.
    """

    module: str = ""
    wanted: str = ""
    known: Iterable[str] = ()

    def __str__(self) -> str:
        """What is missing, and what to write."""
        submodule = f"{self.module}.{self.wanted}"
        if _is_module(submodule):
            said = f"import {submodule} first"
        else:
            said = _what_to_write(self.wanted, self.known)
        return f"{super().__str__()}: {said}" if said else super().__str__()


def missing(module: str, name: str, known: Iterable[str] = ()) -> AttributeError | ImportError:
    """The error that a module's ``__getattr__`` raises: it calls this function itself.

    Python makes an ImportError of its own where ``from module import name`` finds no attribute,
    and drops the AttributeError with what it says.  An ImportError stays as it is.

    Args:
        module: its ``__name__``.
        name: what was asked for.
        known: the names that the module has.

    Returns:
        An ImportError where a statement imports the name, else an AttributeError.
    """
    # A submodule that is being imported is found after an AttributeError alone.
    if _imports(sys._getframe(1).f_back) and f"{module}.{name}" not in sys.modules:
        said = _what_to_write(name, known)
        text = f"cannot import name {name!r} from {module!r}"
        return ImportError(f"{text}: {said}" if said else text, name=module)
    error = MissingName(f"module {module!r} has no attribute {name!r}", name=name)
    error.module, error.wanted, error.known = module, name, known
    return error


def _what_to_write(name: str, known: Iterable[str]) -> str:
    """The package of ours that has the name, or what the index says of it."""
    homes = (package for package in PACKAGES if name in import_module(package).__all__)
    home = "" if name in names() else next(homes, "")
    return f"write {home}.{name}" if home else suggestion(name, known)


def _imports(frame: FrameType | None) -> bool:
    """Whether a frame executes ``from ... import name`` right now."""
    return frame is not None and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM


def _is_module(name: str) -> bool:
    """Whether there is a module of this name, which may not have been imported."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # what it would lie in is no package
        return False
