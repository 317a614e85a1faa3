"""``trainer_desc_configs``: files for each trainer and step, to be read while training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.eager_jobs import Servers, batches
from trainer import fleet
from transpiler import DistributedStrategy, name


class Net(nn.Module):
    """Two layers, and a tensor with a name between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(name(torch.tanh(self.first(x)), "hidden"))
        return out


def strategy(path: object, **settings: list[str]) -> DistributedStrategy:
    made = DistributedStrategy()
    made.a_sync = False
    made.trainer_desc_configs = {"dump_fields_path": str(path), **settings}
    return made


def begun(given: DistributedStrategy, endpoints: str = "", **init: Any) -> Any:
    if endpoints:
        init["role_maker"] = fleet.UserDefinedRoleMaker(
            0, worker_num=1, server_endpoints=endpoints.split(",")
        )
    fleet.init(strategy=given, **init)
    model = fleet.distributed_model(Net())
    return model, fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.observes(
    "trainer_desc_configs.dump_fields_path",
    "trainer_desc_configs.dump_fields",
    "trainer_desc_configs.dump_param",
    "trainer_desc_configs.stat_var_names",
)
@pytest.mark.parametrize("job", ["alone", "servers", "collective"])
def test_a_step_is_a_file_of_what_it_computed(tmp_path: Path, servers: Servers, job: str) -> None:
    """Outputs of modules and named tensors, a line for each sample; parameters as the step found
    them; the extremes and means of a gradient.  The file is there when step() returns.
    """
    given = strategy(
        tmp_path / "dump",
        dump_fields=["second", "hidden"],
        dump_param=["first.bias"],
        stat_var_names=["first.weight@GRAD"],
    )
    is_collective = job == "collective"
    model, optimizer = begun(
        given, servers(1) if job == "servers" else "", is_collective=is_collective
    )
    (x, y), _ = data = batches(2)
    seen = []
    for x, y in data:
        optimizer.zero_grad()
        out = model(x)
        F.cross_entropy(out, y).backward()
        bias, grad = model.first.bias.detach().clone(), model.first.weight.grad.clone()
        optimizer.step()
        seen.append((out.detach(), bias, grad))
        with torch.no_grad():
            model(x)  # an evaluation is not dumped

    for number, (out, bias, grad) in enumerate(seen, 1):
        file = tmp_path / "dump" / "trainer-0" / f"step-{number:08d}.jsonl"
        found = lines(file.read_text())
        outputs = [line for line in found if line.get("field") == "second"]
        hidden = [line for line in found if line.get("field") == "hidden"]
        assert [line["sample"] for line in outputs] == list(range(8))
        assert torch.equal(torch.tensor([line["value"] for line in outputs]), out)
        assert len(hidden) == 8 and all(line["step"] == number for line in found)
        (param,) = (line for line in found if "param" in line)
        assert torch.equal(torch.tensor(param["value"]), bias)
        (stat,) = (line for line in found if "stat" in line)
        assert stat["min"] == float(grad.min()) and stat["max"] == float(grad.max())
        assert stat["abs_mean"] == pytest.approx(float(grad.abs().mean()), rel=1e-6)
        assert (stat["count"], stat["nonfinite"]) == (24, 0)


def test_a_dump_goes_behind_a_url_and_holds_what_is_not_finite() -> None:
    """Each line is JSON, also of a NaN."""
    model, optimizer = begun(strategy("memory://dumps/job", dump_fields=["second"]))
    model.second.bias.data.copy_(torch.tensor([float("nan"), float("inf")]))
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    fleet.finish()
    with fsspec.open("memory://dumps/job/trainer-0/step-00000001.jsonl", "rt") as file:
        (line,) = lines(file.read())

    assert line["value"] == ["NaN", "Infinity"]


def test_the_hooks_end_with_the_job(tmp_path: Path) -> None:
    """A model that goes on without the job dumps nothing, and names are not listened to."""
    model, optimizer = begun(strategy(tmp_path, dump_fields=["second"]))
    fleet.finish()
    model(torch.ones(1, 6))

    assert not model.second._forward_hooks and list(tmp_path.iterdir()) == []


def test_a_name_that_does_not_exist_is_told(tmp_path: Path) -> None:
    """A parameter when the optimizer is distributed, anything else at the first step, with close
    names.
    """
    with pytest.raises(ValueError, match=r"dump_param: .*'first.bia'; close names: first.bias"):
        begun(strategy(tmp_path, dump_param=["first.bia"]))
    fleet.finish()
    model, optimizer = begun(strategy(tmp_path, dump_fields=["firs"]))
    model(torch.ones(1, 6)).sum().backward()
    with pytest.raises(ValueError, match="nothing of the name 'firs' was computed"):
        optimizer.step()
    fleet.finish()


def test_keys_that_need_another_raise(tmp_path: Path) -> None:
    """A path without names dumps nothing, and names without a path go nowhere."""
    with pytest.raises(ValueError, match="dump_fields_path: has no effect without"):
        fleet.init(strategy=strategy(tmp_path))
    with pytest.raises(ValueError, match="dump_fields: has no effect without"):
        fleet.init(strategy=strategy("", dump_fields=["first"]))
