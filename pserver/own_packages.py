"""The other packages of this distribution, also where a module of the script's hides them.

Many repositories have a ``trainer.py`` beside the script, and Python finds it before our package
of that name.  So this module checks once, when ``pserver`` is imported, whether ``import trainer``
and ``import transpiler`` find ours.  Where they do, nothing else happens.  Otherwise ours is loaded
from its place beside this package, under the name ``pserver.trainer``; the script's own keeps the
short name.

[Note: imports of a hidden package]  Our modules write ``from transpiler.plan import ...`` in either
case.  Where a package is hidden, the loader of all our modules gives each of them an ``__import__``
of its own, which an import statement calls: it looks for the hidden names below ``pserver``.
Neither source nor bytecode differ, and no module is loaded twice.  Pickles name the modules as they
are here, and spawned processes import ``pserver`` first.
"""

from __future__ import annotations

import builtins
import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

PACKAGES = ("trainer", "transpiler")
_OWN = __name__.partition(".")[0]  # pserver
_ROOT = Path(__file__).resolve().parent.parent
_hidden: frozenset[str] = frozenset()
public: PublicModules


def own(name: str) -> ModuleType:
    """A module of this distribution, imported.

    Args:
        name: as our sources write it: "trainer.fleet".
    """
    with uncollected():
        return import_module(_name(name))


@contextmanager
def uncollected() -> Iterator[None]:
    """Suspends the garbage collector while the block imports modules, none of which is garbage: a
    fifth of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def place_of(name: str) -> Path | None:
    """The file of a module of ours, which is not imported; None if there is none."""
    place = _ROOT.joinpath(*name.split("."))
    files = (place.with_suffix(".py"), place / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def hiding(folder: Path, name: str) -> Path | None:
    """The file in a folder that Python finds in place of one of our packages, for a script there:
    of two a package's; None if there is none.
    """
    for place in (folder / name / "__init__.py", folder / f"{name}.py"):
        if place.is_file():
            return None if place.resolve() == place_of(name) else place
    return None


def install(modules: Mapping[str, str]) -> None:
    """Makes the public modules importable below ``pserver``, and the hidden packages, too.

    Args:
        modules: see :class:`PublicModules`.
    """
    global _hidden, public
    public = PublicModules(modules)
    sys.meta_path.insert(0, public)  # a package's path would give its modules twice
    _hidden = frozenset(name for name in PACKAGES if not _is_ours(name))
    if _hidden:
        sys.meta_path.insert(0, _Finder())


class PublicModules(MetaPathFinder, Loader):
    """Lets import statements find the public modules, ``import pserver.nn.functional``, which are
    elsewhere: each is one module under both names.

    Args:
        modules: by the name below ``pserver``, that of the module, as our sources write it.
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = dict(modules)
        self._specs: dict[str, ModuleSpec | None] = {}  # the modules' own

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        real = self.real(name)
        return None if real is None or place_of(real) is None else ModuleSpec(name, self)

    def real(self, name: str) -> str | None:
        """The name of a module in our sources: "trainer.nn" for "pserver.nn"; None if it is no
        public module.
        """
        root, _, rest = name.partition(".")
        first, dot, below = rest.partition(".")
        if root != _OWN or first not in self._modules:
            return None
        return self._modules[first] + dot + below

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module, imported under its own name."""
        module = own(str(self.real(spec.name)))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module back its own spec; it has run already."""
        if module.__spec__ is not None:
            module.__spec__ = self._specs.pop(module.__spec__.name)


def _is_ours(name: str) -> bool:
    """Whether an import of this name gives our package; what is loaded already counts."""
    loaded = sys.modules.get(name)
    try:
        spec = loaded.__spec__ if loaded is not None else find_spec(name)
    except ValueError:  # a module without a spec
        return False
    origin = spec.origin if spec is not None else None
    return bool(origin) and Path(str(origin)).resolve() == _ROOT / name / "__init__.py"


def _name(name: str) -> str:
    """The name of a module of ours in this process."""
    return f"{_OWN}.{name}" if name.partition(".")[0] in _hidden else name


def _import(
    name: str,
    globals: Mapping[str, object] | None = None,
    locals: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> ModuleType:
    """``__import__`` of our own modules: see [Note: imports of a hidden package]."""
    if level or (found := _name(name)) == name:
        return builtins.__import__(name, globals, locals, fromlist or (), level)
    if fromlist:
        return builtins.__import__(found, globals, locals, fromlist)
    import_module(found)
    return sys.modules[found.rsplit(".", name.count("."))[0]]  # the package, as __import__ gives


_BUILTINS = {**vars(builtins), "__import__": _import}


class _Loader(SourceFileLoader):
    """Gives a module its own ``__import__``."""

    def exec_module(self, module: ModuleType) -> None:
        """Runs the source."""
        vars(module)["__builtins__"] = _BUILTINS
        super().exec_module(module)


class _Finder(MetaPathFinder):
    """Finds the modules of all three packages; the hidden ones lie below ``pserver``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's place, where it is one of ours."""
        name = fullname.removeprefix(f"{_OWN}.")
        if name in PACKAGES and fullname == _name(name):
            place = str(_ROOT / name / "__init__.py")
            return spec_from_file_location(fullname, place, loader=_Loader(fullname, place))
        root, inside, _ = fullname.partition(".")
        if not inside or root in _hidden or root not in (_OWN, *PACKAGES):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec
