"""The last save that a later one may continue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pserver.checkpoint.checkpoint import Saved


@dataclass(frozen=True, slots=True)
class LastSave:
    """A save that was written, and what says whether all changes since are known.

    Attributes:
        saved: the save.
        epochs: by table: how often its changes had been counted as saved, with this save.
    """

    saved: Saved
    epochs: Mapping[str, int]
