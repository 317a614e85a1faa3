"""From a strategy to lanes: every row of the table, every contradiction."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.every_mode import with_every_mode
from transpiler import DistributedStrategy
from transpiler.ir.rules import Rule, state_of
from transpiler.plan.lanes import check_lane, describe
from transpiler.plan.modes import MODES
from transpiler.plan.plan import Lane
from transpiler.plan.planner import plan_parameters
from transpiler.strategy.from_strategy import lanes_of
from transpiler.strategy.strategy import CONFIGS, every_setting, supported_with_servers

SGD = Rule("sgd", {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0})
ADAM = Rule("adam", {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})
NESTEROV = {"type": "nesterov", "lr": 0.7, "momentum": 0.9}


def strategy(a_sync: bool | None = None, **settings: Any) -> DistributedStrategy:
    """A strategy with these keys of a_sync_configs."""
    made = DistributedStrategy()
    made.a_sync_configs = settings
    if a_sync is not None:
        made.a_sync = a_sync
    return made


def lanes(made: DistributedStrategy | None, *rules: Rule) -> tuple[Lane, ...]:
    """The lanes of two parameters, fc.weight and emb.weight, of the groups of these rules (one for
    both: sgd).
    """
    groups = [0, 0] if len(rules) < 2 else [0, 1]
    named = [
        (name, (4,), "float32", group)
        for name, group in zip(("fc.weight", "emb.weight"), groups, strict=True)
    ]
    return plan_parameters(named, rules or [SGD], lanes=lanes_of(made), trainers=2, servers=1).lanes


@pytest.mark.parametrize(
    ("made", "lane"),
    [
        (None, Lane("sync")),
        (strategy(False), Lane("sync")),
        (strategy(), Lane("async", "sum", send_queue_size=16)),
        (strategy(True), Lane("async", "sum", send_queue_size=16)),
        (strategy(half_async=True, max_merge_var_num=3), Lane("half_async", "mean", 3)),
        (strategy(staleness=2), Lane("async", "sum", send_queue_size=16, staleness=2)),
        (strategy(staleness=0), Lane("sync")),
        (strategy(dc_asgd=0.04), Lane("async", "sum", send_queue_size=16, dc_asgd=0.04)),
        (strategy(k_steps=100), Lane("geo", send_queue_size=16, k_steps=100)),
        (
            strategy(k_step=100, thread_pool_size=2),
            Lane("geo", send_queue_size=16, thread_pool_size=2, k_steps=100),
        ),
    ],
)
def test_every_row_of_the_table(made: DistributedStrategy | None, lane: Lane) -> None:
    """A strategy has one mode for all parameters, with its settings and nothing else."""
    assert lanes(made) == (lane,)


def test_the_settings_of_the_queue_reach_the_lane() -> None:
    """Every key of the queues is a field of the asynchronous lane."""
    settings = {
        "max_merge_var_num": 4,
        "send_queue_size": 2,
        "send_wait_times": 0,
        "thread_pool_size": 3,
        "independent_recv_thread": True,
        "min_send_grad_num_before_recv": 5,
        "merge": "mean",
        "staleness": 7,
        "dc_asgd": 0.5,
    }
    (lane,) = lanes(strategy(**settings))
    assert {name: getattr(lane, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"type": "sgd"}, Rule("sgd", {**SGD.hparams, "lr": 1.0}, {"nesterov": False})),
        (
            {"type": "sgd", "momentum": 0.5},
            Rule("momentum", {**SGD.hparams, "lr": 1.0, "momentum": 0.5}, {"nesterov": False}),
        ),
        (
            NESTEROV,
            Rule("momentum", {**SGD.hparams, "lr": 0.7, "momentum": 0.9}, {"nesterov": True}),
        ),
        ({"type": "adam", "lr": 0.1}, Rule("adam", ADAM.hparams, {"amsgrad": False})),
    ],
)
def test_outer_optimizers(settings: dict[str, Any], rule: Rule) -> None:
    """SGD, Nesterov and Adam are rules that torch takes; every k steps with one of them is
    DiLoCo.
    """
    (lane,) = lanes(strategy(k_steps=10, outer_optimizer=settings))
    assert (lane.mode, lane.k_steps, lane.outer) == ("diloco", 10, rule)
    assert lane.outer is not None and ("exp_avg" in state_of(lane.outer)) == (
        settings["type"] == "adam"
    )


def test_modes_by_name() -> None:
    """The first pattern that a parameter's name matches decides; common settings go to the lanes
    whose modes read them.
    """
    made = strategy(modes={"emb.*": "async", "*": "sync"}, send_queue_size=3)
    assert lanes(made) == (Lane("sync"), Lane("async", "sum", send_queue_size=3))
    own = strategy(False, modes={"emb.*": "k_steps"}, k_steps=5)
    assert lanes(own) == (Lane("sync"), Lane("geo", send_queue_size=16, k_steps=5))
    three = strategy(modes={"*.weight": "half_async", "*": "sync"})
    assert lanes(three) == (Lane("half_async"),)
    outer = strategy(modes={"emb.*": "geo", "*": "k_step"}, k_steps=5, outer_optimizer=NESTEROV)
    assert [lane.mode for lane in lanes(outer)] == ["diloco", "geo"]
    named = [("a", (2,), "float32", 0), ("held", (2,), "float32", None), ("b", (2,), "float32", 0)]
    choice = lanes_of(strategy(modes={"a": "sync", "*": "async"}))
    plan = plan_parameters(named, [SGD], lanes=choice, trainers=1, servers=1)
    assert {p.name: p.lane for p in plan.placements} == {
        "a": 0,
        "b": 1,
        "held": 0,
    } and plan.mode == "mixed"
    assert plan.fingerprint() != plan_parameters(named, [SGD], trainers=1, servers=1).fingerprint()


def test_a_pattern_without_parameters_raises() -> None:
    """A pattern that decides for nothing is a mistake, said with the names that there are; only "*"
    may be left over.
    """
    with pytest.raises(ValueError, match=r"got 'embd.\*'; parameters are fc.weight, emb.weight"):
        lanes(strategy(modes={"embd.*": "async", "*": "sync"}))
    with pytest.raises(ValueError, match=r"got 'emb.\*'"):
        lanes(strategy(modes={"*.weight": "async", "emb.*": "half_async"}))


def test_the_merge_rule_follows_the_update_rule() -> None:
    """Sums for plain and momentum SGD, means for the others; where steps merge and groups differ, a
    lane for each; merge wins.
    """
    assert [lane.merge for lane in lanes(strategy(max_merge_var_num=2), SGD)] == ["sum"]
    assert [lane.merge for lane in lanes(strategy(max_merge_var_num=2), ADAM)] == ["mean"]
    assert [lane.merge for lane in lanes(strategy(max_merge_var_num=2), ADAM, SGD)] == [
        "mean",
        "sum",
    ]
    assert [lane.merge for lane in lanes(strategy(), ADAM, SGD)] == ["mean"]
    assert [
        lane.merge for lane in lanes(strategy(max_merge_var_num=2, merge="sum"), ADAM, SGD)
    ] == ["sum"]
    assert [lane.merge for lane in lanes(strategy(max_merge_var_num=2, half_async=True), SGD)] == [
        "mean"
    ]


CONTRADICTIONS: list[tuple[DistributedStrategy, str, str]] = [
    (strategy(half_async=True, k_steps=3), "k_steps=3", "half_async=True"),
    (strategy(half_async=True, staleness=3), "staleness=3", "half_async=True"),
    (strategy(half_async=True, dc_asgd=0.1), "dc_asgd=0.1", "half_async=True"),
    (strategy(half_async=True, send_queue_size=3), "send_queue_size=3", "half_async=True"),
    (strategy(k_steps=3, staleness=1), "staleness=1", "k_steps=3"),
    (strategy(k_steps=3, staleness=0), "staleness=0", "k_steps=3"),
    (strategy(k_steps=3, dc_asgd=0.1), "dc_asgd=0.1", "k_steps=3"),
    (strategy(k_steps=3, max_merge_var_num=2), "max_merge_var_num=2", "k_steps=3"),
    (strategy(outer_optimizer=NESTEROV), "outer_optimizer=", "k_steps=0"),
    (strategy(False, outer_optimizer=NESTEROV, k_steps=3), "k_steps=3", "a_sync=False"),
    (strategy(False, staleness=3), "staleness=3", "a_sync=False"),
    (strategy(False, half_async=True), "half_async=True", "a_sync=False"),
    (strategy(False, merge="mean"), "merge='mean'", "a_sync=False"),
    (
        strategy(False, min_send_grad_num_before_recv=2),
        "min_send_grad_num_before_recv=2",
        "a_sync=False",
    ),
    (strategy(staleness=0, max_merge_var_num=2), "max_merge_var_num=2", "staleness=0"),
    (strategy(staleness=0, dc_asgd=0.1), "dc_asgd=0.1", "staleness=0"),
    (strategy(modes={"*": "async"}, k_steps=3), "k_steps=3", "modes="),
    (strategy(modes={"*": "sync"}, half_async=True), "half_async=True", "modes="),
    (strategy(modes={"a": "geo"}), "modes['a']='geo'", "k_steps"),
    (strategy(modes={"a": "diloco"}, k_steps=3), "modes['a']='diloco'", "outer_optimizer"),
    (strategy(k_steps=3, outer_optimizer={"type": "nesterov"}), "type='nesterov'", "momentum=0"),
    (
        strategy(k_steps=3, outer_optimizer={"type": "adam", "momentum": 0.9}),
        "type='adam'",
        "momentum=0.9",
    ),
    (strategy(k_steps=3, overlap=True), "overlap=True", "k_steps=3"),
    (
        strategy(a_sync=False, runtime_split_send_recv=True),
        "runtime_split_send_recv=True",
        "a_sync=False",
    ),
    (
        strategy(k_steps=3, runtime_split_send_recv=True),
        "runtime_split_send_recv=True",
        "k_steps=3",
    ),
]


@pytest.mark.parametrize("case", CONTRADICTIONS, ids=lambda case: f"{case[1]} and {case[2]}")
def test_a_key_without_effect_raises_and_so_do_keys_that_contradict(
    case: tuple[DistributedStrategy, str, str],
) -> None:
    """The message names both: the key, and what decides the mode."""
    made, key, other = case
    with pytest.raises(ValueError) as raised:
        lanes_of(made)
    assert key in str(raised.value) and other in str(raised.value)


def test_supported_names_are_names_of_a_strategy() -> None:
    """Everything that has an effect exists, and all keys of a_sync_configs have one."""
    keys = {f"a_sync_configs.{key}" for key in CONFIGS["a_sync_configs"]}
    supported = supported_with_servers()
    assert keys <= supported
    assert supported <= {name for name, _ in every_setting()} and "a_sync" in supported
    assert strategy(launch_barrier=False, k_steps=4).unsupported(supported) == []


OUTER = Rule("sgd", {**SGD.hparams}, {})


@pytest.mark.parametrize(
    ("lane", "words"),
    [
        (Lane("turbo"), "mode"),
        (Lane("async", "median"), "merge"),
        (Lane("async", max_merge_var_num=0), "max_merge_var_num: expected a whole number of 1"),
        (Lane("async", send_queue_size=0), "send_queue_size: expected a whole number of 1"),
        (Lane("async", thread_pool_size=0), "thread_pool_size: expected a whole number of 1"),
        (Lane("async", send_wait_times=-1), "send_wait_times: expected a whole number of 0"),
        (
            Lane("async", min_send_grad_num_before_recv=0),
            "min_send_grad_num_before_recv: expected a whole number of 1",
        ),
        (Lane("async", staleness=0), "staleness: expected a whole number of 1 or more"),
        (Lane("async", dc_asgd=float("nan")), "dc_asgd"),
        (Lane("async", k_steps=2), "k_steps: expected 0, because async mode does not read it"),
        (Lane("sync", staleness=2), "staleness: .* sync mode does not read it"),
        (Lane("half_async", dc_asgd=1.0), "dc_asgd: .* half_async mode does not read it"),
        (Lane("geo"), "k_steps: expected 1"),
        (Lane("geo", k_steps=2, outer=OUTER), "outer: .* geo mode does not read it"),
        (Lane("diloco", k_steps=2), "outer: expected an update rule"),
        (Lane("diloco", k_steps=2, outer=Rule("exec", {})), "outer: rule 'exec'"),
    ],
)
def test_a_lane_that_makes_no_sense_is_refused(lane: Lane, words: str) -> None:
    """Out of range, contradictory, or set where the mode does not read it: named."""
    with pytest.raises(ValueError, match=words):
        check_lane(lane)


@pytest.mark.parametrize(
    ("lane", "text"),
    [
        (Lane("sync"), "mean over trainers"),
        (Lane("async"), "each gradient as it comes, each waits for its own result"),
        (Lane("async", send_queue_size=16), "each gradient as it comes, at most 16 on the way"),
        (
            Lane(
                "async",
                "sum",
                4,
                2,
                send_wait_times=0,
                staleness=3,
                dc_asgd=0.5,
                thread_pool_size=2,
            ),
            "sum of up to 4 steps, at most 2 on the way, 0 waits for a further one, at most 3 "
            "steps ahead of the slowest, "
            "delay compensation 0.5, to 2 servers at a time",
        ),
        (
            Lane("async", independent_recv_thread=True, min_send_grad_num_before_recv=3),
            "each gradient as it comes, each waits for its own result, a receiving thread of its "
            "own, received after 3 messages",
        ),
        (
            Lane("async", staleness=1),
            "each gradient as it comes, each waits for its own result, at most 1 step ahead of the "
            "slowest",
        ),
        (Lane("half_async", "mean", 3), "mean of 3 own steps, waits for its own result"),
        (Lane("geo", k_steps=100), "every 100 steps what changed, divided by 2, is added"),
        (
            Lane(
                "diloco",
                k_steps=1,
                outer=Rule(
                    "momentum", {**SGD.hparams, "lr": 0.7, "momentum": 0.9}, {"nesterov": True}
                ),
            ),
            "every step the mean of what changed is the gradient of momentum(lr=0.7, "
            "momentum=0.9, nesterov=True)",
        ),
    ],
)
def test_a_lane_in_words(lane: Lane, text: str) -> None:
    """The merge rule and every bound stand in the line that the plan prints."""
    check_lane(lane)
    assert describe(lane, 2) == text


def test_every_mode_is_described() -> None:
    """There is a line for each mode."""
    made = {"geo": {"k_steps": 3}, "diloco": {"k_steps": 3, "outer": OUTER}}
    assert len({describe(Lane(mode, **made.get(mode, {})), 3) for mode in MODES}) == len(MODES)


@pytest.mark.parametrize("name", MODES)
def test_the_example_of_a_mode_asks_for_it(name: str) -> None:
    """The matrices of tests have a new mode by it."""
    assert {each.mode for each in lanes(strategy(**MODES[name].example), SGD)} == {name}


def test_a_matrix_has_every_mode() -> None:
    """Those that it does not choose, a new one among them, by their examples."""
    new = replace(MODES["geo"], name="new_one", example={"k_steps": 7})
    chosen: dict[str, dict[str, Any]] = {"half-async": {}, "sync, clipped": {}}
    found = with_every_mode(chosen, dict, {**MODES, "new_one": new})
    assert [*found] == ["half-async", "sync, clipped", "sync", "async", "geo", "diloco", "new_one"]
    assert found["new_one"] == {"k_steps": 7}
