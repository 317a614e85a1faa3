"""The steps of a table: its rules at work on the rows that a step touches, and what the others have
missed.

[Note: rows that were always there]  Under rules that move every row at every step, a table whose
ids are a range is the whole parameter: a row that no step has touched yet has missed all steps from
the first on, and reads as torch's would.  Where ids may be anything, or rows come and go, a row
begins with the push that makes it.

[Note: a history that ends]  Where a schedule gives every step numbers of its own, what rows may
have missed becomes long.  Once it has ``KEPT`` stretches, every step also makes up for what a few
further rows have missed, in turn, so that all rows have had theirs after ``PERIOD`` steps; what was
before the turn began is forgotten.  (Not where weights decay in a table whose ids are a range:
there a row may have missed all steps from the first on.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pserver.table.deferred_updates import HparamHistory
from pserver.table.kernels import Array
from pserver.table.optimizers import ROW_OPTIMIZERS, first_hparams
from pserver.table.rows import Rows
from transpiler.ir.rules import Hparam, Rule
from transpiler.ir.tables import Table

Hparams = list[dict[str, Any]]
KEPT, PERIOD = 4096, 16384


class RowUpdater:
    """See the module's docstring.

    Args:
        table: what the plan says of it; ``rules``: one for each of its segments.
        words: of records, besides the step that a row has seen.

    Attributes:
        step: how many steps were taken.
        rows: what they work on.

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
            if rule.type not in ROW_OPTIMIZERS:
                raise ValueError(
                    f"{self._what}: expected a rule among {', '.join(ROW_OPTIMIZERS)}, got "
                    f"{rule.type!r}"
                )
        self._types = tuple(rule.type for rule in rules)
        self._optimizers = tuple(ROW_OPTIMIZERS[rule.type] for rule in rules)
        self._hparams: Hparams = [first_hparams(rule) for rule in rules]
        self._begun = [False] * len(rules)  # whether a segment has a velocity yet
        self._words = tuple(words)
        self.rows, self._states = self._made_rows()
        self._history = self._no_history()
        self._swept, self._sweep_began = 0, 0  # see [Note: a history that ends]
        self._ranged = (
            table.rows is not None
            and table.entry is None
            and table.ttl is None
            and table.capacity is None
        )
        self._fill_template()

    def _made_rows(self) -> tuple[Rows, list[Array]]:
        """Memory of rows, and for each segment where its part of each of its states begins in a
        record.
        """
        widths: dict[str, int] = {}
        offsets: list[list[tuple[str, int]]] = []
        for segment, optimizer in zip(self.table.segments, self._optimizers, strict=True):
            offsets.append([(name, widths.get(name, 0)) for name in optimizer.states])
            for name, full in optimizer.states.items():
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
            optimizer.moves(held) for optimizer, held in zip(self._optimizers, hparams, strict=True)
        )

    def _no_history(self) -> HparamHistory:
        widths = [
            len(optimizer.past(held))
            for optimizer, held in zip(self._optimizers, self._hparams, strict=True)
        ]
        return HparamHistory(
            widths, [optimizer.decay for optimizer in self._optimizers], self.rows.dtype
        )

    def _fill_template(self) -> None:
        parts = zip(self.table.segments, self._optimizers, self._states, self._hparams, strict=True)
        for segment, optimizer, states, held in parts:
            for begin, full in zip(states, optimizer.states.values(), strict=True):
                width = segment.end - segment.begin if full else 1
                self.rows.template[begin : begin + width] = (
                    held[optimizer.initial] if optimizer.initial else 0.0
                )

    # ---- rows ----

    def make(self, ids: Array, current: bool = False) -> Array:
        """New rows for ids that have none: their slots.  ``current``: they have seen all steps."""
        slots = self.rows.make(ids)
        self.seen(slots, self.step if current or not self._ranged else 0)
        return slots

    def seen(self, slots: Array, step: int | Array) -> None:
        """Notes that these rows have seen all steps up to this."""
        if self.rows.has("step"):
            self.rows.word("step")[slots] = step

    def know_steps(self) -> None:
        """From here on records say which steps they have seen."""
        if not self.rows.has("step"):
            self.rows.relaid(self._all_words(True))
            self.seen(np.arange(self.rows.index.used), self.step)

    def read(self, slots: Array, ids: Array, out: Array) -> None:
        """Copies the first columns of records, as many as ``out`` has, with all steps taken; of
        rows that are not there (slot -1), what they would hold.
        """
        if not len(self._history):
            self.rows.gather(slots, ids, out)
            return
        copies = np.empty((len(slots), self.rows.layout.columns), self.rows.dtype)
        self.rows.gather(slots, ids, copies)
        words = copies.view(np.int64)
        if not self._ranged:
            words[slots < 0, self.rows.layout.words["step"]] = self.step
        self._take_missed(copies, words, np.arange(len(slots)))
        out[:] = copies[:, : out.shape[1]]

    def make_up(self, slots: Array) -> None:
        """Takes the steps that these rows (-1: none) have missed."""
        if len(self._history):
            self._take_missed(self.rows.records, self.rows.words, slots)
            self.seen(slots[slots >= 0], self.step)

    def _take_missed(self, records: Array, words: Array, slots: Array) -> None:
        word = self.rows.layout.words["step"]
        for index, (segment, optimizer) in enumerate(
            zip(self.table.segments, self._optimizers, strict=True)
        ):
            if optimizer.missed is not None:
                columns = word, segment.begin, segment.end, self._states[index]
                optimizer.missed(
                    records, words, slots, *columns, self.step, *self._history.arguments(index)
                )

    # ---- steps ----

    def hparams(self, given: Sequence[Mapping[str, Hparam]]) -> Hparams:
        """All numbers of a step: what is not given stays as it was.

        Raises:
            ValueError: a number that a rule does not have, or not a mapping for each segment.
        """
        if len(given) != len(self._hparams):
            raise ValueError(
                f"{self._what}: expected numbers for each of {len(self._hparams)} segments, got "
                f"{len(given)}"
            )
        for kind, held, new in zip(self._types, self._hparams, given, strict=True):
            if not new.keys() <= held.keys():
                known, unknown = ", ".join(held), ", ".join(sorted(new.keys() - held.keys()))
                raise ValueError(
                    f"{self._what}: rule {kind}: expected numbers among {known}, got {unknown}"
                )
        return [{**held, **new} for held, new in zip(self._hparams, given, strict=True)]

    def take(self, slots: Array, gradients: Array, hparams: Hparams) -> None:
        """One step of these rows (-1: leave out), with gradients [u, dim] that may be
        overwritten.
        """
        rows = self.rows
        if self._moves(hparams):
            self.know_steps()
        self.make_up(slots)
        self._sweep()
        self.step, self._hparams = self.step + 1, hparams
        if self.step == 1:
            self._fill_template()
        now = [self._at_first(index, held) for index, held in enumerate(hparams)]
        for segment, optimizer, states, held in zip(
            self.table.segments, self._optimizers, self._states, now, strict=True
        ):
            if held["maximize"]:
                np.negative(
                    gradients[:, segment.begin : segment.end],
                    out=gradients[:, segment.begin : segment.end],
                )
            scalars = np.array(optimizer.scalars(held, self.step), rows.dtype)
            optimizer.kernel(
                rows.records, slots, gradients, segment.begin, segment.end, states, scalars
            )
        if rows.has("step"):
            self._history.note(
                self.step,
                [each.past(held) for each, held in zip(self._optimizers, now, strict=True)],
            )
            self.seen(slots[slots >= 0], self.step)

    def _sweep(self) -> None:
        """See [Note: a history that ends]."""
        if len(self._history) < KEPT or (self._ranged and self._history.decays):
            return
        rows = self.rows
        slots, after = rows.index.listed(self._swept, rows.index.used // PERIOD + 1)
        self.make_up(slots)
        # what was saved of them needs what is forgotten
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
        """What of this is not in rows: JSON-able."""
        sweep = [self._swept, self._sweep_began]
        history = self._history.plain()
        return {
            "step": self.step,
            "numbers": self._hparams,
            "begun": self._begun,
            "history": history,
            "sweep": sweep,
        }

    def restore(self, metadata: Mapping[str, Any]) -> None:
        """Takes over what :meth:`metadata` returned.

        Raises:
            ValueError: it is of a table with other rules.
        """
        hparams = self.hparams(metadata["numbers"])
        self._hparams = [
            {name: tuple(value) if name == "betas" else value for name, value in held.items()}
            for held in hparams
        ]
        if metadata["history"]:
            self.know_steps()
        self.step, self._begun = int(metadata["step"]), list(metadata["begun"])
        self._history = self._no_history()
        self._history.restore(metadata["history"])
        self._swept, self._sweep_began = metadata["sweep"]
        self._fill_template()
