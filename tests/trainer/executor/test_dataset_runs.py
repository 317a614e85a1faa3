"""``train_from_dataset`` and ``infer_from_dataset``: passes of programs over datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.executed import transpiled
from trainer import Executor, fleet
from transpiler import DistributedStrategy, Program, capture, data, program_guard

INPUTS = [
    data("ids", ["values"], "int64"),
    data("ids_offsets", [None], "int64"),
    data("label", [None], "float32"),
]


class Bags(nn.Module):
    """The mean of a bag's rows, and a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.EmbeddingBag(16, 4, mode="sum")
        self.out = nn.Linear(4, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """int64 [values], int64 [batch] -> logits [batch]."""
        found: Tensor = self.out(self.rows(ids, offsets)).squeeze(1)
        return found


def step(model: nn.Module, ids: Tensor, ids_offsets: Tensor, label: Tensor) -> Any:
    """The loss of a batch, and its logits."""
    logits = model(ids, ids_offsets)
    return {"loss": F.binary_cross_entropy_with_logits(logits, label), "logits": logits}


def programs(model: nn.Module) -> tuple[Program, Program]:
    """Main and startup program of a step."""
    batch = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([0, 2]), torch.tensor([0.0, 1.0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with program_guard(Program(()), Program(())):
        return capture(model, step, optimizer, batch, inputs=INPUTS)


def dataset(folder: Path) -> fleet.QueueDataset:
    """Ten batches of four samples, with a slot that no input takes."""
    path = folder / "part-0"
    bags = [[(n * 7 + k) % 16 for k in range(1 + n % 3)] for n in range(40)]
    lines = [f"{len(bag)} {' '.join(map(str, bag))} 1 {n % 2} 1 9" for n, bag in enumerate(bags)]
    path.write_text("\n".join(lines))
    made = fleet.QueueDataset()
    slots = [fleet.Slot("ids", width=None), fleet.Slot("label", "float32"), fleet.Slot("unused")]
    made.init(batch_size=4, use_var=slots)
    made.set_filelist([str(path)])
    return made


def trained(batches: Any) -> nn.Module:
    """The same steps in ordinary torch."""
    model = Bags()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        step(model, *batch["ids"], batch["label"])["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_a_pass_trains_and_infers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the bit as plain torch; lines come as often as asked; inference changes nothing."""
    batches, model = dataset(tmp_path), Bags()
    main, startup = programs(model)
    with Executor() as executor:
        executor.run(startup)
        count = executor.train_from_dataset(
            main, batches, ["loss"], ["the loss"], print_period=4, debug=True
        )
        said = capsys.readouterr().out.splitlines()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        logits, losses = executor.infer_from_dataset(main, batches, ["logits", "loss"])
    reference = trained(batches)

    assert count == 10
    assert [line.split(" (")[0].rsplit(" ", 1)[0] for line in said] == [
        "batch 4: the loss",
        "batch 8: the loss",
    ]
    assert "s for batches, ran" in said[0]
    for name, value in reference.state_dict().items():
        assert torch.equal(before[name], value) and torch.equal(model.state_dict()[name], value)
    assert logits.shape == (40,) and losses.shape == (10,)
    with torch.no_grad():
        assert torch.equal(logits, torch.cat([reference(*batch["ids"]) for batch in batches]))


def test_steps_of_a_pass_are_dumped(tmp_path: Path) -> None:
    """What ``trainer_desc_configs`` names, for every batch."""
    strategy = DistributedStrategy()
    strategy.trainer_desc_configs = {
        "dump_fields_path": str(tmp_path / "dumped"),
        "dump_fields": ["logits"],
        "dump_param": ["out.bias"],
    }
    program, start = transpiled(*programs(Bags()), strategy)
    with Executor() as executor:
        executor.run(start)
        executor.train_from_dataset(program, dataset(tmp_path))
    files = sorted((tmp_path / "dumped" / "trainer-0").iterdir())

    assert len(files) == 10
    lines = [json.loads(line) for line in files[9].read_text().splitlines()]
    assert [line.get("sample") for line in lines] == [0, 1, 2, 3, None]


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    """A missing slot, a wrong period, batches that are no dicts."""
    main, startup = programs(Bags())
    short = [{"label": torch.ones(4)}]
    with Executor() as executor:
        executor.run(startup)
        for given, settings, why in (
            (short, {}, "expected slots for the inputs ids, ids_offsets, got the slots label"),
            (dataset(tmp_path), {"print_period": 0}, "print_period: expected a whole number"),
            (short, {"fetch_list": ["loss"], "fetch_info": []}, "for each of 1 in fetch_list"),
        ):
            with pytest.raises(ValueError, match=why):
                executor.train_from_dataset(main, given, **settings)
        with pytest.raises(TypeError, match="dicts of tensors by slot, got Tensor"):
            executor.train_from_dataset(main, [torch.ones(2)])  # type: ignore[list-item]
