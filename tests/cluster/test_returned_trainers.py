"""``launch --max-restarts``: a trainer that was killed comes back alone, and its script goes on
where those of the others are: in the pass, in the schedule, at the joint calls, and at the saves.
"""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

from tests.support.processes import Processes
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SAMPLES, EPOCHS = 160, 4
SCRIPT = f"""
import json, os, signal, sys, time
import torch
from pathlib import Path
from torch.utils.data import DataLoader
from trainer import fleet

strategy = fleet.DistributedStrategy()
strategy.a_sync_configs = json.loads(sys.argv[1])
victim = int(sys.argv[2])
fleet.init(strategy=strategy)
me = fleet.worker_index()
print("process", os.getpid(), flush=True)
model = fleet.distributed_model(torch.nn.Linear(1, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e-4))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
loader = DataLoader(torch.arange({SAMPLES}), batch_size=4, shuffle=True)
back = Path("back")
if me == victim and Path("died").exists():
    back.touch()
fleet.barrier_worker()
for epoch in range({EPOCHS}):
    seen = []
    for number, x in enumerate(fleet.shard(loader), 1):
        model(x.float()[:, None]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += x.tolist()
        print("trained", epoch, json.dumps(x.tolist()), flush=True)
        if epoch == 1 and number == 3 and me == victim and not Path("died").exists():
            optimizer.flush()
            Path("died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        while epoch == 1 and number == 8 and me != victim and not back.exists():
            time.sleep(0.01)
    scheduler.step()
    total = fleet.all_reduce(torch.tensor(float(len(seen))))
    print("epoch", epoch, json.dumps([total.item(), optimizer.param_groups[0]["lr"]]), flush=True)
fleet.finish()
print("finished after", optimizer.steps, "steps", flush=True)
"""


def launched(processes: Processes, mode: str, victim: int, *more: str) -> tuple[int, list[str]]:
    """A job's exit status, and its lines."""
    (processes.path / "script.py").write_text(SCRIPT)
    flags = ("--servers", "2", "--trainers", "2", "--max-restarts", "2", *more)
    launch = ("-m", "pserver", "launch", *flags, "script.py", mode, str(victim))
    started = processes.python("launch", *launch)
    return started.status(patience=200), started.lines


@pytest.mark.parametrize("victim", [RARE(0), 1])
@pytest.mark.parametrize("mode", ["{}", RARE('{"half_async": true}')])
def test_a_trainer_comes_back_to_where_the_others_are(
    processes: Processes, mode: str, victim: int
) -> None:
    """Every sample of every epoch is trained on once; sums over trainers and rates are those of the
    others.
    """
    status, lines = launched(processes, mode, victim)
    text = "\n".join(lines)

    assert status == 0, text
    assert "starts it again (restart 1 of 2); the others go on" in text, text
    trained: dict[int, Counter[int]] = {epoch: Counter() for epoch in range(EPOCHS)}
    for epoch, batch in re.findall(r"trained (\d) (\[.*\])", text):
        trained[int(epoch)].update(json.loads(batch))
    for epoch, seen in trained.items():
        assert seen == Counter(range(SAMPLES)), f"epoch {epoch}\n{text}"
    said = re.findall(r"trainer (\d) *\| epoch (\d) (\[.*\])", text)
    for epoch in range(EPOCHS):
        of_epoch = [json.loads(told) for _, number, told in said if int(number) == epoch]
        assert len(of_epoch) == (3 if epoch == 0 else 2), text
        assert all(each[0] == of_epoch[0][0] for each in of_epoch), text
    rates = {json.loads(told)[1] for _, number, told in said if int(number) == EPOCHS - 1}
    assert rates == {1e-4 * 0.5**EPOCHS}, text
    (processes.path / "died").unlink()


@pytest.mark.long  # the test before, and tests/trainer/job/test_late_trainers.py, stand for it
def test_the_others_go_on_where_they_save_by_themselves(processes: Processes) -> None:
    """No other process is started again; the one that comes back saves with them, and the job goes
    on from a checkpoint of that time when it is started once more.
    """
    saving = ("--checkpoint", "saved", "--every", "0.05")
    status, lines = launched(processes, "{}", 1, *saving)
    text = "\n".join(lines)

    assert status == 0, text
    assert len(re.findall(r"\| process \d+", text)) == 3 and "starts the job again" not in text
    assert "joins the others after" in text and "continues from" not in text
    listed = json.loads((processes.path / "saved" / "checkpoints.json").read_text())
    assert listed, text
    newest = sorted((processes.path / "saved").glob("step-*/checkpoint.json"))[-1]
    place = json.loads(newest.read_text())["meta"]["place"]
    assert sorted(trainer for trainer, _ in place["trainers"]) == [0, 1], place

    status, lines = launched(processes, "{}", 1, *saving)
    text = "\n".join(lines)

    assert status == 0, text
    assert text.count("continues from") == 2, text
