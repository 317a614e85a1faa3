"""Programs without servers, run for real: equal to a single node, and on their way while backward
runs.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.collective_trainers import (
    GRAD,
    LOCAL,
    NCCL2,
    ROWS,
    Trainer,
    batches,
    fine,
    joined,
    net,
    ports,
    step,
    together,
)
from trainer import Executor, ParallelExecutor
from trainer.collective.process_groups import ProcessGroups
from transpiler.collective import collective_program, collective_startup, deployment_of
from transpiler.plan.plan import Collective

# ---- equal to a single node ----


@pytest.mark.parametrize(
    ("trainers", "settings", "clip"),
    [
        (2, GRAD, False),
        (2, {**GRAD, "nccl_comm_num": 2}, True),
        (4, {**GRAD, **ROWS}, True),
        (2, LOCAL, False),
        (2, {**NCCL2, "nccl_comm_num": 2}, True),
        (4, {**NCCL2, **ROWS, "nccl_comm_num": 2}, False),
    ],
)
def test_equal_to_a_single_node_on_the_concatenated_batch(
    trainers: int, settings: dict[str, Any], clip: bool
) -> None:
    """Parameters after five steps with a schedule are those of plain training on all samples,
    within 1e-6, and the same bits on all trainers, whatever values those but trainer 0 began
    with.
    """
    data, endpoints = batches(trainers), ports(trainers)
    expected = Trainer([], 0, {}, clip=clip).train(joined(data))
    team = [Trainer(endpoints, rank, settings, clip=clip) for rank in range(trainers)]
    parallel = settings["mode"] == "nccl2"
    results = fine(
        together(
            trainers,
            lambda r: team[r].train([row[r] for row in data], (trainers, r) if parallel else None),
        )
    )
    for ours, theirs in zip(results[0], expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    for other in results[1:]:
        assert all(map(torch.equal, other, results[0]))


def test_local_sgd_averages_after_every_kth_step() -> None:
    """Two trainers step by themselves; after steps 3 and 6 both have the mean of their parameters,
    and the seventh step is each one's own.
    """
    data, endpoints = batches(2, 7), ports(2)
    team = [Trainer(endpoints, rank, {**LOCAL, "k_steps": 3}) for rank in range(2)]
    results = fine(together(2, lambda rank: team[rank].train([row[rank] for row in data])))
    alone = [Trainer([], 0, {}) for _ in range(2)]
    with Executor() as executor:
        for number, row in enumerate(data, start=1):
            for trainer, batch in zip(alone, row, strict=True):
                executor.run(trainer.main, feed=batch)
                trainer.schedule.step()
            pairs = zip(*(trainer.model.parameters() for trainer in alone), strict=True)
            for one, other in pairs if number % 3 == 0 else ():
                mean = (one.data + other.data) * 0.5
                one.data.copy_(mean)
                other.data.copy_(mean)

    for ours, trainer in zip(results, alone, strict=True):
        for mine, theirs in zip(ours, trainer.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
    assert not torch.equal(results[0][0], results[1][0])
    text = str(team[0].main)
    assert text.startswith("trainer 0 of 2, local_sgd, 1 ring, every 3 steps")
    assert "c_allreduce_sum(0.weight, ring 0, bucket 0, every 3 steps)" in text
    assert "scale(0.weight@SUM, 0.5, 3)" in text


@pytest.mark.parametrize(
    "settings", [GRAD, LOCAL, {**LOCAL, "k_steps": 2}, NCCL2, {**GRAD, "nccl_comm_num": 2}]
)
def test_one_trainer_is_a_single_node_to_the_bit(settings: dict[str, Any]) -> None:
    """A world of one goes the same way, with clipping and a schedule, and gives the same bits."""
    data = [row[0] for row in batches(1)]
    expected = Trainer([], 0, {}, clip=True).train(data)
    trainer = Trainer(ports(1), 0, settings, clip=True)
    assert all(
        map(
            torch.equal,
            trainer.train(data, (1, 0) if settings["mode"] == "nccl2" else None),
            expected,
        )
    )


def test_what_is_fetched() -> None:
    """The loss is the trainer's own, a gradient the mean over trainers; the transport is gloo."""
    data, endpoints = batches(2, 1), ports(2)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(2)]

    def act(rank: int) -> Any:
        with Executor() as executor:
            executor.run(team[rank].startup)
            values = executor.run(
                team[rank].main, feed=data[0][rank], fetch_list=["loss", "0.weight@GRAD"]
            )
            return executor.transport, *values

    results = fine(together(2, act))
    single = Trainer([], 0, {})
    with Executor() as executor:
        losses = [float(step(net(), *batch).detach()) for batch in data[0]]
        (grad,) = executor.run(single.main, feed=joined(data)[0], fetch_list=["0.weight@GRAD"])
    for (transport, loss, mean), own in zip(results, losses, strict=True):
        assert transport == "gloo" and float(loss) == own
        torch.testing.assert_close(mean, grad, rtol=0, atol=1e-6)


def test_an_nccl2_program_in_a_plain_executor_trains_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It gives the bits of single-node training on this trainer's batches, and the log says who
    would average.
    """
    data = [row[0] for row in batches(1)]
    trainer, expected = Trainer(ports(2), 0, NCCL2), Trainer([], 0, {}).train(data)
    with caplog.at_level(logging.WARNING), Executor() as executor:
        for batch in data:
            executor.run(trainer.main, feed=batch)
            trainer.schedule.step()
    assert all(map(torch.equal, trainer.model.parameters(), expected))
    assert "ParallelExecutor averages gradients" in caplog.text


# ---- on their way while backward runs ----


class _Journal(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes every aten op of this thread."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._notes.append(str(func))
        return func(*args, **(kwargs or {}))


def test_sums_are_on_their_way_while_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's sums start before the compute of the layer before it, and none is waited for before
    backward ends.
    """
    notes: list[str] = []
    begin, wait = ProcessGroups.begin, ProcessGroups.wait

    def noted_begin(world: ProcessGroups, operation: Any, what: str) -> Any:
        if world.rank == 0 and "allreduce" in what:
            notes.append(f"start {what}")
        return begin(world, operation, what)

    def noted_wait(world: ProcessGroups, work: Any, what: str, *more: Any) -> None:
        if world.rank == 0 and "allreduce" in what:
            notes.append(f"wait {what}")
        wait(world, work, what, *more)

    monkeypatch.setattr(ProcessGroups, "begin", noted_begin)
    monkeypatch.setattr(ProcessGroups, "wait", noted_wait)
    endpoints, data = ports(2), batches(2, 1)
    team = [Trainer([], rank, {}) for rank in range(2)]

    def act(rank: int) -> None:
        deployment = deployment_of(
            team[rank].main, Collective("grad_allreduce", bucket_bytes=8), endpoints, rank
        )
        with Executor() as executor:
            executor.run(collective_startup(team[rank].startup, deployment))
            main = collective_program(team[rank].main, deployment)
            with _Journal(notes if rank == 0 else []):
                executor.run(main, feed=data[0][rank])

    fine(together(2, act))
    starts = [index for index, note in enumerate(notes) if note.startswith("start")]
    waits = [index for index, note in enumerate(notes) if note.startswith("wait")]
    products = [index for index, note in enumerate(notes) if note.startswith("aten.mm")]
    assert len(starts) == len(waits) == 6  # three layers, weight and bias
    assert all(
        any(starts[last] < product < starts[last + 1] for product in products) for last in (1, 3)
    )
    assert max(products) < min(waits) and max(starts) < min(waits)
    # the updates
    assert min(waits) < min(
        index for index, note in enumerate(notes) if note.startswith("aten.add_")
    )


def test_every_ring_has_its_process_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rings in rows of two are six process groups on a row's first trainer, and four on the
    others.
    """
    found: dict[int, set[str]] = {}
    group = ProcessGroups.group

    def noted(world: ProcessGroups, name: str, ranks: Any, device: Any) -> Any:
        found.setdefault(world.rank, set()).add(f"{name} {list(ranks)}")
        return group(world, name, ranks, device)

    monkeypatch.setattr(ProcessGroups, "group", noted)
    endpoints = ports(4)
    team = [Trainer(endpoints, rank, {**GRAD, **ROWS, "nccl_comm_num": 2}) for rank in range(4)]
    fine(together(4, lambda rank: team[rank].train([])))
    all_four = {"NCCLID [0, 1, 2, 3]", "NCCLID_1 [0, 1, 2, 3]"}
    for rank, row in enumerate(([0, 1], [0, 1], [2, 3], [2, 3])):
        rows = {f"Hierarchical_inter_NCCLID_{ring} {row}" for ring in range(2)}
        heads = (
            {f"Hierarchical_exter_NCCLID_{ring} [0, 2]" for ring in range(2)}
            if rank in (0, 2)
            else set()
        )
        assert found[rank] == all_four | rows | heads


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("settings", [GRAD, NCCL2])
def test_one_trainer_on_a_gpu(settings: dict[str, Any]) -> None:
    """NCCL carries the sums of a world of one, and training equals that on the CPU within 1e-4.
    This proves streams and waits; communication needs several GPUs.
    """
    data = [row[0] for row in batches(1)]
    expected = Trainer([], 0, {}, clip=True).train(data)
    trainer = Trainer(ports(1), 0, settings, clip=True)
    with ParallelExecutor(True, "loss", trainer.main, 1, 0) as executor:
        for batch in data:
            executor.run(feed=batch)
            trainer.schedule.step()
        assert executor.transport == "nccl"
    for ours, theirs in zip(trainer.model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_two_trainers_on_two_gpus() -> None:
    """Sums by NCCL between two GPUs equal a single node on the concatenated batch within 1e-4."""
    data, endpoints = batches(2), ports(2)
    expected = Trainer([], 0, {}).train(joined(data))
    team = [Trainer(endpoints, rank, NCCL2) for rank in range(2)]

    def act(rank: int) -> None:
        with ParallelExecutor(True, "loss", team[rank].main, 2, rank) as executor:
            for row in data:
                executor.run(feed=row[rank])
                team[rank].schedule.step()

    fine(together(2, act))
    for ours, theirs in zip(team[1].model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach().cpu(), theirs, rtol=0, atol=1e-4)
