"""DistributedStrategy: plain data whose every assignment is checked."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.settings import assign, other, read
from transpiler import DistributedStrategy
from transpiler import strategy_pb2 as pb
from transpiler.plan.settings import OUTER_OPTIMIZER
from transpiler.strategy.strategy import CONFIGS, KEPT, SWITCHES, documentation, every_setting

DEFAULTS = {
    "a_sync": True,
    "amp": False,
    "fuse_all_reduce_ops": True,
    "fuse_grad_size_in_MB": 32,
    "last_comm_group_size_MB": 1.0,
    "nccl_comm_num": 1,
    "find_unused_parameters": False,
    "split_data": True,
    "cudnn_exhaustive_search": torch.backends.cudnn.benchmark,
    "conv_workspace_size_limit": 0,
    "cudnn_batchnorm_spatial_persistent": False,
    "sync_nccl_allreduce": False,
    "a_sync_configs.k_steps": 0,
    "a_sync_configs.max_merge_var_num": 1,
    "a_sync_configs.send_queue_size": 16,
    "a_sync_configs.min_send_grad_num_before_recv": 1,
    "a_sync_configs.launch_barrier": True,
    "gradient_scale_configs.scale_strategy": "avg",
    "amp_configs.init_loss_scaling": 32768.0,
    "amp_configs.decr_ratio": 0.5,
    "amp_configs.use_fp16_guard": True,
    "recompute_configs.checkpoints": [],
    "dgc_configs.sparsity": [0.999],
    "sharding_configs.sharding_degree": 8,
    "sharding_configs.segment_broadcast_MB": 32.0,
    "gradient_merge_configs.avg": True,
    "lars_configs.lars_coeff": 0.001,
    "lamb_configs.lamb_weight_decay": 0.01,
    "qat_configs.weight_bits": 8,
    "hybrid_configs.dp_degree": -1,
    "hybrid_configs.order": ["dp", "pp", "sharding", "sep", "mp"],
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_are_the_documentations(name: str) -> None:
    """What nobody has assigned reads as the documentation says."""
    assert read(DistributedStrategy(), name) == DEFAULTS[name]


def test_the_table_and_the_proto_file_agree() -> None:
    """Every switch and key of the table is a field of the message, and the other way round."""

    def names(fields: Any) -> set[str]:
        return {field.name for field in fields if field.number < KEPT}

    top = pb.DistributedStrategy.DESCRIPTOR.fields
    assert names(top) == {*SWITCHES, *CONFIGS, "emptied"}
    for field in top:
        if field.name in CONFIGS:
            assert names(field.message_type.fields) == set(CONFIGS[field.name]), field.name
    assert names(pb.OuterOptimizer.DESCRIPTOR.fields) == set(OUTER_OPTIMIZER)


def test_documentation_has_one_row_for_each_key() -> None:
    """A generator of pages finds each key once, with its default, range, modes and a sentence."""
    rows = {row.key: row for row in documentation()}

    assert list(rows) == [name for name, _ in every_setting()]
    assert all(row.type and row.sentence.endswith(".") for row in rows.values())
    staleness = rows["a_sync_configs.staleness"]
    assert staleness[1:5] == ("int or None", "None", "0 or more", ("async",))
    assert rows["hybrid_configs.order"].modes == ("hybrid job",)
    assert rows["amp_configs.decr_ratio"][1:4] == ("float", "0.5", "above 0 and below 1")


EVERY = dict(every_setting())


@pytest.mark.parametrize("name", EVERY)
def test_every_switch_is_kept_found_saved_and_loaded(name: str, tmp_path: Path) -> None:
    """An assigned value reads back, is named as unsupported, and survives a file, a copy and a
    pickle.
    """
    strategy, value = DistributedStrategy(), other(name, EVERY[name])
    assign(strategy, name, value)
    strategy.save_to_prototxt(tmp_path / "s.prototxt")
    loaded = DistributedStrategy()
    loaded.load_from_prototxt(tmp_path / "s.prototxt")

    assert read(strategy, name) == value
    assert type(value)(read(strategy, name)) == value
    assert strategy.unsupported(()) == [name] and strategy.unsupported([name]) == []
    assert strategy != DistributedStrategy()
    assert loaded == strategy == copy.deepcopy(strategy) == pickle.loads(pickle.dumps(strategy))
    assert name.rpartition(".")[2] in str(strategy)


WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("amp", 1, TypeError, "amp: expected True or False, got 1"),
    ("a_sync", None, TypeError, "a_sync"),
    ("nccl_comm_num", True, TypeError, "nccl_comm_num: expected a whole number, got True"),
    ("nccl_comm_num", 2.0, TypeError, "nccl_comm_num"),
    ("nccl_comm_num", 0, ValueError, "nccl_comm_num: expected a whole number of 1 or more, got 0"),
    ("fuse_grad_size_in_MB", -1, ValueError, "fuse_grad_size_in_MB"),
    ("last_comm_group_size_MB", "1", TypeError, "last_comm_group_size_MB"),
    ("last_comm_group_size_MB", float("nan"), ValueError, "above 0"),
    ("a_sync_configs", [("k_steps", 1)], TypeError, "a_sync_configs: expected a dict"),
    (
        "a_sync_configs.k_steps",
        -5,
        ValueError,
        r"a_sync_configs\['k_steps'\]: expected a whole number of 0 or more, got -5",
    ),
    ("a_sync_configs.k_steps", 2**40, ValueError, "a whole number of 0 to 2147483647, got 1099"),
    ("a_sync_configs.min_send_grad_num_before_recv", 0, ValueError, "a whole number of 1 or more"),
    ("a_sync_configs.launch_barrier", 1, TypeError, "launch_barrier"),
    ("a_sync_configs.outer_optimizer", {"type": "lion"}, ValueError, "'sgd', 'nesterov', 'adam'"),
    ("a_sync_configs.merge", "median", ValueError, "'auto', 'sum', 'mean'"),
    ("a_sync_configs.staleness", True, TypeError, "staleness"),
    ("a_sync_configs.dc_asgd", -0.1, ValueError, "dc_asgd"),
    (
        "a_sync_configs.modes",
        {"*": "chaos"},
        ValueError,
        r"modes'\]\['\*'\]: expected one of 'sync', 'async', 'half_async'",
    ),
    ("a_sync_configs.outer_optimizer", {"lr": 0}, ValueError, r"\['outer_optimizer'\]\['lr'\]"),
    ("a_sync_configs.outer_optimizer", {"rate": 1.0}, ValueError, "has no 'rate'"),
    ("gradient_scale_configs.scale_strategy", "bogus", ValueError, "'avg', 'sum', 'customized'"),
    ("amp_configs.incr_ratio", 1.0, ValueError, "incr_ratio"),
    ("amp_configs.custom_white_list", "conv2d", TypeError, "expected a list"),
    (
        "amp_configs.custom_white_list",
        ["conv2d", 3],
        TypeError,
        r"\['custom_white_list'\]\[1\]: expected a text",
    ),
    (
        "recompute_configs.checkpoint_shape",
        [4, -1],
        ValueError,
        r"\[1\]: expected a whole number of 1 or more, got -1",
    ),
    ("dgc_configs.sparsity", [], ValueError, "a list of 1 or more"),
    ("dgc_configs.sparsity", [1.0], ValueError, "below 1"),
    ("hybrid_configs.order", ["dp", "xx"], ValueError, "each of dp, pp, sharding, sep, mp once"),
    ("hybrid_configs.mp_degree", 0, ValueError, "mp_degree"),
    ("qat_configs.weight_bits", 64, ValueError, "2 to 16"),
    ("gradient_merge_configs.avg", "mean", ValueError, "'avg' or 'sum'"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), WRONG)
def test_a_wrong_value_is_refused_and_changes_nothing(
    name: str, value: Any, error: type[Exception], message: str
) -> None:
    """Another type is a TypeError, a value out of range a ValueError; both name the key, and the
    strategy stays as it was.
    """
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"send_queue_size": 5}
    before = copy.deepcopy(strategy)

    with pytest.raises(error, match=message):
        assign(strategy, name, value)

    assert strategy == before


def test_an_unknown_name_is_refused_with_the_closest_one() -> None:
    """A misspelt switch or key raises both an AttributeError and a ValueError, and names what was
    probably meant.
    """
    strategy = DistributedStrategy()
    for error in (AttributeError, ValueError):
        with pytest.raises(error, match="no 'recompte': did you mean recompute"):
            strategy.recompte = True
        with pytest.raises(error, match="amp_configs has no 'incr_ratoi': did you mean incr_ratio"):
            strategy.amp_configs = {"incr_ratoi": 2.0}
    with pytest.raises(AttributeError, match="no 'ampp'"):
        strategy.ampp  # noqa: B018  # reading it is the test
    with pytest.raises(ValueError, match="has no 7"):
        strategy.amp_configs = {7: 2.0}
    assert strategy == DistributedStrategy()
    assert not hasattr(strategy, "nothing")


def test_order_never_matters() -> None:
    """a_sync before or after its settings, in any order with anything else, gives the same
    strategy.
    """
    steps: list[tuple[str, Any]] = [
        ("a_sync", True),
        ("a_sync_configs", {"k_steps": 100}),
        ("amp", True),
    ]
    found = []
    for order in itertools.permutations(steps):
        strategy = DistributedStrategy()
        for name, value in order:
            setattr(strategy, name, value)
        found.append(strategy)

    assert all(strategy == found[0] for strategy in found)
    assert found[0].a_sync_configs["k_steps"] == 100


def test_assignment_replaces() -> None:
    """Lists do not grow, and keys that the new dict does not name return to their defaults."""
    strategy = DistributedStrategy()
    strategy.recompute_configs = {"checkpoints": ["a"], "enable_offload": True}
    strategy.recompute_configs = {"checkpoints": ["b"]}

    assert strategy.recompute_configs == {
        "checkpoints": ["b"],
        "enable_offload": False,
        "checkpoint_shape": [],
    }
    strategy.recompute_configs = {}
    assert strategy == DistributedStrategy()


def test_the_callers_dict_is_neither_changed_nor_kept() -> None:
    """What is assigned stays the caller's."""
    strategy, settings = (
        DistributedStrategy(),
        {"order": ["dp", "pp", "sharding", "sep", "mp"], "mp_degree": 2},
    )
    before = copy.deepcopy(settings)
    strategy.hybrid_configs = settings

    assert settings == before
    settings["mp_degree"] = 4
    assert strategy.hybrid_configs["mp_degree"] == 2


def test_what_is_read_refuses_changes() -> None:
    """A change to a copy would be lost, so it raises; a copy of the copy is the user's own, and can
    be assigned.
    """
    strategy = DistributedStrategy()
    strategy.recompute_configs = {"checkpoints": ["a"]}
    with pytest.raises(TypeError, match="assign a whole dict"):
        strategy.recompute_configs["enable_offload"] = True
    with pytest.raises(TypeError, match="assign a whole dict"):
        strategy.recompute_configs["checkpoints"].append("b")

    mine = copy.deepcopy(strategy.recompute_configs)
    mine["checkpoints"].append("b")
    strategy.recompute_configs = mine
    assert strategy.recompute_configs["checkpoints"] == ["a", "b"]
    with pytest.raises(AttributeError, match="assign its default"):
        del strategy.amp


ALIASES = [
    ("a_sync_configs", {"k_step": 7}, "k_steps", 7),
    ("pipeline_configs", {"micro_batch": 12}, "accumulate_steps", 12),
    (
        "pipeline_configs",
        {"micro_batch": 12, "accumulate_steps": 12, "micro_batch_size": 3},
        "accumulate_steps",
        12,
    ),
    ("gradient_merge_configs", {"avg": "sum"}, "avg", False),
    ("gradient_merge_configs", {"avg": "avg"}, "avg", True),
    ("lars_configs", {"exclude_from_weight_decay": None}, "exclude_from_weight_decay", []),
]


@pytest.mark.parametrize(("name", "settings", "key", "value"), ALIASES)
def test_both_spellings_of_the_documentation_mean_one_thing(
    name: str, settings: dict[str, Any], key: str, value: Any
) -> None:
    """What the two generations of pages spell differently is one key."""
    strategy = DistributedStrategy()
    setattr(strategy, name, settings)

    assert getattr(strategy, name)[key] == value


def test_two_spellings_that_contradict_each_other_raise() -> None:
    """One key given twice with different values is an error that names both spellings."""
    with pytest.raises(ValueError, match="'k_step' and 'k_steps' mean one thing, and got 1 and 2"):
        DistributedStrategy().a_sync_configs = {"k_step": 1, "k_steps": 2}


def test_a_strategy_prints_what_differs_and_no_password() -> None:
    """str() is the differences from the defaults, one a line; a password is never among them."""
    strategy = DistributedStrategy()
    assert str(strategy) == "DistributedStrategy: all defaults"

    strategy.a_sync_configs = {"k_steps": 100}
    strategy.recompute_configs = {"checkpoints": ["a"]}
    strategy.fs_client_param = {"passwd": "sesame"}

    assert str(strategy).splitlines() == [
        "DistributedStrategy: defaults, but",
        "  a_sync_configs.k_steps         100",
        "  fs_client_param.passwd         '***'",
        "  recompute_configs.checkpoints  ['a']",
    ]


def test_an_explicit_default_is_the_default() -> None:
    """A default that was assigned asks for nothing more than its absence; the order of patterns is
    part of the modes.
    """
    strategy, first, second = DistributedStrategy(), DistributedStrategy(), DistributedStrategy()
    strategy.a_sync = True
    strategy.dgc_configs = {"sparsity": [0.999]}
    first.a_sync_configs = {"modes": {"emb.*": "async", "*": "sync"}}
    second.a_sync_configs = {"modes": {"*": "sync", "emb.*": "async"}}

    assert strategy == DistributedStrategy() and strategy.unsupported(()) == []
    assert first != second
    assert list(first.a_sync_configs["modes"]) == ["emb.*", "*"]
    assert strategy != "amp"
    assert {"amp", "amp_configs", "save_to_prototxt"} <= set(dir(strategy))


def test_settings_are_read_as_attributes_too() -> None:
    """As those of a BuildStrategy; they are a copy, and refuse a change in this form, too."""
    strategy = DistributedStrategy()
    strategy.build_strategy = {"enable_inplace": True}
    assert strategy.build_strategy.enable_inplace is True
    assert strategy.execution_strategy.num_iteration_per_run == 1
    with pytest.raises(TypeError, match="this is a copy of the strategy's settings"):
        strategy.build_strategy.enable_inplace = False
    with pytest.raises(AttributeError, match="expected one of .*enable_inplace.*, got 'enable'"):
        strategy.build_strategy.enable  # noqa: B018  # it is looked up
