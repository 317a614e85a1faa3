"""Promises of the rows on disk: what was kept comes back to the bit, and nothing stays on the disk
of those who are gone.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pserver.table.index import KEYS, Index, order_of
from pserver.table.tiered import PREFIX, Chunk, ColdRows
from tests.support.fork_server import finished

COLUMNS: dict[str, Any] = {
    "values": (np.dtype(np.float32), (3,)),
    "state.sum": (np.dtype(np.float32), (1,)),
    "pushed": (np.dtype(np.float64), ()),
}


def records(ids: list[int]) -> Chunk:
    own = np.array(ids, np.int64)
    numbers = own.astype(np.float32)
    return {
        "ids": own,
        "values": np.stack([numbers, numbers + 1, -numbers], 1),
        "state.sum": numbers[:, None],
        "pushed": own / 3,
    }


def same(first: Chunk, second: Chunk) -> bool:
    return set(first) == set(second) and all(
        np.array_equal(first[name], second[name]) for name in first
    )


def all_of(cold: ColdRows, limit: int, changed: bool = False) -> list[int]:
    found, cursor = [], 0
    while cursor >= 0:
        chunk, cursor = cold.scan(cursor, limit, changed)
        assert same(chunk, records(chunk["ids"].tolist())) and len(chunk["ids"]) <= limit + 3
        found += chunk["ids"].tolist()
    return found


def ordered(ids: list[int]) -> list[int]:
    """Ids in the order of their keys."""
    order = np.empty(len(ids), np.uint64)
    order_of(np.array(ids), order)
    return [ids[place] for place in np.argsort(order)]


def test_records_come_back_to_the_bit(tmp_path: Path) -> None:
    """Of any int64 ids, in the order that was asked for, without those that are not there; removed
    ones are gone.
    """
    cold = ColdRows(COLUMNS, tmp_path)
    ids = [5, -1, 2**63 - 1, -(2**63), 0, 1, 2, 3, 4, 77]
    cold.put(records(ids), np.arange(len(ids)) % 2 == 0)
    found = cold.get(np.array([3, 99, -1, -(2**63)]))

    assert (
        same(found, records([3, -1, -(2**63)]))
        and found["values"].flags.writeable
        and len(cold) == len(ids)
    )
    assert cold.changed(np.array([5, -1, 2**63 - 1, 8])).tolist() == [True, False, True, False]
    assert all_of(cold, 3) == ordered(ids) and all_of(cold, 2, True) == ordered(ids[::2])
    cold.remove(np.array([5, 0]))
    assert (
        len(cold) == 8
        and not len(cold.get(np.array([5, 0]))["ids"])
        and all_of(cold, 1, True) == ordered([2, 4, 2**63 - 1])
    )
    cold.mark_saved()
    assert all_of(cold, 100, True) == [] and len(all_of(cold, 100)) == 8
    cold.put(records([5]), np.array([True]))
    assert all_of(cold, 100, True) == [5]
    cold.clear()
    assert len(cold) == 0 and all_of(cold, 5) == [] and not len(cold.get(np.array([2]))["ids"])


def test_records_in_a_range_of_keys_are_the_rows_of_an_index(tmp_path: Path) -> None:
    """The same ids as in memory, some at a time, as they were when the first were read, while they
    are replaced; what is replaced has changed.
    """
    random = np.random.default_rng(2)
    ids = np.unique(np.append(random.integers(-(2**62), 2**62, 3000), [0, 1, 2**63 - 1]))
    cold, index = ColdRows(COLUMNS, tmp_path), Index()
    cold.put(records(ids.tolist()), np.zeros(len(ids), bool))
    index.insert(ids, 0, 0)
    bounds = np.sort(np.append(random.integers(0, KEYS, 30), [0, 1, 2**32, KEYS])).tolist()
    for begin, end in zip(bounds, bounds[1:], strict=False):
        found: list[int] = []
        for chunk in cold.within(begin, end, 20):
            assert same(chunk, records(chunk["ids"].tolist())) and len(chunk["ids"]) <= 20
            found += chunk["ids"].tolist()
            cold.replace({name: chunk[name] for name in chunk} | {"pushed": -chunk["pushed"]})
        assert sorted(found) == sorted(index.ids.array[index.within(begin, end)].tolist())

    assert len(cold) == len(ids) and cold.changed(ids).all()
    assert np.array_equal(cold.get(ids)["pushed"], -ids / 3)


def test_the_directory_goes_with_its_table(tmp_path: Path) -> None:
    """When it is closed, and when nobody holds it any more."""
    first, second = ColdRows(COLUMNS, tmp_path / "a"), ColdRows(COLUMNS, tmp_path / "a")
    assert len(list((tmp_path / "a").iterdir())) == 2
    first.close()
    assert list((tmp_path / "a").iterdir()) == [second.path]
    second.put(records([1]), np.ones(1, bool))  # works on
    del second
    gc.collect()

    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.processes
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """A directory whose owner is gone is not read, and goes; one whose owner lives stays."""
    mine = ColdRows(COLUMNS, tmp_path)
    killed = finished([__file__, str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL and len(list(tmp_path.iterdir())) == 2
    (tmp_path / f"{PREFIX}strange").mkdir()
    other = ColdRows(COLUMNS, tmp_path)

    assert len(other) == 0 and not len(other.get(np.array([1]))["ids"])
    assert sorted(tmp_path.iterdir()) == sorted(
        [mine.path, other.path, tmp_path / f"{PREFIX}strange"]
    )


def test_without_rocksdict_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ImportError that names the extra, and no directory."""
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with pytest.raises(ImportError, match=r"pip install '.\[disk\]' .* \(.*rocksdict"):
        ColdRows(COLUMNS, tmp_path)

    assert list(tmp_path.iterdir()) == []


class Full:
    """Stands for a RocksDB on a full disk."""

    def write(self, batch: object) -> None:
        raise Exception("IO error: No space left on device")


def test_a_disk_that_refuses_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What RocksDB cannot write is an OSError that names the directory, and counts as not kept."""
    cold = ColdRows(COLUMNS, tmp_path)
    monkeypatch.setattr(cold, "_db", Full())
    with pytest.raises(
        OSError, match="cold-rows-.*cannot keep rows on disk: IO error: No space left"
    ):
        cold.put(records([1]), np.ones(1, bool))

    assert len(cold) == 0


if __name__ == "__main__":
    held = ColdRows(COLUMNS, Path(sys.argv[1]))
    held.put(records([1, 2]), np.ones(2, bool))
    os.kill(os.getpid(), signal.SIGKILL)
