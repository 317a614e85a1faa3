"""Our packages beside a script's own modules of the same names."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import pytest

from tests.support.processes import Processes

pytestmark = pytest.mark.processes

SCRIPT = """
import pickle, sys
import torch
from torch.utils.data import DataLoader, Dataset

BEFORE
from pserver import Constant, DistributedEmbedding, DistributedStrategy, fleet, nn
AFTER


class Clicks(Dataset):
    def __init__(self):
        self.uniform = Constant(0.5)  # one of ours travels into the workers

    def __len__(self):
        return 16

    def __getitem__(self, index):
        assert self.uniform == Constant(0.5)
        return torch.tensor([index]), torch.ones(1)


def main():
    fleet.init(strategy=DistributedStrategy())
    model = torch.nn.Sequential(DistributedEmbedding(2), torch.nn.Flatten(), torch.nn.Linear(2, 1))
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = DataLoader(Clicks(), 4, num_workers=1, multiprocessing_context="spawn")
    for ids, labels in fleet.shard(loader):
        torch.nn.functional.mse_loss(model(ids), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert pickle.loads(pickle.dumps(Clicks().uniform)) == Constant(0.5)
    fleet.finish()
    print("STEPS", optimizer.steps, flush=True)
    for name in ("trainer", "transpiler"):
        ours = [each for each in sys.modules if each.split(".")[0] == name and "." in each]
        print(name, "ours" if ours else "theirs", flush=True)
        copies = [each for each in sys.modules if each.startswith(f"pserver.{name}.")]
        assert not (ours and copies), "two copies"


if __name__ == "__main__":
    main()
"""
MINE = "from pserver import fleet\n\n\ndef mine():\n    return 'mine'\n"
USED = "import {0}\nassert {0}.mine() == 'mine'\n"
BESIDE: dict[str, Mapping[str, str]] = {
    "nothing": {},
    "trainer.py": {"trainer.py": MINE},
    "trainer/": {"trainer/__init__.py": MINE},
    "transpiler.py": {"transpiler.py": MINE},
    "both": {"trainer.py": MINE, "transpiler.py": MINE},
}


SHORT = {("both", True, False)}
ROWS = [
    pytest.param(*row, marks=() if row in SHORT else pytest.mark.long)
    for row in product(BESIDE, (False, True), (False, True))
]


@pytest.mark.parametrize(("beside", "launched", "first"), ROWS)
def test_a_script_has_modules_of_these_names(
    processes: Processes, beside: str, launched: bool, first: bool
) -> None:
    """Both are found, also in spawned workers of a loader, and no package is loaded twice."""
    hidden = {name.split("/")[0].removesuffix(".py") for name in BESIDE[beside]}
    for name, text in BESIDE[beside].items():
        (processes.path / name).parent.mkdir(exist_ok=True)
        (processes.path / name).write_text(text)
    uses = "".join(USED.format(name) for name in sorted(hidden))
    text = SCRIPT.replace("BEFORE", uses if first else "").replace("AFTER", uses)
    (processes.path / "clicks.py").write_text(text)
    launch = ("-m", "pserver", "launch", "--servers", "1", "--trainers", "1") if launched else ()
    # -u: none is forked, as it would have imported packages of these names already
    process = processes.python("script", "-u", *launch, "clicks.py")

    assert process.status() == 0, process
    said = "\n".join(process.lines)
    assert "STEPS 4" in said
    for name in ("trainer", "transpiler"):
        assert f"{name} {'theirs' if name in hidden else 'ours'}" in said
