"""The rules of a table, one for each of its segments, and what a record keeps for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pserver.table.deferred_updates import DEFERRED_UPDATES
from pserver.table.kernels import Array
from pserver.table.memory import Layout
from pserver.table.update_kernels import ROW_UPDATES
from transpiler.ir.rules import ROW_RULES, Hparam, Rule
from transpiler.ir.tables import Table

Hparams = list[dict[str, Any]]


class SegmentRules:
    """How the segments of a table are updated.

    Args:
        table: the table's description in the plan.
        rules: one for each of its segments.

    Attributes:
        segments: the table's.
        specs, updates: of each segment's rule: its description, and its kernel.
        deferred: the kernel by which rows take the steps that they have missed; None under rules
            that move only the rows of a step.
        hparams: with which each segment begins.
        states: name and width of each state of a record.

    Raises:
        ValueError: a rule that rows do not have, or another number of rules than of segments.
    """

    def __init__(self, table: Table, rules: Sequence[Rule]) -> None:
        self._what, self.segments = f"table {table.name!r}", table.segments
        if len(rules) != len(table.segments):
            raise ValueError(
                f"{self._what}: expected a rule for each of {len(table.segments)} segments, got "
                f"{len(rules)}"
            )
        for rule in rules:
            if rule.type not in ROW_RULES:
                raise ValueError(
                    f"{self._what}: expected a rule among {', '.join(ROW_RULES)}, got {rule.type!r}"
                )
        self._types = tuple(rule.type for rule in rules)
        self.specs = tuple(ROW_RULES[kind] for kind in self._types)
        self.updates = tuple(ROW_UPDATES[kind] for kind in self._types)
        self.deferred = tuple(DEFERRED_UPDATES.get(kind) for kind in self._types)
        self.hparams: Hparams = [
            spec.complete(rule) for spec, rule in zip(self.specs, rules, strict=True)
        ]
        self.states: list[tuple[str, int]] = []
        self._offsets: list[list[tuple[str, int]]] = []
        self._place_states()

    def _place_states(self) -> None:
        """Segments whose rules have a state of the same name have parts of one state."""
        widths: dict[str, int] = {}
        for segment, spec in zip(self.segments, self.specs, strict=True):
            self._offsets.append([(name, widths.get(name, 0)) for name in spec.states])
            for name, full in spec.states.items():
                widths[name] = widths.get(name, 0) + (segment.end - segment.begin if full else 1)
        self.states = list(widths.items())

    def words(self) -> list[str]:
        """Words of records that the first step needs; see ``Layout``."""
        return ["step"] if self.move_untouched(self.hparams) else []

    def columns(self, layout: Layout) -> list[Array]:
        """For each segment int64[states]: the columns where its parts of states begin."""
        begins = {name: begin for name, (begin, _) in layout.states.items()}
        return [
            np.array([begins[name] + offset for name, offset in own], np.int64)
            for own in self._offsets
        ]

    def move_untouched(self, hparams: Hparams) -> bool:
        """Whether a step with these numbers moves rows that it does not touch."""
        return any(
            spec.moves_untouched(held) for spec, held in zip(self.specs, hparams, strict=True)
        )

    def deferred_scalars(self, hparams: Hparams) -> list[Sequence[float]]:
        """A step's line in the history: each segment's scalars, none where rows never catch up."""
        return [
            () if deferred is None else deferred.scalars(held)
            for deferred, held in zip(self.deferred, hparams, strict=True)
        ]

    def completed(self, held: Hparams, given: Sequence[Mapping[str, Hparam]]) -> Hparams:
        """All hparams of a step: what is not given is as it was held.

        Raises:
            ValueError: an hparam that a rule does not have, or not a mapping for each segment.
        """
        if len(given) != len(held):
            raise ValueError(
                f"{self._what}: expected hparams for each of {len(held)} segments, got {len(given)}"
            )
        for kind, old, new in zip(self._types, held, given, strict=True):
            if not new.keys() <= old.keys():
                known, unknown = ", ".join(old), ", ".join(sorted(new.keys() - old.keys()))
                raise ValueError(
                    f"{self._what}: rule {kind}: expected hparams among {known}, got {unknown}"
                )
        return [{**old, **new} for old, new in zip(held, given, strict=True)]
