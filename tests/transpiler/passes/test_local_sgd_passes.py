"""Local SGD of programs by a strategy: what transpile makes of it, and what it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.collectives import FOUR, GRAD, KINDS, LOCAL, Single, of_type, pair
from transpiler import DistributedStrategy, DistributeTranspilerConfig
from transpiler.program import Program
from transpiler.strategy.collective_plan import collective_of

MODE: dict[str, Any] = {"mode": "collective"}


def strategy_of(**fields: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    for name, value in fields.items():
        setattr(strategy, name, value)
    return strategy


def localsgd(k_steps: int, begin_step: int) -> DistributedStrategy:
    configs = {"k_steps": k_steps, "begin_step": begin_step}
    return strategy_of(localsgd=True, localsgd_configs=configs)


def test_a_strategy_and_a_configuration_lead_to_one_program(single: Single) -> None:
    """localsgd with k_steps is collective_mode "local_sgd" with k_steps; begin_step comes from the
    strategy alone.
    """
    by_strategy = pair(single, **MODE, strategy=localsgd(4, 0))
    by_both = pair(single, **LOCAL, k_steps=4, strategy=localsgd(4, 0))
    by_configuration = pair(single, **LOCAL, k_steps=4)

    assert list(map(str, by_strategy)) == list(map(str, by_configuration))
    assert list(map(str, by_both)) == list(map(str, by_configuration))
    every = pair(single, **MODE, strategy=strategy_of(localsgd=True))
    assert list(map(str, every)) == list(map(str, pair(single, **LOCAL)))


def test_a_rule_prints_and_is_kept_in_files(single: Single, tmp_path: Path) -> None:
    """The first line and the ops say it; plans that differ in it have other fingerprints."""
    begun = pair(single, **MODE, strategy=localsgd(4, 30))[0]
    follows = pair(single, FOUR, **KINDS["adaptive"])[0]
    assert str(begun).startswith("trainer 0 of 2, local_sgd, 1 ring, every 4 steps after step 30")
    assert "bucket 0, every 4 steps after step 30)" in str(begun)
    assert (
        str(follows).splitlines()[0].endswith("every 3 steps after step 2, which follow the loss")
    )
    assert "c_adapt_k_steps(loss, ring 0, every 3 steps)" in str(follows)
    for program in (begun, follows):
        program.save(tmp_path / "program")
        assert str(Program.load(tmp_path / "program")) == str(program)
        program.draw(tmp_path / "program.svg")
    plans = [
        pair(single, **MODE, strategy=strategy)[0].deployment.plan.fingerprint()  # type: ignore[union-attr]
        for strategy in (
            localsgd(4, 0),
            localsgd(4, 30),
            strategy_of(adaptive_localsgd=True, adaptive_localsgd_configs={"init_k_steps": 4}),
        )
    ]
    assert len(set(plans)) == 3


def test_one_step_of_a_fixed_rule_needs_no_rule(single: Single) -> None:
    """An adaptive one begins with 1 and goes on from there."""
    fixed = pair(single, **MODE, strategy=strategy_of(localsgd=True))[0]
    follows = pair(single, **MODE, strategy=strategy_of(adaptive_localsgd=True))[0]

    assert all("k_steps" not in op.arguments for op in of_type(fixed, "c_allreduce_sum", "scale"))
    assert all(op.arguments["k_steps"] == 1 for op in of_type(follows, "c_allreduce_sum", "scale"))


@pytest.mark.parametrize(
    ("settings", "strategy", "words"),
    [
        (
            GRAD,
            localsgd(4, 1),
            "collective_mode='grad_allreduce' contradicts strategy.localsgd=True",
        ),
        (
            {"mode": "nccl2"},
            localsgd(4, 1),
            "mode='nccl2' contradicts strategy.localsgd=True.*set mode='collective'",
        ),
        (
            {**LOCAL, "k_steps": 3},
            localsgd(4, 1),
            r"k_steps=3 contradicts strategy.localsgd_configs\['k_steps'\]=4",
        ),
        (
            {**MODE, "k_steps": 3},
            strategy_of(adaptive_localsgd=True),
            r"k_steps=3 contradicts strategy.adaptive_localsgd_configs\['init_k_steps'\]=1",
        ),
        (
            MODE,
            strategy_of(localsgd=True, adaptive_localsgd=True),
            "strategy.localsgd: contradicts strategy.adaptive_localsgd",
        ),
        (MODE, localsgd(1, 5), "begin_step: 5 has no effect with k_steps=1"),
        (
            LOCAL,
            strategy_of(localsgd_configs={"k_steps": 4}),
            "strategy.localsgd_configs.k_steps: has no effect without localsgd=True",
        ),
        (
            LOCAL,
            strategy_of(sync_batch_norm=True),
            "strategy.sync_batch_norm: acts only in a job with parameter servers",
        ),
        (
            {},
            localsgd(4, 1),
            r"strategy.localsgd, .+: acts only in .+ set a_sync_configs\['k_steps'\]",
        ),
    ],
)
def test_contradictions_name_both(
    single: Single, settings: dict[str, Any], strategy: DistributedStrategy, words: str
) -> None:
    """transpile raises, and plans nothing."""
    with pytest.raises(ValueError, match=words):
        pair(single, 2 if not settings else FOUR, **settings, strategy=strategy)  # type: ignore[arg-type]


def test_a_configuration_alone_has_no_begin(single: Single) -> None:
    """As before there was a strategy."""
    found = collective_of(DistributeTranspilerConfig(**LOCAL, k_steps=3), ["h:1", "h:2"])
    assert (found.steps, found.begin, found.adaptive) == (3, 0, False)
