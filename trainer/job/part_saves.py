"""Saves of which every server writes its part.

[Note: who waits for a save]  The trainers meet for the cut: between two steps trainer 0 copies the
values that no server has, and every server takes a snapshot.  After an automatic save all continue:
a thread of trainer 0 waits until the parts are written, writes the manifest that names them, and
lists the checkpoint.  In ``fleet.save`` all wait for that.  Until then a reader finds the
checkpoint before.  While a save is under way no other one begins.

Where a server cannot write its part, or trainer 0 cannot read it, trainer 0 writes everything by
itself, as the servers send it: see save_load.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pserver.checkpoint import checkpoint, manifest
from pserver.checkpoint.checkpoint import Claims, Saved, Writer
from pserver.client.client import Client, SaveCalls, SaveState
from pserver.errors import Busy, PServerError, Refused
from pserver.running_clock import RUNNING
from pserver.storage.place import place_at, relative
from pserver.storage.single_file import joined
from pserver.table import counts
from trainer.checkpoint import resume
from trainer.checkpoint.checkpoint_folder import CheckpointFolder
from trainer.checkpoint.resume import Rest
from trainer.communicator.communicator import Communicator
from trainer.job.position import Position
from trainer.optimizer import DistributedOptimizer
from transpiler.files import bounded_json
from transpiler.files.files import shown

if TYPE_CHECKING:
    from trainer.checkpoint.tables import TableStore
    from trainer.communicator.tables import Tables

FINISH_SECONDS = 600.0  # for which the end of a job waits for a save
WRITE_SECONDS = 3600.0  # that a part may take
FIRST_PAUSE, LONGEST_PAUSE = 0.01, 1.0  # seconds between two requests for a part's state

log = logging.getLogger(__name__)


class SavedJob(Protocol):
    """A job, as its saves need it: see :class:`trainer.job.job.Job`."""

    saved: Saved | None
    claims: Claims
    optimizers: list[DistributedOptimizer]
    tables: Tables | None

    @property
    def communicator(self) -> Communicator | None:
        """The connection to the servers."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers, by name."""

    def table_store(self) -> TableStore | None:
        """The rows of the tables."""


class Elsewhere(OSError):
    """A server writes to a place that trainer 0 cannot read."""


@dataclass(slots=True)
class _Part:
    """A server's part of a save.

    Attributes:
        path: of the directory of the save's parts, as sent to the server.
        base: that of the save that it continues, or "".
        where: the path of the directory for trainer 0; "": the server names the file.
        saves: the calls of the connection at the start of the save: a server that restarts
            meanwhile does not know the save, and must not begin it later than the others.
        state: of the part; None if it has not begun.
        failure: the reason why it has not begun.
    """

    client: Client
    path: str
    base: str
    where: str
    saves: SaveCalls
    state: SaveState | None = None
    failure: PServerError | None = None

    def begin(self, number: int) -> None:
        """Makes the server take the snapshot for its part."""
        saves = self.saves
        try:
            try:
                self.state = saves.in_background(self.path, number, self.base)
            except Refused:
                if not self.base:
                    raise
                self.state = saves.in_background(self.path, number)  # the changes are not known
        except PServerError as error:
            self.failure = error

    def withdraw(self, number: int) -> None:
        """Withdraws the part, unless it has begun, because another server cannot save."""
        with contextlib.suppress(PServerError):  # then its part does not count
            self.saves.withdraw(number)

    def wait(self, number: int) -> None:
        """Waits until the part is written.

        Raises:
            OSError: it is not written.
            PServerError: the server does not answer, or the job has failed.
        """
        end, pause = RUNNING() + WRITE_SECONDS, FIRST_PAUSE
        while self.state is None or not self.state.done:
            if RUNNING() > end:
                raise OSError(f"{self.client}: no part is written after {WRITE_SECONDS:.0f} s")
            self.client.check()
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
            self.state = self.saves.in_background(self.path, number, self.base)
        if self.state.failure:
            raise OSError(f"{self.client}: {self.state.failure}")

    def found(self) -> manifest.Manifest:
        """The server's part, as trainer 0 reads it.

        Raises:
            Elsewhere: it is not where trainer 0 reads.
            OSError, ValueError: it cannot be read.
        """
        assert self.state is not None, "it is written"
        own = f"server-{self.client.index}"
        place = place_at(joined(self.where, own) if self.where else self.state.file)
        try:
            found = manifest.read(place)
        except FileNotFoundError as error:
            raise Elsewhere(
                f"expected a part in {place}, where trainer 0 reads, got none: {self.client} wrote "
                f"{self.state.file}"
            ) from error
        if found.identity != self.state.identity:
            raise Elsewhere(f"expected the part of {self.client} in {place}, got another one")
        return found


@dataclass(frozen=True, slots=True)
class _SaveInProgress:
    """A save whose snapshot has been taken.

    Attributes:
        number: the save's number on the servers.
        rest: the content that trainer 0 adds.
        parts: by server.
        failure: the reason why a part has not begun, so that the others are useless; None: all
            have.
    """

    number: int
    rest: Rest
    parts: Sequence[_Part]
    failure: PServerError | None
    communicator: Communicator
    store: TableStore | None

    def complete(self, writer: Writer) -> Saved:
        """Waits for the parts, and writes trainer 0's content, and the manifest.

        Raises:
            Elsewhere: trainer 0 cannot read a part.
            OSError, ValueError: a part, or the rest, cannot be written.
            PServerError: a server does not answer, or the job has failed.
        """
        for part in self.parts:
            part.wait(self.number)
        found = [part.found() for part in self.parts]
        return resume.write_rest(
            writer,
            self.rest,
            [Saved(each.place.path, each.identity) for each in found],
            resume.layout_of(self.communicator.plan, self.communicator.transfer.slice_states),
            _tables(found, self.store),
        )


class PartSaves:
    """The leader's side of saves by parts.  See [Note: who waits for a save].

    The script's thread calls it.

    Args:
        job: the job that saves.
    """

    def __init__(self, job: SavedJob) -> None:
        self._job = job
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None  # set by the thread
        self._number = 0  # of the last save
        self._newest = ""  # the path of the last save, which these servers have written
        self._said = ""  # the last logged reason why servers do not save
        self._elsewhere = False

    @property
    def under_way(self) -> bool:
        """Whether a save has begun that has neither completed nor failed."""
        return self._thread is not None and self._thread.is_alive()

    def possible(self) -> bool:
        """Whether every server keeps files where trainer 0 can read them.  Logs once why not."""
        communicator, why = self._job.communicator, ""
        if communicator is None:
            return False
        lacking = [client for client in communicator.clients if not client.store]
        if lacking:
            why = f"{lacking[0]} was started without --store or --data-dir"
        elif self._elsewhere:
            why = "servers keep files where trainer 0 cannot read them"
        if why and why != self._said:
            log.warning("trainer 0 writes the checkpoints, and the job waits meanwhile: %s", why)
            self._said = why
        return not why

    # ---- automatic saves ----

    def begin(self, folder: CheckpointFolder, steps: int, position: Position, deltas: int) -> None:
        """Takes the snapshot after so many steps, and continues in a thread.  All trainers wait,
        and have sent everything.

        Args:
            folder: of the checkpoints; the thread uses it while the save is under way.
            position: of the scripts.
            deltas: the most checkpoints in a row that have only the changed rows of tables.

        Raises:
            OSError, ValueError: no save has begun.
        """
        self.collect()
        base = "" if self._job.tables is None else folder.continued(self._job.saved, deltas)
        if base and folder.path_of(base) != self._newest:
            base = ""
        name = folder.name_at(steps)
        path = folder.path_of(name)
        begun = self._begin(path, folder.path_of(base) if base else "", None, position)
        self._thread = threading.Thread(
            target=self._complete,
            args=(folder, name, base, begun),
            name="checkpoint",
            daemon=True,
        )
        self._thread.start()
        if begun.failure is not None:
            raise OSError(f"a server cannot save its part: {begun.failure}") from begun.failure

    def _complete(
        self, folder: CheckpointFolder, name: str, base: str, begun: _SaveInProgress
    ) -> None:
        """Completes a checkpoint of the folder, in a thread; failures are logged."""
        path = folder.path_of(name)
        try:
            if begun.failure is None:
                with checkpoint.writing(path) as writer:
                    self._saved = begun.complete(writer)
                folder.add(name, base)
                self._newest = path
                log.info("saved %s", path)
        except Exception as error:  # any error of a store: no thread waits for this one
            self._saved = None
            self._elsewhere = isinstance(error, Elsewhere)
            log.error("no checkpoint %s, the job continues: %s", path, error)
        if self._saved is None:
            folder.discard(name)

    # ---- saves of the script ----

    def save(self, path: str, scheduler: Any | None, position: Position) -> bool:
        """Saves to a directory, in place of the checkpoint that may be there, and waits until all
        of it is written.  All other trainers wait, and everything has been sent.

        Args:
            scheduler: see :func:`trainer.job.save_load.save`.
            position: of the scripts.

        Returns:
            Whether it is saved; False where not all servers keep files there, one still writes its
            part of a save that has failed, or trainer 0 does not find the files: trainer 0 has to
            write everything.

        Raises:
            InUse: another job writes there.
            OSError, ValueError: it cannot be saved; an existing checkpoint stays.
            PServerError: a server does not answer, or the job has failed.
        """
        job, parts = self._job, joined(path, f"parts-{secrets.token_hex(8)}")
        self.finish()
        if self._elsewhere or self.under_way or not self._reach(parts):
            return False
        manifest.check_unshared(place_at(path))
        saved: Saved | None = None
        try:
            with checkpoint.writing(path, None, job.claims) as writer:
                begun = self._begin(parts, "", scheduler, position)
                if isinstance(begun.failure, Busy):  # it still writes its part of a failed save
                    return False
                if isinstance(begun.failure, Refused):  # a full disk, too
                    raise OSError(f"a server cannot save its part: {begun.failure}")
                if begun.failure is not None:
                    raise begun.failure
                saved = job.saved = begun.complete(writer)
        except Elsewhere as error:
            log.warning("trainer 0 writes the checkpoints by itself from now on: %s", error)
            self._elsewhere = True
        finally:
            if saved is None:
                _discard(parts)
        return saved is not None

    def _reach(self, path: str) -> bool:
        """Whether all servers keep files at a path of trainer 0."""
        stores = [client.store for client in self._clients()]
        return bool(stores) and all(
            store and self._place_of(store, path)[1] == path for store in stores
        )

    # ---- the servers ----

    def _begin(
        self, path: str, base: str, scheduler: Any | None, position: Position
    ) -> _SaveInProgress:
        """Takes the snapshot.

        Args:
            path: the directory of the parts.
            base: that of the parts that these continue, or "".
        """
        job = self._job
        communicator, store = job.communicator, job.table_store()
        assert communicator is not None, "it is possible"
        layout = resume.layout_of(communicator.plan, communicator.transfer.slice_states)
        tensors = {n: t for n, t in job.tensors().items() if f"model/{n}" not in layout}
        rest = Rest.of(
            tensors | _unserved(communicator, job.tensors()),
            job.optimizers,
            communicator.plan,
            resume.described(job.optimizers, scheduler, position.meta()),
            store,
        )
        job.saved, self._newest = None, ""  # until this save is complete
        self._number += 1
        parts = [self._part(client, path, base) for client in communicator.clients]
        with ThreadPoolExecutor(len(parts), "save") as pool:
            begins = {pool.submit(part.begin, self._number): part for part in parts}
            failures = (begins[each].failure for each in as_completed(begins))
            failure = next((each for each in failures if each is not None), None)
            for future, part in begins.items() if failure is not None else ():
                if not future.done():
                    part.withdraw(self._number)
        return _SaveInProgress(self._number, rest, parts, failure, communicator, store)

    def _part(self, client: Client, path: str, base: str) -> _Part:
        below, where = self._place_of(client.store, path)
        before = self._place_of(client.store, base)[0] if base else ""
        return _Part(client, below, before, where, client.saves)

    def _place_of(self, store: str, path: str) -> tuple[str, str]:
        """The path below a server's store, for the server, and the path for trainer 0, or "" if the
        server names the file.
        """
        try:
            below = relative(place_at(store), place_at(path))
        except (ValueError, ImportError, OSError):
            below = ".."
        if below.split("/")[0] != "..":
            return below, path
        folder, _, name = path.rpartition("/")
        own = hashlib.blake2b(folder.encode(), digest_size=8).hexdigest()
        return f"{own}/{name}", ""  # other jobs' parts may be there, too

    # ---- results ----

    def collect(self) -> None:
        """Takes over the result of a save that is over; does not wait for one under way."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread.join()
            if self._job.saved is None:  # otherwise the script has saved, or loaded, since
                self._job.saved = self._saved
            self._saved = self._thread = None

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """Waits for a save that is under way, up to so many seconds, unless the job has failed."""
        end = RUNNING() + seconds
        while self._thread is not None and self._thread.is_alive():
            failed = any(client.failure is not None for client in self._clients())
            if failed or RUNNING() > end:
                log.error("the last automatic checkpoint is not complete: it is given up")
                break
            self._thread.join(LONGEST_PAUSE)
        self.collect()

    def _clients(self) -> list[Client]:
        communicator = self._job.communicator
        return [] if communicator is None else communicator.clients


def _discard(parts: str) -> None:
    """Removes the parts of a save that has failed."""
    try:
        manifest.clear(place_at(parts))
    except OSError as error:
        log.warning("what is left in %s could not be removed: %s", shown(parts), error)


def _unserved(
    communicator: Communicator, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The variables whose values on servers may differ from those here, by name: those that servers
    only hold, and those with possible external writes since the last step; also the servers' values
    of buffers that travel with steps taken here.
    """
    plan, buffers = communicator.plan, communicator.buffers
    written = communicator.suspected()
    placed = [p.name for p in plan.placements if p.group is None or p.name in written]
    found = {name: tensors[name] for name in placed}
    if plan.lanes[buffers.lane].kind.steps_on_trainer:
        found |= communicator.transfer.values(buffers.placements)
    return found


def _tables(found: Sequence[manifest.Manifest], store: TableStore | None) -> dict[str, Any]:
    """The tables' metadata, as the servers have written them."""
    if store is None:
        return {}
    tables = [each.meta["tables"] for each in found]
    return {
        name: store.described(
            name, counts.joint(bounded_json.loads(known[name]) for known in tables)
        )
        for name in store.names()
    }
