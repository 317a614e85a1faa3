"""Where a replay begins: a checkpoint, and as of which entries of the recorded log it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pserver.checkpoint import checkpoint
from pserver.checkpoint.checkpoint import Reader
from pserver.dense.slices import PREFIX
from pserver.errors import FingerprintMismatch, Refused
from pserver.operations.replayed_server import ReplayedServer
from transpiler.files.local_path import shown
from transpiler.ir.graph import Role
from transpiler.ir.slice_states import slice_states


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """A checkpoint of a job whose log is recorded.

    Attributes:
        path: of it.
        places: by server, as of which entry of which recording it is.
        readers: of the servers' own parts; one, of the whole, where a trainer has written it.
        whole: whether a trainer has.
    """

    path: str
    places: Sequence[Mapping[str, Any]]
    readers: Sequence[Reader]
    whole: bool

    @property
    def record(self) -> int:
        """The last record of the job's log that is in it."""
        return max(int(place["record"]) for place in self.places)

    def load(self, server: int, into: ReplayedServer) -> None:
        """Loads a server's part.

        Raises:
            FingerprintMismatch: it is of another plan.
            Refused: it does not fit the server, or lacks what the server had.
        """
        if self.whole:
            _load_whole(self, server, into)
        else:
            _load_part(self.readers[server], into)
        into.record = self.record


def starting_point(path: str) -> StartingPoint:
    """A checkpoint that ``fleet.save``, an automatic save, ``pserver save`` or the servers
    themselves have written.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a file of it is torn.
        Refused: it does not say of which recorded log it is.
    """
    try:
        reader = checkpoint.reading(path)
    except FileNotFoundError:
        parts = sorted(Path(path).glob("server-*/checkpoint.json"), key=_number)
        if not parts:
            raise
        readers: Sequence[Reader] = [checkpoint.reading(part.parent) for part in parts]
    else:
        readers = reader.parts
        if not readers:
            places = reader.meta.get("log", {}).get("servers", [])
            return StartingPoint(path, _checked(path, places), [reader], True)
    return StartingPoint(path, _checked(path, [r.meta.get("log") for r in readers]), readers, False)


def _number(part: Path) -> int:
    text = part.parent.name.removeprefix("server-")
    return int(text) if text.isdecimal() else 2**32


def _checked(path: str, places: Iterable[Any]) -> list[Mapping[str, Any]]:
    found = list(places)
    if not found or not all(isinstance(e, dict) and e.get("recording") for e in found):
        raise Refused(
            f"{shown(path)}: expected a checkpoint of a job whose log was recorded (--record-log) "
            "when it was saved; this one does not say as of which entry of a log it is"
        )
    return found


def _load_part(reader: Reader, into: ReplayedServer) -> None:
    if reader.meta.get("fingerprint") != into.fingerprint:
        raise FingerprintMismatch(
            f"{shown(reader.saved.path)} is of a job with another plan than the log's"
        )
    installed = into.installed
    installed.slices.load(reader.tensors())
    for name, table in installed.tables.items():
        table.restore(reader.meta["tables"][name])
        for chunk in reader.chunks(name):
            table.load(chunk)
    for lane, version in zip(installed.lanes, reader.meta["versions"], strict=True):
        lane.version = version
    installed.discard_snapshots()


def _load_whole(start: StartingPoint, server: int, into: ReplayedServer) -> None:
    (reader,), place, installed = start.readers, start.places[server], into.installed
    for lane, version in zip(installed.lanes, place["versions"], strict=True):
        lane.version = version
    installed.slices.load(_slices(start.path, reader.tensors(), server, into))
    for name, table in installed.tables.items():
        if name not in reader.tables:
            raise FingerprintMismatch(f"{shown(start.path)} has no table {name!r}")
        table.restore(place["tables"][name])
        for chunk in reader.chunks(name):
            table.load(chunk)
    installed.discard_snapshots()


def _slices(
    path: str, tensors: Mapping[str, torch.Tensor], server: int, into: ReplayedServer
) -> dict[str, torch.Tensor]:
    """A server's slices and states, cut out of whole tensors.

    Raises:
        FingerprintMismatch: they are of another model.
        Refused: states are not there that the server had.
    """
    installed = into.installed
    states, found = slice_states(into.program.blocks), dict[str, torch.Tensor]()
    for placement in installed.plan.placements:
        whole, shape = tensors.get(f"model/{placement.name}"), tuple(placement.shape)
        if whole is None or tuple(whole.shape) != shape:
            raise FingerprintMismatch(
                f"{shown(path)}: expected {placement.name!r} of shape {list(shape)}, got "
                f"{'none' if whole is None else list(whole.shape)}"
            )
        stepped = installed.lanes[placement.lane].version
        for slice_ in placement.slices:
            if slice_.server != server:
                continue
            own = {f"model/{placement.name}": slice_.name}
            for state, variable in states.get(slice_.name, {}).items():
                own[f"state/{state}/{placement.name}"] = variable
            outer = installed.plan.lane_of(placement).kind.outer_optimizer
            for name, variable in own.items():
                of_server = tensors.get(f"{PREFIX}{variable}")
                if of_server is not None:
                    found[variable] = of_server
                elif outer and name.startswith("state/"):  # a state of that name is a trainer's
                    if stepped:
                        raise Refused(
                            f"{shown(path)}: expected {PREFIX}{variable}, the outer optimizer's "
                            "state: begin with another checkpoint, or with the log itself"
                        )
                elif name in tensors:
                    found[variable] = _cut(tensors[name], slice_.begin, slice_.end, shape)
    held = into.program.main.variables_of(Role.PARAMETER, Role.BUFFER, Role.STATE)
    shapes = {each.name: [int(extent) for extent in each.shape] for each in held}
    return {name: tensor.reshape(shapes[name]) for name, tensor in found.items()}


def _cut(whole: torch.Tensor, begin: int, end: int, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(whole.shape) != shape:
        return whole  # a number that every slice has: the count of steps
    return whole.reshape(-1)[begin:end]
