"""Makes the plan of a job with servers: lanes, placements and tables, from the variables, their
update rules and the user's choices.

::

    plan_parameters   checks, then
      _laned          the lane of each updated variable and each table     (planner.py)
      _undivided      variables that stay whole, because their rule needs norms
      place           slices and their servers                             (placement.py)
      compressed      how gradients travel                             (planner.py)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeVar

import torch

from transpiler.ir.rules import ROW_RULES, RULES, TENSOR_LR, Clip, Rule, is_dense, rule_of
from transpiler.ir.tables import ROW_COMPRESSIONS, Segment, Table
from transpiler.plan.lanes import check_lane
from transpiler.plan.modes import MODES
from transpiler.plan.placement import Dispatcher, RoundRobin, place
from transpiler.plan.plan import COMPRESSIONS, Lane, Placement, Plan, check_unique

# ---- table planner ----
#
# Tables in a plan: the rules that may update their rows, and the lanes that they may be in.


# flags that only choose how torch computes a rule, or that the rule's type says already
_FORM = ("foreach", "fused", "decoupled_weight_decay")


def row_rule(rule: Rule, whose: str) -> Rule:
    """A parameter group's rule as a rule for rows: with the hparams and flags that matter to rows.

    Args:
        rule: the group's.
        whose: the table, for error messages.

    Returns:
        The rule for rows.

    Raises:
        ValueError: there is no such rule for rows, it has a flag that rows do not have, no learning
            rate, or an hparam that is not finite.
    """
    if rule.type not in ROW_RULES:
        known = ", ".join(ROW_RULES)
        raise ValueError(
            f"{whose}: rows are updated by one of {known}; got {rule.type!r}: give the table an "
            "optimizer of its own"
        )
    spec = ROW_RULES[rule.type]
    if rule.type == "adam" and rule.flags.get("decoupled_weight_decay"):
        return row_rule(
            replace(rule, type="adamw", flags={**rule.flags, "decoupled_weight_decay": False}),
            whose,
        )
    if rule.flags.get(TENSOR_LR):
        raise ValueError(
            f"{whose}: lr: expected a number, got a tensor of float32: rows are updated with a "
            "float, which differs in the last bits"
        )
    odd = [name for name, flag in rule.flags.items() if flag and name not in (*spec.flags, *_FORM)]
    if odd:
        raise ValueError(f"{whose}: {odd[0]}=True: rows have no such form of {rule.type!r}")
    if rule.type == "sgd" and rule.hparams.get("momentum"):
        raise ValueError(f"{whose}: sgd with a momentum is called 'momentum'")
    hparams = {name: rule.hparams[name] for name in spec.hparams if name in rule.hparams}
    for name, value in hparams.items():
        if not all(map(math.isfinite, value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"{whose}: {name}: expected a finite number, got {value}")
    if "lr" in spec.hparams and "lr" not in hparams:
        raise ValueError(f"{whose}: expected a learning rate, got none")
    flags = {name: flag for name, flag in rule.flags.items() if name in spec.flags}
    return Rule(rule.type, hparams, flags)


def group_rule(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], whose: str) -> Rule:
    """The rule for the rows of a table whose proxy parameter is in this parameter group.

    Args:
        optimizer: the group's optimizer.
        group: one of its ``param_groups``.
        whose: the table, for error messages.

    Returns:
        The rule, with the group's present hparams.

    Raises:
        ValueError: rows have no such rule.
    """
    if type(optimizer) is torch.optim.SparseAdam:
        hparams = {name: group[name] for name in ROW_RULES["lazy_adam"].hparams}
        return row_rule(
            Rule("lazy_adam", hparams, {"maximize": bool(group.get("maximize"))}), whose
        )
    try:
        rule = rule_of(optimizer, group)
    except ValueError as error:
        raise ValueError(f"{whose}: {error}; or give the table an optimizer of its own") from error
    return row_rule(rule, whose)


def rules_of(table: Table, groups: Sequence[Rule]) -> list[Rule]:
    """The rule of each of a table's segments.

    Args:
        table: the table.
        groups: the rules of the plan's parameter groups.

    Returns:
        One rule for each segment.

    Raises:
        ValueError: a segment names no group, or one whose rule rows do not have.
    """
    for segment in table.segments:
        if not 0 <= segment.group < len(groups):
            raise ValueError(
                f"table {table.name!r}: expected a group below {len(groups)}, got {segment.group}"
            )
    return [row_rule(groups[segment.group], f"table {table.name!r}") for segment in table.segments]


def served(table: Table, plan: Plan) -> list[tuple[Segment, Rule]]:
    """The columns of a table's rows that servers update, with their rules; none where they add.

    An outer optimizer has all columns.  The number of its group comes after those of the parameter
    groups, as :func:`transpiler.plan.lanes.applied` says.
    """
    lane = plan.lanes[table.lane]
    if lane.kind.servers_add:
        return []
    if lane.outer is not None:
        rule = row_rule(lane.outer, f"table {table.name!r}, outer optimizer")
        return [(Segment(0, table.dim, len(plan.groups) + table.lane), rule)]
    return list(zip(table.segments, rules_of(table, plan.groups), strict=True))


def stored(table: Table, plan: Plan) -> list[tuple[Segment, Rule]]:
    """The rules whose states a server's records have beside the values of rows: those that it
    applies, or where it only adds, the trainers'.
    """
    return served(table, plan) or list(
        zip(table.segments, rules_of(table, plan.groups), strict=True)
    )


def first_group(table: Table) -> int:
    """The group whose optimizer has the table: that of its first columns."""
    return table.segments[0].group


def rows_read(table: Table, trainers: int) -> tuple[str, ...]:
    """The names of a table's rows as each trainer has last looked them up, where delays are
    compensated.
    """
    return tuple(f"{table.name}.trainer_{trainer}_bak" for trainer in range(trainers))


def check_table(table: Table, groups: Sequence[Rule], lanes: Sequence[Lane]) -> None:
    """Checks that a table may be in a plan.

    Args:
        table: the table.
        groups: the rules of the plan's parameter groups.
        lanes: the plan's lanes.

    Raises:
        ValueError: its rule is not for rows, or its lane's mode is not for tables.
    """
    rules_of(table, groups)
    if not 0 <= table.lane < len(lanes):
        raise ValueError(
            f"table {table.name!r}: expected a lane below {len(lanes)}, got {table.lane}"
        )
    lane = lanes[table.lane]
    if not lane.kind.tables:
        raise ValueError(
            f"table {table.name!r}: mode {lane.mode} is for dense parameters; name another mode "
            "for it"
        )
    if lane.outer is not None:
        row_rule(lane.outer, f"table {table.name!r}, outer optimizer")


# ---- compression ----
#
# Which compression the gradients of a parameter or of a table have, by patterns of names.


Compressed = TypeVar("Compressed", Placement, Table)


def compressed(
    placements: tuple[Placement, ...],
    tables: tuple[Table, ...],
    lanes: Sequence[Lane],
    asked: Sequence[tuple[Mapping[str, str], Collection[int]]],
) -> tuple[tuple[Placement, ...], tuple[Table, ...]]:
    """The placements and tables with the compression that the first matching pattern asks for.

    Rows of tables travel as ``ROW_COMPRESSIONS``: a pattern with a wildcard and another scheme is
    not for them.

    Args:
        placements, tables: without compression.
        lanes: of the plan.
        asked: by optimizer, pattern of names -> scheme, one of ``COMPRESSIONS``; and the groups
            whose parameters and tables these are for.

    Raises:
        ValueError: an unknown scheme, a pattern that decides for nothing, or one for gradients that
            do not travel or have no dtype to compress.
    """
    for patterns, groups in asked:
        schemes = _schemes(placements, tables, lanes, patterns, groups)
        placements = tuple(_with(each, schemes) for each in placements)
        tables = tuple(_with(each, schemes) for each in tables)
    return placements, tables


def _schemes(
    placements: Sequence[Placement],
    tables: Sequence[Table],
    lanes: Sequence[Lane],
    patterns: Mapping[str, str],
    groups: Collection[int],
) -> dict[str, str]:
    """By name, the compression that one optimizer's patterns choose."""
    own: list[Placement | Table] = [each for each in placements if each.group in groups]
    own += [table for table in tables if first_group(table) in groups]
    chosen = {each.name: _pattern(each, patterns) for each in own}
    for pattern, scheme in patterns.items():
        if scheme not in COMPRESSIONS:
            raise ValueError(
                f"compression[{pattern!r}]: expected one of {', '.join(map(repr, COMPRESSIONS))}, "
                f"got {scheme!r}"
            )
        if pattern not in chosen.values():
            raise ValueError(
                "compression: expected patterns that match a parameter which none before them "
                f"matches, got {pattern!r}"
            )
    schemes = {name: patterns.get(pattern or "", "") for name, pattern in chosen.items()}
    for each in own:
        if schemes[each.name]:
            _check_compressed(each, lanes[each.lane])
    return schemes


def _pattern(each: Placement | Table, patterns: Mapping[str, str]) -> str | None:
    """The first pattern for a parameter or a table."""
    for pattern, scheme in patterns.items():
        of_rows = isinstance(each, Placement) or scheme in ROW_COMPRESSIONS or pattern == each.name
        if of_rows and fnmatchcase(each.name, pattern):
            return pattern
    return None


def _check_compressed(each: Placement | Table, lane: Lane) -> None:
    """Checks that the gradients of a parameter or a table can be compressed.

    Raises:
        ValueError: no gradients travel, or they have no dtype to compress.
    """
    if lane.kind.steps_on_trainer:
        raise ValueError(
            f"compression: {each.name!r} is in mode {lane.mode}, where no gradients travel"
        )
    if isinstance(each, Placement) and each.dtype not in ("float32", "float64"):
        raise ValueError(f"compression: {each.name!r} is {each.dtype}; expected float32 or float64")


def _with(each: Compressed, schemes: Mapping[str, str]) -> Compressed:
    return replace(each, compression=schemes[each.name]) if each.name in schemes else each


# ---- lane plan ----
#
# Lane plans: which lane each parameter is in, decided by patterns of parameter names.
#
# A strategy names patterns (``{"emb.*": "async", "*": "sync"}``) before it is known which
# parameters a model has.  A :class:`LanePlan` keeps these choices; when the parameters are known,
# ``assign`` turns it into the lanes of a plan::
#
#   strategy --lanes_of--> LanePlan --assign(names, update rules)--> lanes, lane of each parameter
#
# One thing is decided in ``assign`` only: the merge rule of an async lane.  Merged gradients of sgd
# and momentum are summed, because a sum over steps is what the single steps add up to; under other
# rules, which do not see the scale of a gradient or see it squared, they are averaged.


AUTO = "auto"  # a merge rule that is still to be chosen, by the update rules of a lane's parameters
SUMMED = frozenset({"sgd", "momentum"})


@dataclass(frozen=True)
class LanePlan:
    """Lanes by patterns of parameter names.

    Attributes:
        choices: (pattern, lane): the first pattern that a name matches decides.  The last one is
            ``"*"``.  A lane's ``merge`` may be ``"auto"``; its mode may be "collective", for which
            ``assign`` makes no lane.
    """

    choices: tuple[tuple[str, Lane], ...]

    def collective(self, names: Sequence[str]) -> tuple[str, ...]:
        """The parameters among these whose gradients trainers average among themselves."""
        first = {
            name: next(lane for pattern, lane in self.choices if fnmatchcase(name, pattern))
            for name in names
        }
        return tuple(name for name, lane in first.items() if lane.kind.among_trainers)

    def of(self, names: Sequence[str]) -> LanePlan:
        """The plan for some of the parameters: without the patterns that decide for none of them,
        but with the last one.
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


# ---- planner ----


class Named(NamedTuple):
    """A variable that servers hold.

    Attributes:
        name, shape, dtype: of the whole variable.
        group: the index of its update rule; None if servers never update it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: int | None


class OptimizerRequest(NamedTuple):
    """The choices for one of the script's optimizers.

    Attributes:
        groups: the indices of its update rules.
        lanes: for its parameters and tables: no other optimizer's are in them.
        compression: how its gradients travel; see :func:`plan_parameters`.
        clip: how its gradients are clipped, if they are.
    """

    groups: Collection[int]
    lanes: LanePlan
    compression: Mapping[str, str] | None = None
    clip: Clip | None = None


def _check(listed: Sequence[Named], rules: Sequence[Rule], **counts: int) -> None:
    """Checks that counts, rules and groups are in range."""
    for what, count in counts.items():
        if count < 1:
            raise ValueError(f"{what}: expected 1 or more, got {count}")
    for index, rule in enumerate(rules):
        if not is_dense(rule.type) and rule.type not in ROW_RULES:
            raise ValueError(
                f"group {index}: expected an optimizer op among {', '.join(RULES)}, got "
                f"{rule.type!r}"
            )
    for variable in listed:
        if variable.group is not None and not 0 <= variable.group < len(rules):
            raise ValueError(
                f"{variable.name}: expected a group from 0 to {len(rules) - 1}, got "
                f"{variable.group}"
            )


def _known(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    return mode


def plan_parameters(
    named: Iterable[tuple[str, Sequence[int], str, int | None]],
    rules: Sequence[Rule],
    *,
    mode: str = "sync",
    lanes: LanePlan | None = None,
    trainers: int,
    servers: int,
    min_block_size: int = 8192,
    slice_var_up: bool = True,
    split_method: type[Dispatcher] = RoundRobin,
    clip: Clip | None = None,
    graph: str = "",
    compression: Mapping[str, str] | None = None,
    tables: Sequence[Table] = (),
    optimizers: Sequence[OptimizerRequest] = (),
) -> Plan:
    """The plan for variables and tables.

    Args:
        named: (name, shape, dtype, group) of what the servers hold; ``group`` is the index of the
            update rule, None for a variable that is never updated.
        rules: one for each parameter group.
        mode: of all parameters, for modes without settings: "sync", "async" or "half_async".
        lanes: the lanes that a strategy asks for, in place of ``mode``.
        trainers, servers: the number of processes of each role.
        min_block_size: the least number of elements of a slice.
        slice_var_up: False leaves variables whole.
        split_method: chooses the server of each slice.
        clip: how the system clips gradients, if it does.
        graph: fingerprint of the single-node program; "" for an eager script.
        compression: by pattern of names of parameters and tables, of which the first that matches
            applies: how gradients travel; see :class:`Placement` and :class:`Table`.
        tables: sparse ones, whose segments name groups.  Their lanes are found by name, as those of
            parameters are.
        optimizers: of a script that has several, in place of ``mode``, ``lanes``, ``compression``
            and ``clip``.  Each has lanes of its own, so that its steps wait for no other's.

    Returns:
        The plan: the placements of updated variables first, in the order of ``named``, then those
        of the others.

    Raises:
        ValueError: a number is out of range; a mode, rule or group is unknown; a name occurs twice;
            or a lane's pattern decides for no parameter.
    """
    lanes = lanes or uniform(Lane(_known(mode), merge=AUTO))
    asked = list(optimizers) or [OptimizerRequest(range(len(rules)), lanes, compression, clip)]
    listed = [Named(name, tuple(shape), dtype, group) for name, shape, dtype, group in named]
    _check(listed, rules, trainers=trainers, servers=servers)
    averaged = tuple(
        name
        for each in asked
        for name in each.lanes.collective([v.name for v in listed if v.group in each.groups])
    )
    listed = [each._replace(group=None) if each.name in averaged else each for each in listed]
    listed.sort(key=lambda each: each.group is None)  # stable
    made, indices, placed_tables = _laned(asked, listed, rules, tables)
    undivided = _undivided(listed, rules, [made[index] for index in indices])
    placed = place(listed, servers, min_block_size, slice_var_up, split_method, undivided)
    # a variable that is never updated is in the first lane, and no step has it
    of_each = [*indices, *[0] * (len(listed) - len(indices))]
    placements = tuple(
        replace(placement, lane=lane) for placement, lane in zip(placed, of_each, strict=True)
    )
    patterns = [(each.compression, each.groups) for each in asked if each.compression]
    placements, placed_tables = compressed(placements, placed_tables, made, patterns)
    plan = Plan(
        made,
        trainers,
        servers,
        tuple(rules),
        placements,
        graph=graph,
        tables=placed_tables,
        averaged=averaged,
        lost_trainer=_lost_trainer(asked, averaged),
    )
    return _clipping(plan, [each.clip for each in asked])


def _lost_trainer(asked: Sequence[OptimizerRequest], averaged: Sequence[str]) -> str:
    """The ``lost_trainer`` of averages; of optimizers that differ, the first of "stop", "wait" and
    "go_on" that one has.
    """
    lanes = [lane for each in asked for _, lane in each.lanes.choices if averaged]
    said = {lane.lost_trainer for lane in lanes if lane.kind.among_trainers}
    return next((word for word in ("stop", "wait", "go_on") if word in said), "wait")


def _clipping(plan: Plan, clips: Sequence[Clip | None]) -> Plan:
    """The plan with the clipping rule of all optimizers; where they differ, trainers clip, if they
    can.
    """
    plan = replace(plan, clip=next((clip for clip in clips if clip is not None), None))
    odd = next((number for number, clip in enumerate(clips) if clip != clips[0]), None)
    if odd is None:
        return plan
    if plan.clips_on_servers:
        raise ValueError(
            "grad_clip: expected the same for every optimizer, because servers clip the mean of "
            f"{plan.trainers} trainers' gradients by the one rule of the plan; got {clips[0]} for "
            f"optimizer 0 and {clips[odd]} for optimizer {odd}: give both the same"
        )
    return replace(plan, clip=None)


def _undivided(
    listed: Sequence[Named], rules: Sequence[Rule], lanes: Sequence[Lane]
) -> frozenset[str]:
    """The variables whose rule, on the servers, needs numbers of the whole tensor, as norms.

    Args:
        lanes: of the updated variables, which come first.
    """
    return frozenset(
        each.name
        for each, lane in zip(listed, lanes, strict=False)
        if each.group is not None and rules[each.group].whole and not lane.kind.steps_on_trainer
    )


def _laned(
    asked: Sequence[OptimizerRequest],
    listed: Sequence[Named],
    rules: Sequence[Rule],
    tables: Sequence[Table],
) -> tuple[tuple[Lane, ...], list[int], tuple[Table, ...]]:
    """The lanes in use, the index of each updated variable's, and the tables with theirs."""
    check_unique(
        "variable or table",
        [*{variable.name for variable in listed}, *(table.name for table in tables)],
    )
    wanted = {v.name: (v.group, rules[v.group]) for v in listed if v.group is not None}
    updated = list(wanted)
    wanted |= {table.name: (first_group(table), rules_of(table, rules)[0]) for table in tables}
    if not wanted:
        raise ValueError(
            "modes: nothing is left for the servers: start the job without them "
            "(is_collective=True)"
        )
    made: list[Lane] = []
    of_name: dict[str, int] = {}
    for number, each in enumerate(asked):
        own = {name: rule for name, (group, rule) in wanted.items() if group in each.groups}
        if odd := each.lanes.collective([table.name for table in tables if table.name in own]):
            raise ValueError(
                f"modes: table {odd[0]!r} is in mode collective, which is for dense parameters: "
                "name another one for it"
            )
        if own:
            lanes, indices = each.lanes.assign(list(own), list(own.values()))
            of_name |= {name: len(made) + i for name, i in zip(own, indices, strict=True)}
            made += [replace(lane, optimizer=number) for lane in lanes]
    placed = tuple(replace(table, lane=of_name[table.name]) for table in tables)
    for table in placed:
        check_table(table, rules, made)
    return tuple(made), [of_name[name] for name in updated], placed
