"""Lanes by patterns of parameter names: which parameters travel together, before it is known which
parameters there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from transpiler.ir.rules import Rule
from transpiler.plan.lanes import COLLECTIVE, check_lane
from transpiler.plan.plan import Lane

AUTO = "auto"  # a merge rule that is still to be chosen, by the update rules of a lane's parameters
SUMMED = frozenset({"sgd", "momentum"})


@dataclass(frozen=True)
class LanePlan:
    """Lanes by patterns of parameter names, before it is known which parameters there are.

    Attributes:
        choices: (pattern, lane): the first pattern that a name matches decides.  The last one is
            ``"*"``.  A lane's ``merge`` may be ``"auto"``.
    """

    choices: tuple[tuple[str, Lane], ...]

    def collective(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of these parameters whose gradients trainers average among themselves."""
        first = {
            name: next(lane for pattern, lane in self.choices if fnmatchcase(name, pattern))
            for name in names
        }
        return tuple(name for name, lane in first.items() if lane.mode == COLLECTIVE)

    def assign(
        self, names: Sequence[str], rules: Sequence[Rule]
    ) -> tuple[tuple[Lane, ...], list[int]]:
        """The lanes that parameters use, in the order of their first use, and the index of each
        parameter's.

        Parameters of one choice whose update rules ask for different merge rules are in two lanes.

        Args:
            names: of the parameters that are updated.
            rules: the update rule of each.

        Raises:
            ValueError: a pattern decides for no parameter, or a lane makes no sense.
        """
        taken = [
            next(i for i, (pattern, _) in enumerate(self.choices) if fnmatchcase(name, pattern))
            for name in names
        ]
        for index, (pattern, _) in enumerate(self.choices):
            if index not in taken and pattern != "*" and self.choices[index][1].mode != COLLECTIVE:
                raise ValueError(
                    "modes: expected patterns that match a parameter which none before them "
                    f"matches, got {pattern!r}; "
                    "parameters are "
                    f"{', '.join(names[:8]) or 'none'}{', ...' if len(names) > 8 else ''}"
                )
        lanes: list[Lane] = []
        indices = []
        for index, rule in zip(taken, rules, strict=True):
            alike = [other for other, at in zip(rules, taken, strict=True) if at == index]
            lane = _merged(self.choices[index][1], rule, alike)
            if lane not in lanes:
                lanes.append(lane)
            indices.append(lanes.index(lane))
        lanes = lanes or [_merged(self.choices[-1][1], None, [])]
        for index, lane in enumerate(lanes):
            check_lane(lane, f"lane {index}")
        return tuple(lanes), indices


def uniform(lane: Lane) -> LanePlan:
    """All parameters in one lane."""
    return LanePlan((("*", lane),))


def _merged(lane: Lane, rule: Rule | None, alike: Sequence[Rule]) -> Lane:
    """The lane with its merge rule; ``alike`` are the rules of all parameters that chose it."""
    if lane.merge != AUTO:
        return lane
    if lane.mode != "async":
        return replace(lane, merge="mean")
    # nothing is merged, so nothing asks for a second lane
    if lane.max_merge_var_num == 1 or rule is None:
        return replace(
            lane, merge="sum" if all(other.type in SUMMED for other in alike) else "mean"
        )
    return replace(lane, merge="sum" if rule.type in SUMMED else "mean")
