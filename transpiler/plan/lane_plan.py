"""Lane plans: which lane each parameter is in, decided by patterns of parameter names.

A strategy names patterns (``{"emb.*": "async", "*": "sync"}``) before it is known which parameters
a model has.  A :class:`LanePlan` keeps these choices; when the parameters are known, ``assign``
turns it into the lanes of a plan::

    strategy --lanes_of--> LanePlan --assign(names, update rules)--> lanes, lane of each parameter

One thing is decided in ``assign`` only: the merge rule of an async lane.  Merged gradients of sgd
and momentum are summed, because a sum over steps is what the single steps add up to; under other
rules, which do not see the scale of a gradient or see it squared, they are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from transpiler.ir.rules import Rule
from transpiler.plan.lanes import check_lane
from transpiler.plan.plan import Lane

AUTO = "auto"  # a merge rule that is still to be chosen, by the update rules of a lane's parameters
SUMMED = frozenset({"sgd", "momentum"})


@dataclass(frozen=True)
class LanePlan:
    """Lanes by patterns of parameter names.

    Attributes:
        choices: (pattern, lane): the first pattern that a name matches decides.  The last one is
            ``"*"``.  A lane's ``merge`` may be ``"auto"``; its mode may be "collective", which
            ``assign`` makes no lane of.
    """

    choices: tuple[tuple[str, Lane], ...]

    def collective(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of these parameters whose gradients trainers average among themselves."""
        first = {
            name: next(lane for pattern, lane in self.choices if fnmatchcase(name, pattern))
            for name in names
        }
        return tuple(name for name, lane in first.items() if lane.kind.among_trainers)

    def of(self, names: Sequence[str]) -> LanePlan:
        """The same for some of the parameters: without the patterns that decide for none of
        them.
        """
        deciding = {
            next(i for i, (pattern, _) in enumerate(self.choices) if fnmatchcase(name, pattern))
            for name in names
        }
        last = len(self.choices) - 1
        return LanePlan(
            tuple(each for i, each in enumerate(self.choices) if i in deciding or i == last)
        )

    def assign(
        self, names: Sequence[str], rules: Sequence[Rule]
    ) -> tuple[tuple[Lane, ...], list[int]]:
        """Makes the lanes of these parameters.

        Parameters of one choice whose update rules ask for different merge rules are in two lanes.

        Args:
            names: of the parameters that servers update.
            rules: the update rule of each.

        Returns:
            The lanes, in the order of their first use, and the index of each parameter's lane.

        Raises:
            ValueError: a pattern decides for no parameter, or a lane makes no sense.
        """
        taken = [
            next(i for i, (pattern, _) in enumerate(self.choices) if fnmatchcase(name, pattern))
            for name in names
        ]
        for index, (pattern, _) in enumerate(self.choices):
            among_trainers = self.choices[index][1].kind.among_trainers
            if index not in taken and pattern != "*" and not among_trainers:
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
    """The plan with all parameters in one lane."""
    return LanePlan((("*", lane),))


def _merged(lane: Lane, rule: Rule | None, alike: Sequence[Rule]) -> Lane:
    """The lane of one parameter, with its merge rule.

    Args:
        lane: as it was chosen.
        rule: the parameter's update rule; None where there is no parameter.
        alike: the update rules of all parameters that chose this lane.
    """
    if lane.merge != AUTO:
        return lane
    if not lane.kind.merges_by_rule:
        return replace(lane, merge="mean")
    # nothing is merged, so there is no reason for a second lane
    if lane.max_merge_var_num == 1 or rule is None:
        return replace(
            lane, merge="sum" if all(other.type in SUMMED for other in alike) else "mean"
        )
    return replace(lane, merge="sum" if rule.type in SUMMED else "mean")
