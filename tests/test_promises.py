"""What the design promises, row by row, and where each promise is tested; and the promises that
have no better place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from trainer import fleet
from transpiler import DistributedStrategy

TESTS = Path(__file__).parent
Servers = Callable[[int], str]


KEPT = {
    "slicing": "test_slicing",
    "dispatch": "test_round_robin_has_one_cursor_over_all_blocks",
    "trainer program, sync": "test_trainer_program_sync",
    "trainer program, async": "test_trainer_program_async_is_the_same_without_barriers",
    "trainer program, runtime_split_send_recv": "test_runtime_split_send_recv",
    "trainer program, half-async": "test_half_async_programs",
    "trainer program, geo": "test_geo_programs",
    "trainer startup program": "test_trainer_startup_program",
    "pserver program, sync": "test_pserver_program_sync",
    "pserver program, async": "test_pserver_program_async",
    "pserver program, delay compensation": "test_delay_compensation_programs",
    "a server that owns nothing": "test_a_server_that_owns_nothing_has_one_empty_block",
    "merging in the queues": "test_max_merge_var_num_merges_steps",
    "sum or mean": "test_the_merge_rule_follows_the_update_rule",
    "waiting when the queue is empty": "test_send_wait_times_0_does_not_wait_to_merge",
    "a full queue blocks": "test_send_queue_size_blocks_the_step_that_finds_no_slot",
    "one slot equals plain torch": "test_async_with_one_trainer_equals_plain_torch",
    "half-async": "test_half_async_averages_its_own_steps",
    "geo": "test_a_held_server_takes_a_geo_delta_while_training_goes_on",
    "diloco": "test_two_trainers_diloco_go_on_from_the_same_point",
    "parameters arrive between steps": (
        "test_parameters_arrive_between_steps_and_never_under_a_running_backward"
    ),
}

DONE_BETTER = {
    "the argument sync_mode decides": (
        "test_sync_mode_false_on_a_default_configuration_is_async_on_both_sides"
    ),
    "a contradiction raises": "test_a_contradiction_between_configuration_and_argument_raises",
    "1 x 1": "test_one_trainer_and_one_server_agree_on_names",
    "1 x N and N x 1": "test_one_trainer_on_many_servers_and_many_trainers_on_one",
    "every element-wise optimizer": "test_every_optimizer_equals_plain_torch_on_the_program_path",
    "any other raises": "test_what_cannot_be_sliced_raises_and_says_why",
    "the rule that was asked for": "test_the_rule_that_was_asked_for_runs",
    "clipping, one trainer": "test_gradient_clipping_equals_plain_torch_with_one_trainer",
    "clipping, several": "test_several_trainers_equal_the_concatenated_batch",
    "the schedule": "test_the_schedule_that_runs_is_the_users",
    "trainers that disagree": "test_trainers_that_disagree_on_the_rate_are_told_group_and_key",
    "divided by those that committed": (
        "test_a_trainer_that_finishes_early_neither_stalls_nor_distorts_the_others"
    ),
    "absent on one trainer": "test_a_gradient_that_one_trainer_lacks_counts_as_zero",
    "absent on all": "test_parameters_without_gradient_are_skipped",
    "the merge rule is printed": "test_every_lane_is_printed_with_its_mode_merge_rule_and_bounds",
    "stable hashing": "test_hashing_is_stable_across_processes",
    "size-balanced": "test_size_balanced_balances_bytes",
    "alone, with one log line": "test_alone_the_same_script_trains_single_node_with_one_log_line",
    "a missing variable": "test_a_required_variable_that_is_missing_or_empty_is_named",
    "a deadline for a server": "test_an_unreachable_server_is_named_within_the_start_deadline",
    "slowness is no silence": (
        "test_a_trainer_that_evaluates_for_longer_than_the_deadline_stops_nobody"
    ),
    "an exception says who": "test_everybody_learns_how_a_job_ends",
    "over 2 GiB": "test_a_parameter_of_3_gb_passes",
    "exactly once": "test_a_step_is_applied_once_however_often_it_is_sent",
    "slices of the module's values": "test_slices_start_from_the_modules_own_values",
    "checkpoints, any number of servers": (
        "test_a_saved_job_resumes_to_the_bit_on_any_number_of_servers"
    ),
    "checkpoints, rate and schedule": "test_a_saved_job_goes_on_at_its_rate_and_schedule",
    "checkpoints, atomic": (
        "test_a_save_that_stops_anywhere_leaves_the_old_checkpoint_or_the_new_one"
    ),
    "one call exports": "test_one_call_exports_a_plain_state_dict",
}


@pytest.mark.parametrize("promise", [*KEPT, *DONE_BETTER])
def test_every_promise_has_a_test(promise: str) -> None:
    """Each row names a test that exists."""
    name = {**KEPT, **DONE_BETTER}[promise]

    assert [
        file.name for file in TESTS.rglob("test_*.py") if f"\ndef {name}(" in file.read_text()
    ] != []


def net(seed: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 2))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 2, (8,), generator=generator))
        for _ in range(count)
    ]


def joined(
    endpoints: str, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> Any:
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(",")))
    fleet.distributed_model(model)
    return fleet.distributed_optimizer(optimizer, **options)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, scheduler: Any = None
) -> None:
    for x, y in data:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


def assert_equal(mine: nn.Module, reference: nn.Module) -> None:
    for (name, one), other in zip(
        mine.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name


def test_parameters_arrive_between_steps_and_never_under_a_running_backward(
    servers: Servers,
) -> None:
    """What a server sends while backward runs waits: the parameters that forward saw are those that
    backward sees.
    """
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"send_queue_size": 4}
    model = nn.Linear(6, 2)
    optimizer = joined(
        servers(1), model, torch.optim.SGD(model.parameters(), lr=0.5), strategy=strategy
    )
    before = fleet.metrics()["bytes_in"]
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

    out = model(torch.ones(3, 6))
    seen = model.weight.detach().clone()
    beside: list[bool] = []

    def answered(_: torch.Tensor) -> None:
        patience = threading.Event()
        tries = 0
        while fleet.metrics()["bytes_in"] == before and tries < 1000:
            patience.wait(0.01)
            tries += 1
        beside.append(fleet.metrics()["bytes_in"] > before and torch.equal(model.weight, seen))

    out.register_hook(answered)
    out.sum().backward()
    assert beside == [True]
    optimizer.step()
    optimizer.flush()

    assert not torch.equal(model.weight, seen)


def test_one_trainer_on_many_servers_and_many_trainers_on_one(servers: Servers) -> None:
    """1 x 3 equals plain torch to the bit; in 3 x 1 the three are equal to one another and within
    rounding of it.
    """
    from concurrent.futures import ThreadPoolExecutor

    from trainer import Executor
    from transpiler import DistributeTranspiler, capture

    def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    def plain_net() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 2))

    def job(trainers: int, count: int) -> list[nn.Module]:
        models, transpilers = (
            [plain_net() for _ in range(trainers)],
            [DistributeTranspiler() for _ in range(trainers)],
        )
        for number, (model, transpiler) in enumerate(zip(models, transpilers, strict=True)):
            program, startup = capture(
                model, step, torch.optim.SGD(model.parameters(), lr=0.1), batches(1)[0]
            )
            transpiler.transpile(number, program, servers(count), trainers, startup_program=startup)

        def run(transpiler: DistributeTranspiler) -> None:
            torch.set_num_threads(1)
            with Executor() as executor:
                executor.run(transpiler.get_startup_program())
                for batch in batches(5):
                    executor.run(transpiler.get_trainer_program(), feed=batch)

        with ThreadPoolExecutor(trainers) as pool:
            for future in [pool.submit(run, transpiler) for transpiler in transpilers]:
                future.result(timeout=60)
        return models

    reference = plain_net()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), batches(5))
    assert_equal(job(1, 3)[0], reference)
    first, *others = job(3, 1)

    for other in others:
        assert_equal(other, first)
    for mine, theirs in zip(first.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("schedule", ["one_cycle", "step"])
def test_a_saved_job_goes_on_at_its_rate_and_schedule(
    servers: Servers, tmp_path: Path, schedule: str
) -> None:
    """The checkpoint holds every group's present numbers; with the scheduler's own state the job
    goes on to the bit.
    """

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        if schedule == "step":
            return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=10)

    reference = net()
    plain = torch.optim.Adam(reference.parameters(), lr=0.01)
    train(reference, plain, batches(8), scheduler(plain))

    first = net()
    optimizer = joined(servers(2), first, torch.optim.Adam(first.parameters(), lr=0.01))
    before = scheduler(optimizer)
    train(first, optimizer, batches(8)[:4], before)
    fleet.save(str(tmp_path / "saved"))
    hparams = {key: optimizer.param_groups[0][key] for key in ("lr", "betas")}
    fleet.finish()

    second = net(seed=99)
    optimizer = joined(servers(3), second, torch.optim.Adam(second.parameters(), lr=0.01))
    after = scheduler(optimizer)
    fleet.load(str(tmp_path / "saved"))
    assert {key: optimizer.param_groups[0][key] for key in ("lr", "betas")} == hparams
    after.load_state_dict(before.state_dict())
    train(second, optimizer, batches(8)[4:], after)

    assert_equal(second, reference)


@pytest.mark.parametrize("file", ["model.safetensors", "model.pt"])
def test_one_call_exports_a_plain_state_dict(servers: Servers, tmp_path: Path, file: str) -> None:
    """torch (or safetensors) alone loads it: the last step is in it, tied names are, the cluster is
    not.
    """

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.norm, self.head = (
                nn.Embedding(9, 4),
                nn.BatchNorm1d(4),
                nn.Linear(4, 9, bias=False),
            )
            self.head.weight = self.embedding.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.embedding(x)))

    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"send_queue_size": 4}  # steps are on their way when export is called
    model, path = Tied(), tmp_path / "out" / file
    optimizer = joined(
        servers(2), model, torch.optim.SGD(model.parameters(), lr=0.5), strategy=strategy
    )
    ids = torch.arange(8)
    train(model, optimizer, [(ids, ids)] * 3)
    fleet.export(str(path))
    fleet.export(str(path))

    held = (
        safetensors.torch.load_file(path)
        if file.endswith(".safetensors")
        else torch.load(path, weights_only=True)
    )
    fresh = Tied()
    fresh.load_state_dict(held)
    assert held.keys() == model.state_dict().keys()
    assert_equal(fresh, model)
    assert [left.name for left in path.parent.iterdir()] == [file]


def test_export_alone_and_before_its_turn(tmp_path: Path) -> None:
    """Without a cluster it writes the model as it is; before a model is registered it says what is
    missing.
    """
    fleet.init()
    with pytest.raises(RuntimeError, match="distributed_model"):
        fleet.export(str(tmp_path / "x.pt"))
    first, second = (
        fleet.distributed_model(nn.Linear(2, 1)),
        fleet.distributed_model(nn.Linear(3, 1)),
    )
    fleet.export(str(tmp_path / "x.pt"))

    held = torch.load(tmp_path / "x.pt", weights_only=True)
    assert torch.equal(held["model0.weight"], first.weight) and torch.equal(
        held["model1.weight"], second.weight
    )
