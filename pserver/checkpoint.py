"""Tensors and their metadata on a disk, such that a file is either whole or refused.

A checkpoint is a directory::

    checkpoint.json                      format, metadata, and each other file's size and checksum
    tensors-0f3a9c....safetensors        the tensors

[Note: what makes a checkpoint complete]  ``checkpoint.json`` is written last, under another name, and renamed; that rename is
the only moment at which anything changes for a reader.  Before it the old ``checkpoint.json`` still lists the old tensor file,
which is removed only afterwards; so whenever the process or the machine stops, ``load`` finds the old checkpoint or the new one.
(Renaming whole directories can't do that: one that is not empty can't be replaced in one step.)  Every file is flushed to the
disk before the rename that refers to it, and the directory after it.  What a stopped save leaves, the next one removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

MANIFEST = "checkpoint.json"
FORMAT = 1
_CHUNK = 1 << 20


def save(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
    """Writes a checkpoint to the directory ``path``, in place of the one that may be there.

    Tensors may be on any device and of any dtype and layout of strides; ``meta`` is whatever JSON holds.  One process at a time
    writes to a directory.

    Raises:
        TypeError: ``meta`` holds something that is not JSON.
        OSError: the disk is full, or refuses.  The old checkpoint is still the one that ``load`` gives.
    """
    directory = Path(path)
    json.dumps(dict(meta))  # refuse before anything is written
    directory.mkdir(parents=True, exist_ok=True)
    data = directory / f"tensors-{secrets.token_hex(8)}.safetensors"
    try:
        safetensors.torch.save_file(_detached(tensors), data)
        data.chmod(0o644)  # as the manifest beside it: safetensors keeps its files to their owner
        _flush(data)
    except BaseException:
        data.unlink(missing_ok=True)  # a full disk gets its space back; from here on the manifest may refer to the file
        raise
    files = {data.name: {"size": data.stat().st_size, "blake2b": _checksum(data)}}
    _replace(directory / MANIFEST, {"format": FORMAT, "meta": dict(meta), "files": files})
    _flush(directory)
    _tidy(directory, keep={MANIFEST, data.name})


def load(path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors, on the CPU, and the metadata of the checkpoint in the directory ``path``.

    Raises:
        FileNotFoundError: there is no complete checkpoint.
        ValueError: there is one, and a file of it is missing, torn or changed.
    """
    directory = Path(path)
    if not (directory / MANIFEST).is_file():
        raise FileNotFoundError(f"no complete checkpoint in {directory}: expected a file {MANIFEST}")
    manifest = _manifest(directory / MANIFEST)
    tensors: dict[str, torch.Tensor] = {}
    for name, facts in manifest["files"].items():
        _check(directory / name, facts)
        tensors.update(safetensors.torch.load_file(directory / name))
    return tensors, manifest["meta"]


def _detached(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Contiguous tensors on the CPU, no two of which share memory: what safetensors writes."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor.detach().cpu().contiguous()
        address = found[name].untyped_storage().data_ptr()
        if address in seen:
            found[name] = found[name].clone()
        seen.add(address)
    return found


def _replace(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        _flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """Returns when the file, or the directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tidy(directory: Path, keep: set[str]) -> None:
    """Removes the files of older saves and of stopped ones; nothing that a save has not written."""
    for pattern in ("tensors-*.safetensors", f"{MANIFEST}.*"):
        for path in directory.glob(pattern):
            if path.name not in keep:
                path.unlink(missing_ok=True)


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(manifest, dict) or not all(isinstance(manifest.get(key), dict) for key in ("files", "meta")):
        raise ValueError(f"{path}: expected an object with the keys format, meta and files")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: expected format {FORMAT}, got {manifest.get('format')!r}")
    for name in manifest["files"]:
        if Path(name).name != name:
            raise ValueError(f"{path}: expected names of files beside it, got {name!r}")
    return manifest


def _check(path: Path, facts: Any) -> None:
    if not isinstance(facts, dict):
        raise ValueError(f"{path.parent / MANIFEST}: expected size and blake2b of {path.name}, got {facts!r}")
    if not path.is_file():
        raise ValueError(f"{path}: {MANIFEST} lists it, and it is missing")
    if path.stat().st_size != facts.get("size"):
        raise ValueError(f"{path}: torn: expected {facts.get('size')} bytes, got {path.stat().st_size}")
    if _checksum(path) != facts.get("blake2b"):
        raise ValueError(f"{path}: its bytes are not those that were saved (checksum)")


def _checksum(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
