"""Promises of tensors as a stream of bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from transpiler.files import files
from transpiler.files.files import pieces

DTYPES = list(files._NAMES)


@pytest.mark.parametrize("piece", [7, files.PIECE])
def test_the_library_reads_what_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Tensors of every dtype, scalars and empty ones, and names with quotes, to the bit."""
    monkeypatch.setattr(files, "PIECE", piece)
    torch.manual_seed(0)
    of_dtypes = {f't "{dtype}"': torch.randint(0, 2, (3, 5)).to(dtype) for dtype in DTYPES}
    others = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "flag": torch.tensor(True)}
    others["strided"] = torch.arange(4)[::2][:1]
    tensors = of_dtypes | others
    path = tmp_path / "streamed"
    given = dict(tensors)
    path.write_bytes(b"".join(pieces(given)))
    found = safetensors.torch.load_file(path)

    assert found.keys() == tensors.keys() and not given  # who holds them no longer has room
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].reshape(-1).tolist() == tensor.reshape(-1).tolist()


def test_no_tensor_at_all_is_a_file_too(tmp_path: Path) -> None:
    """A server without slices writes one."""
    (tmp_path / "empty").write_bytes(b"".join(pieces({})))

    assert safetensors.torch.load_file(tmp_path / "empty") == {}


def test_a_dtype_that_such_a_file_cannot_have_is_named() -> None:
    """With the tensor."""
    with pytest.raises(TypeError, match="'w': a safetensors file has no tensors of .*complex128"):
        list(pieces({"w": torch.zeros(1, dtype=torch.complex128)}))
