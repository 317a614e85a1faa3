"""Tables whose ids are strings: the same ids in every form and place, trained, saved and served."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from pserver.table.string_ids import string_ids
from pserver.table.xxh3 import hashed
from trainer import DistributedEmbedding, fleet
from trainer.serving import load_embedding

WORDS = ["red", "", "Gr\u00fcn", "shoes"]
BYTES = [word.encode() for word in WORDS]
COLUMN = b"".join(BYTES), np.cumsum([0, *map(len, BYTES)])
Servers = Callable[[int], str]


def test_ids_are_xxh3_of_the_bytes() -> None:
    """In every form; the hash of nothing is the one that its specification has."""
    digests = [xxhash.xxh3_64_intdigest(each) for each in BYTES]
    expected = torch.from_numpy(np.array(digests, np.uint64).view(np.int64))
    assert int(string_ids([""])) % 2**64 == 0x2D06800538D394C2
    values = torch.frombuffer(bytearray(COLUMN[0]), dtype=torch.uint8)
    forms: list[Any] = [WORDS, BYTES, tuple(WORDS), np.array(WORDS), np.array(BYTES)]
    forms += [np.array(WORDS, object), COLUMN, (values, torch.from_numpy(COLUMN[1]))]
    for form in forms:
        assert torch.equal(string_ids(form), expected)
    pairs = [WORDS[:2], WORDS[2:]]
    assert torch.equal(string_ids(pairs), expected.reshape(2, 2))
    assert string_ids(WORDS, 10).tolist() == [digest % 10 for digest in digests]
    assert hashed(np.frombuffer(COLUMN[0], np.uint8), COLUMN[1]).tolist() == expected.tolist()
    assert string_ids([]).shape == (0,) and string_ids([[], []]).shape == (2, 0)


def test_a_column_has_the_same_ids_at_every_length() -> None:
    """Compiled, of a column's bytes from any place on, and of bytes that the kernel leaves to the
    library.
    """
    rng = random.Random(0)
    lengths = [*range(300), *(rng.randint(0, 1000) for _ in range(300))]
    texts = [rng.randbytes(length) for length in lengths]
    ends = np.cumsum([0, *map(len, texts)])

    found = hashed(np.frombuffer(b"".join(texts), np.uint8), ends.astype(np.int32)[1:])

    assert found.tolist() == string_ids(texts[1:]).tolist()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("red", "in a list, an array or a column, got str"),
        ([1, 2], "expected strings of str or bytes"),
        ([["a"], ["b", "c"]], r"one length, got \[1\] at 0 and \[2\] at 1.*with offsets"),
        ((b"ab", np.array([0, 3])), "never going down, at most 2"),
        (np.array([1.0]), "got float64"),
        ((["red", "blue"], torch.tensor([0])), "got list and offsets: those of bags are"),
    ],
)
def test_what_is_no_strings_is_refused(given: Any, message: str) -> None:
    """With what was expected."""
    with pytest.raises((TypeError, ValueError), match=message):
        DistributedEmbedding(2, hash="xxh3")(given)


def test_wrong_settings_are_refused() -> None:
    """An unknown hash, a padding among hashes, and strings without a hash."""
    with pytest.raises(ValueError, match="hash: expected None or one of xxh3, got 'md5'"):
        DistributedEmbedding(2, hash="md5")
    with pytest.raises(ValueError, match="padding_idx: expected None with hash"):
        DistributedEmbedding(2, hash="xxh3", padding_idx=0)
    with pytest.raises(TypeError, match="expected a tensor of int64, got list"):
        DistributedEmbedding(2)(["red"])


@pytest.mark.parametrize("rows", [None, 50])
def test_strings_train_are_exported_and_served(
    servers: Servers, tmp_path: Path, rows: int | None
) -> None:
    """On two servers as the same table by ids does alone; the export reads strings alike."""
    served = DistributedEmbedding(2, hash="xxh3", num_embeddings=rows, pooling="sum")
    alone = DistributedEmbedding(2, num_embeddings=rows, pooling="sum")
    offsets = torch.tensor([0, 3])
    role = fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=servers(2).split(","))
    fleet.init(role)
    model = fleet.distributed_model(torch.nn.ModuleDict({"words": served}))
    mine = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    plain = torch.optim.SGD(alone.parameters(), lr=0.5)
    given = ((model["words"], mine, WORDS), (alone, plain, string_ids(WORDS, rows)))
    for table, optimizer, ids in given:
        for _ in range(2):
            optimizer.zero_grad()
            table(ids, offsets).square().sum().backward()
            optimizer.step()
    found = model["words"](WORDS, offsets).detach()
    fleet.export(str(tmp_path / "model.pt"))
    fleet.finish()

    torch.testing.assert_close(found, alone(string_ids(WORDS, rows), offsets).detach())
    module = load_embedding(str(tmp_path / "model.pt"), "words", pooling="sum")
    assert torch.equal(module(WORDS, offsets), found)
    assert torch.equal(module(COLUMN, offsets), found)
    assert torch.equal(module(string_ids(WORDS, rows), offsets), found)


def test_a_state_dict_has_the_hash() -> None:
    """It is loaded where the same hash is, and refused where there is none."""
    table = DistributedEmbedding(2, hash="xxh3")
    state = table.state_dict()
    DistributedEmbedding(2, hash="xxh3").load_state_dict(state)
    with pytest.raises(RuntimeError, match='Unexpected key.*"hash"'):
        DistributedEmbedding(2).load_state_dict(state)
