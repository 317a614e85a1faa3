"""A strategy given to transpile: what it says beside the configuration, and what is refused."""

import copy
import re
from typing import Any

import pytest

from tests.support.distributed import TWO, Single, captured, plan_in, transpiled
from tests.support.settings import assign, other
from trainer import fleet
from transpiler import (
    ClipGradByGlobalNorm,
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    Program,
)
from transpiler.plan.plan import Lane
from transpiler.plan.settings import Setting
from transpiler.strategy.strategy import every_setting

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
        ("qat", True, "strategy.qat: no job reads it"),
        ("a_sync_configs", {"embeddings": ["emb"]}, "acts in fleet.init only"),
        ("a_sync_configs", {"outer_optimizer": {"type": "sgd"}}, "outer_optimizer=.* no effect"),
        (
            "a_sync_configs",
            {"staleness": 0, "send_queue_size": 1},
            "staleness=0, which makes the mode sync; it is read in mode async",
        ),
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


def test_settings_of_servers_are_refused_without_servers(single: Single) -> None:
    """Each is named, with where it acts; a strategy that asks for nothing is taken."""
    endpoints = "127.0.0.1:6170,127.0.0.1:6171"

    def program(strategy: DistributedStrategy | None) -> Program:
        transpiler = DistributeTranspiler(
            DistributeTranspilerConfig(mode="collective", collective_mode="local_sgd")
        )
        transpiler.transpile(0, single[0], trainers=endpoints, strategy=strategy)
        found = transpiler.get_trainer_program()
        assert isinstance(found, Program)
        return found

    assert program(DistributedStrategy()).main.ops == program(None).main.ops
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"k_steps": 4}
    said = "a_sync_configs.k_steps: acts only in a job with parameter servers.*without servers"
    with pytest.raises(ValueError, match=said):
        program(strategy)
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


# what else a setting needs to act, and values of which no other one will do
BESIDE: dict[str, dict[str, Any]] = {
    "a_sync_configs.outer_optimizer": {"a_sync_configs": {"k_steps": 3}},
    "a_sync_configs.modes": {"a_sync_configs": {"k_steps": 3}},
    "gradient_scale_configs.scale_strategy": {"a_sync": False},
    "gradient_merge": {"gradient_merge_configs": {"k_steps": 3}},
    "gradient_merge_configs.k_steps": {"gradient_merge": True},
    "gradient_merge_configs.avg": {
        "gradient_merge": True,
        "gradient_merge_configs": {"k_steps": 3},
    },
    "recompute": {"recompute_configs": {"checkpoints": ["loss"]}},
    "recompute_configs.checkpoints": {"recompute": True},
}
VALUES: dict[str, Any] = {
    "a_sync_configs.modes": {"*": "geo"},
    "a_sync_configs.merge": "sum",
    "recompute_configs.checkpoints": ["loss"],
}
# what they change depends on the program: rewrites/test_amp_programs.py
OTHERS = {name: each for name, each in every_setting() if not name.startswith("amp")}


@pytest.mark.parametrize(("name", "setting"), OTHERS.items())
def test_every_setting_acts_in_a_program_or_is_refused(
    single: Single, name: str, setting: Setting
) -> None:
    """What acts in programs changes them, or how they are run; ``overlap`` holds for every program.
    Anything else is refused by its name.
    """
    acts = name.startswith("a_sync") or "program" in setting.jobs
    made: list[Any] = []
    acts = name.startswith("a_sync") or "program" in setting.jobs
    for changed in (False, True):
        strategy = DistributedStrategy()
        if name == "a_sync_configs.outer_optimizer":
            strategy.a_sync_configs = {"k_steps": 3}
        strategy.lamb = name.startswith("lamb_configs")
        if changed:
            needed, (owner, _, key) = BESIDE.get(name, {}), name.rpartition(".")
            for field, values in needed.items():
                setattr(strategy, field, values)
            value = VALUES.get(name) or other(name, setting)
            assign(strategy, name, value)
            if needed.get(owner):
                setattr(strategy, owner, {**needed[owner], key: value})
        transpiler = DistributeTranspiler()
        try:
            transpiler.transpile(0, single[0], TWO, 2, startup_program=single[1], strategy=strategy)
        except ValueError as error:
            assert changed and name.rpartition(".")[2] in str(error)
            # it is read, and needs another optimizer, mode, or switch beside it
            needs = (
                "expected torch.optim|has no effect (with|without) |embeddings.* acts in fleet.init"
            )
            assert bool(re.search(needs, str(error))) == acts, error
            return
        made.append((transpiler.get_trainer_program(), transpiler.get_startup_program()))

    assert acts and made[0] != made[1] or name == "a_sync_configs.overlap"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("last_comm_group_size_MB", 10**400, "last_comm_group_size_MB: expected a number"),
        ("amp_configs", {"init_loss_scaling": 1e39}, "expected a number from 1e-30 to 1e38"),
        ("fs_client_param", {"uri": "ftp://b", "user": "\ud800"}, "a text without surrogates"),
    ],
    ids=["float", "scale", "text"],
)
def test_a_value_that_cannot_be_kept_changes_nothing(name: str, value: Any, words: str) -> None:
    """Larger than any float, than any loss scale, and no Unicode."""
    strategy = DistributedStrategy()
    strategy.fs_client_param = {"uri": "ftp://a", "user": "ann"}
    before = copy.deepcopy(strategy)
    with pytest.raises(ValueError, match=re.escape(words)):
        setattr(strategy, name, value)
    assert strategy == before


def test_a_pattern_behind_the_one_for_all_is_refused() -> None:
    """It would match nothing."""
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"modes": {"*": "sync", "0.*": "async"}}
    with pytest.raises(ValueError, match=r"'0\.\*': has no effect behind '\*'"):
        fleet.init(strategy=strategy)
