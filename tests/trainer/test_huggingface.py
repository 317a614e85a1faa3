"""transformers' Trainer as a trainer of a job, in one process: with a server, or alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.support.eager_jobs import assert_same
from tests.support.tiers import RARE
from trainer import DistributedEmbedding, fleet
from trainer.job.job import present
from trainer.samplers.part import Part
from trainer.samplers.passes import Passes
from trainer.samplers.shard import Shard
from transpiler import ClipGradByGlobalNorm, ClipGradByValue, DistributedStrategy

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

from tests.cluster.bert_trainer import (  # noqa: E402
    ACCUMULATED,
    RATE,
    WARM_UP,
    arguments,
    bert,
    samples,
)
from trainer.huggingface import PServerTrainer, TrainerLoader  # noqa: E402

Servers = Callable[[int], str]
pytestmark = pytest.mark.filterwarnings("ignore")  # those of transformers' own
RANDOM = {"train_sampling_strategy": "random"}


def begin(endpoints: str, **options: Any) -> None:
    """``fleet.init`` of a job with these servers, or of one alone."""
    ends = endpoints.split(",")
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=ends) if endpoints else None
    fleet.init(role, **options)


def trained(trainer: Any, **options: Any) -> dict[str, torch.Tensor]:
    trainer.train(**options)
    return dict(trainer.model.state_dict())


def plain_loop(folder: Path) -> dict[str, torch.Tensor]:
    """What it is held against: the loop as one writes it with torch alone."""
    model = bert().train()
    optimizer = transformers.Trainer(model, arguments(folder)).create_optimizer()
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, WARM_UP, 12)
    collate = transformers.default_data_collator
    loader = torch.utils.data.DataLoader(samples(), batch_size=4, collate_fn=collate)
    for _ in range(3):
        for number, batch in enumerate(loader, 1):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            if number % ACCUMULATED == 0 or number == len(loader):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.parametrize("where", ["one server", RARE("alone")])
def test_fine_tuning_equals_the_plain_loop(servers: Servers, tmp_path: Path, where: str) -> None:
    """With bf16, a warm-up, accumulation and clipping, to the bit; and without a word of warning
    that it clips before the mean.
    """
    begin(servers(1) if where == "one server" else "")
    trainer = PServerTrainer(bert(), arguments(tmp_path), train_dataset=samples())

    assert_same(trained(trainer), plain_loop(tmp_path))
    assert RATE > trainer.state.log_history[-2]["learning_rate"] > 0


def test_shuffled_training_goes_on_from_its_checkpoint(servers: Servers, tmp_path: Path) -> None:
    """From the middle of an epoch, to the bit; the checkpoint is one of transformers' own."""
    saving = {**RANDOM, "save_strategy": "steps", "save_steps": 6, "num_train_epochs": 2}
    begin(servers(1))
    options = arguments(tmp_path, **saving)
    whole = trained(PServerTrainer(bert(), options, train_dataset=samples()))
    fleet.finish()
    begin(servers(1))
    resumed = PServerTrainer(bert(), options, train_dataset=samples())
    state = trained(resumed, resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    plain = transformers.Trainer(bert(), options, train_dataset=samples())

    assert_same(state, whole)
    assert_same(trained(plain, resume_from_checkpoint=str(tmp_path / "checkpoint-6")), whole)


def test_a_part_of_an_epoch_is_skipped_alike() -> None:
    """Of two trainers: an epoch that is resumed has the batches that were left of it, and epochs
    have orders of their own, the same whether or not the ones before were drawn.
    """
    from accelerate import skip_first_batches

    def loader(number: int) -> TrainerLoader:
        passes = Passes(number)
        data: Any = torch.arange(20)
        whole = torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)
        return TrainerLoader(whole, Shard(whole, Part(number, 2), None, passes), passes)

    def epoch(from_: Any) -> list[list[int]]:
        return [batch.tolist() for batch in from_]

    first, second, resumed = loader(0), loader(1), loader(0)
    epochs = []
    for number in range(2):
        for each in (first, second):
            each.set_epoch(number)
        epochs.append(epoch(first))
        seen = sorted(sum(epochs[-1] + epoch(second), []))
        assert seen == list(range(20)) and len(first) == 5
    resumed.set_epoch(1)

    assert epochs[0] != epochs[1]
    assert epoch(skip_first_batches(resumed, 2)) == epochs[1][2:]


def test_other_clippings_and_optimizers_are_taken(servers: Servers, tmp_path: Path) -> None:
    """``grad_clip`` with ``max_grad_norm=0``, and an optimizer and a schedule of the script's."""
    begin(servers(1))
    model = bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    trainer = PServerTrainer(
        model,
        arguments(tmp_path, max_grad_norm=0.0, max_steps=2, bf16=False),
        train_dataset=samples(),
        optimizers=(optimizer, schedule),
        grad_clip=ClipGradByValue(1e-4),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = trained(trainer)
    moved = max(float((after[name] - before[name]).abs().max()) for name in before)

    assert moved == pytest.approx((0.5 + 0.05) * 1e-4, rel=1e-2)
    assert present().optimizer.inner is optimizer  # type: ignore[union-attr]


@pytest.mark.long
def test_train_twice_goes_on(servers: Servers, tmp_path: Path) -> None:
    """As under transformers alone: the optimizer keeps its state."""
    begin(servers(1))
    options = arguments(tmp_path, max_steps=2)
    ours = PServerTrainer(bert(), options, train_dataset=samples())
    plain = transformers.Trainer(bert(), options, train_dataset=samples())
    for each in (ours, plain):
        each.train()

    assert_same(trained(ours), trained(plain))


def test_a_loop_of_accelerates_equals_the_plain_loop(servers: Servers) -> None:
    """With its accumulation and mixed precision around fleet's optimizer and clipping, to the
    bit.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # the process's, of a test before
    begin(servers(1))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    models = [torch.nn.Linear(6, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    batches = list(torch.randn(6, 4, 6))
    given = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in models]
    model: Any = fleet.distributed_model(models[0])
    optimizer: Any = fleet.distributed_optimizer(given[0], grad_clip=ClipGradByGlobalNorm(0.1))
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for x in fleet.shard(batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    plain = torch.optim.lr_scheduler.StepLR(given[1], 2)
    for number, x in enumerate(batches, 1):
        with torch.autocast("cpu", torch.bfloat16):
            scores = models[1](x)
        (scores.float().square().mean() / 2).backward()
        if number % 2 == 0:
            torch.nn.utils.clip_grad_norm_(models[1].parameters(), 0.1)
            given[1].step()
            plain.step()
            given[1].zero_grad()

    assert_same(dict(models[0].state_dict()), dict(models[1].state_dict()))
    assert fleet.metrics()["steps"] == 3


# ---- rows that are looked up ahead ----


class Noted(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Writes a checkpoint after a step; of a model with tables the Trainer writes none."""

    trainer: Any

    def __init__(self, step: int, folder: Path) -> None:
        self.step, self.folder = step, folder

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            self.trainer.save_model(str(self.folder))
            self.trainer._save_rng_state(str(self.folder))
            state.save_to_json(str(self.folder / "trainer_state.json"))


class Replacing(PServerTrainer):
    """One whose steps get other dicts than the loop has read."""

    def get_batch_samples(self, *args: Any, **named: Any) -> Any:
        found, count = super().get_batch_samples(*args, **named)
        return [dict(each) for each in found], count


def looked_up(
    endpoints: str,
    depth: int,
    options: Any,
    kind: type[PServerTrainer] = PServerTrainer,
    resumes: str | None = None,
    noted: Noted | Half | None = None,
    sets: Any = None,
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """A model with a table, trained: its values, with its rows, and its metrics."""
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"modes": {"*": "sync"}, "look_ahead": depth}
    begin(endpoints, strategy=strategy)
    try:
        model = bert()
        model.bert.embeddings.word_embeddings = DistributedEmbedding(16, name="words")
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
        trainer = kind(
            model,
            options,
            train_dataset=samples() if sets is None else sets,
            eval_dataset=samples(8),
            optimizers=(optimizer, None),
        )
        if noted is not None:
            noted.trainer = trainer
            trainer.add_callback(noted)
        state = trained(trainer, resume_from_checkpoint=resumes)
        drawn = {"drawn": torch.rand(3)}  # the script's random numbers go on alike
        return {name: each.clone() for name, each in state.items()} | drawn, fleet.metrics()
    finally:
        fleet.finish()


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize(
    "changed",
    [
        {"gradient_accumulation_steps": 1},
        {"gradient_accumulation_steps": 3, "eval_strategy": "steps", "eval_steps": 2},
        RARE({"gradient_accumulation_steps": 1, "max_steps": 12}),
        pytest.param(
            {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
            marks=[pytest.mark.long, pytest.mark.processes],
        ),
    ],
    ids=["each batch a step", "three a step", "an early end", "a worker"],
)
def test_rows_of_its_batches_are_looked_up_ahead(
    servers: Servers, tmp_path: Path, changed: Any, depth: int
) -> None:
    """To the bit as without, also where a step has several batches and evaluations come between."""
    options = arguments(tmp_path, **RANDOM, **changed)
    expected, before = looked_up(servers(2), 0, options)
    found, metrics = looked_up(servers(2), depth, options)

    assert_same(found, expected)
    assert metrics["rows_ahead"] > before["rows_looked_up"] / 3
    own, each = metrics["rows_looked_up"], before["rows_looked_up"]
    more = metrics["rows_ahead"] + own - each  # of batches that no step has had
    assert 0 < more < each / 2 if "max_steps" in changed else more == 0


def test_an_epoch_goes_on_with_rows_ahead(servers: Servers, tmp_path: Path) -> None:
    """From a checkpoint in the middle of an epoch, which was written while batches were read ahead:
    with the batches that the loop had not had, to the bit.
    """
    options = arguments(tmp_path, **RANDOM, gradient_accumulation_steps=1)
    written = list[dict[str, torch.Tensor]]()
    for depth in (0, 2):
        noted = Noted(11, tmp_path / f"checkpoint-{depth}")
        looked_up(servers(1), depth, options, noted=noted)
        written.append(read_checkpoint(noted.folder))
    expected, _ = looked_up(servers(1), 0, options, resumes=str(tmp_path / "checkpoint-0"))
    found, metrics = looked_up(servers(1), 2, options, resumes=str(tmp_path / "checkpoint-2"))

    assert_same(written[1], written[0])
    assert_same(found, expected)
    assert metrics["rows_ahead"] > metrics["rows_looked_up"] > 0


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Its values, and its random state."""
    states = torch.load(folder / "rng_state.pth", weights_only=False)
    values = safetensors.torch.load_file(folder / "model.safetensors")
    return {**values, "random": states["cpu"]}


class Drawing(torch.utils.data.Dataset[Any]):
    """Samples that draw the script's random numbers."""

    def __init__(self) -> None:
        self.samples = samples()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        shift = int(torch.randint(0, 3, ()))
        return {**self.samples[number], "input_ids": self.samples[number]["input_ids"] // 2 + shift}


def test_batches_that_draw_are_known_within_a_step(servers: Servers, tmp_path: Path) -> None:
    """They are not read ahead of their step, which the loop reads whole: the others of a step are
    known when its first forward begins.
    """
    options = arguments(tmp_path, gradient_accumulation_steps=3)
    expected, before = looked_up(servers(2), 0, options, sets=Drawing())
    found, metrics = looked_up(servers(2), 1, options, sets=Drawing())

    assert_same(found, expected)
    assert before["rows_looked_up"] / 3 < metrics["rows_ahead"] < before["rows_looked_up"] * 3 / 4


class Persistent(PServerTrainer):
    """One with a loader of its own, which gives the same iterator in every epoch."""

    def get_train_dataloader(self) -> Any:
        data: Any = samples()
        made = torch.utils.data.DataLoader(data, 4, num_workers=1, persistent_workers=True)
        made.collate_fn = transformers.default_data_collator
        return made


class Half(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    """Ends each epoch after four steps."""

    trainer: Any

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step % 4 == 0


@pytest.mark.processes
def test_an_epoch_that_ends_early_leaves_nothing(servers: Servers, tmp_path: Path) -> None:
    """The next one has its own batches, from the first on, also of the same iterator."""
    options = arguments(tmp_path, gradient_accumulation_steps=1)
    expected, before = looked_up(servers(1), 0, options, Persistent, noted=Half())
    found, metrics = looked_up(servers(1), 2, options, Persistent, noted=Half())

    assert_same(found, expected)
    assert metrics["rows_ahead"] > before["rows_looked_up"] / 3


def test_batches_that_a_subclass_replaces_are_looked_up_ahead(
    servers: Servers, tmp_path: Path
) -> None:
    """They stand where the loop's stood."""
    options = arguments(tmp_path, gradient_accumulation_steps=2)
    expected, before = looked_up(servers(1), 0, options)
    found, metrics = looked_up(servers(1), 1, options, Replacing)

    assert_same(found, expected)
    assert metrics["rows_ahead"] > before["rows_looked_up"] / 2


# ---- what cannot be ----


def overlapping() -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"overlap": True}
    return strategy


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"bf16_full_eval": True}, {}, "bf16_full_eval: expected none"),
        ({"auto_find_batch_size": True}, {}, "a trainer that begins again"),
        ({}, {"grad_clip": ClipGradByValue(1.0)}, "expected grad_clip or max_grad_norm, got both"),
        ({}, {"strategy": overlapping}, "expected gradient_accumulation_steps=1"),
        ({}, {"is_collective": True}, "transformers.Trainer and torchrun are made for these"),
    ],
)
def test_what_cannot_be_is_told(
    servers: Servers, tmp_path: Path, changed: Any, options: Any, message: str
) -> None:
    """Each by what to write instead."""
    options = dict(options)
    if options.pop("is_collective", False):
        fleet.init(is_collective=True)
    else:
        begin(servers(1), strategy=options.pop("strategy", lambda: None)())
    with pytest.raises(ValueError, match=message):
        PServerTrainer(bert(), arguments(tmp_path, **changed), **options)


def test_a_table_is_trained_and_not_saved(servers: Servers, tmp_path: Path) -> None:
    """Its rows are on the servers; a checkpoint of transformers' would be without them."""
    for save, steps in (("no", 2), ("epoch", 0)):
        begin(servers(1))
        model = bert()
        model.bert.embeddings.word_embeddings = DistributedEmbedding(16, name="words")
        options = arguments(tmp_path, save_strategy=save, max_steps=2)
        trainer = PServerTrainer(model, options, train_dataset=samples())
        with pytest.raises(ValueError, match="expected .no.") if not steps else nullcontext():
            trainer.train()
        assert fleet.metrics()["steps"] == steps
        fleet.finish()


def test_the_order_of_calls_is_told(servers: Servers, tmp_path: Path) -> None:
    """A Trainer before ``fleet.init``, and an optimizer that is distributed already."""
    with pytest.raises(RuntimeError, match=r"call fleet.init\(\) first"):
        PServerTrainer(bert(), arguments(tmp_path))
    begin(servers(1))
    model = fleet.distributed_model(bert())
    given = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="distributed already"):
        PServerTrainer(model, arguments(tmp_path), optimizers=(given, None))
