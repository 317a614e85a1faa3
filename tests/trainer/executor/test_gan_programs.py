"""Programs of two optimizers over one module, a GAN's, in one job: each steps its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support import gans
from tests.support.eager_jobs import Servers, assert_same
from tests.support.eager_modes import strategy_of
from tests.support.gans import Gan, Pair, batches, gan, optimizers
from tests.support.threads import at_once
from trainer import Executor
from transpiler import DistributeTranspiler, Program, capture

MODES: dict[str, dict[str, Any] | None] = {
    "sync": None,
    "mixed": {"modes": {"0.*": "async", "*": "sync"}, "send_queue_size": 1},
    "geo": {"k_steps": 1},
}


def discriminate(model: nn.ModuleList, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    fake = model[1](noise).detach()
    return F.softplus(-model[0](real)).mean() + F.softplus(model[0](fake)).mean()


def generate(model: nn.ModuleList, noise: torch.Tensor) -> torch.Tensor:
    return F.softplus(-model[0](model[1](noise))).mean()


def captured(nets: Gan, pair: Pair) -> list[tuple[Program, Program]]:
    """Main and startup program of the discriminator's step, and of the generator's."""
    model, (real, noise) = nn.ModuleList(nets), batches(1)[0]
    return [
        capture(model, discriminate, pair.discriminator, (real, noise)),
        capture(model, generate, pair.generator, (noise,)),
    ]


def transpiled(
    programs: list[tuple[Program, Program]],
    endpoints: str,
    mode: str = "sync",
    trainer: int = 0,
    trainers: int = 1,
) -> DistributeTranspiler:
    configs = MODES[mode]
    transpiler = DistributeTranspiler()
    transpiler.transpile(
        trainer,
        [main for main, _ in programs],
        pservers=endpoints,
        trainers=trainers,
        startup_program=[startup for _, startup in programs],
        strategy=None if configs is None else strategy_of(**configs),
    )
    return transpiler


def run(executor: Executor, mains: list[Program], seed: int, critic: int = 1) -> None:
    discriminator, generator = mains
    for number, (real, noise) in enumerate(batches(6, seed), 1):
        executor.run(discriminator, (real, noise))
        if number % critic == 0:
            executor.run(generator, (noise,))


def begun(executor: Executor, transpiler: DistributeTranspiler) -> list[Program]:
    """The trainer's main programs, after its startup programs have run."""
    for startup in transpiler.get_startup_program():
        executor.run(startup)
    mains: list[Program] = transpiler.get_trainer_program()
    return mains


@pytest.mark.parametrize("mode", MODES)
def test_two_programs_train_a_gan_in_one_job(servers: Servers, mode: str) -> None:
    """One trainer that waits for its results, to the bit of plain torch, in each mode."""
    mine, reference = gan(), gan()
    with Executor() as executor:
        own = transpiled(captured(mine, optimizers(mine)), servers(2), mode)
        mains = begun(executor, own)
        run(executor, mains, 1)
        run(executor, mains, 2, critic=3)
    plain = optimizers(reference)
    gans.train(reference, plain, batches(6))
    gans.train(reference, plain, batches(6, 2), critic=3)
    assert_same(mine.state(), reference.state())


def test_two_trainers_equal_one_on_the_joint_batch(servers: Servers) -> None:
    """In sync mode, within 1e-6."""
    endpoints, data = servers(2), batches(4, size=16)
    nets = [gan(seed=number, norm=False) for number in range(2)]
    made = [
        transpiled(captured(each, optimizers(each)), endpoints, trainer=number, trainers=2)
        for number, each in enumerate(nets)
    ]

    def play(number: int) -> None:
        half = slice(8 * number, 8 * number + 8)
        with Executor() as executor:
            discriminator, generator = begun(executor, made[number])
            for real, noise in data:
                executor.run(discriminator, (real[half], noise[half]))
                executor.run(generator, (noise[half],))

    at_once(lambda: play(0), lambda: play(1))
    reference = gan(seed=0, norm=False)
    gans.train(reference, optimizers(reference), data)
    assert_same(nets[0].state(), nets[1].state())
    for mine, theirs in zip(nets[0], reference, strict=True):
        for one, other in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-6, rtol=0)


def test_the_programs_share_one_plan(servers: Servers) -> None:
    """Each sends and receives what its optimizer trains; a server has one program for both."""
    nets = gan()
    transpiler = transpiled(captured(nets, optimizers(nets)), "a:1,b:1", "mixed")
    discriminator, generator = transpiler.get_trainer_program()
    plan = discriminator.deployment.plan
    assert plan == generator.deployment.plan
    assert [(lane.mode, lane.optimizer) for lane in plan.lanes] == [("async", 0), ("sync", 1)]
    for number, program in enumerate((discriminator, generator)):
        received = {op.arguments["param"] for op in program.main.ops if op.type == "recv"}
        assert {str(name).split(".")[0] for name in received} == {str(number)}
        again = Program.from_proto(program.to_proto())
        assert again == program and again.deployment == program.deployment
    barriers = [op.type for op in discriminator.main.ops if op.type.endswith("_barrier")]
    assert barriers == []  # of an async lane, although the other program's is sync
    server, startup = transpiler.get_pserver_programs("a:1")
    assert server.deployment is not None and server.deployment.plan == plan
    assert {op.outputs[0][0] for op in startup.main.ops} == {"0", "1"}


def test_programs_of_a_gan_are_saved_and_go_on(servers: Servers, tmp_path: Path) -> None:
    """One checkpoint of both, which a job on other servers loads."""
    path, mine, reference = str(tmp_path / "saved"), gan(), gan()
    with Executor() as executor:
        mains = begun(executor, transpiled(captured(mine, optimizers(mine)), servers(2)))
        run(executor, mains, 1, critic=2)
        with pytest.raises(ValueError, match="the programs of all 2 optimizers"):
            executor.save(path, mains[0])
        executor.save(path, mains)
    again = gan(seed=9)
    pair = optimizers(again)
    with Executor() as executor:
        mains = begun(executor, transpiled(captured(again, pair), servers(1)))
        assert executor.load(path, mains) == 6
        run(executor, mains, 2)
        steps = [main.storage.steps for main in mains if main.storage is not None]
    plain = optimizers(reference)
    gans.train(reference, plain, batches(6), critic=2)
    gans.train(reference, plain, batches(6, 2))
    assert_same(again.state(), reference.state())
    assert steps == [12, 9]


def test_what_does_not_belong_together_is_refused() -> None:
    """Programs that train one parameter, or of modules of their own, and lists that do not fit."""
    nets = gan()
    pair = optimizers(nets)
    one, other = captured(nets, pair)
    twice = Pair(pair.discriminator, torch.optim.SGD(nets.discriminator.parameters(), lr=0.1))
    with pytest.raises(ValueError, match=r"0.0.weight: .* that one program trains"):
        transpiled(captured(nets, twice), "a:1")
    elsewhere = gan()
    with pytest.raises(ValueError, match="capture all of them from one module"):
        transpiled([one, captured(elsewhere, optimizers(elsewhere))[1]], "a:1")
    with pytest.raises(ValueError, match="startup_program: expected one for each"):
        DistributeTranspiler().transpile(0, [one[0], other[0]], "a:1", startup_program=one[1])
    with pytest.raises(TypeError, match=r"program\[1\]: expected a Program, got int"):
        DistributeTranspiler().transpile(0, [one[0], 3], "a:1")  # type: ignore[list-item]
