"""Promises of the bytes of manifests: what was written is read, and anything else is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from pserver.checkpoint import checkpoint, manifest
from pserver.checkpoint.manifest import (
    MANIFEST,
    Base,
    CompleteCheckpoint,
    FileChunk,
    Parts,
    WholeTensor,
    encode,
    is_whole,
    list_bytes,
    listed_in,
    packed,
    pieces_of,
)
from pserver.storage.place import place_at

words = st.text(st.characters(codec="utf-8"), max_size=8)
names = st.text("abcxyz0123456789-._", min_size=1, max_size=8).filter(
    lambda x: x not in (".", "..")
)
digests = st.text("0123456789abcdef", min_size=32, max_size=32)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
bases = st.builds(Base, st.sampled_from(["..", "../other", "a/b"]), digests)
wholes = st.builds(
    WholeTensor,
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.lists(st.tuples(st.integers(0, 1), words), min_size=1, max_size=3).map(tuple),
)


@st.composite
def manifests(draw: st.DrawFn) -> tuple[Any, ...]:
    """The arguments of :func:`encode`."""
    sizes = st.fixed_dictionaries({"size": st.integers(0, 2**40), "blake2b": digests})
    files = draw(st.dictionaries(names, sizes, min_size=1, max_size=4))
    some = st.sampled_from([*files])
    numbers = st.integers(0, 2**40)
    pieces = st.lists(st.builds(FileChunk, some, numbers, numbers, digests, numbers), max_size=3)
    base, parts = draw(
        st.tuples(st.none() | bases, st.none())
        | st.tuples(
            st.none(),
            st.builds(
                Parts,
                st.tuples(bases, bases),
                st.dictionaries(words, wholes, max_size=3),
            ),
        )
    )
    tables = draw(st.dictionaries(words, pieces, max_size=3))
    return draw(st.dictionaries(words, plain, max_size=4)), files, tables, base, parts


def parsed(content: bytes) -> manifest.Manifest:
    return manifest._parse(place_at("/nowhere"), content, MANIFEST)


@given(manifests())
def test_a_manifest_is_read_as_it_was_written(given: tuple[Any, ...]) -> None:
    """Metadata, files, chunks, base and parts."""
    meta, files, tables, base, parts = given
    content = encode(*given)
    found = parsed(content)

    assert (found.meta, found.files, found.base, found.parts) == (meta, files, base, parts)
    assert found.tables == tables
    assert found.identity == manifest.identity_of(content) and found.by


@given(manifests(), st.data())
def test_a_damaged_manifest_is_refused_and_named(
    given: tuple[Any, ...], data: st.DataObject
) -> None:
    """A bit that has changed anywhere, and bytes that are missing or too many."""
    whole = encode(*given)
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = whole[:at] + bytes([whole[at] ^ 1 << data.draw(st.integers(0, 7))]) + whole[at + 1 :]
    for damaged in (changed, whole[:at], whole[at + 1 :], whole[:at] + b" " + whole[at:]):
        with pytest.raises(ValueError, match=f"^/nowhere/{MANIFEST}: "):
            parsed(damaged)


@example({"checksum": ""})
@example({"checksum": "\ud800" * 32})
@example({"format": 1, "files": {"a": 3}, "tables": {"t": ["a"]}})
@example({"format": 4, "files": {}, "tables": {"t": [{"offset": float("inf")}]}})
@example({"tables": {"t": [{"file": "f", "size": 1, "offset": float("inf")}]}})
@example({"parts": {"places": [], "tensors": {"w": {"shape": [float("inf")], "slices": []}}}})
@given(
    st.dictionaries(
        st.sampled_from(["format", "files", "meta", "tables", "base", "parts", "checksum", "by"]),
        plain,
        min_size=1,
    )
)
def test_a_manifest_of_any_content_is_read_or_refused(change: dict[str, Any]) -> None:
    """Whatever JSON says with a checksum that fits: the error is one and names the file."""
    content = {"meta": {}, "files": {"f": {"size": 1, "blake2b": "0"}}} | change
    whole = json.dumps(content).encode() if "checksum" in change else packed(content)
    try:
        parsed(whole)
    except ValueError as error:
        assert str(error).startswith(f"/nowhere/{MANIFEST}: ")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object"),
        ('{"format": 1, "meta": {}}', "expected an object"),
        ('{"format": 9, "meta": {}, "files": {}}', "expected format 1, 2, 3 or 4, got 9"),
        ('{"format": 1, "meta": {}, "files": {"../x": {}}}', "names of files beside it"),
        ('{"format": 1, "meta": {}, "files": {"x": 3}}', "expected size and blake2b"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """It says what is wrong."""
    (tmp_path / MANIFEST).write_text(text)

    with pytest.raises(ValueError, match=message):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tables", {"t": ["../x"]}, "each table's chunks in files that are listed"),
        ("tables", {"t": 3}, "each table's chunks in files that are listed"),
        ("base", {"path": "/etc", "identity": "ab"}, "a base's relative path"),
        ("base", {"path": "..", "identity": "../x"}, "a base's relative path"),
        ("base", "x", "a base's path and identity"),
    ],
)
def test_a_manifest_with_odd_tables_or_bases_is_refused(
    key: str, value: object, message: str
) -> None:
    """Also where its checksum fits."""
    with pytest.raises(ValueError, match=message):
        parsed(packed({"meta": {}, "files": {"x": {"size": 1}}, key: value}))


# ---- pieces ----


@given(st.lists(st.tuples(st.integers(-3, 20), st.integers(-3, 9)), max_size=5), st.integers(0, 30))
@example([(0, 4), (4, 5)], 9)
@example([(0, 4), (2, 2), (4, 5)], 9)
def test_chunks_fill_a_file_where_each_byte_is_in_one(
    given: list[tuple[int, int]], size: int
) -> None:
    """No gap, no byte twice, none beyond the end."""
    pieces = [FileChunk("f", begin, length, "", 0) for begin, length in given]
    pieces = manifest.by_file({"t": pieces}).get("f", [])
    covered = [byte for each in pieces for byte in range(each.offset, each.offset + each.size)]
    empty = [each.offset for each in pieces if each.size == 0]
    fills = covered == list(range(size)) and all(each.size >= 0 for each in pieces)

    assert not is_whole(pieces, size) or fills
    assert is_whole(pieces, size) or not fills or empty


@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from(["", "", "missing", "short", "long"]),
)
@example([0], 1, "short")
def test_a_tensor_is_put_together_from_its_slices(
    sizes: list[int], columns: int, lacking: str
) -> None:
    """Cut anywhere, dealt out to any parts; or it lacks something, and is named."""
    flat = torch.arange(float(sum(sizes) * columns))
    slices = flat.split([size * columns for size in sizes])
    parts: list[dict[str, torch.Tensor]] = [{}, {}]
    for at, piece in enumerate(slices):
        parts[at % 2][f"w{at}"] = piece
    whole = WholeTensor(
        (sum(sizes), columns), tuple((at % 2, f"w{at}") for at in range(len(sizes)))
    )
    if lacking == "missing":
        del parts[0]["w0"]
    elif lacking:
        right = slices[0].numel()
        wrong = right - 1 if lacking == "short" and right > 1 else right + 1
        parts[0]["w0"] = torch.zeros(wrong)
    if lacking == "missing" and len(sizes) == 1:
        assert whole.assembled("w", parts) is None
    elif lacking:
        with pytest.raises(ValueError, match=rf"^w: expected {len(sizes)} slices of \["):
            whole.assembled("w", parts)
    else:
        found = whole.assembled("w", parts)
        assert found is not None and torch.equal(found, flat.view(-1, columns))
    assert WholeTensor.of(json.loads(json.dumps(whole.plain())), 2) == whole
    with pytest.raises(ValueError, match="expected slices in 0 parts"):
        WholeTensor.of(whole.plain(), 0)


def test_files_of_older_formats_are_a_chunk_each() -> None:
    """Formats 1 to 3 name them."""
    files = {"a": {"size": 5, "blake2b": "x", "ids": 2}, "b": {"size": 7, "blake2b": "y"}}
    assert pieces_of({"t": ["a", "b"]}, files) == {
        "t": [FileChunk("a", 0, 5, "x", 2), FileChunk("b", 0, 7, "y", 0)]
    }


# ---- lists ----


@given(st.lists(names, unique=True, max_size=5), st.data())
def test_a_list_of_checkpoints_is_read_as_it_was_written(
    named: list[str], data: st.DataObject
) -> None:
    """Or refused, where it is cut, or a base is none of the list."""
    kept = [
        CompleteCheckpoint(each, data.draw(st.sampled_from(["", *named[:at]])))
        for at, each in enumerate(named)
    ]
    content = list_bytes(kept)
    place = place_at("memory://lists")
    place.write(manifest.LIST, content)
    assert listed_in(place) == (content, kept)
    cut = content[: data.draw(st.integers(0, len(content) - 1))]
    stray = list_bytes([*kept, CompleteCheckpoint("z", "none of them")])
    for damaged in (cut, stray, b"[]", b'{"format": 2, "checkpoints": []}'):
        place.write(manifest.LIST, damaged)
        with pytest.raises(ValueError, match="checkpoints.json: expected a list of checkpoints"):
            listed_in(place)
    place.remove(manifest.LIST)
    assert listed_in(place) == (None, [])
