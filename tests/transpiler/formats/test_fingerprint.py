"""The fingerprint of a program: everything that it means, and nothing of where it runs."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from tests.support.fork_server import finished
from tests.support.serialized import DEPLOYMENT, OPS, PLAN, PROGRAM, RULE, VARIABLES
from transpiler.formats.messages import canonical
from transpiler.ir.graph import Block, Literal, Op, Ref, Role, Storage, freeze
from transpiler.plan.plan import Deployment
from transpiler.program import Program


@pytest.mark.processes
def test_the_fingerprint_is_the_same_in_every_process() -> None:
    """One with another hash seed than this one's gives the same digits for the same program."""
    code = "from tests.support.serialized import PROGRAM; print(PROGRAM.fingerprint())"
    done = finished(["-c", code], {**os.environ, "PYTHONHASHSEED": "1"})

    assert done.stdout.strip() == PROGRAM.fingerprint(), done
    assert len(PROGRAM.fingerprint()) == 32


def with_op(op: Op, index: int = 3) -> Program:
    ops = (*OPS[:index], op, *OPS[index + 1 :])
    return PROGRAM.with_blocks(Block(0, freeze(VARIABLES), ops), PROGRAM.blocks[1])


def test_a_fingerprint_does_not_see_where_and_by_whom_a_program_runs() -> None:
    """Endpoints, trainer numbers, this process's place, source lines and the order of named
    arguments change nothing.
    """
    send = {"trainer_id": 1, "endpoints": ("elsewhere:9",), "x": (Ref("w@GRAD"),)}
    same = [
        replace(
            PROGRAM,
            deployment=Deployment(
                PLAN, ("elsewhere:9",), trainer_id=7, server_index=3, wait_port=False
            ),
        ),
        with_op(Op("send", send)),
        with_op(replace(OPS[0], location="other.py:9"), 0),
        replace(PROGRAM, storage=Storage({"w": torch.ones(2, 3)}, None)),
    ]

    assert {program.fingerprint() for program in same} == {PROGRAM.fingerprint()}


def test_a_fingerprint_sees_everything_that_a_program_means() -> None:
    """A number, a type that Python takes for equal, a constant's bit, a variable's role and the
    plan all count.
    """
    full = OPS[2].arguments
    other = b"\x00\xff" * 3 + b"\x01\xff"
    faster = replace(PLAN, groups=(replace(RULE, hparams={**RULE.hparams, "lr": 2e-3}),))
    role = {**VARIABLES, "n": replace(VARIABLES["n"], role=Role.PARAMETER)}
    others = [
        with_op(Op("aten.full", {**full, "fill_value": 1}, ("f",)), 2),
        with_op(Op("aten.full", {**full, "fill_value": True}, ("f",)), 2),
        with_op(Op("aten.full", {**full, "fill_value": 1.0}, ("f",)), 2),
        with_op(Op("assign_value", {"value": Literal("int64", (1,), other)}, ("c",)), 1),
        replace(PROGRAM, deployment=replace(DEPLOYMENT, plan=faster)),
        PROGRAM.with_blocks(Block(0, freeze(role), OPS), PROGRAM.blocks[1]),
        PROGRAM.with_blocks(PROGRAM.main),
        PROGRAM,
    ]

    assert len({program.fingerprint() for program in others}) == len(others)
    assert len({canonical(program.blocks, program.deployment) for program in others}) == len(others)
