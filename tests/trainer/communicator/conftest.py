"""Exact products on a GPU, and no job left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from trainer import fleet


@pytest.fixture
def finished() -> Iterator[None]:
    deterministic = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = deterministic
    fleet.finish()
