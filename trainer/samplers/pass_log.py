"""The passes over data that a script has made, for its position after a restart.

[Note: which pass is which]  A restarted script does not make the same passes: one that evaluates in
the middle of an epoch skips that evaluation where the epoch is over.  So passes are counted by
loader.  A loader is identified by the place in the script where ``fleet.shard`` is called, and by
the number of loaders of earlier calls there.  Once the script is back at its position, all counts
are the saved ones.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)


@dataclass(eq=False)
class LoggedPass:
    """One iteration over a loader.

    Attributes:
        loader: its name.
        number: of this loader's passes, from 1.
        drawn: the number by which its order is drawn.
        given: the number of batches that the script has received.
        trained: the number of those before the end of the last step.
        skipped: the number of batches that were given, and trained on, before the restart; None:
            all, the pass is over.
        live: whether it was running when its job saved.
        size: samples of a full batch of this trainer; 0: unknown.
    """

    loader: str
    number: int
    drawn: int = 0
    given: int = 0
    trained: int = 0
    skipped: int | None = 0
    live: bool = False
    size: int = 0

    def of_size(self, size: int) -> None:
        """Sets the number of samples of the script's batches: converts the counts of a resumed pass
        to such batches, rounded down.  0: unknown.
        """
        if self.live and self.size and size and size != self.size:
            self.skipped = (self.skipped or 0) * self.size // size
            self.given = self.trained = self.skipped
            log.warning(
                "the checkpoint's batches have %d samples, and the script's %d: the saved pass "
                "continues after batch %d of this trainer",
                self.size,
                size,
                self.skipped,
            )
        self.size = size


@dataclass(frozen=True, slots=True)
class SavedPasses:
    """The passes of a script in a checkpoint.

    Attributes:
        loaders: the number of loaders, by the place of the call.
        begun: the number of passes, by loader.
        under_way: the passes that were not over.
    """

    loaders: Mapping[str, int]
    begun: Mapping[str, int]
    under_way: tuple[LoggedPass, ...]

    def plain(self) -> dict[str, Any]:
        """The passes for JSON."""
        return {
            "loaders": dict(self.loaders),
            "begun": dict(self.begun),
            "under_way": [[p.loader, p.number, p.drawn, p.trained, p.size] for p in self.under_way],
        }

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> SavedPasses:
        """Restores from :meth:`plain`."""
        under_way = [
            LoggedPass(loader, number, drawn, trained, trained, trained, True, *size)
            for loader, number, drawn, trained, *size in plain["under_way"]
        ]
        return cls(plain["loaders"], plain["begun"], tuple(under_way))

    def find(self, loader: str, number: int) -> LoggedPass:
        """The saved state of a pass, with its batches that were trained on."""
        for each in self.under_way:
            if (each.loader, each.number) == (loader, number):
                return LoggedPass(**vars(each))
        over = number <= self.begun.get(loader, 0)
        return LoggedPass(loader, number, skipped=None if over else 0)


NOTHING = SavedPasses({}, {}, ())


class PassLog:
    """The passes of this process's script.  The script's thread uses it."""

    def __init__(self) -> None:
        self._loaders: dict[str, int] = {}
        self._known: dict[str, list[tuple[weakref.ref[Any], str]]] = {}
        self._begun: dict[str, int] = {}
        self._under_way: list[LoggedPass] = []
        # joint calls of the script in the passes that it has made, by loader and number
        self.calls: dict[tuple[str, int], int] = {}

    def name_of(self, loader: Any, frame: FrameType) -> str:
        """A loader's name.

        Args:
            frame: that has called ``fleet.shard``.
        """
        code = frame.f_code
        line = frame.f_lineno - code.co_firstlineno
        place = f"{code.co_qualname}, line {line}, {frame.f_lasti}"
        known = [(ref, name) for ref, name in self._known.get(place, []) if ref() is not None]
        for ref, name in known:
            if ref() is loader:
                return name
        self._loaders[place] = self._loaders.get(place, 0) + 1
        name = f"{place}, {self._loaders[place]}"
        try:
            known.append((weakref.ref(loader), name))
        except TypeError:
            pass  # a list, for instance: each call has a name of its own
        self._known[place] = known
        return name

    def begin(self, loader: str, saved: SavedPasses) -> LoggedPass:
        """Counts a pass that begins."""
        self._begun[loader] = self._begun.get(loader, 0) + 1
        begun = saved.find(loader, self._begun[loader])
        if begun.skipped is not None:
            self._under_way.append(begun)
        return begun

    def end(self, over: LoggedPass) -> None:
        """Ends a pass: at its end, by ``break``, or by an error."""
        if over in self._under_way:
            self._under_way.remove(over)

    @property
    def first(self) -> LoggedPass | None:
        """The first of the running passes."""
        return self._under_way[0] if self._under_way else None

    @property
    def any(self) -> bool:
        """Whether a pass has begun."""
        return bool(self._begun)

    def stepped(self) -> None:
        """Counts the batches given so far as trained on, at the end of a step."""
        for each in self._under_way:
            each.trained = each.given

    def called(self) -> None:
        """Counts a joint call of the script, for the first of the running passes."""
        if self._under_way:
            key = self._under_way[0].loader, self._under_way[0].number
            self.calls[key] = self.calls.get(key, 0) + 1

    def saved(self) -> SavedPasses:
        """The passes for a checkpoint."""
        under_way = tuple(LoggedPass(**vars(each)) for each in self._under_way)
        return SavedPasses(dict(self._loaders), dict(self._begun), under_way)

    def trained(self) -> SavedPasses:
        """The passes for a script that continues to train from here: a running evaluation within
        another pass counts as over.
        """
        saved = self.saved()
        first = saved.under_way[:1]
        if first and first[0].trained:
            first += tuple(each for each in saved.under_way[1:] if each.trained)
            return SavedPasses(saved.loaders, saved.begun, first)
        return saved

    def restore(self, saved: SavedPasses) -> None:
        """Sets the counts to the saved ones: the script is back at its position."""
        for mine, theirs in ((self._loaders, saved.loaders), (self._begun, saved.begun)):
            for name, count in theirs.items():
                mine[name] = max(mine.get(name, 0), count)
