"""A model saved for inference is one file that predicts anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from tests.support.fork_server import finished
from tests.support.table_programs import Net, adagrad, batches, train, transpiled
from trainer import Executor, load_inference_model, save_inference_model
from transpiler import capture

Servers = Callable[[int], str]


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.out = nn.Linear(8, 3)
        self.other = nn.Linear(6, 1)


def both(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    logits = model.out(model.body(x))
    loss = F.cross_entropy(logits, y) + model.other(x).square().mean()
    return {"loss": loss, "logits": logits}


def classified(model: nn.Module, ids: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    logits = model(ids)
    return {"loss": F.cross_entropy(logits, y), "logits": logits}


def fed(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 6), torch.randint(0, 3, (size,))


PREDICTS = """
import sys
from safetensors.torch import load_file, save_file
from trainer import Executor, load_inference_model

program, feeds, fetches = load_inference_model(sys.argv[1])
with Executor() as executor:
    # in memory of its own: where a tensor begins can change the last bit of a product
    feed = {name: tensor.clone() for name, tensor in load_file(sys.argv[2]).items()}
    found = executor.run(program, feed, fetches)
save_file(dict(zip(fetches, found)), sys.argv[3])
"""


def predicted(folder: Path, model: Path, feed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What another process computes, that has the file alone."""
    from safetensors.torch import load_file

    save_file(feed, folder / "feed.safetensors")
    script = folder / "predict.py"
    script.write_text(PREDICTS)
    names = [str(model), str(folder / "feed.safetensors"), str(folder / "out.safetensors")]
    finished([str(script), *names]).check_returncode()
    return load_file(folder / "out.safetensors")


@pytest.mark.processes
def test_a_plain_process_predicts(tmp_path: Path) -> None:
    """Trained, saved, loaded in a process that has no module: the logits are those of the module in
    eval() mode, to the bit; what they do not need is not in the file.
    """
    model = Pair()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    program, _ = capture(model, both, optimizer, fed(4))
    path, (x, _y) = tmp_path / "model.program", fed(9)
    with Executor() as executor:
        for _ in range(3):
            executor.run(program, fed(8))
        save_inference_model(path, ["x"], ["logits"], executor, program)
    found, feeds, fetches = load_inference_model(path)

    assert (feeds, fetches) == (["x"], ["logits"])
    assert found.storage is not None and "other.weight" not in found.storage.tensors
    model.eval()
    wanted = model.out(model.body(x))
    assert torch.equal(predicted(tmp_path, path, {"x": x})["logits"], wanted)


@pytest.mark.processes
def test_tables_on_servers_are_saved_as_rows(servers: Servers, tmp_path: Path) -> None:
    """A model of tables, trained on two servers: the file has the servers' rows, and predicts as
    plain training does when the servers are gone; ids that were never seen read their initial rows.
    """
    data, reference = batches(5), Net()
    model = Net()
    optimizer = adagrad(model)
    main, startup = capture(model, classified, optimizer, data[0])
    transpiler = transpiled(main, startup, servers(2))
    path, unseen = tmp_path / "model.program", torch.randint(0, 30, (6, 3))
    with Executor() as executor:
        executor.run(transpiler.get_startup_program())
        for batch in data:
            executor.run(transpiler.get_trainer_program(), batch)
        save_inference_model(path, ["ids"], ["logits"], executor, main)
    train(reference, adagrad(reference), data)

    with torch.no_grad():
        wanted = reference(unseen)
    assert torch.allclose(predicted(tmp_path, path, {"ids": unseen})["logits"], wanted, atol=1e-6)


def test_rows_stay_on_servers_if_one_says_so(servers: Servers, tmp_path: Path) -> None:
    """The file has no rows; an Executor of the job reads the servers' present ones, and another is
    refused.
    """
    data, model = batches(4), Net()
    main, startup = capture(model, classified, adagrad(model), data[0])
    transpiler = transpiled(main, startup, servers(2))
    path = tmp_path / "model.program"
    with Executor() as executor:
        executor.run(transpiler.get_startup_program())
        save_inference_model(path, ["ids"], ["logits"], executor, main, tables="servers")
        program, feeds, fetches = load_inference_model(path, executor)
        ids = data[0][0]
        (before,) = executor.run(program, (ids,), fetches)
        executor.run(transpiler.get_trainer_program(), data[0])
        (after,) = executor.run(program, (ids,), fetches)

    assert feeds == ["ids"] and not torch.equal(before, after)
    with pytest.raises(ValueError, match="expected the Executor that has joined them"):
        load_inference_model(path)
    with pytest.raises(ValueError, match="expected an Executor that has joined a job"):
        load_inference_model(path, Executor())


def test_what_cannot_be_saved_is_told(tmp_path: Path) -> None:
    """Unknown names, an input that is missing, a fetch that nothing computes; no file appears."""
    model = Pair()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    program, _ = capture(model, both, optimizer, fed(4))
    path = tmp_path / "model.program"

    def save(feeds: list[str], fetches: list[str]) -> None:
        save_inference_model(path, feeds, fetches, Executor(), program)

    with pytest.raises(ValueError, match="fetches: the program has no variable 'logit'"):
        save(["x"], ["logit"])
    with pytest.raises(ValueError, match="feeds: expected 'y' too, which loss cannot"):
        save(["x"], ["loss"])
    with pytest.raises(ValueError, match="feeds: 'logits' is no input"):
        save(["x", "logits"], ["loss"])
    with pytest.raises(ValueError, match=r"fetches: 'out.bias' is nothing that the program comp"):
        save(["x"], ["out.bias"])
    with pytest.raises(TypeError, match="fetches: expected a list of names, got 'logits'"):
        save(["x"], "logits")  # type: ignore[arg-type]
    assert not path.exists()
