"""What a user may write wrongly: each is refused, with what was expected."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.distributed import TWO, Single, captured, transpiled
from transpiler import DistributeTranspiler
from transpiler.clip import ClipGradByValue
from transpiler.distribute import plan_parameters, plan_program
from transpiler.ir.graph import Block, Op, Ref, Role, Variable, freeze
from transpiler.ir.rules import Rule
from transpiler.program import Program
from transpiler.verify.invariants import IllegalProgram


def test_calls_before_transpile_raise() -> None:
    """Asking for programs before transpile says what to call first."""
    transpiler = DistributeTranspiler()
    for call in (
        transpiler.get_trainer_program,
        lambda: transpiler.get_pserver_program("h:1"),
        lambda: transpiler.get_pserver_programs("h:1"),
        transpiler.get_startup_program,
    ):
        with pytest.raises(ValueError, match="expected transpile to be called first"):
            call()


def test_an_unknown_endpoint_lists_the_known_ones(single: Single) -> None:
    """A server that is none of the job's is named, and so are those that are."""
    with pytest.raises(ValueError, match="expected one of h:1, h:2, got 'h:3'"):
        transpiled(single).get_pserver_program("h:3")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"trainer_id": 2}, ValueError, "trainer_id: expected 0 to 1, got 2"),
        ({"trainer_id": -1}, ValueError, "trainer_id: expected 0 to 1, got -1"),
        ({"trainer_id": "0"}, TypeError, "trainer_id: expected a whole number"),
        ({"trainer_id": True}, TypeError, "trainer_id: expected a whole number"),
        ({"trainers": 0}, ValueError, "trainers: expected 1 or more, got 0"),
        ({"trainers": "h:1,h:2"}, TypeError, "trainers: expected a whole number"),
        ({"pservers": ""}, ValueError, "HOST:PORT"),
        ({"pservers": "h:1,"}, ValueError, "HOST:PORT"),
        ({"pservers": "h"}, ValueError, "HOST:PORT"),
        ({"pservers": "h:99999"}, ValueError, "HOST:PORT"),
        ({"pservers": ["h:1"]}, TypeError, "pservers: expected text"),
        ({"pservers": "h:1, h:1"}, ValueError, "h:1 twice"),
        ({"sync_mode": 1}, TypeError, "sync_mode: expected True, False or None"),
        ({"program": "main"}, TypeError, "program: expected a Program"),
        ({"startup_program": 3}, TypeError, "startup_program: expected a Program"),
        ({"current_endpoint": "nowhere"}, ValueError, "HOST:PORT"),
        ({"current_endpoint": "any text:1"}, ValueError, "current_endpoint: expected HOST:PORT"),
        ({"current_endpoint": "http://h:1"}, ValueError, "current_endpoint: expected HOST:PORT"),
        ({"current_endpoint": "me@h:1"}, ValueError, "current_endpoint: expected HOST:PORT"),
        ({"current_endpoint": ":1"}, ValueError, "current_endpoint: expected HOST:PORT"),
        ({"current_endpoint": ""}, ValueError, "current_endpoint: expected HOST:PORT"),
        ({"current_endpoint": "h:1,h:2"}, ValueError, "current_endpoint: expected one HOST:PORT"),
        ({"current_endpoint": 6174}, TypeError, "current_endpoint: expected text"),
        ({"pservers": "any text:1"}, ValueError, "pservers: expected HOST:PORT"),
    ],
)
def test_arguments_of_transpile_are_checked(
    single: Single, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    """A wrong type or value raises, says what was expected and what came, and leaves nothing
    half-done.
    """
    transpiler = DistributeTranspiler()
    good = {
        "trainer_id": 0,
        "program": single[0],
        "pservers": TWO,
        "trainers": 2,
        "startup_program": single[1],
    }
    with pytest.raises(error, match=words):
        transpiler.transpile(**{**good, **arguments})
    with pytest.raises(ValueError, match="called first"):
        transpiler.get_trainer_program()


def test_programs_that_do_not_belong_together_raise(single: Single) -> None:
    """A startup program of another model, a transpiled program, and one that updates nothing are
    refused.
    """
    transpiler = DistributeTranspiler()
    with pytest.raises(
        ValueError,
        match="startup_program: expected the one that belongs to the main program, with fc.weight",
    ):
        transpiler.transpile(
            0, single[0], TWO, 2, startup_program=Program((Block(0, freeze({}), ()),))
        )
    with pytest.raises(
        ValueError, match="startup_program: expected a single-node .* got the op 'aten"
    ):
        transpiler.transpile(0, single[0], TWO, 2, startup_program=single[0])
    with pytest.raises(
        ValueError, match="startup_program: expected a single-node .* got the op 'recv'"
    ):
        transpiler.transpile(
            0, single[0], TWO, 2, startup_program=transpiled(single).get_startup_program()
        )
    with pytest.raises(ValueError, match="transpiled already"):
        transpiler.transpile(
            0, transpiled(single).get_trainer_program(), TWO, 2, startup_program=single[1]
        )
    with pytest.raises(ValueError, match="updates nothing"):
        transpiler.transpile(0, single[1], TWO, 2, startup_program=single[1])
    with pytest.raises(TypeError, match="config: expected a DistributeTranspilerConfig"):
        DistributeTranspiler({"min_block_size": 1})  # type: ignore[arg-type]


def test_a_gradient_without_producer_is_no_program(single: Single) -> None:
    """An optimizer op whose gradient no op produces is found by the invariants."""
    program = single[0]
    ops = [op for op in program.main.ops if "fc.bias@GRAD" not in op.outputs]
    broken = program.with_blocks(replace(program.main, ops=tuple(ops)))
    with pytest.raises(IllegalProgram, match="fc.bias@GRAD"):
        transpiled((broken, single[1], single[2]))


def test_two_ways_of_clipping_in_one_program_raise(single: Single) -> None:
    """A plan has one way of clipping: a program that clips some gradients, or two ways, is
    refused.
    """
    program = captured(ClipGradByValue(1.0))[0]
    at = next(i for i, op in enumerate(program.main.ops) if op.type == "clip")
    ops = list(program.main.ops)
    ops[at] = replace(ops[at], arguments={**ops[at].arguments, "max": 2.0})
    with pytest.raises(ValueError, match="expected one way of clipping"):
        plan_program(
            program.with_blocks(replace(program.main, ops=tuple(ops))),
            mode="sync",
            trainers=1,
            servers=1,
        )
    update = next(i for i, op in enumerate(program.main.ops) if op.type == "adam")
    ops = list(program.main.ops)
    raw = str(ops[update].inputs[1]).removesuffix("@CLIP")
    ops[update] = replace(ops[update], arguments={**ops[update].arguments, "grad": Ref(raw)})
    with pytest.raises(ValueError, match=f"{raw} unclipped"):
        plan_program(
            program.with_blocks(replace(program.main, ops=tuple(ops))),
            mode="sync",
            trainers=1,
            servers=1,
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"mode": "turbo"},
            "mode: expected one of sync, async, half_async, geo, diloco, got 'turbo'",
        ),
        ({"trainers": 0}, "trainers: expected 1 or more"),
        ({"servers": 0}, "servers: expected 1 or more"),
        ({"min_block_size": 0}, "at least 1"),
        ({"named": [("w", (4,), "float32", 1)]}, "w: expected a group from 0 to 0, got 1"),
        ({"rules": [Rule("lion", {})]}, "group 0: expected an optimizer op"),
        ({"named": [("w", (4,), "float32", 0), ("w", (4,), "float32", 0)]}, "w twice"),
    ],
)
def test_plan_parameters_checks_its_input(change: dict[str, Any], words: str) -> None:
    """A plan that nobody could follow is refused, naming what is wrong."""
    good: dict[str, Any] = {
        "named": [("w", (4,), "float32", 0)],
        "rules": [Rule("sgd", {"lr": 0.1})],
        "mode": "sync",
    }
    with pytest.raises(ValueError, match=words):
        plan_parameters(**{**good, "trainers": 1, "servers": 1, **change})


def test_rules_of_one_group_must_agree() -> None:
    """Two optimizer ops of one group with different numbers are refused."""
    variables = {n: Variable(n, (2,), "float32", Role.PARAMETER) for n in "ab"}
    variables |= {
        f"{n}@GRAD": Variable(f"{n}@GRAD", (2,), "float32", Role.GRADIENT, n) for n in "ab"
    }
    hparams = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
    ops = [Op("aten.neg", {"self": Ref(n)}, (f"{n}@GRAD",)) for n in "ab"]
    ops += [
        Op(
            "sgd",
            {"param": Ref(n), "grad": Ref(f"{n}@GRAD"), "group": 0, "lr": lr, **hparams},
            (n,),
        )
        for n, lr in (("a", 0.1), ("b", 0.2))
    ]
    program = Program((Block(0, freeze(variables), tuple(ops)),))
    with pytest.raises(ValueError, match="one update rule for group 0"):
        plan_program(program, mode="sync", trainers=1, servers=1)
