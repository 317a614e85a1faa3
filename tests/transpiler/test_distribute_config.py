"""The configuration: defaults, values, modes, and fields that contradict one another."""

from typing import Any

import pytest

from tests.support.distributed import TWO, Single, plan_in, programs_of, transpiled, types
from transpiler import DistributeTranspiler, DistributeTranspilerConfig, HashName
from transpiler.distribute_config import FIELDS
from transpiler.plan.plan import Lane


def test_sync_mode_false_on_a_default_configuration_is_async_on_both_sides(single: Single) -> None:
    """transpile's argument decides where it is given, for the trainer and for the servers."""
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, single[0], TWO, 2, sync_mode=False, startup_program=single[1])
    assert "send_barrier" not in types(transpiler.get_trainer_program())
    assert transpiler.get_pserver_program("h:1").main.ops[0].arguments["mode"] == "async"
    config = DistributeTranspilerConfig()
    config.sync_mode = False
    by_config = DistributeTranspiler(config)
    by_config.transpile(0, single[0], TWO, 2, startup_program=single[1])
    assert plan_in(by_config.get_trainer_program()).mode == "async"


@pytest.mark.parametrize("configured", [True, False])
def test_a_contradiction_between_configuration_and_argument_raises(
    single: Single, configured: bool
) -> None:
    """A sync_mode that was set in the configuration and another one given to transpile contradict;
    nothing is transpiled.
    """
    config = DistributeTranspilerConfig()
    config.sync_mode = configured
    transpiler = DistributeTranspiler(config)
    with pytest.raises(
        ValueError,
        match=f"sync_mode: the configuration says {configured} and transpile says {not configured}",
    ):
        transpiler.transpile(0, single[0], TWO, 2, not configured, single[1])
    with pytest.raises(ValueError, match="transpile to be called first"):
        transpiler.get_trainer_program()
    transpiler.transpile(0, single[0], TWO, 2, configured, single[1])


DEFAULTS = {
    "slice_var_up": True,
    "min_block_size": 8192,
    "mode": "pserver",
    "enable_dc_asgd": False,
    "print_log": False,
    "wait_port": True,
    "runtime_split_send_recv": False,
    "sync_mode": True,
    "half_async": False,
    "completely_not_async": False,
    "geo_sgd_mode": False,
    "geo_sgd_need_push_nums": 100,
    "nccl_comm_num": 1,
    "use_hierarchical_allreduce": False,
    "hierarchical_allreduce_inter_nranks": 0,
    "collective_mode": None,
}


def test_the_configuration_has_the_documented_defaults() -> None:
    """Every field of the contract is there, with its default."""
    config = DistributeTranspilerConfig()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS
    assert config.split_method.__name__ == "RoundRobin"


@pytest.mark.parametrize("error", [AttributeError, ValueError])
def test_unknown_fields_raise_with_the_closest_name(error: type[Exception]) -> None:
    """A misspelt field raises at once, on writing and on reading, in the constructor too, and the
    right name is suggested.
    """
    config = DistributeTranspilerConfig()
    with pytest.raises(error, match="has no 'min_block_sise': did you mean min_block_size"):
        config.min_block_sise = 3  # type: ignore[attr-defined]
    with pytest.raises(error, match="did you mean sync_mode"):
        _ = config.sync_mod
    with pytest.raises(error, match="it has buffers, .*slice_var_up"):
        DistributeTranspilerConfig(qqq=1)
    assert vars(config) == {}


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("slice_var_up", 1, TypeError),
        ("sync_mode", None, TypeError),
        ("min_block_size", 0, ValueError),
        ("min_block_size", 8192.0, TypeError),
        ("min_block_size", True, TypeError),
        ("split_method", "RoundRobin", TypeError),
        ("split_method", dict, ValueError),
        ("split_method", None, TypeError),
        ("mode", "turbo", ValueError),
        ("mode", None, TypeError),
        ("geo_sgd_need_push_nums", 0, ValueError),
        ("nccl_comm_num", 0, ValueError),
        ("hierarchical_allreduce_inter_nranks", -1, ValueError),
        ("collective_mode", "all", ValueError),
        ("wait_port", "yes", TypeError),
    ],
)
def test_bad_values_raise_and_name_the_field(
    name: str, value: object, error: type[Exception]
) -> None:
    """A wrong type is a TypeError, a value out of range a ValueError; the field keeps its value."""
    config = DistributeTranspilerConfig()
    before = getattr(config, name)
    with pytest.raises(error, match=f"^{name}: expected"):
        setattr(config, name, value)
    assert getattr(config, name) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nccl_comm_num", 2),
        ("use_hierarchical_allreduce", True),
        ("hierarchical_allreduce_inter_nranks", 2),
        ("collective_mode", "local_sgd"),
    ],
)
def test_a_switch_without_effect_raises_in_transpile(
    single: Single, name: str, value: object
) -> None:
    """What has no effect with servers may be written down, and is refused by transpile under its
    own name.
    """
    config = DistributeTranspilerConfig(**{name: value})
    with pytest.raises(ValueError, match=f"^{name}={value!r} has no effect with mode='pserver'"):
        DistributeTranspiler(config).transpile(0, single[0], TWO, 2, startup_program=single[1])
    setattr(config, name, DEFAULTS[name])
    DistributeTranspiler(config).transpile(0, single[0], TWO, 2, startup_program=single[1])


LANE_FIELDS: list[tuple[dict[str, Any], Lane]] = [
    ({}, Lane("sync")),
    ({"sync_mode": False}, Lane("async", "mean")),
    ({"half_async": True}, Lane("half_async")),
    ({"half_async": True, "sync_mode": False, "runtime_split_send_recv": True}, Lane("half_async")),
    ({"geo_sgd_mode": True}, Lane("geo", k_steps=100)),
    (
        {"geo_sgd_mode": True, "geo_sgd_need_push_nums": 7, "sync_mode": False},
        Lane("geo", k_steps=7),
    ),
    ({"geo_sgd_mode": True, "runtime_split_send_recv": True}, Lane("geo", k_steps=100)),
    ({"enable_dc_asgd": True}, Lane("async", "mean", dc_asgd=1.0)),
    ({"enable_dc_asgd": True, "dc_asgd": 0.5}, Lane("async", "mean", dc_asgd=0.5)),
    ({"sync_mode": False, "send_queue_size": 8}, Lane("async", "mean", send_queue_size=8)),
    ({"sync_mode": False, "staleness": 0}, Lane("sync")),
    ({"completely_not_async": True}, Lane("sync")),
    (
        {
            "completely_not_async": True,
            "sync_mode": False,
            "half_async": True,
            "runtime_split_send_recv": True,
        },
        Lane("sync"),
    ),
]


@pytest.mark.parametrize(("settings", "lane"), LANE_FIELDS)
def test_the_mode_that_the_configuration_says(
    single: Single, settings: dict[str, Any], lane: Lane
) -> None:
    """The fields say one lane, in whatever order they are assigned, and it is the plan's on every
    side.
    """
    for order in (list(settings), list(reversed(settings))):
        config = DistributeTranspilerConfig(min_block_size=6)
        for name in order:
            setattr(config, name, settings[name])
        transpiler = DistributeTranspiler(config)
        transpiler.transpile(0, single[0], TWO, 2, startup_program=single[1])
        assert {plan_in(program).lanes for program in programs_of(transpiler)} == {(lane,)}


def test_completely_not_async_gives_the_servers_of_sync(single: Single) -> None:
    """Sync through the queues of half-async: what servers do, and so the result, is that of
    sync_mode=True.
    """
    settings = {"completely_not_async": True, "half_async": True, "sync_mode": None}
    ours, theirs = transpiled(single, **settings), transpiled(single, sync_mode=True)
    assert ours.get_pserver_programs("h:1") == theirs.get_pserver_programs("h:1")
    assert ours.get_trainer_program() == theirs.get_trainer_program()


COMBINATIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"geo_sgd_mode": True, "half_async": True}, "geo_sgd_mode", "half_async"),
    ({"geo_sgd_mode": True, "enable_dc_asgd": True}, "geo_sgd_mode", "enable_dc_asgd"),
    ({"geo_sgd_mode": True, "completely_not_async": True}, "geo_sgd_mode", "completely_not_async"),
    ({"geo_sgd_mode": True, "k_steps": 3}, "geo_sgd_mode", "k_steps"),
    ({"half_async": True, "k_steps": 3}, "half_async", "k_steps"),
    ({"k_steps": 3, "dc_asgd": 0.5}, "k_steps", "dc_asgd"),
    ({"k_steps": 3, "sync_mode": True}, "k_steps", "sync_mode"),
    ({"staleness": 3}, "staleness", "sync_mode"),
    ({"max_merge_var_num": 4}, "max_merge_var_num", "sync_mode"),
    ({"geo_sgd_mode": True, "max_merge_var_num": 4}, "max_merge_var_num", "k_steps"),
    ({"launch_barrier": False, "wait_port": True}, "launch_barrier", "wait_port"),
    ({"modes": {"*": "geo"}}, "modes", "k_steps"),
    ({"outer_optimizer": {"type": "sgd"}}, "outer_optimizer", "sync_mode"),
    ({"half_async": True, "enable_dc_asgd": True}, "half_async", "enable_dc_asgd"),
    (
        {"completely_not_async": True, "enable_dc_asgd": True},
        "completely_not_async",
        "enable_dc_asgd",
    ),
    ({"half_async": True, "sync_mode": True}, "half_async", "sync_mode"),
    ({"geo_sgd_mode": True, "sync_mode": True}, "geo_sgd_mode", "sync_mode"),
    ({"enable_dc_asgd": True, "sync_mode": True}, "enable_dc_asgd", "sync_mode"),
    ({"runtime_split_send_recv": True, "sync_mode": True}, "runtime_split_send_recv", "sync_mode"),
    ({"runtime_split_send_recv": True}, "runtime_split_send_recv", "sync_mode"),
    ({"geo_sgd_need_push_nums": 10}, "geo_sgd_need_push_nums", "geo_sgd_mode"),
]


@pytest.mark.parametrize(("settings", "one", "other"), COMBINATIONS)
def test_fields_that_contradict_raise_in_transpile(
    single: Single, settings: dict[str, Any], one: str, other: str
) -> None:
    """Both are named, whichever was assigned first; assignment itself never raises for it."""
    for order in (list(settings), list(reversed(settings))):
        config = DistributeTranspilerConfig()
        for name in order:
            setattr(config, name, settings[name])
        with pytest.raises(ValueError) as raised:
            DistributeTranspiler(config).transpile(0, single[0], TWO, 2, startup_program=single[1])
        assert one in str(raised.value) and other in str(raised.value)


@pytest.mark.parametrize(
    "name", ["half_async", "geo_sgd_mode", "enable_dc_asgd", "runtime_split_send_recv"]
)
def test_an_asynchronous_field_contradicts_transpiles_sync_mode(single: Single, name: str) -> None:
    """sync_mode=True given to transpile counts as one in the configuration; False agrees with
    each.
    """
    with pytest.raises(ValueError, match=f"{name}=True contradicts sync_mode=True"):
        transpiled(single, sync_mode=True, **{name: True})
    assert (
        plan_in(transpiled(single, sync_mode=False, **{name: True}).get_trainer_program()).mode
        != "sync"
    )


ANOTHER: dict[str, Any] = {
    "slice_var_up": False,
    "split_method": HashName,
    "min_block_size": 4,
    "enable_dc_asgd": True,
    "runtime_split_send_recv": True,
    "half_async": True,
    "completely_not_async": True,
    "geo_sgd_mode": True,
    "geo_sgd_need_push_nums": 7,
    "nccl_comm_num": 2,
    "use_hierarchical_allreduce": True,
    "hierarchical_allreduce_inter_nranks": 2,
    "collective_mode": "local_sgd",
}


@pytest.mark.parametrize("mode", ["pserver", "nccl2", "collective"])
def test_all_fields_without_effect_are_named_in_one_error(single: Single, mode: str) -> None:
    """Each with the modes in which it acts; the fields that act in this one are not named."""
    readers = {name: FIELDS[name].modes for name in ANOTHER}
    foreign = [name for name, modes in readers.items() if mode not in modes]
    config = DistributeTranspilerConfig(mode=mode, **{name: ANOTHER[name] for name in foreign})
    with pytest.raises(ValueError) as raised:
        DistributeTranspiler(config).transpile(
            0, single[0], trainers=2 if mode == "pserver" else "a:1,b:1", startup_program=single[1]
        )

    said = str(raised.value).split("; ")
    for name in ANOTHER:
        where = " or ".join(map(repr, readers[name]))
        words = f"{name}={ANOTHER[name]!r} has no effect with mode={mode!r}, but with {where}: "
        assert any(each.startswith(words) for each in said) == (name in foreign), (name, said)


def test_all_contradictions_are_named_in_one_error() -> None:
    """Not only the first one that is found."""
    config = DistributeTranspilerConfig(
        geo_sgd_mode=True, half_async=True, enable_dc_asgd=True, sync_mode=True
    )
    with pytest.raises(ValueError) as raised:
        config.sync_requested()

    for words in (
        "geo_sgd_mode=True contradicts half_async=True",
        "geo_sgd_mode=True contradicts enable_dc_asgd=True",
        "half_async=True contradicts enable_dc_asgd=True",
        "geo_sgd_mode=True contradicts sync_mode=True",
    ):
        assert words in str(raised.value)
