"""The steps of a table: its rules at work on the rows that a step touches, and on the others later.

[Note: rows that were always there]  Under rules that move every row at every step, a table whose
ids are a range is the whole parameter: a row that no step has touched yet has missed all steps from
the first on, and reads as torch's would.  Where ids may be anything, or rows come and go, a row
begins with the push that makes it.

[Note: a history that ends]  Where a schedule gives every step hparams of its own, the history of
the steps that rows may have missed becomes long.  Once it has ``KEPT`` stretches, every step also
lets a few further rows catch up, in turn, so that all rows have done so after ``PERIOD`` steps; the
history before the turn began is then forgotten.  (Not where weights decay in a table whose ids are
a range: there a row may have missed all steps from the first on.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pserver.table.deferred_updates import DEFERRED_UPDATES
from pserver.table.hparam_history import HparamHistory
from pserver.table.kernels import Array
from pserver.table.rows import Rows
from pserver.table.update_kernels import ROW_UPDATES
from transpiler.ir.rules import ROW_RULES, Hparam, Rule
from transpiler.ir.tables import Table

Hparams = list[dict[str, Any]]
KEPT, PERIOD = 4096, 16384


class RowUpdater:
    """Takes the steps of one table; owns its rows.

    One caller at a time; calls of :meth:`read` may run beside each other.

    Args:
        table: the table's description in the plan.
        rules: one for each of its segments.
        words: of records, besides the last step that a row has taken.

    Attributes:
        step: how many steps were taken.
        rows: the rows' memory.

    Raises:
        ValueError: a rule that rows do not have, or another number of rules than of segments.
    """

    def __init__(self, table: Table, rules: Sequence[Rule], words: Sequence[str]) -> None:
        self.table, self.step = table, 0
        self._what = f"table {table.name!r}"
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
        self._specs = tuple(ROW_RULES[kind] for kind in self._types)
        self._updates = tuple(ROW_UPDATES[kind] for kind in self._types)
        self._deferred = tuple(DEFERRED_UPDATES.get(kind) for kind in self._types)
        self._hparams: Hparams = [
            spec.complete(rule) for spec, rule in zip(self._specs, rules, strict=True)
        ]
        self._begun = [False] * len(rules)  # whether a segment has a velocity yet
        self._words = tuple(words)
        self.rows, self._states = self._make_rows()
        self._history = self._empty_history()
        self._swept, self._sweep_began = 0, 0  # see [Note: a history that ends]
        self._ranged = (
            table.rows is not None
            and table.entry is None
            and table.ttl is None
            and table.capacity is None
        )
        self._fill_template()

    def _make_rows(self) -> tuple[Rows, list[Array]]:
        """Memory of rows, and for each segment the column of a record where its part of each of its
        states begins.
        """
        widths: dict[str, int] = {}
        offsets: list[list[tuple[str, int]]] = []
        for segment, spec in zip(self.table.segments, self._specs, strict=True):
            offsets.append([(name, widths.get(name, 0)) for name in spec.states])
            for name, full in spec.states.items():
                widths[name] = widths.get(name, 0) + (segment.end - segment.begin if full else 1)
        rows = Rows(self.table, list(widths.items()), self._all_words(self._moves(self._hparams)))
        begins = {name: begin for name, (begin, _) in rows.layout.states.items()}
        return rows, [
            np.array([begins[name] + offset for name, offset in own], np.int64) for own in offsets
        ]

    def _all_words(self, moves: bool) -> tuple[str, ...]:
        return (("step",) if moves else ()) + self._words

    def _moves(self, hparams: Hparams) -> bool:
        """Whether a step with these numbers moves rows that it does not touch."""
        return any(
            spec.moves_untouched(held) for spec, held in zip(self._specs, hparams, strict=True)
        )

    def _deferred_scalars(self, hparams: Hparams) -> list[Sequence[float]]:
        """A step's line in the history: each segment's scalars, none where rows never catch up."""
        return [
            () if deferred is None else deferred.scalars(held)
            for deferred, held in zip(self._deferred, hparams, strict=True)
        ]

    def _empty_history(self) -> HparamHistory:
        widths = [len(line) for line in self._deferred_scalars(self._hparams)]
        decay = [None if deferred is None else deferred.decay for deferred in self._deferred]
        return HparamHistory(widths, decay, self.rows.dtype)

    def _fill_template(self) -> None:
        """Has states of new rows begin with their initial values."""
        parts = zip(self.table.segments, self._specs, self._states, self._hparams, strict=True)
        for segment, spec, states, held in parts:
            for begin, full in zip(states, spec.states.values(), strict=True):
                width = segment.end - segment.begin if full else 1
                initial = held[spec.initial] if spec.initial else 0.0
                self.rows.template[begin : begin + width] = initial

    # ---- rows ----

    def make(self, ids: Array, current: bool = False) -> Array:
        """Makes rows for ids that have none: their slots.

        ``current``: they have taken all steps.
        """
        slots = self.rows.make(ids)
        self._note_step(slots, self.step if current or not self._ranged else 0)
        return slots

    def _note_step(self, slots: Array, step: int | Array) -> None:
        """Notes that these rows have taken all steps up to this."""
        if self.rows.has("step"):
            self.rows.word("step")[slots] = step

    def track_steps(self) -> None:
        """From here on each record says which steps its row has taken."""
        if not self.rows.has("step"):
            self.rows.set_words(self._all_words(True))
            self._note_step(np.arange(self.rows.index.used), self.step)

    def read(self, slots: Array, ids: Array, out: Array) -> None:
        """Copies the first columns of records, as many as ``out`` has, with all steps taken.

        Of a row that is not there (slot -1): what it would hold.
        """
        if not len(self._history):
            self.rows.gather(slots, ids, out)
            return
        copies = np.empty((len(slots), self.rows.layout.columns), self.rows.dtype)
        self.rows.gather(slots, ids, copies)
        words = copies.view(np.int64)
        if not self._ranged:
            words[slots < 0, self.rows.layout.words["step"]] = self.step
        self._apply_deferred(copies, words, np.arange(len(slots)))
        out[:] = copies[:, : out.shape[1]]

    def catch_up(self, slots: Array) -> None:
        """Takes the steps that these rows (-1: none) have missed."""
        if len(self._history):
            self._apply_deferred(self.rows.records, self.rows.words, slots)
            self._note_step(slots[slots >= 0], self.step)

    def _apply_deferred(self, records: Array, words: Array, slots: Array) -> None:
        word, parts = (
            self.rows.layout.words["step"],
            zip(self.table.segments, self._deferred, strict=True),
        )
        for index, (segment, deferred) in enumerate(parts):
            if deferred is not None:
                columns = word, segment.begin, segment.end, self._states[index]
                history = self._history.arguments(index)
                deferred.kernel(records, words, slots, *columns, self.step, *history)

    # ---- steps ----

    def hparams(self, given: Sequence[Mapping[str, Hparam]]) -> Hparams:
        """All hparams of a step: what is not given stays as it was.

        Raises:
            ValueError: an hparam that a rule does not have, or not a mapping for each segment.
        """
        if len(given) != len(self._hparams):
            raise ValueError(
                f"{self._what}: expected hparams for each of {len(self._hparams)} segments, got "
                f"{len(given)}"
            )
        for kind, held, new in zip(self._types, self._hparams, given, strict=True):
            if not new.keys() <= held.keys():
                known, unknown = ", ".join(held), ", ".join(sorted(new.keys() - held.keys()))
                raise ValueError(
                    f"{self._what}: rule {kind}: expected hparams among {known}, got {unknown}"
                )
        return [{**held, **new} for held, new in zip(self._hparams, given, strict=True)]

    def take_step(self, slots: Array, gradients: Array, hparams: Hparams) -> None:
        """One step of these rows (-1: leave out), with gradients [u, dim] that may be
        overwritten.
        """
        rows = self.rows
        if self._moves(hparams):
            self.track_steps()
        self.catch_up(slots)
        self._sweep()
        self.step, self._hparams = self.step + 1, hparams
        if self.step == 1:
            self._fill_template()
        now = [self._at_first(index, held) for index, held in enumerate(hparams)]
        parts = zip(self.table.segments, self._updates, self._states, now, strict=True)
        for segment, update, states, held in parts:
            if held.get("maximize"):
                own = gradients[:, segment.begin : segment.end]
                np.negative(own, out=own)
            scalars = np.array(update.scalars(held, self.step), rows.dtype)
            columns = segment.begin, segment.end, states
            update.kernel(rows.records, slots, gradients, *columns, scalars)
        if rows.has("step"):
            self._history.append(self.step, self._deferred_scalars(now))
            self._note_step(slots[slots >= 0], self.step)

    def _sweep(self) -> None:
        """See [Note: a history that ends]."""
        if len(self._history) < KEPT or (self._ranged and self._history.decays):
            return
        rows = self.rows
        slots, after = rows.index.listed(self._swept, rows.index.used // PERIOD + 1)
        self.catch_up(slots)
        # what was saved of them cannot catch up any more
        rows.index.mark(rows.index.ids.array[slots], rows.epoch, rows.calls)
        self._swept = max(after, 0)
        if after < 0:
            self._history.forget_before(self._sweep_began)
            self._sweep_began = self.step

    def _at_first(self, index: int, held: dict[str, Any]) -> dict[str, Any]:
        """torch's first step with a momentum takes the gradient as the velocity, whatever the
        dampening.
        """
        if self._begun[index] or not held.get("momentum"):
            return held
        self._begun[index] = True
        return {**held, "dampening": 0.0}

    # ---- as data ----

    def metadata(self) -> dict[str, Any]:
        """What is not in rows, JSON-able: the steps taken, their hparams and the history."""
        sweep = [self._swept, self._sweep_began]
        history = self._history.plain()
        return {
            "step": self.step,
            "hparams": self._hparams,
            "begun": self._begun,
            "history": history,
            "sweep": sweep,
        }

    def restore(self, metadata: Mapping[str, Any]) -> None:
        """Takes over what :meth:`metadata` returned.

        Raises:
            ValueError: it is of a table with other rules.
        """
        hparams = self.hparams(metadata["hparams"])
        self._hparams = [
            {name: tuple(value) if name == "betas" else value for name, value in held.items()}
            for held in hparams
        ]
        if metadata["history"]:
            self.track_steps()
        self.step, self._begun = int(metadata["step"]), list(metadata["begun"])
        self._history = self._empty_history()
        self._history.restore(metadata["history"])
        self._swept, self._sweep_began = metadata["sweep"]
        self._fill_template()
