"""Training on a GPU is training on the CPU within 1e-4: gradients and parameters cross between
device and host.

The last tests need no GPU: they take the same way through main memory with parameters that cannot
receive values in place.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer import Executor, fleet
from trainer.communicator.device_copy import DeviceCopy, PendingCopy
from transpiler import ClipGradByGlobalNorm, DistributedStrategy, DistributeTranspiler, capture

Servers = Callable[[int], str]
STEPS = 10
cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
on_gpu = pytest.param("cuda:0", marks=cuda)


def net(device: str = "cpu") -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
    ).to(device)


def batches(size: int = 8, seed: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, 1, 8, 8, generator=generator),
            torch.randint(0, 10, (size,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x), y)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Any) -> nn.Module:
    device = next(model.parameters()).device
    for x, y in data:
        optimizer.zero_grad()
        loss_of(model, x.to(device), y.to(device)).backward()
        optimizer.step()
    return model


def joined(
    endpoints: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> Any:
    fleet.init(fleet.UserDefinedRoleMaker(0, worker_num=1, server_endpoints=endpoints.split(",")))
    fleet.distributed_model(model)
    return fleet.distributed_optimizer(optimizer or adam(model), **options)


def assert_near(model: nn.Module, reference: nn.Module) -> None:
    """Every variable within 1e-4 of the reference's, relative to its norm."""
    theirs = reference.state_dict()
    for name, tensor in model.state_dict().items():
        mine, other = tensor.detach().cpu().double(), theirs[name].detach().cpu().double()
        assert (mine - other).norm() <= 1e-4 * max(1.0, float(other.norm())), name


@pytest.fixture(autouse=True)
def finished() -> Iterator[None]:
    deterministic = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = deterministic
    fleet.finish()


@pytest.mark.parametrize("device", ["cpu", on_gpu])
@pytest.mark.parametrize("count", [1, 2])
def test_the_eager_path_equals_the_cpu(servers: Servers, device: str, count: int) -> None:
    """Gradients leave the device, parameters come back to it: the model stays where it is and is
    trained.
    """
    model = net(device)
    places = [parameter.data_ptr() for parameter in model.parameters()]

    train(model, joined(servers(count), model), batches())

    assert {parameter.device for parameter in model.parameters()} == {torch.device(device)}
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert_near(model, train(reference := net(), adam(reference), batches()))


@pytest.mark.parametrize("device", ["cpu", on_gpu])
@pytest.mark.parametrize("mode", ["k_steps", "async"])
def test_the_other_modes_equal_the_cpu(servers: Servers, device: str, mode: str) -> None:
    """Values that arrive between steps cross too: one trainer that waits for its own result, or
    steps by itself.
    """
    strategy = DistributedStrategy()
    strategy.a_sync_configs = {"k_steps": 2} if mode == "k_steps" else {"send_queue_size": 1}
    model = net(device)

    train(model, joined(servers(2), model, strategy=strategy), batches())
    fleet.finish()

    assert_near(model, train(reference := net(), adam(reference), batches()))


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_the_program_path_equals_the_cpu(servers: Servers, device: str) -> None:
    """``Executor(device)`` moves the module's tensors; feeds may be anywhere."""
    model, reference = net(), net()
    program, startup = capture(model, loss_of, adam(model), batches()[0])
    transpiler = DistributeTranspiler()
    transpiler.transpile(0, program, pservers=servers(2), trainers=1, startup_program=startup)
    with Executor(device) as exe:
        exe.run(transpiler.get_startup_program())
        losses = [
            exe.run(transpiler.get_trainer_program(), feed=batch, fetch_list=["loss"])[0]
            for batch in batches()
        ]

    assert {parameter.device for parameter in model.parameters()} == {torch.device(device)}
    assert all(loss.device == torch.device(device) for loss in losses)
    assert_near(model, train(reference, adam(reference), batches()))


@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_a_single_node_program_equals_the_cpu(device: str) -> None:
    """Without servers too, optimizer state included."""
    model, reference = net(), net()
    optimizer = adam(model)
    program, startup = capture(model, loss_of, optimizer, batches()[0])
    with Executor(device) as exe:
        exe.run(startup)
        for batch in batches():
            exe.run(program, feed=batch)

    assert_near(model, train(reference, adam(reference), batches()))
    assert all(
        state["exp_avg"].device == parameter.device for parameter, state in optimizer.state.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_a_program_moves_a_resumed_optimizers_state(servers: Servers, device: str) -> None:
    """An optimizer that has stepped on the CPU goes on elsewhere."""
    model, reference = net(), net()
    optimizer, plain = adam(model), adam(reference)
    train(model, optimizer, batches()[:3])
    train(reference, plain, batches()[:3])
    program, startup = capture(model, loss_of, optimizer, batches()[0])
    with Executor(device) as exe:
        exe.run(startup)
        for batch in batches()[3:]:
            exe.run(program, feed=batch)

    assert_near(model, train(reference, plain, batches()[3:]))


@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_state_dicts_are_on_the_models_device(servers: Servers, device: str) -> None:
    """As plain torch would have them; and both can be loaded again, into a job or into plain
    torch.
    """
    model = net(device)
    optimizer = joined(servers(2), model)
    train(model, optimizer, batches()[:5])
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for state in states[1]["state"].values():
        assert state["exp_avg"].device == state["exp_avg_sq"].device == torch.device(device)
        assert state["step"].device == torch.device("cpu")
    train(model, optimizer, batches()[5:])
    fleet.finish()

    for start in (lambda other: adam(other), lambda other: joined(servers(2), other)):
        again = net(device)
        resumed = start(again)
        again.load_state_dict(states[0])
        resumed.load_state_dict(copy.deepcopy(states[1]))
        assert_near(train(again, resumed, batches()[5:]), model)


@pytest.mark.parametrize("after", ["cpu", on_gpu])
@pytest.mark.parametrize("before", ["cpu", on_gpu])
def test_a_checkpoint_does_not_know_where_it_was_made(
    servers: Servers, tmp_path: Path, before: str, after: str
) -> None:
    """Saved on one device, loaded on another: by a job, and by a process alone."""
    model = net(before)
    train(model, joined(servers(2), model), batches()[:5])
    fleet.save(str(tmp_path / "saved"))
    fleet.finish()
    reference = train(whole := net(), adam(whole), batches())

    again = net(after)
    optimizer = joined(servers(1), again)
    assert fleet.load(str(tmp_path / "saved")) == 5
    assert_near(train(again, optimizer, batches()[5:]), reference)
    fleet.finish()

    fleet.init()
    alone = fleet.distributed_model(net(after))
    optimizer = fleet.distributed_optimizer(adam(alone))
    assert fleet.load(str(tmp_path / "saved")) == 5
    assert_near(train(alone, optimizer, batches()[5:]), reference)


@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_clipping_and_grad_scaler_equal_the_cpu(servers: Servers, device: str) -> None:
    """The global norm of device gradients; scaled gradients, an overflow, and none."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> nn.Module:
        scaler = torch.amp.GradScaler(device.partition(":")[0], init_scale=256.0)
        for number, (x, y) in enumerate(batches()):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, x.to(device), y.to(device))).backward()
            if number == 4:
                model[0].weight.grad[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        return model

    model, reference = net(device), net()
    run(model, joined(servers(2), model, grad_clip=ClipGradByGlobalNorm(0.5)), device)
    fleet.finish()
    fleet.init()
    fleet.distributed_model(reference)
    run(
        reference,
        fleet.distributed_optimizer(adam(reference), grad_clip=ClipGradByGlobalNorm(0.5)),
        "cpu",
    )

    assert_near(model, reference)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", on_gpu])
def test_two_trainers_share_one_device(servers: Servers, device: str) -> None:
    """Two trainers' programs, each with half of every batch: what one node computes with the whole
    of it.
    """

    def make() -> nn.Module:  # without batch norm, whose statistics are each trainer's own
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.Tanh(), nn.Linear(40, 10))

    endpoints, whole, jobs = servers(2), batches(), []
    parts = [[(x[i::2], y[i::2]) for x, y in whole] for i in range(2)]
    for number in range(2):
        model = make()
        program, startup = capture(
            model, loss_of, torch.optim.SGD(model.parameters(), lr=0.1), parts[number][0]
        )
        transpiler = DistributeTranspiler()
        transpiler.transpile(
            number, program, pservers=endpoints, trainers=2, startup_program=startup
        )
        jobs.append((model, transpiler))

    def run(number: int) -> nn.Module:
        model, transpiler = jobs[number]
        with Executor(device) as exe:
            exe.run(transpiler.get_startup_program())
            for batch in parts[number]:
                exe.run(transpiler.get_trainer_program(), feed=batch)
        return model

    with ThreadPoolExecutor(2) as pool:
        models = [
            future.result(timeout=100)
            for future in [pool.submit(run, number) for number in range(2)]
        ]
    for model in models:
        assert_near(
            model,
            train(reference := make(), torch.optim.SGD(reference.parameters(), lr=0.1), whole),
        )


ON_THE_WAY: dict[str, dict[str, Any]] = {
    "sync": {"modes": {"*": "sync"}},
    "sync, overlap": {"modes": {"*": "sync"}, "overlap": True},
    "async, one slot": {"send_queue_size": 1},
    "async, a queue": {},
    "async, cut late": {"runtime_split_send_recv": True},
    "half-async": {"half_async": True, "max_merge_var_num": 1},
    "k-step": {"k_steps": 1, "outer_optimizer": {"type": "sgd", "lr": 1.0}},
}


def train_on(
    model: nn.Module, optimizer: Any, data: Any, scaler: Any = None, keeps: bool = False
) -> nn.Module:
    """Every step sees the one before; with ``keeps`` gradients stay where they are and are written
    to in place.
    """
    device = next(model.parameters()).device.type
    scaler = scaler or torch.amp.GradScaler(device, enabled=False)
    for x, y in data:
        optimizer.zero_grad(set_to_none=not keeps)
        with torch.autocast(device, enabled=scaler.is_enabled()):
            loss = loss_of(model, x.to(device), y.to(device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if keeps:
            optimizer.zero_grad(set_to_none=False)
        getattr(optimizer, "flush", lambda: None)()
    return model


def strategy_of(configs: dict[str, Any]) -> DistributedStrategy:
    strategy = DistributedStrategy()
    strategy.a_sync_configs = configs
    return strategy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("mode", ON_THE_WAY)
def test_gradients_and_parameters_cross_on_a_side_stream(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, mode: str, mixed: bool
) -> None:
    """Through pinned memory; what is trained, with autocast and GradScaler too, is what plain torch
    trains on the GPU.
    """
    seen = []

    class Seen(DeviceCopy):
        def _copy(self, source: torch.Tensor, target: torch.Tensor) -> PendingCopy:
            host = source if target.is_cuda else target
            seen.append(
                (
                    target.is_cuda,
                    host.is_pinned(),
                    self.stream != torch.cuda.current_stream(self.device),
                )
            )
            return super()._copy(source, target)

    monkeypatch.setattr("trainer.communicator.parameter_slices.DeviceCopy", Seen)
    torch.backends.cudnn.deterministic = True
    model, reference = net("cuda:0"), net("cuda:0")
    scalers = [torch.amp.GradScaler("cuda", init_scale=256.0) if mixed else None for _ in range(2)]
    if mixed and ON_THE_WAY[mode].get("overlap"):
        pytest.skip("overlap refuses GradScaler")
    train_on(
        model,
        joined(servers(2), model, strategy=strategy_of(ON_THE_WAY[mode])),
        batches(),
        scalers[0],
    )
    fleet.finish()

    assert_near(model, train_on(reference, adam(reference), batches(), scalers[1]))
    assert seen and all(pinned and aside for _, pinned, aside in seen)
    assert {back for back, _, _ in seen} == ({True} if mode == "k-step" else {False, True})


# ---- the same way, without a GPU ----


class Late:
    """A DeviceCopy without a GPU: copies out are made when somebody waits for them; those back have
    to be waited for, too.
    """

    class Copy:
        """One of them."""

        def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
            self.source: torch.Tensor | None = source
            self.target = target
            self.lock = threading.Lock()

        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            with self.lock:
                if self.source is not None:
                    self.target.copy_(self.source)
                self.source = None

    def __init__(self, device: torch.device) -> None:
        self._under_way: list[Late.Copy] = []
        self._back: dict[int, Late.Copy] = {}  # by the memory that they come from

    def to_host(self, source: torch.Tensor, target: torch.Tensor) -> Late.Copy:
        target.fill_(float("nan"))
        self._under_way.append(Late.Copy(source, target))
        return self._under_way[-1]

    def to_device(self, source: torch.Tensor, target: torch.Tensor) -> Late.Copy:
        target.copy_(source)  # what the script reads next waits for the copy
        before, self._back[source.data_ptr()] = (
            self._back.get(source.data_ptr()),
            Late.Copy(source.clone(), source.clone()),
        )
        assert before is None or before.source is None, (
            "the buffer was written to again, and nobody had waited for the copy"
        )
        return self._back[source.data_ptr()]

    def join(self) -> None:
        """What the script writes from now on does not meet the copies."""
        for copy_ in self._under_way:
            with copy_.lock:
                copy_.source = None if copy_.source is None else copy_.source.clone()
        self._under_way.clear()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ON_THE_WAY)
def test_nobody_reads_or_writes_a_buffer_before_its_copy_has_been_made(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """With copies that take as long as they may, and gradients written to after the step, it is
    plain torch to the bit.
    """
    for module in ("communicator", "sync_sender", "async_sender", "parameter_slices"):
        monkeypatch.setattr(f"trainer.communicator.{module}.is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(
        "trainer.communicator.parameter_slices.pinned",
        lambda shape, dtype: torch.empty(shape, dtype=dtype),
    )
    monkeypatch.setattr("trainer.communicator.parameter_slices.DeviceCopy", Late)
    model, reference = net(), net()
    train_on(
        model,
        joined(servers(2), model, strategy=strategy_of(ON_THE_WAY[mode])),
        batches(),
        keeps=True,
    )
    fleet.finish()

    train_on(reference, adam(reference), batches(), keeps=True)
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def strided(model: nn.Module) -> nn.Module:
    """Gives every parameter and floating-point buffer strides that are not row-major: values land
    elsewhere and are copied.
    """
    for tensor in (*model.parameters(), *(buffer for buffer in model.buffers() if buffer.dim())):
        room = torch.empty(*tensor.shape, 2, dtype=tensor.dtype)[..., 0]
        tensor.data = room.copy_(tensor.detach())
        assert not tensor.is_contiguous()
    return model


STRATEGIES: dict[str, dict[str, Any] | None] = {
    "sync": None,
    "async": {"send_queue_size": 1},
    "k_steps": {"k_steps": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("mode", STRATEGIES)
def test_parameters_that_cannot_receive_in_place_are_trained_all_the_same(
    servers: Servers, mode: str, count: int
) -> None:
    """What a GPU's parameters go through: copied, sliced, and back; equal to plain torch to the
    bit, strides kept.
    """
    strategy = None
    if STRATEGIES[mode] is not None:
        strategy = DistributedStrategy()
        strategy.a_sync_configs = STRATEGIES[mode]
    model, reference = strided(net()), strided(net())
    strides = [(parameter.data_ptr(), parameter.stride()) for parameter in model.parameters()]

    train(model, joined(servers(count), model, strategy=strategy), batches())
    fleet.finish()

    train(reference, adam(reference), batches())
    for (name, mine), theirs in zip(
        model.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        assert (
            torch.equal(mine, theirs)
            if mode != "k_steps"
            else torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        ), name
    assert [
        (parameter.data_ptr(), parameter.stride()) for parameter in model.parameters()
    ] == strides


def test_a_checkpoint_of_strided_parameters_resumes_to_the_bit(
    servers: Servers, tmp_path: Path
) -> None:
    """Saving, loading and pushing take the same way."""
    model = strided(net())
    train(model, joined(servers(3), model), batches()[:5])
    fleet.save(str(tmp_path / "saved"))
    fleet.finish()
    again = strided(net())
    optimizer = joined(servers(2), again)
    fleet.load(str(tmp_path / "saved"))
    train(again, optimizer, batches()[5:])

    reference = train(whole := strided(net()), adam(whole), batches())
    for (name, mine), theirs in zip(
        again.state_dict().items(), reference.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, theirs), name
