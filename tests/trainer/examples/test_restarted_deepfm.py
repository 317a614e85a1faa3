"""DeepFM loses a trainer in the middle of an epoch: started again it goes on at its samples."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.launched import launched
from trainer.examples import deepfm

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
from trainer import fleet
from trainer.examples import deepfm

learn, dies = deepfm.learn, int(sys.argv.pop(1))

def told(model, optimizer, batches):
    def seen():
        for batch in batches:
            rank = fleet.worker_index()
            if (rank, optimizer.steps) == (1, dies) and not Path("died").exists():
                Path("died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            with open(f"seen-{rank}.txt", "a") as file:
                print(json.dumps([optimizer.steps, batch["number"].tolist()]), file=file)
            yield batch
    learn(model, optimizer, seen())

deepfm.learn = told
deepfm.main()
"""
SAMPLES, EPOCHS, BATCH = 400, 2, 40
STEPS = SAMPLES // BATCH  # of an epoch


def expected(rank: int) -> dict[int, list[int]]:
    """The samples of each step of a trainer of two: it reads files rank and rank + 2."""
    own = [*range(rank, SAMPLES, deepfm.FILES), *range(rank + 2, SAMPLES, deepfm.FILES)]
    begins = range(0, len(own), BATCH // 2)
    return dict(enumerate([own[begin : begin + BATCH // 2] for begin in begins] * EPOCHS))


@pytest.mark.long  # tests/cluster/test_restarted_servers.py and test_restarted_trainers.py
@pytest.mark.processes
@pytest.mark.timeout(240)
def test_deepfm_goes_on_at_the_same_samples(tmp_path: Path) -> None:
    """A trainer dies in the second epoch: all in all every step has the samples that it has where
    none dies, and each sample is learned from once in each epoch.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["--samples", str(SAMPLES), "--epochs", str(EPOCHS), "--batch", str(BATCH)]
    saving = ("--checkpoint", "saved", "--every", "0.01", "--max-restarts", "1")
    said = launched(tmp_path, "2 x 2", *saving, "script.py", "16", *words).output
    joined = [int(steps) for steps in re.findall(r"joins the others after (\d+) steps", said)]

    assert (tmp_path / "died").exists() and "continues from" not in said
    assert len(joined) == 1 and 0 < joined[0] % STEPS, "in the middle of an epoch"
    learned = list[int]()
    for rank in (0, 1):
        lines = (tmp_path / f"seen-{rank}.txt").read_text().splitlines()
        found = dict(map(json.loads, lines))  # of two attempts at one step the last
        assert found == expected(rank)
        learned += sum(found.values(), [])
    assert sorted(learned) == sorted([*range(SAMPLES)] * EPOCHS)
