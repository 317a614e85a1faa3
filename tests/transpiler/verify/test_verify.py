"""Each invariant has a test that breaks it."""

import inspect
from dataclasses import replace

import pytest

from tests.support.broken_lanes import BROKEN_LANES
from tests.support.broken_servers import BROKEN_SERVERS
from tests.support.broken_trainers import BROKEN_TRAINERS
from tests.support.edited_jobs import (
    ENDPOINTS,
    LANES,
    Broken,
    added,
    job,
    plan_of,
    single_node,
    twice,
    with_variable,
    without,
)
from transpiler.distribute import pserver_program
from transpiler.ir.graph import Op, Ref, freeze
from transpiler.ir.rules import Clip
from transpiler.plan.plan import Deployment, Plan, Slice
from transpiler.program import Program
from transpiler.verify import invariants, trainer
from transpiler.verify import pserver as pserver_invariants
from transpiler.verify import trainer as trainer_invariants
from transpiler.verify.invariants import IllegalProgram, Violation
from transpiler.verify.verify import PassStage, invariants_of, run, verify, verify_servers

BROKEN = BROKEN_TRAINERS + BROKEN_SERVERS + BROKEN_LANES


@pytest.mark.parametrize(
    "case", BROKEN, ids=lambda case: f"{case[0]}-{case[1]}-{case[2].replace(' ', '_')}-{case[3]}"
)
def test_a_broken_law_is_named(case: Broken) -> None:
    """A program that violates an invariant is refused, with the invariant's sentence, the op or
    variable, and what is wrong.
    """
    invariant, mode, which, named, edit, words = case
    program = job(mode)[which]
    verify(program, plan_of(program))  # lawful before the edit
    broken = edit(program)
    module = next(
        m
        for m in (invariants, trainer, trainer_invariants, pserver_invariants)
        if hasattr(m, invariant)
    )
    violations = list(getattr(module, invariant)(broken, plan_of(program)))
    assert violations, "the invariant sees nothing"
    assert any(words in violation.why for violation in violations)
    assert any(
        named in f"{violation.op} {violation.variable} {violation.why}" for violation in violations
    )
    with pytest.raises(IllegalProgram):
        verify(broken, plan_of(program))


def test_every_law_has_a_test_that_breaks_it() -> None:
    """Whatever invariant a complete program is held against stands in the tables of what is broken,
    or in a test of its own: below, in test_table_invariants.py, or in test_merged_programs.py.
    """
    broken = {case[0] for case in BROKEN} | {"slices_tile", "merged_once"}
    invariants = {
        invariant
        for programs in map(job, LANES)
        for program in programs.values()
        for invariant in invariants_of(program)
    }
    used = {
        invariant.__name__
        for invariant in invariants
        if invariant.__module__ != "transpiler.verify.tables"
    }
    assert used == broken


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        (
            [Slice("w.block0", 0, 6, (2, 3), 0), Slice("w.block1", 7, 12, (5,), 1)],
            "from element 6, got [7, 12)",
        ),
        (
            [Slice("w.block0", 0, 6, (2, 3), 0), Slice("w.block1", 3, 12, (3, 3), 1)],
            "from element 6, got [3, 12)",
        ),
        ([Slice("w", 0, 9, (3, 3), 0)], "slices of 12 elements in all, got 9"),
        ([Slice("w", 0, 12, (4, 4), 0)], "expected 12 elements, got shape [4, 4]"),
        ([Slice("w", 0, 6, (2, 3), 0), Slice("w", 6, 12, (2, 3), 1)], "two slices have this name"),
        ([Slice("w", 0, 12, (4, 3), 2)], "expected a server from 0 to 1, got 2"),
    ],
)
def test_slices_tile_the_parameter(pieces: list[Slice], words: str) -> None:
    """A plan whose slices leave a gap, overlap, fall short, share a name or name no server is
    refused.
    """
    program = job()["trainer"]
    plan = plan_of(program)
    bad = replace(
        plan, placements=(replace(plan.placement("w"), slices=tuple(pieces)), *plan.placements[1:])
    )
    with pytest.raises(IllegalProgram, match="follow one another without gap") as raised:
        verify(program, bad)
    assert words in str(raised.value)


def test_every_slice_is_owned_once_over_all_servers() -> None:
    """The servers' programs together hold each slice once: not twice, not never, and there is one
    program for each server.
    """
    plan = plan_of(job()["server"])
    programs = [pserver_program(Deployment(plan, ENDPOINTS, None, server)) for server in range(2)]
    verify_servers(programs, plan)
    extra = programs[0].main.variables["w.block0"]
    with pytest.raises(IllegalProgram, match=r"w.block0: expected one owner, got servers \[0, 1\]"):
        verify_servers([programs[0], with_variable(programs[1], extra)], plan)
    rest = {
        name: variable
        for name, variable in programs[0].main.variables.items()
        if name != "w.block0"
    }
    emptied = programs[0].with_blocks(
        replace(programs[0].main, variables=freeze(rest)), *programs[0].blocks[1:]
    )
    with pytest.raises(IllegalProgram, match=r"w.block0: expected one owner, got servers \[\]"):
        verify_servers([emptied, programs[1]], plan)
    with pytest.raises(IllegalProgram, match="one program for each of 2 servers"):
        verify_servers(programs[:1], plan)


def test_where_servers_clip_a_trainer_must_not() -> None:
    """A clip op left on a trainer of a job whose servers clip is refused."""
    program = job()["trainer"]
    plan = replace(plan_of(program), clip=Clip("value", 1.0, -1.0))
    clipped = added(Op("clip", {"x": Ref("b@GRAD"), "min": -1.0, "max": 1.0}, ("h",)), 4)(program)
    with pytest.raises(IllegalProgram, match="the servers clip the merged gradient"):
        verify(clipped, plan)


def test_laws_are_checked_after_every_pass() -> None:
    """A pass that violates an invariant established by an earlier one is caught before the next
    pass runs.
    """
    program = job()["trainer"]
    seen: list[str] = []

    def harmless(program: Program, plan: Plan) -> Program:
        seen.append("harmless")
        return program

    def careless(program: Program, plan: Plan) -> Program:
        seen.append("careless")
        return without("send")(program)

    def never(program: Program, plan: Plan) -> Program:
        seen.append("never")
        return program

    stages = [
        PassStage(harmless, (trainer_invariants.sent_exactly_once,)),
        PassStage(careless),
        PassStage(never),
    ]
    with pytest.raises(IllegalProgram, match="b@GRAD: it is never sent"):
        run(program, plan_of(program), stages)
    assert seen == ["harmless", "careless"]


def test_the_message_names_op_variable_and_law() -> None:
    """An IllegalProgram says where, what and by which invariant, and keeps them for whoever handles
    it.
    """
    program = job()["trainer"]
    with pytest.raises(IllegalProgram) as raised:
        verify(twice("send")(program), plan_of(program))
    assert str(raised.value).startswith("op 4 of block 0 (send), b@GRAD: it is sent a second time")
    assert "invariant: Each gradient is sent exactly once" in str(raised.value)
    assert isinstance(raised.value, ValueError) and isinstance(raised.value.violation, Violation)


def test_a_law_is_a_sentence() -> None:
    """Every invariant's docstring begins with the sentence that its error quotes."""
    for mode in LANES:
        for program in job(mode).values():
            for invariant in invariants_of(program):
                assert (inspect.getdoc(invariant) or "").split("\n\n")[0].endswith(".")


def test_a_single_node_program_has_no_laws_of_a_cluster() -> None:
    """verify asks for a program of a cluster."""
    main, _ = single_node()
    plan = plan_of(job()["trainer"])
    with pytest.raises(ValueError, match="got a single-node one"):
        verify(main, plan)
