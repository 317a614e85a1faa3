"""The progress of a server's job: the part of its state that no variable of its program holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from transpiler.files import bounded_json
from transpiler.ir.rules import Hparam


@dataclass(frozen=True, slots=True)
class HeldRows:
    """One server's part of a table.

    Attributes:
        arrays: the table's records by array, as pserver/table/snapshots.py names them.
        metadata: the table's state besides its rows, as JSON.
    """

    arrays: Mapping[str, torch.Tensor]
    metadata: str


@dataclass(frozen=True, slots=True)
class Served:
    """The state of a server of a job, beside its slices and their optimizer states.

    Attributes:
        versions: updates applied, by lane.
        steps: by trainer: the last step that was applied of each lane.
        hparams: by parameter group: those of its last step.
        tables: its part of every table, by name.

    Example:
        >>> served = Served((3,), {0: (3,)}, {0: {"lr": 0.1}})
        >>> Served.from_text(served.text(), {}) == served
        True
    """

    versions: Sequence[int]
    steps: Mapping[int, Sequence[int]]
    hparams: Mapping[int, Mapping[str, Hparam]]
    tables: Mapping[str, HeldRows] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The last step that was applied, of the most advanced trainer."""
        return max((step for steps in self.steps.values() for step in steps), default=0)

    def text(self) -> str:
        """All but the arrays of tables, as JSON."""
        return json.dumps(
            {
                "versions": list(self.versions),
                "steps": {str(trainer): list(steps) for trainer, steps in self.steps.items()},
                "hparams": {str(group): dict(values) for group, values in self.hparams.items()},
                "tables": {name: held.metadata for name, held in self.tables.items()},
            }
        )

    @classmethod
    def from_text(cls, text: str, arrays: Mapping[str, Mapping[str, torch.Tensor]]) -> Served:
        """Reads the text of :meth:`text`.

        Args:
            arrays: of every table, by the table's name.

        Raises:
            ValueError: the text is malformed, or a table's arrays are missing.
        """
        try:
            read: dict[str, Any] = bounded_json.loads(text)
            return cls(
                tuple(map(int, read["versions"])),
                {int(trainer): tuple(map(int, each)) for trainer, each in read["steps"].items()},
                {
                    int(group): {key: _hparam(value) for key, value in values.items()}
                    for group, values in read["hparams"].items()
                },
                {
                    name: HeldRows(dict(arrays[name]), str(metadata))
                    for name, metadata in read["tables"].items()
                },
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the job's progress: {error!r}") from error


def _hparam(value: Any) -> Hparam:
    return tuple(map(float, value)) if isinstance(value, list) else float(value)
