"""A strategy given to transpile: what it says beside the configuration, and what is refused."""

from typing import Any

import pytest

from tests.support.distributed import TWO, Single, captured, plan_in, transpiled
from tests.support.settings import assign, other
from transpiler import (
    ClipGradByGlobalNorm,
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
)
from transpiler.plan.plan import Lane
from transpiler.plan.setting import Setting
from transpiler.strategy.fields import every_setting

AGAINST_A_STRATEGY: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"sync_mode": True}, {}, "a_sync=True"),
    ({"sync_mode": False}, {"a_sync": False}, "a_sync=False"),
    ({"sync_mode": True}, {"modes": {"fc.*": "async", "*": "sync"}}, "modes"),
    ({"half_async": True}, {}, "half_async"),
    ({"geo_sgd_mode": True}, {}, "k_steps"),
    ({"geo_sgd_mode": True, "geo_sgd_need_push_nums": 7}, {"k_steps": 8}, "k_steps"),
    ({"enable_dc_asgd": True}, {}, "dc_asgd"),
    ({"completely_not_async": True}, {}, "a_sync=True"),
    ({"wait_port": False}, {}, "launch_barrier"),
    ({"max_merge_var_num": 4}, {"max_merge_var_num": 5}, "max_merge_var_num"),
    ({"buffers": "own"}, {}, "buffers"),
    ({"runtime_split_send_recv": False}, {"runtime_split_send_recv": True}, "runtime_split"),
]


@pytest.mark.parametrize(("fields", "configs", "other"), AGAINST_A_STRATEGY)
def test_a_contradiction_with_a_strategy_raises(
    single: Single, fields: dict[str, Any], configs: dict[str, Any], other: str
) -> None:
    """Both are named; where the two agree the strategy's plan is made."""
    strategy = DistributedStrategy()
    strategy.a_sync = configs.get("a_sync", True)
    strategy.a_sync_configs = {key: value for key, value in configs.items() if key != "a_sync"}
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(**fields))
    with pytest.raises(ValueError, match="contradicts strategy") as raised:
        transpiler.transpile(0, single[0], TWO, 2, startup_program=single[1], strategy=strategy)
    assert list(fields)[-1] in str(raised.value) and other in str(raised.value)


def test_a_strategy_that_agrees_with_the_configuration_is_taken(single: Single) -> None:
    """Saying one thing twice is no contradiction."""
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"k_steps": 7}
    fields: dict[str, Any] = {"geo_sgd_mode": True, "geo_sgd_need_push_nums": 7}
    config = DistributeTranspilerConfig(**fields, sync_mode=False, runtime_split_send_recv=True)
    transpiler = DistributeTranspiler(config)
    transpiler.transpile(0, single[0], TWO, 2, False, single[1], strategy=strategy)
    lanes = plan_in(transpiler.get_trainer_program()).lanes
    assert lanes == (Lane("geo", k_steps=7, send_queue_size=16),)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("amp", True, "strategy.amp: no job reads it"),
        ("a_sync_configs", {"embeddings": ["emb"]}, "acts in fleet.init only"),
        ("a_sync_configs", {"outer_optimizer": {"type": "sgd"}}, "outer_optimizer=.* no effect"),
    ],
)
def test_a_strategy_whose_settings_cannot_act_in_a_program_raises(
    single: Single, name: str, value: Any, words: str
) -> None:
    """As in fleet, each with what to do instead."""
    strategy = DistributedStrategy()
    setattr(strategy, name, value)
    with pytest.raises(ValueError, match=words):
        DistributeTranspiler().transpile(
            0, single[0], TWO, 2, startup_program=single[1], strategy=strategy
        )


def test_a_strategy_has_no_effect_without_servers(single: Single) -> None:
    """The modes without servers are the configuration's."""
    config = DistributeTranspilerConfig(mode="collective", collective_mode="local_sgd")
    with pytest.raises(ValueError, match="strategy: expected none with mode='collective'"):
        DistributeTranspiler(config).transpile(
            0, single[0], trainers="a:1", strategy=DistributedStrategy()
        )
    with pytest.raises(TypeError, match="strategy: expected a DistributedStrategy, got dict"):
        DistributeTranspiler().transpile(0, single[0], strategy={})  # type: ignore[arg-type]


def test_overlap_needs_gradients_that_leave_early() -> None:
    """A send stands where the gradient is final, which a norm over all of them is not before the
    end of backward.
    """
    clipped = captured(ClipGradByGlobalNorm(1.0))
    with pytest.raises(ValueError, match="overlap: gradients cannot leave early"):
        transpiled(clipped, trainers=1, overlap=True)
    transpiled(clipped, trainers=2, overlap=True)  # servers clip


@pytest.mark.parametrize(("name", "setting"), dict(every_setting()).items())
def test_every_setting_acts_in_a_program_or_is_refused(
    single: Single, name: str, setting: Setting
) -> None:
    """What acts in fleet's jobs with servers changes the programs; ``overlap`` holds for every
    program.  Anything else is refused by its name.
    """
    made: list[Any] = []
    for changed in (False, True):
        strategy = DistributedStrategy()
        if name == "a_sync_configs.outer_optimizer":
            strategy.a_sync_configs = {"k_steps": 3}
        if changed:
            special = {"a_sync_configs.modes": {"*": "geo"}, "a_sync_configs.merge": "sum"}
            value = special.get(name) or other(name, setting)
            beside = {"k_steps": 3} if name.endswith(("outer_optimizer", "modes")) else {}
            assign(strategy, name, value)
            if beside:
                strategy.a_sync_configs = {**beside, name.rpartition(".")[2]: value}
        transpiler = DistributeTranspiler()
        try:
            transpiler.transpile(0, single[0], TWO, 2, startup_program=single[1], strategy=strategy)
        except ValueError as error:
            assert changed and name.rpartition(".")[2] in str(error)
            assert not setting.modes or name == "a_sync_configs.embeddings", error
            return
        made.append((transpiler.get_trainer_program(), transpiler.get_startup_program()))

    assert setting.modes and made[0] != made[1] or name == "a_sync_configs.overlap"
