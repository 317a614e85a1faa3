"""ParallelExecutor: its arguments, and the documentation's example in processes of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.collective_trainers import NCCL2, Trainer, joined, ports
from tests.support.processes import Processes
from tests.trainer.executor.nccl2_example import STEPS, model_and_data
from tests.trainer.executor.nccl2_example import step as example_step
from trainer import ParallelExecutor
from transpiler import DistributeTranspiler


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
    processes = Processes(tmp_path)
    try:
        words = (",".join(endpoints), str(tmp_path))
        path = str(script.parents[3])
        running = [
            processes.python(f"trainer {rank}", str(script), str(rank), *words, PYTHONPATH=path)
            for rank in range(2)
        ]
        assert [each.status() for each in running] == [0, -9], running
    finally:
        processes.end()
    said = running[0].said("TrainerLost after .*")[0]
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
    assert float(said.split()[2]) < 8
    assert f"trainer 1 ({endpoints[1]}) is lost" in said
    assert (
        f"trainer 0 ({endpoints[0]}) is in c_allreduce_sum of bias@GRAD to weight@GRAD (bucket 0, "
        f"step {STEPS + 1})" in said
    )
