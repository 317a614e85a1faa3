"""Hashes that are the same everywhere, ids within shards, and samples chosen by tags."""

from __future__ import annotations

import struct

import pytest
import torch
import xxhash

import trainer.nn.functional as FF


@pytest.mark.parametrize("size", [1, 3, 4, 11])
def test_hash_is_xxh64_of_the_rows_bytes(size: int) -> None:
    """As the reference implementation has it, for rows shorter and longer than a block."""
    rows = torch.randint(-(2**63), 2**63 - 1, (7, size))
    for modulus in (1000, 2**62, 1):
        found = FF.hash(rows, modulus, num_hash=3)
        assert found.shape == (7, 3, 1)
        for row, hashes in zip(rows.tolist(), found[:, :, 0].tolist(), strict=True):
            bytes_ = struct.pack(f"<{size}q", *row)
            assert hashes == [xxhash.xxh64_intdigest(bytes_, seed) % modulus for seed in range(3)]
    with pytest.raises(TypeError, match="whole numbers"):
        FF.hash(torch.rand(3), 10)


def test_ids_within_a_shard() -> None:
    """Every id is in one shard, and ids that no shard has in none."""
    ids = torch.arange(-2, 23)
    parts = [FF.shard_index(ids, 20, 3, k, ignore_value=-7) for k in range(3)]
    for i, each in enumerate(ids.tolist()):
        found = [k * 7 + int(p[i]) for k, p in enumerate(parts) if int(p[i]) != -7]
        assert found == ([each] if 0 <= each < 20 else [])
    with pytest.raises(ValueError, match="shard_id: expected 0 to 2, got 3"):
        FF.shard_index(ids, 20, 3, 3)


def test_samples_with_a_tag() -> None:
    """In every form of samples and tags; none left gives one row that weighs nothing."""
    rows = torch.arange(8.0).reshape(4, 2).requires_grad_()
    tags = torch.tensor([0, 1, 1, 3, 0, 3, 2, 6]), torch.tensor([0, 2, 4, 6])
    wanted = torch.tensor([1])
    for given in (
        tags,
        tags[0].reshape(4, 2),
        torch.nested.nested_tensor_from_jagged(*tags_of(tags)),
    ):
        kept, weight = FF.filter_by_instag(rows, given, wanted)
        assert torch.equal(kept, rows[:2]) and torch.equal(weight, torch.ones(2, 1))
    (values, offsets), weight = FF.filter_by_instag(
        (torch.arange(6.0), torch.tensor([0, 1, 1, 4])), tags, torch.tensor([3, 6])
    )
    assert values.tolist() == [1, 2, 3, 4, 5] and offsets.tolist() == [0, 0, 3]
    assert weight.shape == (5, 1)
    none, weight = FF.filter_by_instag(rows, tags, torch.tensor([9]), out_val_if_empty=5)
    assert none.tolist() == [[5, 5]] and weight.tolist() == [[0]]
    kept.sum().backward()
    assert rows.grad.tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]


def tags_of(tags: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, and offsets with the end, as nested tensors have them."""
    values, offsets = tags
    return values, torch.cat([offsets, torch.tensor([len(values)])])
