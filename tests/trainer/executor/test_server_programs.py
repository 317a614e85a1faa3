"""A server's program that is saved with what its job has left: another job goes on from there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pserver.config import ServerConfig
from pserver.errors import FingerprintMismatch, JobFailed, Refused
from pserver.launcher.cluster import free_port
from pserver.service.server import Server
from tests.support.eager_modes import strategy_of
from trainer import DistributedEmbedding, Executor, Uniform
from transpiler import DistributeTranspiler, Program, capture, program_guard

STEPS = 4  # of either half
Batch = tuple[torch.Tensor, torch.Tensor]
MODES: dict[str, dict[str, Any]] = {
    "sync": {"modes": {"*": "sync"}},
    "mixed": {"modes": {"emb": "async", "*": "sync"}},
}


class Net(nn.Sequential):
    """A table, batch norm and two layers."""

    def __init__(self) -> None:
        emb = DistributedEmbedding(4, num_embeddings=30, name="emb", init=Uniform(-1, 1))
        super().__init__(emb, nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def batches(seed: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(0, 30, (8,), generator=generator),
            torch.randint(0, 3, (8,), generator=generator),
        )
        for _ in range(2 * STEPS)
    ]


class Job:
    """One process's view of the job: it captures and transpiles anew.

    Args:
        endpoints: of the servers, comma-separated.
        seed: of the model's own values, which count in a new job only.
    """

    def __init__(
        self,
        endpoints: str,
        seed: int = 5,
        *,
        trainer: int = 0,
        trainers: int = 1,
        mode: str = "sync",
        lr: float = 0.1,
    ) -> None:
        torch.manual_seed(seed)
        self.model = Net()
        self.values: dict[str, torch.Tensor] = {}  # parameters and rows, when it has trained
        optimizer = torch.optim.Adam(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=20)
        self.transpiler = DistributeTranspiler()
        with program_guard(Program(()), Program(())):
            main, startup = capture(self.model, step, optimizer, batches()[0])
        strategy = strategy_of(**MODES[mode])
        self.transpiler.transpile(
            trainer, main, endpoints, trainers, startup_program=startup, strategy=strategy
        )

    def train(self, data: Sequence[Batch]) -> int:
        """Joins, trains, leaves; the steps that the job had taken when it joined."""
        main = self.transpiler.get_trainer_program()
        with Executor() as executor:
            executor.run(self.transpiler.get_startup_program())
            before = executor.steps(main)
            for _ in range(before):
                self.schedule.step()
            for batch in data:
                executor.run(main, feed=batch)
                self.schedule.step()
                executor.flush()
            assert executor.steps(main) == before + len(data)
            self.model.eval()
            with torch.no_grad():
                rows = self.model[0](torch.arange(30)).clone()
            dense = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            self.values = {"rows": rows, **{k: v.detach().clone() for k, v in dense.items()}}
        return before


@contextmanager
def serving(job: Job, endpoints: str, begin: str, end: str) -> Iterator[None]:
    """Every server's script, in a thread: it begins anew or from its file, and leaves a file."""

    def script(endpoint: str, index: int) -> None:
        main, startup = job.transpiler.get_pserver_programs(endpoint)
        executor = Executor()
        if begin:
            executor.load(f"{begin}-{index}", main)
        else:
            executor.run(startup)
        executor.run(main)
        executor.save(f"{end}-{index}", main)

    threads = [
        threading.Thread(target=script, args=(endpoint, index))
        for index, endpoint in enumerate(endpoints.split(","))
    ]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def two_endpoints() -> str:
    return ",".join(f"127.0.0.1:{free_port()}" for _ in range(2))


@pytest.mark.parametrize("mode", MODES)
def test_a_job_goes_on_with_what_servers_scripts_have_saved(tmp_path: Path, mode: str) -> None:
    """With its steps, its schedule, optimizer states, rows and buffers, to the bit; whatever values
    the new processes begin with.
    """
    endpoints, whole, half = two_endpoints(), str(tmp_path / "whole"), str(tmp_path / "half")
    unbroken = Job(endpoints, mode=mode)
    with serving(unbroken, endpoints, "", whole):
        assert unbroken.train(batches()) == 0
    first = Job(endpoints, mode=mode)
    with serving(first, endpoints, "", half):
        assert first.train(batches()[:STEPS]) == 0
    second = Job(endpoints, seed=6, mode=mode)
    with serving(second, endpoints, half, half):
        assert second.train(batches()[STEPS:]) == STEPS

    for name, value in unbroken.values.items():
        assert torch.equal(second.values[name], value), name
    assert_same_files(tmp_path)


def assert_same_files(path: Path) -> None:
    for index in range(2):
        one, other = (Program.load(path / f"{name}-{index}").storage for name in ("whole", "half"))
        assert one is not None and other is not None and one.tensors.keys() == other.tensors.keys()
        assert any(name.endswith("exp_avg") for name in one.tensors)
        for name, value in one.tensors.items():
            assert torch.equal(other.tensors[name], value), name
        assert one.steps == other.steps == 2 * STEPS


def trained_by_two(endpoints: str, files: tuple[str, str], part: slice) -> list[Job]:
    """Both trainers of a job take these of their batches."""
    jobs = [Job(endpoints, seed, trainer=seed, trainers=2) for seed in range(2)]
    with serving(jobs[0], endpoints, *files):
        threads = [
            threading.Thread(target=job.train, args=(batches(number)[part],))
            for number, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    return jobs


def test_two_trainers_go_on_to_the_bit(tmp_path: Path) -> None:
    """In sync mode, buffers included."""
    endpoints, half = two_endpoints(), str(tmp_path / "half")
    unbroken = trained_by_two(endpoints, ("", str(tmp_path / "whole")), slice(None))
    trained_by_two(endpoints, ("", half), slice(STEPS))
    second = trained_by_two(endpoints, (half, half), slice(STEPS, None))

    for one, other in zip(unbroken, second, strict=True):
        assert all(torch.equal(value, other.values[name]) for name, value in one.values.items())
    assert_same_files(tmp_path)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The endpoints of a job, and what its servers have left after some steps."""
    endpoints, path = two_endpoints(), str(tmp_path_factory.mktemp("left") / "half")
    job = Job(endpoints)
    with serving(job, endpoints, "", path):
        job.train(batches()[:STEPS])
    return endpoints, path


def test_a_file_of_something_else_is_refused(left: tuple[str, str], tmp_path: Path) -> None:
    """That of another job by what differs, another server's by the endpoints, a trainer's program;
    and one without values.
    """
    endpoints, path = left
    here, there = endpoints.split(",")
    main = Job(endpoints).transpiler.get_pserver_program(here)
    other = Job(endpoints, lr=0.5).transpiler
    with Executor() as executor:
        with pytest.raises(
            FingerprintMismatch, match=f"{path}-0 is of another job.*server 0, .*lr"
        ):
            executor.load(f"{path}-0", other.get_pserver_program(here))
        with pytest.raises(ValueError, match=f"program of server 0, {here}, got .* 1, {there}"):
            executor.load(f"{path}-1", main)
        other.get_trainer_program().save(tmp_path / "trainer")
        with pytest.raises(ValueError, match="expected a pserver program, got another"):
            executor.load(str(tmp_path / "trainer"), main)
        with pytest.raises(ValueError, match="expected no scheduler"):
            executor.save(str(tmp_path / "other"), main, Job(endpoints).schedule)
        with pytest.raises(ValueError, match="no value for .*startup program first"):
            executor.run(main)
    main.save(tmp_path / "empty")
    config = ServerConfig(program=str(tmp_path / "empty"))
    with pytest.raises(Refused, match="with its values, as Executor.save writes it; got no value"):
        Server(config).start()


def test_servers_of_different_moments_are_refused(left: tuple[str, str]) -> None:
    """The trainer says which server begins where; and one of another job is told what differs."""
    endpoints, path = left
    programs = [Program.load(f"{path}-{index}") for index in range(2)]
    assert (storage := programs[1].storage) is not None and storage.served is not None
    storage.served = replace(storage.served, steps={0: (STEPS + 1,)})
    configs = [ServerConfig(each, once=True) for each in endpoints.split(",")]
    with Server(configs[0], programs[0]), Server(configs[1], programs[1]):
        with pytest.raises(Refused, match=f"begins with step {STEPS} of lane 0, .* with step 5: "):
            Job(endpoints).train([])
        other = "trainer 0 runs another program than the server's program: .*lr"
        with pytest.raises(FingerprintMismatch, match=other):
            Job(endpoints, lr=0.5).train([])


def test_what_a_failed_job_has_left_is_saved_too(tmp_path: Path) -> None:
    """The server's run raises what has ended the job, and the file has the steps before."""
    endpoint, path = f"127.0.0.1:{free_port()}", str(tmp_path / "left")
    job = Job(endpoint)
    main, startup = job.transpiler.get_pserver_programs(endpoint)
    executor, raised = Executor(), []
    executor.run(startup)

    def script() -> None:
        try:
            executor.run(main)
        except JobFailed as error:
            raised.append(str(error))
        executor.save(path, main)

    server = threading.Thread(target=script)
    server.start()
    with pytest.raises(TypeError, match="the data are gone"):
        job.train([*batches()[:2], _Gone()])
    server.join(30)

    assert raised == ["trainer 0 ended the job: TypeError: the data are gone"]
    assert (storage := Program.load(path).storage) is not None and storage.steps == 2


class _Gone(tuple[torch.Tensor, torch.Tensor]):
    """A batch that cannot be read."""

    def __len__(self) -> int:
        raise TypeError("the data are gone")
