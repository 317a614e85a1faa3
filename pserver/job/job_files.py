"""Save and Load: everything that a server holds, in files below the directory, or the prefix of a
store, that it was given at its start.  A caller names paths below it, and no others: no "..", no
link that leads out, no URL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeVar

from pserver.checkpoint import checkpoint, manifest
from pserver.errors import FingerprintMismatch, Refused
from pserver.job.program import InstalledProgram, LastSave
from pserver.job.server_cut import ServerCut
from pserver.membership.decisions import CUT_SECONDS
from pserver.membership.members import Membership
from pserver.storage.place import place_at
from pserver.undone import or_undone
from transpiler.files.files import is_url, local_path, shown

Named = TypeVar("Named", str, Path)


def check_place(data_dir: str | None, store: str | None) -> None:
    """Returns if a server can keep files there; makes the directory where it is missing.  Nothing
    is written, and a store is not asked.

    Raises:
        OSError: it cannot; one sentence.
    """
    if store is not None and is_url(store):
        try:
            place_at(store)
        except (ValueError, ImportError) as error:
            raise OSError(f"store: {error}") from error
        return
    name, path = ("data_dir", str(data_dir)) if store is None else ("store", store)
    check_folder(name, path)


def check_folder(name: str, path: str) -> None:
    """Returns if a server can keep files in a directory; makes it where it is missing.

    Args:
        name: of the setting.

    Raises:
        OSError: it cannot; one sentence.
    """
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"{name}: {path}: {error.strerror or error}") from error
    if not os.access(path, os.W_OK | os.X_OK):
        raise OSError(f"{name}: {path}: expected a directory that this user may write to")


def place_of(data_dir: str | None, store: str | None) -> str:
    """The directory, or the URL without a login, below which a server keeps files; "": it keeps
    none.
    """
    if store is not None and is_url(store):
        return shown(store)
    path = data_dir if store is None else store
    return "" if path is None else str(Path(path).resolve())


def directory(data_dir: str | None, path: str, server_index: int, store: str | None = None) -> str:
    """The directory, or the URL, of a caller's ``path`` in a server's files.

    Args:
        data_dir: the server's, on its machine.
        store: a URL, or a directory, which takes the place of ``data_dir``.

    Raises:
        Refused: the server keeps no files, or the path leads out of what it was given, or is a URL.
    """
    if data_dir is None and store is None:
        raise Refused("the server was started without --data-dir or --store, so it keeps no files")
    try:
        local_path(path or ".", "a server's files")
    except ValueError as error:
        raise Refused(str(error)) from error
    if store is not None and is_url(store):
        parts = PurePosixPath(path).parts
        if ".." in parts or path.startswith("/") or "::" in path or "\\" in path:
            raise Refused(f"expected a path below the server's store, got {path!r}")
        return "/".join((store.rstrip("/"), *parts, f"server-{server_index}"))
    root = Path(str(data_dir if store is None else store)).resolve()
    target = (root / path / f"server-{server_index}").resolve()
    if not target.is_relative_to(root):
        raise Refused(f"expected a path below the data directory, got {path!r}")
    return str(target)


def save(path: Named, installed: InstalledProgram, members: Membership) -> Named:
    """Writes slices, states, tables, the plan's fingerprint and the trainers' watermarks, all of
    one moment between two steps.

    Steps wait until that moment is fixed (server_cut.py), and not until it is written.

    Returns:
        ``path``.

    Raises:
        Busy: another save is being written.
        Refused: the disk does not take it, or another job writes there; what was saved before
            stays.
    """
    saving = Saving(str(path), installed, members, wait_seconds=CUT_SECONDS)
    saving.cut()
    saving.write()
    return path


class Saving:
    """A save that is ready when this is made: :meth:`cut` fixes its moment, :meth:`write` writes
    it, and :meth:`close` gives it up.

    Args:
        path: a directory or a URL.
        installed, members: what is saved.
        base: the directory or URL of the save that this one continues: of tables it has only the
            rows that changed since; "": none.
        continues: a later save may continue this one.
        wait_seconds: for how long to wait for another save that is being written.

    Attributes:
        pause_seconds: for how long steps waited.
        identity: of what is written, once it is whole.

    Raises:
        Busy: another save is being written.
        Refused: another job writes there, or the base is not the last save that was written here,
            or something else has counted changes as saved since.
    """

    def __init__(
        self,
        path: str,
        installed: InstalledProgram,
        members: Membership,
        base: str = "",
        continues: bool = False,
        wait_seconds: float = 0.0,
    ) -> None:
        self._path, self._installed, self._continues = path, installed, continues
        with ExitStack() as stack:
            installed.quiesce.begin_cut(wait_seconds)
            stack.callback(installed.quiesce.end_cut)
            before = _base_of(base, installed) if base else None
            with _refusing(path):
                self._writer = stack.enter_context(checkpoint.writing(path, before))
            self._cut = ServerCut(installed, members)
            stack.callback(self._cut.close)
            self._stack = stack.pop_all()
        self._changed, self._marks = bool(base), continues or bool(base)
        self.pause_seconds, self.identity = 0.0, ""

    def cut(self, record: int | None = None) -> int:
        """Fixes the save's moment; once.

        Args:
            record: of the job's log, as of which it is; None: the last one that is applied.

        Returns:
            The versions of the lanes together.
        """
        with or_undone(self.close):
            self._cut.begin(record, self._changed, self._marks)
            if self._marks:
                self._epochs = _epochs(self._installed)
                self._installed.last_save = None  # until this one is written
            self.pause_seconds = self._cut.pause_seconds
            return int(sum(self._cut.meta["versions"]))

    def close(self) -> None:
        """Gives the save up."""
        self._stack.close()

    def write(self, wrote: Callable[[int], None] = lambda size: None) -> int:
        """Writes the save; once.

        Args:
            wrote: called with the number of bytes written so far.

        Returns:
            How many bytes its files have.

        Raises:
            Refused: the disk does not take it; what was saved before stays.
        """
        with _refusing(self._path), self._stack:
            self._writer.wrote = wrote
            self._cut.write(self._writer)
            saved = self._writer.commit(self._cut.meta)
            self.identity = saved.identity
        if self._continues:
            self._installed.last_save = LastSave(saved, self._epochs)
        return self._writer.size


@contextmanager
def _refusing(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise Refused(f"cannot save to {shown(path)}: {error}") from error


def _epochs(installed: InstalledProgram) -> dict[str, int]:
    return {name: table.epoch for name, table in installed.tables.items()}


def _base_of(path: str, installed: InstalledProgram) -> checkpoint.Saved:
    """The save at a path, if all changes since are known.

    Raises:
        Refused: it is not.
    """
    last = installed.last_save
    if last is None or last.saved.path != place_at(path).path:
        known = "none" if last is None else shown(last.saved.path)
        raise Refused(f"base: expected the last save that was written here, {known}, got {path}")
    if last.epochs != _epochs(installed):
        raise Refused(
            "base: rows that have changed since were counted as saved by another save: save all"
        )
    return last.saved


def load(path: Named, installed: InstalledProgram, members: Membership, root: str = "") -> Named:
    """Reads the files of :func:`save`.

    A trainer's watermarks count for the same incarnation only, whether it has joined or joins
    later, and never go back: a trainer that is still running keeps its step numbers, and one that
    was started again counts from 1.  Versions never go back either.  Leases of samples count where
    no trainer has asked for one yet: a script that is still running knows its position.

    Args:
        root: the server's directory or store: a save that continues others may name none outside.

    Returns:
        ``path``.

    Raises:
        Busy: a save is being written.
        Refused: there is no complete save, or a file of it is torn.
        FingerprintMismatch: it was written by a job with another plan.
    """
    try:
        _check_inside(path, root)
        reader = checkpoint.reading(path)
        tensors, meta = reader.tensors(), reader.meta
    except (OSError, ValueError) as error:
        raise Refused(f"cannot load from {shown(str(path))}: {error}") from error
    if meta.get("fingerprint") != installed.plan.fingerprint():
        raise FingerprintMismatch(f"{shown(str(path))} was saved by a job with another plan")
    installed.quiesce.await_cut()
    with installed.quiesce.paused():
        installed.last_save = None
        installed.slices.load(tensors)
        installed.discard_snapshots()
        for name in installed.tables:
            installed.restore_table(name, meta["tables"][name])
            for chunk in reader.chunks(name):
                installed.load_rows(name, chunk)
        for lane, version in zip(installed.lanes, meta.get("versions", []), strict=False):
            lane.version = max(lane.version, version)
        installed.record_values()
        members.load_watermarks(meta.get("watermarks", {}))
        installed.leases.restore(meta.get("leases", {}))
    return path


def _check_inside(path: Named, root: str) -> None:
    """Returns if a save, all that it continues and all of its parts lie in the server's directory
    or store.

    Raises:
        ValueError: they do not, or one is missing.
    """
    saved = manifest.read(place_at(path))
    if saved.base is None and saved.parts is None:
        return  # its own files alone are read
    for each in manifest.everything(saved):
        inside = f"{each.place.path}/".startswith(f"{root.rstrip('/')}/")
        if not root or not inside:
            raise ValueError(
                "expected a save that continues none outside of the server's files, and has no "
                f"part there, got {shown(each.place.path)}"
            )
