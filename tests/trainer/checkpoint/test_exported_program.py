"""A forward program is one of torch.export too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.support.models import convolution, gpt2
from tests.support.table_programs import Net, adagrad, batches, step
from tests.support.tiers import RARE
from trainer import Executor, export_program, load_inference_model, save_inference_model
from transpiler import InputSpec, capture


@pytest.mark.parametrize("case", [convolution, RARE(gpt2)])
def test_an_exported_program_computes_the_same(case, tmp_path: Path):
    """A convolution and GPT-2 at other sizes: saved by torch.export, loaded, the same bits."""
    torch.manual_seed(4)
    model, one, optimizer, batch = case()
    spec = [InputSpec([None, None], "int64")] if case is gpt2 else None
    program, _ = capture(model, one, optimizer(model), batch(4), inputs=spec)
    clone = program.clone(for_test=True)
    torch.export.save(export_program(clone), tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()

    fed = (torch.randint(0, 37, (3, 11)),) if case is gpt2 else batch(7)
    with Executor() as executor:
        (loss,) = executor.run(clone, fed, ["loss"])
    with torch.no_grad():
        assert torch.equal(again(*fed)["loss"], loss)


def test_rows_of_tables_are_exported(tmp_path: Path):
    """A trained model of tables, saved, loaded and exported: ids that were seen and others."""
    data, model = batches(3), Net()
    program, _ = capture(model, step, adagrad(model), data[0])
    path = tmp_path / "model.program"
    with Executor() as executor:
        for batch in data:
            executor.run(program, batch)
        save_inference_model(path, ["ids", "y"], ["loss"], executor, program)
    loaded, _, _ = load_inference_model(path)
    ids, y = torch.randint(0, 30, (5, 3)), torch.tensor([0, 1, 0, 1, 1])

    with torch.no_grad():
        wanted = step(model, ids, y)
        for exported in (export_program(loaded), export_program(program.clone(for_test=True))):
            assert torch.allclose(exported.module()(ids, y)["loss"], wanted, rtol=1e-6, atol=0)


def test_what_is_no_forward_program_is_refused():
    """A training program, and something that is no program."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    program, _ = capture(model, lambda m, x: m(x).mean(), optimizer, (torch.ones(3, 4),))
    with pytest.raises(ValueError, match=r"clone\(for_test=True\) is one"):
        export_program(program)
    with pytest.raises(TypeError, match="expected a Program, got Linear"):
        export_program(model)
