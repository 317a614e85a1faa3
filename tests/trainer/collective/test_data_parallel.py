"""DataParallel: the mean gradient, buckets of the size that was asked for, names without a prefix.

The two trainers of most tests are two processes, started once: ``ranks.py`` has what they do, and
each test looks at one result.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.support import ranks
from trainer import DataParallel, fused_allreduce_gradients, spawn
from trainer.collective.buckets import buckets
from trainer.collective.world import leave_parallel_env

Results = list[dict[str, Any]]  # by trainer, what each of the functions has returned
pytestmark = pytest.mark.processes  # two trainers, started once for most of the tests
cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
KB = 1 / 1024


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    path = tmp_path_factory.mktemp("ranks")
    spawn(ranks.keep, (str(path),), nprocs=2, start_method="forkserver")
    return [torch.load(path / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    leave_parallel_env()


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# ---- two trainers ----


def test_two_trainers_equal_torchs_ddp_to_the_bit(results: Results) -> None:
    """Other buckets, the same sums; batch norm's statistics, which are each trainer's own after a
    step, are the same as well.
    """
    for found in results:
        ddp = {
            name.removeprefix("module."): value for name, value in found["equality"]["ddp"].items()
        }

        assert_equal(found["equality"]["ours"], ddp)


def test_two_trainers_equal_a_single_node_on_the_joint_batch(results: Results) -> None:
    """And one another to the bit."""
    reference = ranks.train(ranks.plain_net(0), ranks.batches())

    assert_equal(results[0]["equality"]["plain"], results[1]["equality"]["plain"])
    for name, value in results[0]["equality"]["plain"].items():
        assert torch.allclose(value, reference[name], rtol=1e-5, atol=1e-6), name


def test_parameters_and_buffers_are_trainer_0s_from_the_construction_on(results: Results) -> None:
    """Whatever the others' models began with."""
    assert_equal(results[0]["construction"], dict(ranks.net(0).state_dict()))
    assert_equal(results[1]["construction"], results[0]["construction"])


@pytest.mark.parametrize("unused", [False, True])
def test_the_last_bucket_is_small_in_every_step(results: Results, unused: bool) -> None:
    """Six gradients of 4 KB, 8 KB at once, the last at most 5 KB or 20 KB, as a communication hook
    sees them.
    """
    for found in results:
        sent = found["sent"]

        assert sent[f"small last, {unused}"] == [["54", "32", "1", "0"]] * 3
        assert sent[f"large last, {unused}"] == [["5", "43210"]] * 3
        assert sent[f"one, {unused}"] == [["543210"]] * 3


def test_no_sync_leaves_gradients_until_the_next_backward_outside(results: Results) -> None:
    """Inside, each trainer has its own; the first backward outside averages what has
    accumulated.
    """
    own = []
    for rank, found in enumerate(results):
        model = ranks.plain_net(0)
        x, y = ranks.batches(1)[0]
        F.mse_loss(model(x[4 * rank : 4 * rank + 4]), y[4 * rank : 4 * rank + 4]).backward()
        own.append([parameter.grad for parameter in model.parameters()])

        assert all(
            torch.equal(*pair)
            for pair in zip(found["accumulated"]["inside"], own[rank], strict=True)
        )
    for first, second, mean in zip(*own, results[1]["accumulated"]["outside"], strict=True):
        # the mean of twice the first and twice the second
        assert torch.allclose(mean, first + second, rtol=1e-5, atol=1e-7)


def test_one_trainer_may_evaluate_alone(results: Results) -> None:
    """A forward without gradients waits for nobody and changes nothing, and training goes on."""
    for name, value in results[0]["evaluation"]["after"].items():
        if "running" not in name and "tracked" not in name:
            assert torch.equal(value, results[1]["evaluation"]["after"][name]), name


def test_gradients_are_averaged_by_hand(results: Results) -> None:
    """One that a trainer lacks counts as zero, one that all lack stays None."""
    for found in results:
        first, second, third = found["by_hand"]["gradients"]

        assert (
            torch.equal(first, torch.full((3,), 0.5))
            and torch.equal(second, torch.full((2, 2), 2.0))
            and third is None
        )


def test_models_that_differ_are_named_by_trainer_and_parameter(results: Results) -> None:
    """Every trainer is told the same: a shape, a dtype, a parameter that one lacks, one that needs
    no gradient.
    """
    for found in results:
        said = found["refused"]

        assert "'weight' is float32[3, 2] on trainer 0, float32[3, 3] on trainer 1" in said["shape"]
        assert "'weight' is float32[3, 2] on trainer 0, float64[3, 2] on trainer 1" in said["dtype"]
        assert "'1.weight' is not there on trainer 0, float32[2, 2] on trainer 1" in said["name"]
        assert (
            "'bias' is float32[2] on trainer 0, float32[2] without gradient on trainer 1"
            in said["frozen"]
        )
        assert all(
            said[key].startswith("FingerprintMismatch")
            for key in ("shape", "dtype", "name", "frozen")
        )
    assert results[0]["refused"]["group"] == "DataParallel"
    assert "expected one that trainer 1 is in" in results[1]["refused"]["group"]


def test_trainers_with_different_numbers_of_batches_end_together(results: Results) -> None:
    """fleet.shard stops everybody when one has no further batch; DataParallel's join() lets the
    others finish theirs.
    """
    assert [found["uneven"]["steps"] for found in results] == [3, 3]
    assert_equal(results[0]["uneven"]["model"], results[1]["uneven"]["model"])
    assert results[1]["uneven"]["joined"].keys() == results[0]["uneven"]["joined"].keys()


def test_who_goes_on_alone_is_told_who_has_finished(results: Results) -> None:
    """After how many steps, and what would have kept them together."""
    assert results[1]["left"] == (
        "TrainerLost: trainer 0 has left the job: it finished after 3 steps; fleet.shard gives "
        "all trainers equally many"
    )


# ---- a world of one ----


def test_alone_it_trains_as_the_model_itself() -> None:
    """No process group has to be made first, and nothing else changes."""
    model = ranks.net(3)
    reference = copy.deepcopy(model)

    assert_equal(
        ranks.train(DataParallel(model), ranks.batches(), torch.optim.Adam),
        ranks.train(reference, ranks.batches(), torch.optim.Adam),
    )


def test_a_custom_function_trains_as_in_the_single_process() -> None:
    """The page's way, with no_sync() and fused_allreduce_gradients(), gives plain torch's
    parameters.
    """
    torch.manual_seed(4)
    found = ranks.custom_function_example()
    torch.manual_seed(4)
    model = ranks.SimpleNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(10):
        model(torch.randn(2, 2)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert all(torch.equal(*pair) for pair in zip(found, model.parameters(), strict=True))


def test_states_have_the_models_own_names(tmp_path: Path) -> None:
    """They go through safetensors into the bare model, and back by set_state_dict and
    load_state_dict.
    """
    model, fresh = DataParallel(ranks.net(1)), ranks.net(2)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "m.safetensors")
    held = safetensors.torch.load_file(tmp_path / "m.safetensors")
    fresh.load_state_dict(held)
    other = DataParallel(ranks.net(3))
    other.set_state_dict(held)

    assert_equal(dict(fresh.state_dict()), dict(model.state_dict()))
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))
    model.load_state_dict(ranks.net(2).state_dict())
    assert torch.equal(model.module[0].weight, ranks.net(2)[0].weight)
    ranks.state_dict_example(str(tmp_path / "emb.safetensors"))


def test_states_go_where_they_are_asked_to() -> None:
    """``destination`` is filled, ``include_sublayers=False`` leaves out what the submodules
    have.
    """

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.ones(1)), nn.Linear(2, 2)
            self.register_buffer("count", torch.zeros(1))
            self.register_buffer("scratch", torch.zeros(1), persistent=False)

    into: dict[str, Any] = {"before": 1}
    model = DataParallel(Outer())

    assert model.state_dict(into) is into and list(into) == [
        "before",
        "scale",
        "count",
        "inner.weight",
        "inner.bias",
    ]
    assert list(model.state_dict(include_sublayers=False)) == ["scale", "count"]


def test_a_model_with_one_inside_loads_what_it_saves() -> None:
    """Names are without the wrapper's there too."""
    outer = nn.Sequential(DataParallel(nn.Linear(2, 2)), nn.Linear(2, 2))
    held = {name: value + 1 for name, value in outer.state_dict().items()}
    outer.load_state_dict(held)

    assert list(held) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert_equal(dict(outer.state_dict()), held)


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (
            lambda: DataParallel(frozen()),
            ValueError,
            "expected a parameter .* gradient, got none among the 2 of Linear",
        ),
        (lambda: DataParallel("model"), TypeError, "layers: expected a torch.nn.Module, got str"),
        (lambda: DataParallel(nn.Linear(2, 2), strategy={}), ValueError, "strategy: expected None"),
        (
            lambda: DataParallel(nn.Linear(2, 2), comm_buffer_size=0),
            ValueError,
            "comm_buffer_size: expected .* above 0, got 0",
        ),
        (
            lambda: DataParallel(nn.Linear(2, 2), last_comm_buffer_size="1"),
            ValueError,
            "last_comm_buffer_size: .* got '1'",
        ),
        (
            lambda: DataParallel(nn.Linear(2, 2)).set_state_dict({}, False),
            ValueError,
            "use_structured_name=False",
        ),
        (
            lambda: DataParallel(nn.Linear(2, 2)).set_state_dict({}),
            RuntimeError,
            "Missing key.*weight",
        ),
        (
            lambda: DataParallel(nn.Linear(2, 2)).join(False),
            ValueError,
            "divide_by_initial_world_size=False",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    make: Callable[[], object], error: type[Exception], words: str
) -> None:
    """A message says what was expected and what came."""
    with pytest.raises(error, match=words):
        make()


def test_other_trainers_without_a_process_group_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun a forgotten init_parallel_env() is no reason to train alone in silence."""
    torchrun = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match="call init_parallel_env"):
        DataParallel(nn.Linear(2, 2))


def test_parameters_that_a_step_does_not_use() -> None:
    """With find_unused_parameters they have no gradient, step after step; without, the next forward
    says what to set.
    """
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model.forward = lambda x: model[0](x)  # type: ignore[method-assign]
    found = DataParallel(model, find_unused_parameters=True)
    for _ in range(3):
        found(torch.ones(1, 2)).sum().backward()

    assert model[0].weight.grad is not None and model[1].weight.grad is None
    missed = DataParallel(model)
    missed(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="find_unused_parameters"):
        missed(torch.ones(1, 2))


# ---- buckets ----


def parameters(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Of so many KB each."""
    return [torch.zeros(size * 1024 // dtype.itemsize, dtype=dtype) for size in sizes]


@pytest.mark.parametrize(
    ("sizes", "size", "last_size", "expected"),
    [
        ([1, 1, 1, 1], 2, 1, [[3, 2], [1], [0]]),
        ([1, 1, 1, 1], 25, 2.5, [[3, 2], [1, 0]]),
        ([9, 1, 1, 1], 4, 1, [[3, 2, 1], [0]]),
        ([1, 9, 1, 1], 4, 1, [[3, 2], [1], [0]]),
        ([1, 1, 1, 1], 25, 25, [[3, 2, 1, 0]]),
        ([5], 1, 1, [[0]]),
    ],
)
def test_buckets_hold_at_most_what_they_may(
    sizes: list[int], size: float, last_size: float, expected: list[list[int]]
) -> None:
    """In backward's order; a gradient that is larger than the limit goes by itself."""
    found, limits = buckets(parameters(*sizes), [False] * len(sizes), size * KB, last_size * KB)

    assert found == expected
    assert limits == [int(size * 1024)] * (len(found) - 1) + [int(last_size * 1024)]


def test_buckets_are_of_one_dtype_and_sparse_gradients_go_alone() -> None:
    """What is reduced together is one tensor."""
    mixed = [
        *parameters(1),
        *parameters(1, dtype=torch.float64),
        *parameters(1),
        *parameters(1, dtype=torch.float64),
    ]

    assert buckets(mixed, [False] * 4, 25, 1 * KB)[0] == [[2], [3, 1], [0]]
    assert buckets(parameters(1, 1, 1, 1), [False, False, True, False], 25, 1 * KB)[0] == [
        [2],
        [3, 1],
        [0],
    ]


# ---- GPUs: a world of one proves streams and mixed precision, not communication ----


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=cuda)])
def test_on_a_gpu_it_trains_as_the_model_itself(device: str, amp: bool) -> None:
    """NCCL in a world of one, with and without autocast and GradScaler: plain torch's parameters to
    the bit.
    """
    model = ranks.net(3).to(device)
    reference = copy.deepcopy(model)
    wrapped = DataParallel(model, comm_buffer_size=1 * KB, last_comm_buffer_size=0.1 * KB)

    def run(model: nn.Module) -> dict[str, torch.Tensor]:
        optimizer, scaler = (
            torch.optim.Adam(model.parameters(), lr=0.01),
            torch.amp.GradScaler(enabled=amp),
        )
        for x, y in ranks.batches(10):
            with torch.autocast("cuda", torch.float16, enabled=amp):
                loss = F.mse_loss(model(x.to(device)), y.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return dict(model.state_dict())

    assert_equal(run(wrapped), run(reference))
    assert "nccl" in dist.get_backend_config()


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=cuda)])
def test_on_a_gpu_gradients_are_averaged_by_hand(device: str) -> None:
    """A world of one: the mean is the gradient itself."""
    parameter = nn.Parameter(torch.zeros(3, device=device))
    parameter.grad = torch.arange(3.0, device=device)
    fused_allreduce_gradients([parameter])

    assert parameter.grad.tolist() == [0, 1, 2]
