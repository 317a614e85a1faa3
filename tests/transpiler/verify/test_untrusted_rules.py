"""Registered rules that came over the wire: a server refuses what is not plain arithmetic."""

from __future__ import annotations

import pytest

from tests.support.rule_attacks import ATTACKS, block, rule
from transpiler import program_pb2 as pb
from transpiler.formats.messages import block_to_proto, update_from_proto
from transpiler.ir.graph import Op
from transpiler.program import Program
from transpiler.verify.untrusted import check_plan


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_rule_is_refused_by_name(name: str) -> None:
    """Before anything runs, and the refusal says what was wrong."""
    program, why = ATTACKS[name]
    sent = Program.from_proto(pb.Program.FromString(program.to_proto().SerializeToString()))
    assert sent.deployment is not None

    with pytest.raises(ValueError, match=why):
        check_plan(sent.deployment.plan)


def test_the_sound_rule_passes() -> None:
    """So it is the attack that each of the others is refused for."""
    sound = rule().deployment

    assert sound is not None
    check_plan(sound.plan)


def test_blocks_do_not_nest() -> None:
    """A message cannot be a tree of blocks."""
    inner = Op("registered.mine", {"update": block()}, ("t",))

    with pytest.raises(ValueError, match="expected no block within a block"):
        update_from_proto(block_to_proto(block(inner)))
