"""What each of two trainers does in the tests of the collective mode: functions that ``spawn`` can
find.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pserver.errors import PServerError
from trainer import DataParallel, fleet, fused_allreduce_gradients, init_parallel_env, new_group

KB = 1 / 1024  # of a MB


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


def plain_net(seed: int) -> nn.Module:
    """Without batch norm, whose statistics are of each trainer's own part."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def batches(count: int = 4, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Joint batches of 8 samples: 4 for each of two trainers."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(8, 6, generator=generator), torch.randn(8, 4, generator=generator))
        for _ in range(count)
    ]


def train(
    model: nn.Module, data: Any, make: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
) -> dict[str, torch.Tensor]:
    """What the parameters and buffers are in the end."""
    optimizer = make(model.parameters(), lr=0.1)
    for x, y in data:
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def mine(joint: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rank = dist.get_rank()
    return [(x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]) for x, y in joint]


# ---- one function for each promise: what it returns is what the test looks at ----


def equality(rank: int) -> dict[str, Any]:
    """Trained with DataParallel, with torch's DDP, and (with no batch norm) to compare with a
    single node.
    """
    return {
        "ours": train(DataParallel(net(rank)), mine(batches())),
        "ddp": dict(train(DistributedDataParallel(net(rank)), mine(batches()))),
        "plain": train(DataParallel(plain_net(rank)), mine(batches())),
    }


def construction(rank: int) -> dict[str, Any]:
    """Parameters and buffers right after the construction, of models that began differently."""
    model = net(rank)
    with torch.no_grad():
        model[1].running_mean += rank  # type: ignore[operator,union-attr]
    return dict(DataParallel(model).state_dict())


def sent(rank: int) -> dict[str, Any]:
    """The buckets of three steps, by the names of the parameters in them, for several limits."""
    found: dict[str, Any] = {}
    for key, limits in {
        "small last": (8 * KB, 5 * KB),
        "large last": (8 * KB, 20 * KB),
        "one": (25.0, 25.0),
    }.items():
        for unused in (False, True):
            model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))  # 4 KB each
            wrapped = DataParallel(model, None, *limits, unused)
            names = {parameter: name[0] for name, parameter in model.named_parameters()}
            steps: list[list[str]] = []

            def hook(
                state: Any, bucket: dist.GradBucket, names: Any = names, steps: Any = steps
            ) -> Any:
                steps[-1].append("".join(names[parameter] for parameter in bucket.parameters()))
                return (
                    dist.all_reduce(bucket.buffer(), async_op=True)
                    .get_future()
                    .then(lambda done: done.value()[0])
                )

            wrapped.register_comm_hook(None, hook)
            for _ in range(3):
                steps.append([])
                wrapped(torch.ones(2, 32)).sum().backward()
            found[f"{key}, {unused}"] = steps
    return found


def accumulated(rank: int) -> dict[str, Any]:
    """Gradients inside no_sync(), and after the first backward outside."""
    model, (x, y) = DataParallel(plain_net(0)), mine(batches(1))[0]
    with model.no_sync():
        F.mse_loss(model(x), y).backward()
    inside = [parameter.grad.clone() for parameter in model.parameters()]
    F.mse_loss(model(x), y).backward()
    return {
        "inside": inside,
        "outside": [parameter.grad.clone() for parameter in model.parameters()],
    }


def evaluation(rank: int) -> dict[str, Any]:
    """One trainer evaluates between two steps, and the other does not."""
    model = DataParallel(net(0))
    before = train(model, mine(batches(1)))
    if rank == 0:
        with torch.no_grad():
            model(batches(1)[0][0])
    return {"before": before, "after": train(model, mine(batches(1)))}


def by_hand(rank: int) -> dict[str, Any]:
    """fused_allreduce_gradients over parameters of which one has a gradient on one trainer only,
    and one on none.
    """
    parameters = [
        nn.Parameter(torch.zeros(3)),
        nn.Parameter(torch.zeros(2, 2)),
        nn.Parameter(torch.zeros(1)),
    ]
    parameters[0].grad = torch.full((3,), float(rank))
    if rank == 1:
        parameters[1].grad = torch.full((2, 2), 4.0)
    fused_allreduce_gradients(parameters)
    return {"gradients": [parameter.grad for parameter in parameters]}


def refused(rank: int) -> dict[str, Any]:
    """Models that differ in a shape, a dtype, a name and in what needs a gradient; a group that
    this trainer is not in.
    """
    frozen = nn.Linear(2, 2)
    frozen.bias.requires_grad_(rank == 0)
    models: dict[str, nn.Module] = {
        "shape": nn.Linear(2 + rank, 3),
        "dtype": nn.Linear(2, 3, dtype=(torch.float32, torch.float64)[rank]),
        "name": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if rank
        else nn.Sequential(nn.Linear(2, 2)),
        "frozen": frozen,
    }
    said = {}
    for key, model in models.items():
        try:
            DataParallel(model)
        except PServerError as error:
            said[key] = f"{type(error).__name__}: {error}"
    group = new_group([0])
    try:
        said["group"] = type(DataParallel(nn.Linear(2, 2), group=group)).__name__
    except ValueError as error:
        said["group"] = str(error)
    return said


def uneven(rank: int) -> dict[str, Any]:
    """fleet.shard of loaders that differ: trainer 1's has fewer batches; and torch's own join()."""
    fleet.init(is_collective=True)
    model = fleet.distributed_model(plain_net(rank))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    steps = 0
    for x, y in fleet.shard(iter(batches(10 if rank == 0 else 7))):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    fleet.barrier_worker()
    wrapped = DataParallel(plain_net(0))
    with wrapped.join():
        joined = train(wrapped, mine(batches(2 + rank)))
    return {"steps": steps, "model": dict(model.state_dict()), "joined": joined}


def left(rank: int) -> str:
    """Trainer 0 has finished, and trainer 1 takes a further step: what that raises."""
    model = DataParallel(plain_net(0))
    if rank == 0:
        fleet.finish()
        return ""
    try:
        train(model, batches(1))
    except PServerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


PROMISES = (equality, construction, sent, accumulated, evaluation, by_hand, refused)


def keep(path: str) -> None:
    """Does all of them in one process group; the results are left in files."""
    torch.set_num_threads(1)
    init_parallel_env()
    rank = dist.get_rank()
    found = {promise.__name__: promise(rank) for promise in PROMISES}
    examples()
    found["uneven"] = uneven(rank)  # fleet takes the process group over
    found["left"] = left(rank)
    torch.save(found, Path(path) / f"{rank}.pt")
    fleet.finish()


# ---- the examples of the documentation, line by line ----


class LinearNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._linear1 = nn.Linear(10, 10)
        self._linear2 = nn.Linear(10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear2(self._linear1(x))


def first_example() -> None:
    """Which is started by ``spawn(first_example, nprocs=2)``, or by ``launch``."""
    init_parallel_env()
    layer = LinearNet()
    dp_layer = DataParallel(layer)
    loss_fn = nn.MSELoss()
    adam = torch.optim.Adam(dp_layer.parameters(), lr=0.001)
    inputs = torch.randn([10, 10])
    outputs = dp_layer(inputs)
    labels = torch.randn([10, 1])
    loss = loss_fn(outputs, labels)
    loss.backward()
    adam.step()
    adam.zero_grad()


class cus_tanh(torch.autograd.Function):  # the page's own name
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return dy * (1 - torch.square(y))


class SimpleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = cus_tanh.apply(inputs)
        return self.linear(inputs)


def custom_function_example() -> list[torch.Tensor]:
    init_parallel_env()
    model = DataParallel(SimpleNet())
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(10):
        x = torch.randn(2, 2)
        x.requires_grad = True
        # step 1: skip gradient synchronization by 'no_sync'
        with model.no_sync():
            y_pred = model(x)
            loss = y_pred.mean()
            loss.backward()
        # step 2: fuse + allreduce manually before optimization
        fused_allreduce_gradients(list(model.parameters()), None)
        opt.step()
        opt.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def no_sync_example() -> None:
    init_parallel_env()
    dp_model = DataParallel(nn.Linear(10, 1))
    inputs_1 = torch.randn([10, 10])
    inputs_2 = torch.ones([10, 10])
    with dp_model.no_sync():
        # gradients will not be synchronized
        dp_model(inputs_1).sum().backward()
    # synchronization happens here
    dp_model(inputs_2).sum().backward()


def state_dict_example(path: str = "") -> None:
    init_parallel_env()
    emb = DataParallel(nn.Embedding(10, 10))
    state_dict = emb.state_dict()
    if path:
        safetensors.torch.save_file(state_dict, path)
        para_state_dict = safetensors.torch.load_file(path)
        emb.set_state_dict(para_state_dict)


def examples() -> None:
    """All of them, by two trainers; after the one with a function of its own, both have the same
    parameters.
    """
    torch.manual_seed(dist.get_rank())
    first_example()
    no_sync_example()
    state_dict_example()
    new_group([0, 1])
    parameters = custom_function_example()
    others = [parameter.clone() for parameter in parameters]
    for other in others:
        dist.broadcast(other, 0)
    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))


# ---- ends ----


def end(path: str, how: str) -> None:
    """Trainer 1 ends in mid-training; trainer 0 writes down what its backward then raises, and
    after how many seconds.
    """
    torch.set_num_threads(1)
    init_parallel_env()
    model, data = DataParallel(nn.Linear(4, 1)), torch.ones(2, 4)
    model(data).sum().backward()
    if dist.get_rank() == 1:
        if how == "raise":
            raise ValueError("no data for trainer 1")
        if how == "kill":
            os.kill(os.getpid(), 9)
        sys.exit(7)
    began = time.monotonic()
    try:
        while True:
            model(data).sum().backward()
    except PServerError as error:
        (Path(path) / "said").write_text(
            f"{time.monotonic() - began:.1f} {type(error).__name__}: {error}"
        )
        raise
