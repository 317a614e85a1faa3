"""Programs whose dense gradients trainers average among themselves, beside servers."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.eager_jobs import Servers, batches
from tests.support.eager_modes import OUTER_SGD, adam, strategy_of
from trainer import DistributedEmbedding, Executor, Uniform
from transpiler import ClipGradByGlobalNorm, DistributeTranspiler, capture
from transpiler.program import Program


class Net(nn.Module):
    """A table and two dense layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.emb = DistributedEmbedding(4, num_embeddings=30, init=Uniform(-1, 1))
        self.hidden = nn.Linear(4, 5)
        self.out = nn.Linear(5, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.hidden(self.emb(ids)).tanh())
        return out


def step(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def data(steps: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (
            torch.randint(0, 30, (size,), generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
        )
        for _ in range(steps)
    ]


def transpiled(
    model: nn.Module, endpoints: str, rank: int, modes: dict[str, str], **arguments: Any
) -> tuple[Program, Program]:
    """The main and the startup program of one of two trainers."""
    main, startup = capture(model, step, adam(model), data(1, 4)[0], **arguments)
    transpiler = DistributeTranspiler()
    strategy = strategy_of(modes=modes)
    transpiler.transpile(rank, main, endpoints, 2, startup_program=startup, strategy=strategy)
    return transpiler.get_trainer_program(), transpiler.get_startup_program()


def train(programs: tuple[Program, Program], batches_: Any) -> None:
    with Executor() as executor:
        executor.run(programs[1])
        for batch in batches_:
            executor.run(programs[0], feed=batch)


@pytest.mark.parametrize("emb", ["sync", "async"])
def test_two_trainers_average_dense_gradients_and_train_a_table_on_servers(
    servers: Servers, emb: str
) -> None:
    """Both have the same dense values, and with a sync table those of plain torch on the joint
    batches, within 1e-6.
    """
    endpoints, joint = servers(2), data(6, 12)
    models = [Net() for _ in range(2)]
    made = [
        transpiled(model, endpoints, rank, {"emb": emb, "*": "collective"})
        for rank, model in enumerate(models)
    ]
    shares = [[(x.chunk(2)[rank], y.chunk(2)[rank]) for x, y in joint] for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, made, shares))
    reference = Net()
    optimizer = adam(reference)
    for x, y in joint:
        optimizer.zero_grad()
        step(reference, x, y).backward()
        optimizer.step()

    for name in ("hidden", "out"):
        one, other = (getattr(model, name).weight for model in models)
        assert torch.equal(one, other)
        if emb == "sync":
            assert (one - getattr(reference, name).weight).abs().max() <= 1e-6


def test_a_program_of_a_mixed_job_is_printed_saved_and_drawn(servers: Servers) -> None:
    """The header names what is averaged; the two ops stand before the updates; the message is
    exact.
    """
    main, startup = transpiled(Net(), "a:1,b:2", 1, {"emb": "async", "*": "collective"})
    text = str(main)
    types = [op.type for op in main.main.ops]
    assert "collective: mean over trainers, of hidden.weight, hidden.bias, out.weight" in text
    assert re.search(r"c_allreduce_avg\(.*out.bias@GRAD.*, ring 0\)", text)
    assert types.count("c_allreduce_avg") == types.count("c_sync_comm_stream") == 1
    first = types.index("adam")
    assert types[first - 2 : first] == ["c_allreduce_avg", "c_sync_comm_stream"]
    assert types.count("adam") == 4 and "scale" not in types
    assert not {"send_barrier", "fetch_barrier"} & set(types)
    for program in (main, startup):
        assert Program.from_proto(program.to_proto()) == program


def test_a_program_of_every_mode_is_loaded_and_runs(servers: Servers, tmp_path: Path) -> None:
    """Five modes in one program: it is drawn, and what was saved is the program, fingerprint and
    all, and computes the same losses.
    """
    modes = {"emb": "async", "hidden.weight": "geo", "hidden.bias": "half_async"}
    configs = {"k_steps": 2, "outer_optimizer": OUTER_SGD, "send_queue_size": 4}
    strategy = strategy_of(modes={**modes, "out.weight": "collective", "*": "diloco"}, **configs)
    losses: list[list[torch.Tensor]] = []
    for loaded in (False, True):
        model = Net()
        main, startup = capture(model, step, adam(model), data(1, 4)[0])
        transpiler = DistributeTranspiler()
        endpoints = servers(2)
        transpiler.transpile(0, main, endpoints, 1, startup_program=startup, strategy=strategy)
        made = [transpiler.get_trainer_program(), transpiler.get_startup_program()]
        if loaded:
            for number, program in enumerate(made):
                program.draw(tmp_path / "drawn.svg")
                program.save(tmp_path / "saved")
                made[number] = Program.load(tmp_path / "saved")
                assert made[number] == program
                assert made[number].fingerprint() == program.fingerprint()
        with Executor() as executor:
            executor.run(made[1])
            losses.append([])
            for batch in data(4, 8):
                losses[-1] += executor.run(made[0], feed=batch, fetch_list=["loss"])
                executor.flush()

    assert losses[0] == losses[1]
    lines = str(made[0]).splitlines()
    said = [line.partition(":")[0].strip() for line in lines[:6]]
    assert said == [
        "trainer 0 of 1, mixed, 2 servers",
        *(f"lane {i}" for i in range(4)),
        "collective",
    ]


def test_averaged_gradients_are_clipped_on_their_trainer(servers: Servers) -> None:
    """Where some gradients do not come to servers, these clip nothing, and the trainers everything:
    with one trainer as plain torch.
    """
    model, plain = (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimizer, reference = adam(model), adam(plain)
    clip = ClipGradByGlobalNorm(0.1)
    main, startup = capture(model, step, optimizer, batches(1)[0], grad_clip=clip)
    transpiler = DistributeTranspiler()
    strategy = strategy_of(modes={"0.*": "sync", "*": "collective"})
    transpiler.transpile(0, main, servers(1), 1, startup_program=startup, strategy=strategy)
    with Executor() as executor:
        executor.run(transpiler.get_startup_program())
        for batch in batches(4):
            executor.run(transpiler.get_trainer_program(), feed=batch)
            reference.zero_grad()
            step(plain, *batch).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            reference.step()

    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    transpiler.transpile(0, main, "a:1", 2, startup_program=startup, strategy=strategy)
    types = [op.type for op in transpiler.get_trainer_program().main.ops]
    assert types.count("scale_by") == 4
