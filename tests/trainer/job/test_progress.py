"""``fleet.shard(progress=True)``, and where a trainer is in its data."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader, IterableDataset

from tests.support.screen import Screen
from trainer import fleet
from trainer.job.job import Reported, present
from trainer.job.report import ProgressBar


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    fleet.init()
    yield
    fleet.finish()


class Endless(IterableDataset[int]):
    """Numbers, whose count nobody knows."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(5))

    def __len__(self) -> int:
        raise AssertionError("a guess that torch warns of")


def test_a_log_gets_a_line_for_each_pass(capsys: pytest.CaptureFixture[str]) -> None:
    """At the end of each pass, and where the script leaves one; the batches are the loader's."""
    loader = DataLoader(torch.arange(6), batch_size=2)
    shard = fleet.shard(loader, progress=True)
    for batch, expected in zip(shard, loader, strict=True):
        assert torch.equal(batch, expected)
        fleet.report(samples=2, loss=float(batch[0]), auc=0.75)
    for _ in shard:
        break
    for _ in fleet.shard(DataLoader(Endless(), batch_size=2), progress=True):
        assert present().position.now()[0] == 3

    assert len(shard) == 3  # type: ignore[arg-type]
    first, second, third = capsys.readouterr().out.splitlines()
    assert re.fullmatch(
        r"pass 1: 3 batches in \d+\.\d s  [\d,]+ samples/s  auc 0\.75  loss 4", first
    )
    assert second.startswith("pass 2: 1 batches in") and third.startswith("pass 3: 3 batches in")
    assert present().position.now() == (3, 3, 0)


def test_nothing_changes_unless_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone the loader itself comes back; under launch's panel nothing is printed."""
    loader = DataLoader(torch.arange(6), batch_size=2)
    assert fleet.shard(loader) is loader
    monkeypatch.setenv("PSERVER_PANEL", "1")
    assert fleet.shard(loader, progress=True) is loader
    assert len(list(fleet.shard([1, 2, 3], progress=True))) == 3
    assert capsys.readouterr().out == ""
    with pytest.raises((TypeError, ValueError), match="progress"):
        fleet.shard(loader, progress="yes")  # type: ignore[arg-type]


def test_a_terminal_gets_a_bar() -> None:
    """One line, which stays at the end of the pass, below the cursor's own."""
    out, reported = io.StringIO(), Reported()
    console = Console(file=out, force_terminal=True, width=80, color_system=None, _environ={})
    bar = ProgressBar(reported, console)
    bar.begin(2, 4)
    reported.add(64, {"loss": 0.25, "[b]": 1.0})
    for batch in range(1, 4):
        bar.advance(batch)
    bar.end()
    screen = Screen()
    screen.write(out.getvalue().replace("\n", "\r\n"))

    assert re.match(r"pass 2 .*3/4 +75% .*samples/s  \[b\] 1", screen.shown[0]), screen.shown
    assert screen.cursor and screen.shown[1:] == [""]
