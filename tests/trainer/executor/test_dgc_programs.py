"""Deep gradient compression in programs: the ``dgc`` op, what is sent, and what training makes of
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.dgc_jobs import (
    KEPT,
    LARGE,
    batches,
    close,
    net,
    reference,
    sgd,
    strategy_of,
)
from tests.support.eager_jobs import Servers
from tests.support.threads import at_once
from trainer import Executor
from transpiler import (
    ClipGradByGlobalNorm,
    ClipGradByValue,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    Program,
    capture,
    program_guard,
)

ENDPOINTS = "127.0.0.1:6174,127.0.0.1:6175"


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


class Trainer:
    """One trainer's model, optimizer and transpiled programs."""

    def __init__(
        self,
        endpoints: str,
        number: int = 0,
        trainers: int = 1,
        clip: Any = None,
        strategy: Any = None,
        config: DistributeTranspilerConfig | None = None,
        **options: Any,
    ) -> None:
        self.model, self.sent = net(seed=3 + number), list[int]()  # trainer 0's values count
        self.optimizer = sgd(self.model, **options)
        with program_guard(Program(()), Program(())):
            main, startup = capture(self.model, loss, self.optimizer, batches(0)[0], grad_clip=clip)
        self.transpiler = DistributeTranspiler(config)
        self.transpiler.transpile(
            number,
            main,
            endpoints,
            trainers,
            startup_program=startup,
            strategy=strategy_of() if strategy is None else strategy,
        )
        self.main = self.transpiler.get_trainer_program()

    def train(self, data: list[tuple[Tensor, Tensor]]) -> None:
        with Executor() as executor:
            executor.run(self.transpiler.get_startup_program())
            (runtime,) = executor._runtimes
            before = self._total(runtime)
            for batch in data:
                executor.run(self.main, feed=batch)
                self.sent.append(self._total(runtime) - before)
                before += self.sent[-1]

    def _total(self, runtime: Any) -> int:
        return int(runtime.communicator.variable_bytes()[LARGE]["bytes_out"])


@pytest.mark.observes(
    "dgc", "dgc_configs.rampup_begin_step", "dgc_configs.rampup_step", "dgc_configs.sparsity"
)
@pytest.mark.parametrize("options", [{}, {"nesterov": True}, {"clip": 0.5}], ids=str)
def test_twenty_runs_of_two_trainers_equal_the_paper(
    servers: Servers, options: dict[str, Any]
) -> None:
    """The same reference, and the same number of elements in each step, as in eager scripts."""
    given: dict[str, Any] = dict(options)
    if "clip" in given:
        given["clip"] = ClipGradByGlobalNorm(given["clip"])
    endpoints = servers(2)
    both = [Trainer(endpoints, number, 2, **given) for number in range(2)]
    at_once(*(lambda n=n: both[n].train(batches(n)) for n in range(2)))
    expected = reference([batches(0), batches(1)], **options)

    for each in both:
        close(each.model, expected)
        assert each.sent == [4 * KEPT[0]] * 3 + [8 * kept for kept in KEPT[3:]]


def test_the_program_says_what_is_compressed() -> None:
    """A ``dgc`` op stands between the gradient and its send; the server's block is plain SGD, and
    that of a small parameter momentum.  Clipping stays with the trainer.
    """
    trainer = Trainer(ENDPOINTS, 0, 4, ClipGradByGlobalNorm(0.5))
    ops = trainer.main.main.ops
    at = next(number for number, op in enumerate(ops) if op.type == "dgc")
    server = trainer.transpiler.get_pserver_program(ENDPOINTS.split(",")[0])
    updates = {block.ops[-1].outputs[0]: block.ops[-1].type for block in server.blocks[1:]}

    assert [op.type for op in ops[at - 1 : at + 3]] == ["scale_by", "dgc", "split", "send"]
    assert ops[at].outputs == (f"{LARGE}@GRAD@DGC",)
    assert [op.arguments["max_norm"] for op in ops if op.type == "global_norm_scale"] == [1.0]
    assert "momentum=0.9" in next(line for line in str(trainer.main).split("\n") if " dgc(" in line)
    assert updates[f"{LARGE}.block0"] == "sgd" and updates["2.bias"] == "momentum"


def test_programs_with_dgc_are_saved_and_drawn(tmp_path: Path) -> None:
    """As any others."""
    program = Trainer(ENDPOINTS).main
    program.save(tmp_path / "main")
    program.draw(str(tmp_path / "main.svg"))

    assert str(Program.load(tmp_path / "main")) == str(program)
    assert "dgc" in (tmp_path / "main.svg").read_text()


def test_the_rate_follows_the_schedule(servers: Servers) -> None:
    """Of large parameters, too, whose group is another one on servers."""
    trainer = Trainer(servers(1), lr=0.0)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with Executor() as executor:
        executor.run(trainer.transpiler.get_startup_program())
        executor.run(trainer.main, feed=batches(0)[0])
        still = [
            bool((p == old).all())
            for p, old in zip(trainer.model.parameters(), before, strict=True)
        ]
        trainer.optimizer.param_groups[0]["lr"] = 0.1
        executor.run(trainer.main, feed=batches(0)[0])
        moved = [
            bool((p != old).any())
            for p, old in zip(trainer.model.parameters(), before, strict=True)
        ]

    assert all(still) and all(moved)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"clip": ClipGradByValue(1.0)}, "expected grad_clip=ClipGradByNorm"),
        ({"momentum": 0.0}, "expected torch.optim.SGD with a momentum above 0"),
        (
            {"config": DistributeTranspilerConfig(compression={"*": "int8"})},
            "compression: excludes strategy.dgc",
        ),
    ],
    ids=["clip", "momentum", "compression"],
)
def test_programs_that_do_not_fit_are_refused(given: dict[str, Any], words: str) -> None:
    """With what they have."""
    with pytest.raises(ValueError, match=words):
        Trainer(ENDPOINTS, **given)


def test_programs_without_servers_are_refused() -> None:
    """Their trainers sum whole gradients; the message says where dgc acts."""
    model = net()
    with program_guard(Program(()), Program(())):
        main, startup = capture(model, loss, sgd(model), batches(0)[0])
    transpiler = DistributeTranspiler(DistributeTranspilerConfig(mode="nccl2"))
    with pytest.raises(ValueError, match="strategy.dgc, .+: acts only in a job with parameter ser"):
        transpiler.transpile(
            0,
            main,
            trainers=ENDPOINTS,
            startup_program=startup,
            current_endpoint=ENDPOINTS.split(",")[0],
            strategy=strategy_of(),
        )
