"""A sharded model on a GPU."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.sharded_nets import LEVELS, batches, net, train, values
from trainer.sharding import group_sharded_parallel, save_group_sharded_model
from trainer.sharding.shards import FlatShards
from trainer.sharding.units import Units


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no CUDA device: a world of one on NCCL has not run"
)
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_world_of_one_on_a_gpu(level: str, offload: bool, tmp_path: Path) -> None:
    """Streams, AMP and offloading to the host; communication between devices is not proven by
    one.
    """
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        alone = net(256).cuda()
        model = copy.deepcopy(alone)
        data = [(x.cuda(), y.cuda()) for x, y in batches(4)]
        # an eps above what rounding leaves of a gradient that is nearly 0
        adam = partial(torch.optim.Adam, lr=1e-3, eps=1e-4)
        train(alone, adam(alone.parameters()), data)
        model, optimizer, scaler = group_sharded_parallel(
            *(
                model,
                adam(model.parameters()),
                level,
                torch.amp.GradScaler("cuda"),
            ),
            **({"segment_size": 1} if level == "p_g_os" else {}),
            offload=offload,
        )
        assert scaler is not None
        for x, y in data:
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        states = {
            v.device.type
            for state in optimizer.state.values()
            for key, v in state.items()
            if key != "step"
        }
        assert states == {"cpu" if offload else "cuda"}
        for mine, theirs in zip(values(model), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.cuda(), theirs.detach(), rtol=1e-5, atol=1e-6)
        save_group_sharded_model(model, tmp_path / "out", optimizer)
        assert isinstance(optimizer.shards, Units if level == "p_g_os" else FlatShards)
    finally:
        dist.destroy_process_group()
