"""What a server refuses of the programs that reach it over the wire: everything that is wrong
anywhere.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError

from tests.support.op_attacks import OP_ATTACKS
from tests.support.plan_attacks import PLAN_ATTACKS
from tests.support.server_programs import DEPLOYMENT, LISTEN, PLACED, PLAN, server
from transpiler import program_pb2 as pb
from transpiler.ir.graph import Block, freeze
from transpiler.plan.plan import Slice
from transpiler.program import Program
from transpiler.verify.untrusted import check_server_program


def test_a_server_takes_a_sound_program() -> None:
    """The merge, the clip and the update of one slice pass, and still do after the wire."""
    program = server()

    assert check_server_program(program) is None
    assert check_server_program(Program.from_proto(program.to_proto())) is None


def test_a_server_that_owns_nothing_takes_an_empty_block() -> None:
    """A server without slices listens all the same."""
    plan = replace(PLAN, placements=(replace(PLACED[0], slices=(Slice("w", 0, 12, (4, 3), 1),)),))
    main = Block(0, freeze({}), (LISTEN,))

    assert (
        check_server_program(
            Program((main, Block(1, freeze({}), ())), replace(DEPLOYMENT, plan=plan))
        )
        is None
    )


ATTACKS = PLAN_ATTACKS | OP_ATTACKS


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_server_refuses_a_program_that_is_wrong_anywhere(attack: str) -> None:
    """Whatever is wrong with a program from the wire is a ValueError in words, never another
    exception and never accepted.
    """
    program, message = ATTACKS[attack]
    with pytest.raises(ValueError, match=message):
        check_server_program(program())


def test_random_damage_is_refused_or_harmless() -> None:
    """Bytes of a message changed at random give a ValueError or a sound program: no other
    exception, no long wait.
    """
    sent = server().to_proto().SerializeToString()
    refused = 0
    for seed in range(3000):
        chance = random.Random(seed)
        damaged = bytearray(sent)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        try:
            message = pb.Program.FromString(bytes(damaged))
        except DecodeError:
            continue
        try:
            check_server_program(Program.from_proto(message))
        except ValueError as error:
            refused += 1
            assert str(error)
    assert refused > 50
