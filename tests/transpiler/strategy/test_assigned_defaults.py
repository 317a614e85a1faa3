"""An assignment of a default is an assignment: it is never taken for its absence."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.settings import assign, other, read
from transpiler import DistributedStrategy
from transpiler.distribute_config import FIELDS, DistributeTranspilerConfig
from transpiler.plan.plan import Collective
from transpiler.strategy.collective_plan import collective_of
from transpiler.strategy.from_config import choices_of
from transpiler.strategy.parallel_degrees import degrees_of
from transpiler.strategy.refusals import KINDS, check, refusals, too_late
from transpiler.strategy.strategy import CONFIGS, SWITCHES, every_setting

EVERY = dict(every_setting())
ENDPOINTS = ["127.0.0.1:1", "127.0.0.1:2"]


def given(name: str, value: Any) -> DistributedStrategy:
    strategy = DistributedStrategy()
    assign(strategy, name, value)
    return strategy


def with_default(name: str) -> DistributedStrategy:
    return given(name, EVERY[name].default)


@pytest.mark.parametrize("name", EVERY)
def test_every_setting_counts_as_set_with_its_own_default(name: str, tmp_path: Path) -> None:
    """That one and no other; in a copy, a pickle and a file, too; until the settings of its switch
    are assigned again.
    """
    strategy = with_default(name)
    strategy.save_to_prototxt(tmp_path / "s.prototxt")
    loaded = DistributedStrategy()
    loaded.load_from_prototxt(tmp_path / "s.prototxt")

    for each in (
        strategy,
        loaded,
        copy.deepcopy(strategy),
        pickle.loads(pickle.dumps(strategy)),
    ):
        assert [key for key in EVERY if each.is_set(key)] == [name]
        assert read(each, name) == read(DistributedStrategy(), name)
        assert each == strategy
    owner, _, key = name.rpartition(".")
    if owner:
        setattr(strategy, owner, {})
        assert not strategy.is_set(name)
        assign(strategy, name, other(name, EVERY[name]))
        assert strategy.is_set(name) and key in str(strategy)


@pytest.mark.parametrize("name", EVERY)
def test_a_default_asks_for_nothing_unless_its_absence_means_another_thing(name: str) -> None:
    """So no job refuses it, and a strategy that has it is as one that has nothing; what differs
    says so in its table, and is refused, or acts, as any other value is.
    """
    strategy, alike = with_default(name), given(name, other(name, EVERY[name]))
    if EVERY[name].absent:
        assert strategy != DistributedStrategy() and strategy.unsupported(()) == [name]
        for kind in KINDS:
            said = [sentence.partition(":")[0] for sentence in refusals(strategy, kind)]
            assert said == [sentence.partition(":")[0] for sentence in refusals(alike, kind)]
        return
    assert strategy == DistributedStrategy() and strategy.unsupported(()) == []
    for kind in KINDS:
        assert refusals(strategy, kind) == []


def test_defaults_that_their_absence_does_not_mean() -> None:
    """All of them; a further one is named here, and has a test of what it does."""
    assert [name for name, setting in EVERY.items() if setting.absent] == [
        "sharding_configs.sharding_degree",
        "pipeline_configs.micro_batch_size",
        "pipeline_configs.accumulate_steps",
    ]


@pytest.mark.parametrize("name", [name for name, setting in EVERY.items() if setting.early])
def test_an_early_setting_that_comes_late_with_its_default_is_refused(name: str) -> None:
    """Where fleet.init's strategy said another thing."""
    first = given(name, other(name, EVERY[name]))

    assert [said.partition(":")[0] for said in too_late(with_default(name), first)] == [
        f"strategy.{name}"
    ]
    assert too_late(with_default(name), with_default(name)) == []


def test_a_late_degree_of_8_is_not_that_of_no_word() -> None:
    """Without a word all trainers hold a shard."""
    late = with_default("sharding_configs.sharding_degree")

    assert too_late(late, DistributedStrategy())


DEGREES = {
    "hybrid_configs.dp_degree": "sharding_configs.dp_degree",
    "hybrid_configs.pp_degree": "sharding_configs.pp_degree",
    "hybrid_configs.sharding_degree": "sharding_configs.sharding_degree",
    "hybrid_configs.mp_degree": "sharding_configs.mp_degree",
}


@pytest.mark.parametrize("one", [*DEGREES, *DEGREES.values()])
def test_a_degree_at_its_default_contradicts_another_one(one: str) -> None:
    """Each place that names a direction, with its default, beside another number in the other."""
    opposite = DEGREES.get(one) or next(key for key, value in DEGREES.items() if value == one)
    default = EVERY[one].default
    strategy = with_default(one)
    strategy.sharding = True
    assign(strategy, opposite, 3)
    if default == -1:  # which says that the other places decide
        assert degrees_of(strategy)["dp"] == 3
        return
    with pytest.raises(ValueError, match=rf"{one}={default}\b.*expected one \w+ degree, got two"):
        degrees_of(strategy)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"pipeline": True, "hybrid_configs": {"pp_degree": 1}},
            "strategy.pipeline: expected a pp_degree above 1, which is the number of stages, got 1",
        ),
        (
            {"tensor_parallel": True, "tensor_parallel_configs": {"tensor_parallel_degree": 1}},
            "expected a tensor_parallel_degree above 1, which is the number of parts of a layer, "
            "got 1",
        ),
    ],
)
def test_an_error_shows_the_default_that_was_assigned(values: dict[str, Any], words: str) -> None:
    """It does not say that there was none."""
    strategy = DistributedStrategy()
    for name, value in values.items():
        setattr(strategy, name, value)
    with pytest.raises(ValueError, match=words):
        check(strategy, "hybrid")


def test_a_merge_of_one_step_is_one() -> None:
    """A script that tries 1, 2 and 4 steps says 1 as it says the others; without a number the
    switch has nothing to do.
    """
    strategy = DistributedStrategy()
    strategy.gradient_merge = True
    with pytest.raises(ValueError, match="without gradient_merge_configs.k_steps"):
        check(strategy, "collective")
    strategy.gradient_merge_configs = {"k_steps": 1}
    check(strategy, "collective")


def test_an_empty_list_is_told_as_what_was_assigned() -> None:
    """Beside the switch that needs its names."""
    strategy = DistributedStrategy()
    strategy.recompute = True
    strategy.recompute_configs = {"checkpoints": []}
    with pytest.raises(
        ValueError, match=r"recompute_configs.checkpoints, and got .*checkpoints=\[\]"
    ):
        check(strategy, "collective")


@pytest.mark.parametrize("content", ['emptied: "amp"', 'emptied: "a_sync_configs.k_steps"'])
def test_a_file_cannot_empty_what_is_no_list(content: str, tmp_path: Path) -> None:
    """A switch and a number always have a value."""
    path = tmp_path / "s.prototxt"
    path.write_text(content)
    with pytest.raises(ValueError, match="emptied"):
        DistributedStrategy().load_from_prototxt(path)


# ---- programs: a configuration beside a strategy ----


def collective(
    config: dict[str, Any], strategy: DistributedStrategy | None, trainers: int = 2
) -> Collective:
    made = DistributeTranspilerConfig(
        mode="collective", **{"collective_mode": "grad_allreduce", **config}
    )
    return collective_of(made, [f"127.0.0.1:{port}" for port in range(1, trainers + 1)], strategy)


@pytest.mark.parametrize(
    "name",
    ["nccl_comm_num", "use_hierarchical_allreduce", "hierarchical_allreduce_inter_nranks"],
)
@pytest.mark.parametrize("of_strategy", [True, False])
def test_a_default_of_one_contradicts_another_value_of_the_other(
    name: str, of_strategy: bool
) -> None:
    """A field of the configuration and a key of the strategy that mean one thing."""
    default, another = EVERY[name].default, other(name, EVERY[name])
    strategy = given(name, default if of_strategy else another)
    with pytest.raises(ValueError, match=f"{name}=.* contradicts strategy.{name}="):
        collective({name: another if of_strategy else default}, strategy)


def test_steps_of_a_configuration_at_their_default_contradict_a_strategys() -> None:
    """k_steps=0 of the configuration is no word for the strategy's number."""
    strategy = DistributedStrategy()
    strategy.localsgd, strategy.localsgd_configs = True, {"k_steps": 4}
    with pytest.raises(ValueError, match="k_steps=0 contradicts strategy.localsgd_configs"):
        collective({"collective_mode": "local_sgd", "k_steps": 0}, strategy)


def test_a_program_has_the_degree_that_was_assigned() -> None:
    """8 is wrong for 2 trainers, as 4 is, and right for 8; without a word all of them shard."""
    strategy = DistributedStrategy()
    strategy.sharding = True
    assert collective({}, strategy).sharded
    for degree in (8, 4):
        strategy.sharding_configs = {"sharding_degree": degree}
        with pytest.raises(ValueError, match=f"sharding_degree={degree}: expected the 2 trainers"):
            collective({}, strategy)
    strategy.sharding_configs = {"sharding_degree": 8}
    assert collective({}, strategy, trainers=8).sharded
    strategy.sharding = False
    with pytest.raises(ValueError, match="sharding_degree: has no effect without sharding=True"):
        collective({}, strategy)


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_a_configuration_counts_as_set_with_its_default(name: str) -> None:
    """As the settings of a strategy do."""
    config = DistributeTranspilerConfig(**{name: FIELDS[name].default})

    assert config.is_set(name) and name in repr(config)
    assert not DistributeTranspilerConfig().is_set(name)


def test_a_number_of_pushes_without_its_mode_is_refused() -> None:
    """Its default, too."""
    for pushes in (FIELDS["geo_sgd_need_push_nums"].default, 7):
        config = DistributeTranspilerConfig(geo_sgd_need_push_nums=pushes)
        with pytest.raises(ValueError, match=f"geo_sgd_need_push_nums={pushes} has no effect"):
            choices_of(config)


def shared_with_a_strategy() -> list[str]:
    """Fields that a strategy's a_sync_configs has, with another default of the strategy's own."""
    configs = CONFIGS["a_sync_configs"]
    return [name for name in FIELDS if name in configs]


@pytest.mark.parametrize("name", shared_with_a_strategy())
def test_a_field_at_its_default_contradicts_a_strategys_value(name: str) -> None:
    """Wherever the strategy's value is another one and acts."""
    value = other(f"a_sync_configs.{name}", CONFIGS["a_sync_configs"][name])
    found: Callable[..., Any] = DistributedStrategy
    strategy = found()
    beside: dict[str, Any] = {
        "outer_optimizer": {"k_steps": 2},
        "outlier_factor": {"outlier_push": "stop"},
    }.get(name, {})
    strategy.a_sync_configs = {**beside, name: value}
    config = DistributeTranspilerConfig(**{name: FIELDS[name].default})
    with pytest.raises(ValueError) as raised:
        choices_of(config, strategy=strategy)
    assert f"{name}=" in str(raised.value)


def test_a_switch_that_is_off_by_assignment_is_written(tmp_path: Path) -> None:
    """A file keeps what was said."""
    strategy = DistributedStrategy()
    strategy.amp = False
    strategy.sharding_configs = {"sharding_degree": 8}
    strategy.amp_configs = {"custom_white_list": []}
    strategy.save_to_prototxt(tmp_path / "s.prototxt")
    text = (tmp_path / "s.prototxt").read_text()

    assert "amp: false" in text and "sharding_degree: 8" in text
    assert 'emptied: "amp_configs.custom_white_list"' in text
    assert set(SWITCHES) >= {"amp"}
