"""Programs of trainers without servers: what a strategy says of how gradients travel."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.support.collectives import FOUR, GRAD, LOCAL, Single, of_type, pair, strategy_of, types
from transpiler import DistributeTranspilerConfig
from transpiler.ir.graph import Variable
from transpiler.passes.collective import _buckets
from transpiler.strategy.collective_plan import collective_of


@pytest.mark.observes(
    "fuse_all_reduce_ops",
    "fuse_grad_size_in_num",
    "nccl_comm_num",
    "use_hierarchical_allreduce",
    "hierarchical_allreduce_inter_nranks",
)
def test_a_strategy_says_buckets_and_rings(single: Single) -> None:
    """So many sums a bucket, one without fusing; rings, and rows of trainers."""

    def counts(**switches: Any) -> list[int]:
        sums = of_type(pair(single, **GRAD, strategy=strategy_of(**switches))[0], "c_allreduce_sum")
        return list(Counter(op.arguments["bucket"] for op in sums).values())

    assert counts() == [6]
    assert counts(fuse_grad_size_in_num=4) == [2, 4]  # the last bucket is filled first
    assert counts(fuse_all_reduce_ops=False) == [1] * 6
    switches: dict[str, Any] = {"nccl_comm_num": 3, "fuse_grad_size_in_num": 2}
    rows = {"use_hierarchical_allreduce": True, "hierarchical_allreduce_inter_nranks": 2}
    strategy = strategy_of(**switches, **rows)
    main, startup = pair(single, FOUR, **GRAD, strategy=strategy)
    assert [op.arguments["ring_id"] for op in of_type(main, "c_allreduce_sum")] == [
        *(0, 0, 1, 1, 2, 2)
    ]
    inits = of_type(startup, "c_comm_init")
    assert len(inits) == 3 and inits[0].inputs[1] == "Hierarchical_inter_NCCLID_0"
    assert of_type(startup, "gen_nccl_id")[0].arguments["hierarchical_allreduce_inter_nranks"] == 2


@pytest.mark.observes("fuse_grad_size_in_MB", "last_comm_group_size_MB")
def test_a_strategy_says_the_size_of_buckets() -> None:
    """Gradients of 1.5, 1, 1 and 0.1 MB leave from the last to the first one; a larger one than its
    bound leaves alone.
    """
    tensors = [Variable(f"g{rows}", (rows, 1024), "float32") for rows in (26, 256, 256, 384)]
    strategy = strategy_of(fuse_grad_size_in_MB=2, last_comm_group_size_MB=0.01)
    config = DistributeTranspilerConfig(**GRAD)
    found = collective_of(config, ["h:1", "h:2"], strategy)
    assert (found.bucket_bytes, found.last_bytes) == (2 << 20, 10485)
    assert _buckets(tensors, found) == [0, 0, 1, 2]
    whole = collective_of(config, ["h:1", "h:2"], strategy_of(last_comm_group_size_MB=2.5))
    assert _buckets(tensors, whole) == [0, 0, 1, 1]


@pytest.mark.observes("fp16_allreduce")
def test_gradients_are_cast_around_their_sums(single: Single) -> None:
    """Each to float16 right before its sum, and back after the wait and before the updates."""
    main, _ = pair(single, **GRAD, strategy=strategy_of(fp16_allreduce=True))
    names = [op.outputs[0] for op in of_type(main, "c_allreduce_sum")]
    assert all(main.main.variables[name].dtype == "float16" for name in names)
    casts = of_type(main, "aten._to_copy")
    assert sorted(op.outputs[0] for op in casts[:6]) == sorted(names)
    assert sorted(op.inputs[0] for op in casts[6:]) == sorted(names)
    assert {op.outputs[0] for op in casts[6:]} == {op.inputs[0] for op in casts[:6]}
    printed = str(main)
    assert "gradients as float16" in printed and "dtype=float16" in printed
    with pytest.raises(ValueError, match="fp16_allreduce: acts on gradients"):
        pair(single, **LOCAL, strategy=strategy_of(fp16_allreduce=True))


@pytest.mark.observes("sync_nccl_allreduce")
def test_each_bucket_is_waited_for_at_once(single: Single) -> None:
    """The wait stands right after the bucket's last sum, while backward goes on below it."""
    strategy = strategy_of(sync_nccl_allreduce=True, fuse_grad_size_in_num=2)
    kinds = types(pair(single, **GRAD, strategy=strategy)[0])
    for index, kind in enumerate(kinds):
        if kind == "c_sync_comm_stream":
            assert kinds[index - 1] == "c_allreduce_sum"
    assert kinds.count("c_sync_comm_stream") == 3 and kinds.index("c_sync_comm_stream") < max(
        index for index, kind in enumerate(kinds) if kind.startswith("aten.")
    )


def test_a_strategy_and_a_configuration_that_contradict_each_other(single: Single) -> None:
    """Both are named; where one is silent the other says it."""
    with pytest.raises(ValueError, match="nccl_comm_num=2 contradicts strategy.nccl_comm_num=3"):
        pair(single, **GRAD, nccl_comm_num=2, strategy=strategy_of(nccl_comm_num=3))
    _, startup = pair(single, **GRAD, nccl_comm_num=2, strategy=strategy_of())
    assert len(of_type(startup, "c_comm_init")) == 2
