"""How two programs differ, in words."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from transpiler.formats.text import call, extent, results
from transpiler.ir.graph import Block, Op, Variable
from transpiler.plan.plan import Deployment


def difference(
    mine: Sequence[Block],
    deployment: Deployment | None,
    others: Sequence[Block],
    other_deployment: Deployment | None,
) -> list[str]:
    """What is otherwise in the second program, a sentence each; none if they mean the same."""
    found = list(_of_plans(deployment, other_deployment))
    for one, other in zip(mine, others, strict=False):
        found += _of_variables(one, other)
        found += _of_ops(one, other)
    for block in mine[len(others) :]:
        found.append(f"block {block.index} is gone, with {len(block.ops)} ops")
    for block in others[len(mine) :]:
        found.append(f"block {block.index} is new, with {len(block.ops)} ops")
    return found


def _facts(deployment: Deployment | None) -> dict[str, str]:
    if deployment is None:
        return {}
    return {key: str(value) for key, value in deployment.plan.manifest().items()}


def _of_plans(mine: Deployment | None, other: Deployment | None) -> Iterator[str]:
    if (mine is None) != (other is None):
        was, now = ("transpiled", "single-node") if other is None else ("single-node", "transpiled")
        yield f"it is a {now} program instead of a {was} one"
        return
    before, after = _facts(mine), _facts(other)
    one, two = set(map(_lane, before)), set(map(_lane, after))
    for lane in sorted(one ^ two):
        facts, word = (before, "gone") if lane in one else (after, "new")
        mode = facts[f"{lane}: mode"].strip("'")
        yield f"plan, {lane} is {word}: {mode}"
    for key in sorted({*before, *after}):
        if _lane(key) in one ^ two:
            continue
        if before.get(key) != after.get(key):
            now, was = after.get(key, "nothing"), before.get(key, "nothing")
            yield f"plan, {key}: {now} instead of {was}"


def _lane(key: str) -> str:
    """The lane that a fact of a plan is about; "" for other facts."""
    lane, _, setting = key.partition(": ")
    return lane if lane.startswith("lane ") and setting else ""


def _words(variable: Variable) -> str:
    return f"{variable.role.name.lower()} {extent(variable)}"


def _of_variables(mine: Block, other: Block) -> Iterator[str]:
    made = {name for block in (mine, other) for op in block.ops for name in op.outputs}
    for name in sorted({*mine.variables, *other.variables}):
        one, two = mine.variables.get(name), other.variables.get(name)
        place = f"block {mine.index}, {name}"
        if one is not None and two is not None:
            if _words(one) != _words(two):
                yield f"{place} is {_words(two)} instead of {_words(one)}"
        elif name not in made:  # what an op makes is told with the op
            yield f"{place} is {'gone' if two is None else 'new'}: {_words(two or one)}"  # type: ignore[arg-type]


def _line(op: Op) -> str:
    return f"{results(op)} {call(op)}".strip()


def _of_ops(mine: Block, other: Block) -> Iterator[str]:
    before, after = [_line(op) for op in mine.ops], [_line(op) for op in other.ops]
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, begin, end, first, last in matcher.get_opcodes():
        if kind == "equal":
            continue
        both = min(end - begin, last - first)
        for index in range(both):
            place = f"block {mine.index}, op {begin + index}"
            yield f"{place}: {after[first + index]} instead of {before[begin + index]}"
        for index in range(begin + both, end):
            yield f"block {mine.index}, op {index} is gone: {before[index]}"
        for index in range(first + both, last):
            yield f"block {mine.index}, op {index} is new: {after[index]}"
