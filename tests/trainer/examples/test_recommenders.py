"""The recommenders: two servers and two trainers learn what plain torch learns in one process, from
the same data and as many samples.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.support.launched import EXAMPLES, launched
from tests.support.plain_torch import batches, plain
from tests.support.tiers import RARE
from trainer.examples import deepfm, synthetic

MODES = ["sync", RARE("async")]
NEAR = {"sync": 0.015, "async": 0.02}  # of an AUC, from as many samples in another order


def on_cluster(folder: Path, name: str, mode: str, **flags: float) -> float:
    """The last score that trainer 0 of two has printed."""
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    log = launched(folder, "2 x 2", str(EXAMPLES / f"{name}.py"), "--mode", mode, *words).log
    return float(re.findall(r"(?:auc|recall) (0\.\d+)", log)[-1])


@pytest.mark.processes
@pytest.mark.parametrize("mode", MODES)
def test_deepfm(tmp_path: Path, mode: str) -> None:
    """From files that are dealt out."""
    torch.manual_seed(0)
    model = plain(deepfm.DeepFM(8))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for _ in range(2):
        deepfm.learn(model, optimizer, batches(synthetic.impressions(16_000, 1), 100))
    alone = deepfm.evaluate(model, batches(synthetic.impressions(4_000, 2), 100))
    score = on_cluster(tmp_path, "deepfm", mode, samples=16_000)

    assert alone > 0.82 and score == pytest.approx(alone, abs=NEAR[mode])
