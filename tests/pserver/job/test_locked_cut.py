"""Promises of a table's cut that is read beside the steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pserver.lane import tables
from tests.support.held_servers import plan, server, train

SECONDS = 20.0


def rows(chunks: Any) -> dict[int, bytes]:
    return {
        int(own): value.tobytes()
        for chunk in chunks
        for own, value in zip(chunk["ids"], chunk["values"], strict=True)
    }


def scanned(table: Any) -> dict[int, bytes]:
    chunk, cursor = table.scan(0, 0, changed_since_save=False, materialized=False)
    assert cursor < 0
    return rows([chunk])


@pytest.mark.parametrize("most", [1, 2**26], ids=["waits for the reader", "copies"])
def test_threads_that_update_and_one_that_reads_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """The cut has every row of its moment, each once, while two threads change them."""
    monkeypatch.setattr(tables, "KEPT_BYTES", most)
    monkeypatch.setattr(tables, "KEPT_PART", 10**9)
    monkeypatch.setattr(tables, "READ_ROWS", 3)
    monkeypatch.setattr(tables, "FILE_BYTES", 400)
    held = server(plan(), tmp_path)
    train(held, 8)
    table = held.tables["emb"]
    expected = scanned(table)
    cut = table.cut()
    others = [threading.Thread(target=train, args=(held, 25, seed)) for seed in (5, 6)]
    for other in others:
        other.start()
    chunks = list(cut.chunks())
    cut.close()
    for other in others:
        other.join(SECONDS)

    assert rows(chunks) == expected and sum(len(each["ids"]) for each in chunks) == len(expected)
    assert not any(other.is_alive() for other in others) and scanned(table) != expected


def test_a_step_waits_for_the_reader_for_an_instant_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody reads, steps go on all the same, and what they change is copied."""
    monkeypatch.setattr(tables, "KEPT_BYTES", 1)
    monkeypatch.setattr(tables, "KEPT_PART", 10**9)
    held = server(plan(), tmp_path)
    train(held, 3)
    expected = scanned(held.tables["emb"])
    cut = held.tables["emb"].cut()
    train(held, 4, seed=8)

    assert rows(cut.chunks()) == expected
    cut.close()
    assert np.array_equal([*rows(cut.chunks())], [])
