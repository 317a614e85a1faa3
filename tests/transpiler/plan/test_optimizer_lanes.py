"""Several optimizers in one plan: each has lanes of its own, by its own choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from transpiler.formats.messages import plan_from_proto, plan_to_proto
from transpiler.formats.text import plan_text
from transpiler.ir.rules import Rule
from transpiler.plan.plan import Lane, Plan
from transpiler.plan.planner import LanePlan, OptimizerRequest, plan_parameters, uniform

HPARAMS: dict[str, Any] = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
SYNC, ASYNC = Lane("sync"), Lane("async", send_queue_size=4)


def rule(lr: float) -> Rule:
    return Rule("sgd", {"lr": lr, **HPARAMS}, {"nesterov": False})


def plan_of(*asked: OptimizerRequest) -> Plan:
    """Parameters d.a and d.b of group 0, g.a of group 1, and a buffer."""
    named = [("d.a", (4,), "float32", 0), ("d.b", (4,), "float32", 0), ("g.a", (4,), "float32", 1)]
    return plan_parameters(
        [*named, ("g.mean", (4,), "float32", None)],
        [rule(0.1), rule(0.2)],
        trainers=2,
        servers=2,
        optimizers=asked,
    )


def test_each_optimizer_has_lanes_of_its_own() -> None:
    """Also where both ask for the same mode; a lane says whose it is."""
    plan = plan_of(OptimizerRequest([0], uniform(SYNC)), OptimizerRequest([1], uniform(SYNC)))
    assert plan.lanes == (SYNC, replace(SYNC, optimizer=1))
    assert [plan.placement(name).lane for name in ("d.a", "d.b", "g.a")] == [0, 0, 1]
    assert (plan.lanes_of(0), plan.lanes_of(1), plan.lanes_of(2)) == ((0,), (1,), ())
    assert "of optimizer 1" in plan_text(plan)


def test_each_optimizers_patterns_are_of_its_own_parameters() -> None:
    """``*`` of the first does not reach the second's, and a pattern for the other's is refused."""
    mixed = LanePlan((("*.a", ASYNC), ("*", SYNC)))
    plan = plan_of(
        OptimizerRequest([0], mixed), OptimizerRequest([1], uniform(SYNC), {"*": "bfloat16"})
    )
    assert [lane.mode for lane in plan.lanes] == ["async", "sync", "sync"]
    assert [plan.placement(name).lane for name in ("d.a", "d.b", "g.a")] == [0, 1, 2]
    assert [p.compression for p in plan.placements] == ["", "", "bfloat16", ""]
    with pytest.raises(ValueError, match="got 'g.a'; parameters are d.a, d.b"):
        plan_of(
            OptimizerRequest([0], LanePlan((("g.a", ASYNC), ("*", SYNC)))),
            OptimizerRequest([1], uniform(SYNC)),
        )


@pytest.mark.parametrize(
    ("mode", "lets_in"),
    [("sync", False), ("diloco", False), ("async", True), ("geo", True), ("half_async", True)],
)
def test_a_trainer_may_come_late_where_no_step_needs_the_others(mode: str, lets_in: bool) -> None:
    """Trainers that take the steps of one optimizer together let it in between two of them; those
    of two may stand between the steps of one iteration.
    """
    lane = {
        "diloco": Lane("diloco", k_steps=2, outer=rule(1.0)),
        "geo": Lane("geo", k_steps=2),
    }.get(mode, Lane(mode))
    one, two = (
        OptimizerRequest([0, 1], uniform(lane)),
        [OptimizerRequest([n], uniform(lane)) for n in (0, 1)],
    )
    assert plan_of(one).lets_in_late and plan_of(*two).lets_in_late == lets_in
    assert plan_of(one).keeps_places == (mode == "sync") and not plan_of(*two).keeps_places


def test_a_plan_of_two_optimizers_travels() -> None:
    """As a message, and its fingerprint tells it from that of one optimizer."""
    plan = plan_of(OptimizerRequest([0], uniform(SYNC)), OptimizerRequest([1], uniform(SYNC)))
    assert plan_from_proto(plan_to_proto(plan)) == plan
    one = plan_of(OptimizerRequest([0, 1], uniform(SYNC)))
    assert one == plan_of() and one.fingerprint() != plan.fingerprint()
    assert plan.manifest()["lane 1: optimizer"] == "1"
    assert plan.settings().items() <= plan.manifest().items()
    assert "lane 1: optimizer" in plan.settings() and "graph" not in plan.settings()
