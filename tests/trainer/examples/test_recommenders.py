"""The recommenders: two servers and two trainers learn what plain torch learns in one process, from
the same data and as many samples.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from tests.support.launched import EXAMPLES, launched
from tests.support.plain_torch import TwoRules, batches, plain
from tests.support.tiers import RARE
from trainer.examples import deepfm, din, mmoe, synthetic, two_tower
from trainer.lr import WarmupLR

SAMPLES, BATCH, EPOCHS = 12_000, 100, 2
VISITS = 20_000  # the samples of din, which begins to learn later than the others
MODES = ["sync", RARE("async")]

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def on_cluster(folder: Path, name: str, mode: str, samples: int = SAMPLES) -> list[float]:
    """What trainer 0 of two has printed."""
    words = ["--mode", mode, "--samples", str(samples), "--epochs", str(EPOCHS)]
    log = launched(folder, "2 x 2", str(EXAMPLES / f"{name}.py"), *words).log
    return [float(score) for score in re.findall(r"(?:auc|recall) (0\.\d+)", log)]


@pytest.mark.parametrize("mode", MODES)
def test_deepfm(tmp_path: Path, mode: str) -> None:
    """From files that are dealt out, in another order than in one process."""
    torch.manual_seed(0)
    model = plain(deepfm.DeepFM(8, 0.2))
    optimizer = TwoRules(model, 0.2, 0.01)
    for _ in range(EPOCHS):
        deepfm.learn(model, optimizer, batches(synthetic.impressions(SAMPLES, 1), BATCH))
    alone = deepfm.evaluate(model, batches(synthetic.impressions(SAMPLES // 4, 2), BATCH))
    (score,) = on_cluster(tmp_path, "deepfm", mode)

    assert alone > 0.8 and score == pytest.approx(alone, abs=0.015)


@pytest.mark.long  # test_deepfm stands for it
@pytest.mark.parametrize("mode", MODES)
def test_din(tmp_path: Path, mode: str) -> None:
    """Over histories of any length, shuffled over both trainers."""
    torch.manual_seed(0)
    model = plain(din.DIN(8, 0.5))
    optimizer = TwoRules(model, 0.5, 0.01)
    learned, unseen = (synthetic.visits(*each) for each in ((VISITS, 1), (VISITS // 4, 2)))
    for _ in range(EPOCHS):
        din.learn(model, optimizer, batches({**learned[0], **learned[1]}, BATCH))
    alone = din.evaluate(model, batches({**unseen[0], **unseen[1]}, BATCH))
    (score,) = on_cluster(tmp_path, "din", mode, VISITS)

    assert alone > 0.84 and score == pytest.approx(alone, abs=0.025 if mode == "sync" else 0.06)


@pytest.mark.long  # test_deepfm stands for it
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's, of sparse gradients
@pytest.mark.parametrize("mode", MODES)
def test_two_tower(tmp_path: Path, mode: str) -> None:
    """A softmax over a million items, sampled by each trainer for itself."""
    torch.manual_seed(0)
    model = plain(two_tower.TwoTower(16, 0.6), sparse=True)
    optimizer = TwoRules(model, 0.6, 0.003)
    learned, unseen = (synthetic.choices(*each) for each in ((SAMPLES, 1), (SAMPLES // 4, 2)))
    chosen = DataLoader(TensorDataset(*learned.values()), BATCH, shuffle=True)
    for _ in range(EPOCHS):
        two_tower.learn(model, optimizer, chosen)
    held_out = DataLoader(TensorDataset(*unseen.values()), 1000)
    alone = two_tower.evaluate(model, held_out, torch.unique(unseen["item"]))
    (score,) = on_cluster(tmp_path, "two_tower", mode)

    assert alone > 0.24 and score == pytest.approx(alone, abs=0.03)


@pytest.mark.long  # test_deepfm stands for it
@pytest.mark.parametrize("mode", MODES)
def test_mmoe(tmp_path: Path, mode: str) -> None:
    """Two tasks, by the same batches: sync, what one process learns."""
    torch.manual_seed(0)
    model = plain(mmoe.MMoE(8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    steps = EPOCHS * SAMPLES // BATCH
    scheduler = WarmupLR(CosineAnnealingLR(optimizer, T_max=steps), warmup_steps=steps // 10)
    learned, unseen = (
        DataLoader(TensorDataset(*(columns[name] for name in ("user", "video", "labels"))), BATCH)
        for columns in (synthetic.views(SAMPLES, 1), synthetic.views(SAMPLES // 4, 2))
    )
    for _ in range(EPOCHS):
        mmoe.learn(model, optimizer, scheduler, learned)
    alone = mmoe.evaluate(model, unseen)
    scores = on_cluster(tmp_path, "mmoe", mode)

    assert min(alone) > 0.7
    if mode == "sync":
        assert scores == pytest.approx(alone, abs=0.001)
    else:  # of twice as many updates, which may learn more
        assert all(score > one - 0.04 for score, one in zip(scores, alone, strict=True))
