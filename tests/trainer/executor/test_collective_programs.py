"""Programs without servers, run for real: equal to a single node, on their way while backward runs,
and clear about failures.

Most tests run all trainers as threads of this process: process groups belong to an Executor, not to
the process.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pserver.errors import (
    FingerprintMismatch,
    JobFailed,
    Refused,
    TimedOut,
    TrainerLost,
    Unreachable,
)
from tests.trainer.executor.nccl2_example import STEPS, model_and_data
from tests.trainer.executor.nccl2_example import step as example_step
from trainer import Executor, ParallelExecutor
from trainer.collective.process_groups import ProcessGroups
from trainer.collective.rendezvous import connect_store, rendezvous
from trainer.role import Connection
from transpiler import (
    ClipGradByGlobalNorm,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    capture,
    program_guard,
)
from transpiler.collective import collective_program, collective_startup, deployment_of
from transpiler.ir.graph import Storage
from transpiler.plan.plan import Collective
from transpiler.program import Program

DEADLINE = 60.0
GRAD: dict[str, Any] = {"mode": "collective", "collective_mode": "grad_allreduce"}
LOCAL: dict[str, Any] = {"mode": "collective", "collective_mode": "local_sgd"}
NCCL2: dict[str, Any] = {"mode": "nccl2"}
ROWS: dict[str, Any] = {
    "use_hierarchical_allreduce": True,
    "hierarchical_allreduce_inter_nranks": 2,
}
Batch = tuple[torch.Tensor, torch.Tensor]


def ports(count: int) -> list[str]:
    """Endpoints that were free a moment ago."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"127.0.0.1:{each.getsockname()[1]}" for each in held]
    for each in held:
        each.close()
    return found


def together(count: int, act: Callable[[int], Any]) -> list[Any]:
    """What each of so many trainers gives, or the exception that it ends in."""
    with ThreadPoolExecutor(count) as pool:
        running: list[Future[Any]] = [pool.submit(act, rank) for rank in range(count)]
        return [each.exception(DEADLINE) or each.result() for each in running]


def fine(results: list[Any]) -> list[Any]:
    """The results, none of which is an exception."""
    for each in results:
        if isinstance(each, BaseException):
            raise each
    return results


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def batches(trainers: int, steps: int = 5) -> list[list[Batch]]:
    """By step and trainer."""
    generator = torch.Generator().manual_seed(1)
    return [
        [
            (torch.randn(4, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator))
            for _ in range(trainers)
        ]
        for _ in range(steps)
    ]


@cache
def captured(lr: float, clip: bool) -> tuple[Program, Program]:
    """The programs of such a trainer, captured once; each one binds them to its own model."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    with program_guard(Program(()), Program(())):
        return capture(
            model,
            step,
            optimizer,
            batches(1)[0][0],
            grad_clip=ClipGradByGlobalNorm(0.1) if clip else None,
        )


class Trainer:
    """One trainer's model, optimizer, schedule and programs; with no endpoints, the single
    node's.
    """

    def __init__(
        self,
        endpoints: list[str],
        rank: int,
        settings: dict[str, Any],
        lr: float = 0.1,
        clip: bool = False,
    ) -> None:
        self.model = net()
        if rank:  # trainer 0's values count
            for parameter in self.model.parameters():
                parameter.data.add_(1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        storage = Storage(dict(self.model.named_parameters()), self.optimizer)
        self.main, self.startup = (
            replace(program, storage=storage) for program in captured(lr, clip)
        )
        if endpoints:
            transpiler = DistributeTranspiler(DistributeTranspilerConfig(**settings))
            own = endpoints[rank]
            transpiler.transpile(
                rank,
                self.main,
                trainers=",".join(endpoints),
                startup_program=self.startup,
                current_endpoint=own,
            )
            self.main, self.startup = (
                transpiler.get_trainer_program(),
                transpiler.get_startup_program(),
            )

    def train(self, data: list[Batch], place: tuple[int, int] | None = None) -> list[torch.Tensor]:
        """Runs the programs over the batches: with ParallelExecutor if given its numbers.

        Gives the parameters.
        """
        with Executor() as executor:
            executor.run(self.startup)
            if place is None:
                for batch in data:
                    executor.run(self.main, feed=batch)
                    self.schedule.step()
            else:
                with ParallelExecutor(False, "loss", self.main, *place) as parallel:
                    for batch in data:
                        parallel.run(feed=batch)
                        self.schedule.step()
            return [parameter.detach().clone() for parameter in self.model.parameters()]


def joined(data: list[list[Batch]]) -> list[Batch]:
    """Every step's batches as one."""
    return [(torch.cat([x for x, _ in row]), torch.cat([y for _, y in row])) for row in data]


# ---- equal to a single node ----


@pytest.mark.slow
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


@pytest.mark.parametrize("settings", [GRAD, LOCAL, NCCL2, {**GRAD, "nccl_comm_num": 2}])
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

    def noted_wait(world: ProcessGroups, work: Any, what: str, device: Any) -> None:
        if world.rank == 0 and "allreduce" in what:
            notes.append(f"wait {what}")
        wait(world, work, what, device)

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


# ---- ParallelExecutor ----


def test_parallel_executor_checks_its_arguments() -> None:
    """Both numbers must be the program's, the loss must be its loss, and a GPU must be there."""
    trainer, single = Trainer(["127.0.0.1:1", "127.0.0.1:2"], 1, NCCL2), Trainer([], 0, {})
    refused: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (
            (False, "loss", trainer.main, 3, 1),
            ValueError,
            "num_trainers: expected that of the program, 2, got 3",
        ),
        (
            (False, "loss", trainer.main, 2, 0),
            ValueError,
            "trainer_id: expected that of the program, 1, got 0",
        ),
        (
            (False, "los", trainer.main, 2, 1),
            ValueError,
            "loss_name: expected the program's loss, got 'los'; close names: loss",
        ),
        ((False, 3, trainer.main, 2, 1), TypeError, "loss_name"),
        (
            (False, "loss", single.main, 2, 0),
            ValueError,
            "num_trainers: expected that of a program that was not transpiled, 1",
        ),
        ((False, "loss", trainer.main, "2", 1), TypeError, "num_trainers: expected a whole number"),
        ((1, "loss", trainer.main, 2, 1), TypeError, "use_cuda"),
        ((False, "loss", "main", 2, 1), TypeError, "main_program: expected a Program, got str"),
    ]
    if not torch.cuda.is_available():
        refused.append(
            (
                (True, "loss", trainer.main, 2, 1),
                ValueError,
                "use_cuda=True: expected GPU 1 on this host, got 0 GPUs",
            )
        )
    for arguments, error, message in refused:
        with pytest.raises(error, match=message):
            ParallelExecutor(*arguments)
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, single.main, trainers=1, startup_program=single.startup)
    with pytest.raises(
        ValueError, match="expected a program without servers, got one of mode sync"
    ):
        ParallelExecutor(False, None, transpiler.get_trainer_program())


@pytest.mark.processes
def test_the_documentations_example_and_a_death(tmp_path: Path) -> None:
    """The nccl2 example, line by line, in two processes, trains as one does on both batches; when
    one of them is killed the other is told within seconds who it was.
    """
    endpoints, script = ports(2), Path(__file__).with_name("nccl2_example.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parents[3])}
    words = [
        [sys.executable, str(script), str(rank), ",".join(endpoints), str(tmp_path)]
        for rank in range(2)
    ]
    running = [
        subprocess.Popen(each, env=environment, stdout=subprocess.PIPE, text=True) for each in words
    ]
    try:
        said = [each.communicate(timeout=DEADLINE)[0] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0, -9]
    model, data = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for row in joined(data):
        optimizer.zero_grad()
        example_step(model, *row).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[0][name], value, rtol=0, atol=1e-6)
        assert torch.equal(found[0][name], found[1][name])
    assert said[0].startswith("TrainerLost after ") and float(said[0].split()[2]) < 8
    assert f"trainer 1 ({endpoints[1]}) is lost" in said[0]
    assert (
        f"trainer 0 ({endpoints[0]}) is in c_allreduce_sum of bias@GRAD to weight@GRAD (bucket 0, "
        f"step {STEPS + 1})" in said[0]
    )


# ---- failures ----


@pytest.mark.slow
def test_a_trainer_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever came says after the deadline who did not, with its endpoint; without trainer 0, that
    it does not answer.
    """
    monkeypatch.setenv("PSERVER_START_TIMEOUT", "0.5")
    endpoints = ports(3)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(3)]
    errors = together(2, lambda rank: team[rank].train([]))
    for error in errors:
        assert isinstance(error, TimedOut | TrainerLost)
        assert f"trainer 2 ({endpoints[2]})" in str(error) and "after 0.5 s" in str(error)
    endpoints, began = ports(2), time.monotonic()
    with pytest.raises(
        Unreachable, match=f"trainer 1 waited 0.5 s for trainer 0 \\({endpoints[0]}\\)"
    ):
        Trainer(endpoints, 1, GRAD).train([])
    assert time.monotonic() - began < 5


def test_without_wait_port_the_others_are_expected_to_be_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """wait_port is recorded in the program; without it the wait is that for a sign of life, not
    that for a start.
    """
    monkeypatch.setenv("PSERVER_HEARTBEAT_TIMEOUT", "0.3")
    endpoints = ports(2)
    trainer = Trainer(endpoints, 1, GRAD)
    assert trainer.startup.deployment is not None
    startup = replace(
        trainer.startup, deployment=replace(trainer.startup.deployment, wait_port=False)
    )
    with pytest.raises(Unreachable, match="waited 0.3 s"), Executor() as executor:
        executor.run(startup)


def test_trainers_with_different_programs_are_told_apart() -> None:
    """All of them learn who runs something else than trainer 0, and what."""
    endpoints = ports(3)
    team = [Trainer(endpoints, rank, GRAD, lr=0.2 if rank == 2 else 0.1) for rank in range(3)]
    for error in together(3, lambda rank: team[rank].train([])):
        assert isinstance(error, FingerprintMismatch)
        assert f"trainer 2 ({endpoints[2]}) has" in str(
            error
        ) and "lr: 0.2 (trainer 0 has 0.1)" in str(error)
        assert "trainer 1" not in str(error)


def test_two_processes_with_one_number_are_refused() -> None:
    """The second one is told who the first is."""
    endpoints = ports(2)
    host, _, port = endpoints[0].rpartition(":")
    store = connect_store(host, int(port), 0, Connection())
    store.set("pserver/1/process/0", "elsewhere:17")
    with pytest.raises(
        Refused,
        match="trainer 0 .*expected one process, got two: elsewhere:17 and this one, "
        f".*:{os.getpid()}$",
    ):
        rendezvous(store, 0, endpoints, Connection(start_timeout_seconds=1.0))


@pytest.mark.slow
def test_different_numbers_of_steps_end_in_words() -> None:
    """A trainer that has taken its last step and left is named to those that wait for it in a
    further one.
    """
    endpoints, data = ports(2), batches(2, 2)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(2)]
    results = together(2, lambda rank: team[rank].train([row[rank] for row in data[: 2 - rank]]))
    assert not isinstance(results[1], BaseException)
    assert isinstance(results[0], TrainerLost)
    assert f"trainer 1 ({endpoints[1]}) has left the job" in str(results[0])
    assert "step 2" in str(results[0]) and "all trainers run the same number of steps" in str(
        results[0]
    )


def test_everybody_learns_who_is_lost() -> None:
    """When one of three falls silent in the middle of a step both others, whose connections to it
    still stand, are told who.
    """
    endpoints, data, over = ports(3), batches(3, 1), threading.Event()
    team = [Trainer(endpoints, rank, GRAD) for rank in range(3)]

    def act(rank: int) -> Any:
        with Executor() as executor:
            executor.run(team[rank].startup)
            executor.run(team[rank].main, feed=data[0][rank])
            if rank < 2:
                return executor.run(team[rank].main, feed=data[0][rank])
            world = executor._collectives[0]._job.world
            assert world is not None and world.peers.membership is not None
            # as the kernel does for a process that dies
            world.peers.membership._peers[0].connection.shutdown(socket.SHUT_RDWR)
            assert over.wait(DEADLINE)

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(act, rank) for rank in range(3)]
        errors = [each.exception(DEADLINE) for each in running[:2]]
        over.set()
    for rank, error in enumerate(errors):
        assert isinstance(error, TrainerLost) and f"trainer 2 ({endpoints[2]}) is lost" in str(
            error
        )
        assert f"trainer {rank} ({endpoints[rank]}) is in c_allreduce_sum" in str(
            error
        ) and "step 2" in str(error)


def test_a_long_wait_says_for_whom(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log of a trainer that waits names the one that is behind; nobody is lost by it, however
    long it takes.
    """
    monkeypatch.setattr("pserver.polling.NOTICE_SECONDS", 0.2)
    endpoints, data = ports(2), batches(2, 1)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(2)]
    what = "c_allreduce_sum of 4.bias@GRAD to 0.weight@GRAD (bucket 0, step 1)"
    said = f"trainer 0 has waited long in {what}, for trainer 1 ({endpoints[1]})"

    def act(rank: int) -> None:
        with Executor() as executor:
            executor.run(team[rank].startup)
            end = time.monotonic() + DEADLINE
            while rank == 1 and said not in caplog.text:
                assert time.monotonic() < end, caplog.text
                threading.Event().wait(0.01)
            executor.run(team[rank].main, feed=data[0][rank])

    fine(together(2, act))


def test_an_error_of_one_trainer_reaches_the_others() -> None:
    """What one trainer raises inside its Executor ends the others' wait, in its words."""
    endpoints, data = ports(2), batches(2, 1)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(2)]
    feeds = [data[0][0], (data[0][1][0], torch.full((4,), 99))]
    errors = together(2, lambda rank: team[rank].train([feeds[rank]]))
    assert isinstance(errors[1], IndexError)
    assert isinstance(
        errors[0], JobFailed
    ) and f"trainer 1 ({endpoints[1]}) failed (IndexError: Target 99" in str(errors[0])


def test_a_run_that_failed_in_the_middle_cannot_go_on() -> None:
    """After a step that broke off with sums on their way the next run says so, instead of adding up
    different steps.
    """
    endpoints, data = ports(2), batches(2, 1)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(2)]

    def act(rank: int) -> None:
        with Executor() as executor:
            executor.run(team[rank].startup)
            executor.run(team[rank].main, feed=data[0][rank])
            if rank == 0:
                runtime = executor._collectives[0]
                # as a compute op's error leaves it
                runtime._filling[0] = [("4.weight@GRAD", torch.zeros(3, 8))]
                executor.run(team[rank].main, feed=data[0][rank])

    errors = together(2, act)
    assert (
        errors[1] is None
        and isinstance(errors[0], JobFailed)
        and "ended in the middle of step 1" in str(errors[0])
    )


def test_the_startup_program_comes_first() -> None:
    """A main program whose rings have not begun says what to run."""
    with (
        pytest.raises(
            ValueError, match="ring 0 has not begun; run the trainer's startup program first"
        ),
        Executor() as executor,
    ):
        executor.run(Trainer(ports(1), 0, GRAD).main, feed=batches(1)[0][0])


def test_close_takes_the_groups_down_and_trainers_can_meet_again() -> None:
    """After close the store's port is free, and a further run of the startup program meets the
    others anew, whoever is first.
    """
    endpoints, data = ports(2), batches(2, 1)
    team = [Trainer(endpoints, rank, GRAD) for rank in range(2)]
    for _ in range(3):
        fine(together(2, lambda rank: team[rank].train([row[rank] for row in data])))
    host, _, port = endpoints[0].rpartition(":")
    socket.create_server((host, int(port))).close()
    assert all(map(torch.equal, *(list(each.model.parameters()) for each in team)))


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
