"""Programs of trainers without servers: what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.collectives import GRAD, TWO, Single, pair, transpiled
from transpiler import DistributeTranspiler, DistributeTranspilerConfig
from transpiler.ir.graph import Op
from transpiler.verify.untrusted import check_server_program


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"trainers": 2}, TypeError, "trainers: expected the trainers' endpoints.*got 2"),
        ({"trainers": "h:1,h:1"}, ValueError, "trainers: expected different endpoints"),
        ({"trainers": "h"}, ValueError, "trainers: expected HOST:PORT"),
        ({"trainer_id": -1}, ValueError, "trainer_id: expected 0 to 1, got -1"),
        ({"trainer_id": 2}, ValueError, "trainer_id: expected 0 to 1, got 2"),
        ({"pservers": "s:1"}, ValueError, "pservers='s:1' has no effect with mode='nccl2'"),
        ({"sync_mode": False}, ValueError, "sync_mode=False contradicts mode='nccl2'"),
        (
            {"current_endpoint": "h:2"},
            ValueError,
            "current_endpoint: expected that of trainer 0 in trainers, h:1, got 'h:2'",
        ),
    ],
)
def test_arguments_that_make_no_sense_without_servers(
    single: Single, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    """transpile refuses them by name."""
    given = {"trainer_id": 0, "program": single[0], "trainers": TWO, **arguments}
    with pytest.raises(error, match=message):
        DistributeTranspiler(DistributeTranspilerConfig(mode="nccl2")).transpile(**given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"mode": "collective", "collective_mode": "grad_allreduce", "k_steps": 3},
            "k_steps=3 has no effect with collective_mode='grad_allreduce'",
        ),
        ({"mode": "nccl2", "k_steps": 3}, "k_steps=3 has no effect with mode='nccl2'"),
        ({"mode": "collective"}, "collective_mode=None: expected 'grad_allreduce' or 'local_sgd'"),
        (
            {"mode": "nccl2", "collective_mode": "local_sgd"},
            "collective_mode='local_sgd' has no effect with mode='nccl2'",
        ),
        (
            {"mode": "nccl2", "slice_var_up": False},
            "slice_var_up=False has no effect with mode='nccl2'",
        ),
        ({"mode": "nccl2", "geo_sgd_mode": True}, "geo_sgd_mode=True has no effect"),
        ({**GRAD, "min_block_size": 4}, "min_block_size=4 has no effect with mode='collective'"),
        ({**GRAD, "sync_mode": False}, "sync_mode=False contradicts mode='collective'"),
        (
            {**GRAD, "hierarchical_allreduce_inter_nranks": 2},
            "has no effect with use_hierarchical_allreduce=False",
        ),
        (
            {**GRAD, "use_hierarchical_allreduce": True},
            "expected from 2 to less than the number of trainers",
        ),
    ],
)
def test_fields_without_effect_in_the_mode(
    single: Single, settings: dict[str, Any], message: str
) -> None:
    """transpile refuses them by name."""
    with pytest.raises(ValueError, match=message):
        transpiled(single, **settings)


def test_there_is_no_program_of_a_server(single: Single) -> None:
    """Asking for one says that the mode has no servers; a server refuses a trainer's program,
    whatever it holds.
    """
    transpiler = transpiled(single, **GRAD)
    for ask in (
        transpiler.get_pserver_program,
        transpiler.get_pserver_programs,
        transpiler.get_startup_program,
    ):
        with pytest.raises(ValueError, match="got mode='grad_allreduce', which has no server"):
            ask("h:1")
    for program in pair(single, **GRAD):
        assert program.deployment is not None
        posing = replace(
            program, deployment=replace(program.deployment, trainer_id=None, server_index=0)
        )
        with pytest.raises(
            ValueError, match="expected one of a job with servers, got mode grad_allreduce"
        ):
            check_server_program(posing)


def test_a_program_without_the_losss_gradient_is_refused(single: Single) -> None:
    """Where backward does not begin with ones for the loss there is nothing to scale, and transpile
    says so.
    """
    main = single[0].main
    ops = [op for op in main.ops if op.type != "aten.ones_like"]
    full = Op(
        "aten.full",
        {"size": (), "fill_value": 1.0},
        next(op.outputs for op in main.ops if op.type == "aten.ones_like"),
    )
    place = next(index for index, op in enumerate(main.ops) if op.type == "aten.ones_like")
    odd = single[0].with_blocks(replace(main, ops=(*ops[:place], full, *ops[place:])))
    with pytest.raises(ValueError, match="backward begins with aten.ones_like"):
        transpiled((odd, single[1]), **GRAD)
