"""The steps of a table: its rules at work on the rows that a step touches, and on the others later.

[Note: rows that were always there]  Under rules that move every row at every step, a table whose
ids are a range is the whole parameter: a row that no step has touched yet has missed all steps from
the first on, and reads as torch's would.  Where ids may be anything, or rows are added and removed,
a row begins with the push that makes it.

[Note: a history that ends]  Where a schedule gives every step hparams of its own, the history of
the steps that rows may have missed becomes long.  Once it has ``KEPT`` stretches, every step also
lets a few further rows catch up, in turn, so that all rows have done so after ``PERIOD`` steps; the
history before the turn began is then forgotten.  Their turn is that of their ids' hashes, so that a
checkpoint says whose it is: rows have other slots after a load.  Rows on disk have the same turn,
see [Note: two tiers] in tiered.py.  (Not where weights decay in a table whose ids are a
range: there a row may have missed all steps from the first on.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pserver.table.deferred import DEFERRED_UPDATES, HparamHistory
from pserver.table.index import KEYS, Layout
from pserver.table.kernels import Array
from pserver.table.rows import Rows
from pserver.table.rules import ROW_UPDATES
from transpiler.ir.rules import ROW_RULES, Hparam, RowSpec, Rule
from transpiler.ir.tables import Table

# ---- segment rules ----
#
# The rules of a table, one for each of its segments, and what a record keeps for them.


Hparams = list[dict[str, Any]]


class SegmentRules:
    """The update rules of a table's segments.

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
        return any(map(RowSpec.moves_untouched, self.specs, hparams))

    def deferred_scalars(self, hparams: Hparams) -> list[Sequence[float]]:
        """A step's line in the history: each segment's scalars, none where rows never catch up."""
        return [
            () if deferred is None else deferred.scalars(held)
            for deferred, held in zip(self.deferred, hparams, strict=True)
        ]

    def completed(self, held: Hparams, given: Sequence[Mapping[str, Hparam]]) -> Hparams:
        """All hparams of a step: those that are not given keep their values.

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


# ---- updater ----


KEPT, PERIOD = 4096, 16384


class RowUpdater:
    """Takes the steps of one table.

    One caller at a time; calls of :meth:`read` may run beside each other.

    Args:
        table: the table's description in the plan.
        rules: of its segments.
        rows: the table's.

    Attributes:
        step: the number of steps that were taken.
    """

    def __init__(self, table: Table, rules: SegmentRules, rows: Rows) -> None:
        self.step = 0
        self._rules, self._rows = rules, rows
        self._states = rules.columns(rows.layout)
        self._hparams = rules.hparams
        self._begun = [False] * len(rules.segments)  # whether a segment has a velocity yet
        self._history = self._empty_history()
        # the key of the next id in turn; see [Note: a history that ends]
        self._swept, self._sweep_began = 0, 0
        self._ranged = (
            table.rows is not None
            and table.entry is None
            and table.ttl is None
            and table.capacity is None
        )
        self._fill_template()

    def _empty_history(self) -> HparamHistory:
        widths = [len(line) for line in self._rules.deferred_scalars(self._hparams)]
        deferred = self._rules.deferred
        decay = [None if each is None else each.decay for each in deferred]
        factors = [None if each is None else each.factors for each in deferred]
        return HparamHistory(widths, decay, factors, self._rows.dtype)

    def _fill_template(self) -> None:
        """Makes states of new rows begin with their initial values."""
        rules = self._rules
        parts = zip(rules.segments, rules.specs, self._states, self._hparams, strict=True)
        for segment, spec, states, held in parts:
            for begin, full in zip(states, spec.states.values(), strict=True):
                width = segment.end - segment.begin if full else 1
                initial = held[spec.initial] if spec.initial else 0.0
                self._rows.template[begin : begin + width] = initial

    @property
    def has_history(self) -> bool:
        """Whether rows may have missed a step."""
        return len(self._history) > 0

    @property
    def turn(self) -> tuple[int, int]:
        """The keys of the ids whose rows catch up with the next step, whether it touches them or
        not: the first, and the one behind the last.  See [Note: a history that ends].
        """
        if len(self._history) < KEPT or (self._ranged and self._history.decays):
            return self._swept, self._swept
        return self._swept, min(self._swept + -(-KEYS // PERIOD), KEYS)

    # ---- rows ----

    def make(self, ids: Array, current: bool = False) -> Array:
        """Makes rows for ids that have none: their slots.

        ``current``: they have taken all steps.
        """
        slots = self._rows.make(ids)
        self._note_step(slots, self.step if current or not self._ranged else 0)
        return slots

    def _note_step(self, slots: Array, step: int | Array) -> None:
        """Notes that these rows have taken all steps up to this."""
        if self._rows.has("step"):
            self._rows.word("step")[slots] = step

    def track_steps(self) -> None:
        """Makes each record keep the last step that its row has taken."""
        if not self._rows.has("step"):
            self._rows.add_word("step")
            self._note_step(np.arange(self._rows.index.used), self.step)
            self._rows.mark_all()  # what was saved of them does not say it

    def read(self, slots: Array, ids: Array, out: Array) -> None:
        """Copies the first columns of records, as many as ``out`` has, with all steps taken.

        Of a missing row (slot -1): the values that it would have.
        """
        if not len(self._history):
            self._rows.gather(slots, ids, out)
            return
        copies = np.empty((len(slots), self._rows.layout.columns), self._rows.dtype)
        self._rows.gather(slots, ids, copies)
        words = copies.view(np.int64)
        if not self._ranged:
            words[slots < 0, self._rows.layout.words["step"]] = self.step
        self._apply_deferred(copies, words, np.arange(len(slots)))
        self._rows.round_values(copies)
        out[:] = copies[:, : out.shape[1]]

    def catch_up(self, slots: Array) -> None:
        """Takes the steps that these rows (-1: none) have missed."""
        if len(self._history):
            memory = self._rows.begin_change(slots)
            self._apply_deferred(*memory)
            self._rows.end_change(slots, memory, self.step)
            self._note_step(slots[slots >= 0], self.step)

    def _apply_deferred(self, records: Array, words: Array, slots: Array) -> None:
        word, parts = (
            self._rows.layout.words["step"],
            zip(self._rules.segments, self._rules.deferred, strict=True),
        )
        for index, (segment, deferred) in enumerate(parts):
            if deferred is not None:
                columns = word, segment.begin, segment.end, self._states[index]
                history = self._history.arguments(index)
                deferred.kernel(records, words, slots, *columns, self.step, *history)

    # ---- steps ----

    def hparams(self, given: Sequence[Mapping[str, Hparam]]) -> Hparams:
        """All hparams of a step: those that are not given stay as they were.

        Raises:
            ValueError: an hparam that a rule does not have, or not a mapping for each segment.
        """
        return self._rules.completed(self._hparams, given)

    def take_step(self, slots: Array, gradients: Array, hparams: Hparams) -> None:
        """One step of these rows (-1: leave out), with gradients [u, dim] that may be
        overwritten.
        """
        rows = self._rows
        if self._rules.move_untouched(hparams):
            self.track_steps()
        if rows.has("step"):
            self.catch_up(slots)
            self._sweep()
        self.step, self._hparams = self.step + 1, hparams
        if self.step == 1:
            self._fill_template()
        now = [self._at_first(index, held) for index, held in enumerate(hparams)]
        memory = rows.begin_change(slots)
        self._update(memory.records, memory.places, gradients, now)
        rows.end_change(slots, memory, self.step)
        if rows.has("step"):
            self._history.append(self.step, self._rules.deferred_scalars(now))
            self._note_step(slots[slots >= 0], self.step)

    def _update(
        self, records: Array, places: Array, gradients: Array, hparams: Sequence[dict[str, Any]]
    ) -> None:
        """Every segment's rule."""
        parts = zip(self._rules.segments, self._rules.updates, self._states, hparams, strict=True)
        for segment, update, states, held in parts:
            if held.get("maximize"):
                own = gradients[:, segment.begin : segment.end]
                np.negative(own, out=own)
            scalars = np.array(update.scalars(held, self.step), self._rows.dtype)
            columns = segment.begin, segment.end, states
            update.kernel(records, places, gradients, *columns, scalars)

    def _sweep(self) -> None:
        """See [Note: a history that ends]."""
        rows = self._rows
        begin, end = self.turn
        if begin == end:
            return
        slots = rows.index.within(begin, end)
        # what was saved of them cannot catch up any more
        rows.index.mark(rows.index.ids.array[slots], rows.epoch, rows.calls)
        self.catch_up(slots)
        self._swept = end % KEYS
        if not self._swept:
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
        """The state outside of rows, JSON-able: the steps taken, their hparams and the history."""
        # the first is a slot in checkpoints of old, which have no "swept"
        sweep = [0, self._sweep_began]
        history = self._history.plain()
        return {
            "step": self.step,
            "hparams": self._hparams,
            "begun": list(self._begun),
            "history": history,
            "sweep": sweep,
            "swept": self._swept,
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
        self._swept, self._sweep_began = int(metadata.get("swept", 0)), metadata["sweep"][1]
        self._fill_template()
