"""The Executor runs programs: it checks what is fed, gives what is fetched, and leaves the module
trained.
"""

from __future__ import annotations

import gc
import shutil

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trainer import Executor
from transpiler import ClipGradByGlobalNorm, capture
from transpiler.ir.graph import Block, Op, Ref, Role, Variable
from transpiler.lower import Kernel
from transpiler.program import Program


def classify(model, x, y):
    return F.cross_entropy(model(x), y)


def batch(size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 6), torch.randint(0, 3, (size,))


@pytest.fixture
def captured():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    program, startup = capture(model, classify, optimizer, batch())
    return model, optimizer, program, startup


def test_a_feed_that_does_not_fit_is_refused_by_name(captured):
    """Missing, unknown, wrong dtype, rank, static size, unequal free sizes, no rows, no tensor:
    each error names the input.
    """
    _, _, program, startup = captured
    x, y = batch(3)
    wrong = {
        "'y'.*expected int64\\[batch\\], got int64\\[4\\]; batch is 3 in the input 'x'": (
            x,
            torch.zeros(4, dtype=torch.long),
        ),
        "'x': expected float32\\[batch, 6\\], got float64\\[3, 6\\]": (x.double(), y),
        "'x': expected float32\\[batch, 6\\], got float32\\[6\\]": (x[0], y),
        "'x': expected float32\\[batch, 6\\], got float32\\[3, 5\\]": (x[:, :5], y),
        "'x'.*1 rows or more": (x[:0], y[:0]),
        "expected 2 tensors \\(x, y\\), got 1": (x,),
        "expected the input 'y', int64\\[batch\\], got none": {"x": x},
        "unknown one 'z'": {"x": x, "y": y, "z": y},
    }
    with Executor() as executor:
        executor.run(startup)
        for message, feed in wrong.items():
            with pytest.raises(ValueError, match=message):
                executor.run(program, feed=feed)
        with pytest.raises(TypeError, match="'x': expected a tensor.*got list"):
            executor.run(program, feed=([1.0], y))
        with pytest.raises(TypeError, match="tuple or a dict"):
            executor.run(program, feed=x)


def test_a_feed_may_be_arrays(captured):
    """Those of numpy, read-only ones too; one of another dtype, or of texts, is refused."""
    _, _, program, startup = captured
    x, y = batch(3)
    arrays = {"x": x.numpy().copy(), "y": y.numpy().copy()}
    arrays["x"].flags.writeable = False
    evaluated = program.clone(for_test=True)
    with Executor() as executor:
        executor.run(startup)
        (expected,) = executor.run(evaluated, (x, y), ["loss"])
        for feed in (arrays, tuple(arrays.values())):
            assert torch.equal(executor.run(evaluated, feed, ["loss"])[0], expected)
        with pytest.raises(ValueError, match="'x': expected float32.*got float64"):
            executor.run(evaluated, {**arrays, "x": arrays["x"].astype("float64")})
        with pytest.raises(TypeError, match="'x': expected a tensor.*got ndarray"):
            executor.run(evaluated, {**arrays, "x": arrays["x"].astype(str)})
        with pytest.raises(TypeError, match="tuple or a dict.*got ndarray"):
            executor.run(evaluated, arrays["x"])


def test_a_batch_that_the_step_cannot_hold_is_refused():
    """Batch norm over features needs two rows: a single one is refused, as eager code refuses it,
    with the smallest number.
    """
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    program, _ = capture(model, classify, torch.optim.SGD(model.parameters(), lr=0.1), batch(4))
    with Executor() as executor:
        executor.run(program, feed=batch(2))
        with pytest.raises(ValueError, match="holds for 2 rows or more"):
            executor.run(program, feed=batch(1))


def test_any_variable_can_be_fetched(captured):
    """Outputs, inputs, gradients, parameters, states, sizes and temporaries come detached, and
    later runs do not change them.
    """
    model, optimizer, program, startup = captured
    names = ["loss", "x", "0.weight@GRAD", "0.weight", "0.weight@exp_avg", "0.weight@step", "addmm"]
    x, y = batch(5)
    with Executor() as executor:
        executor.run(startup)
        loss, fed, grad, weight, average, step, hidden = executor.run(
            program, feed={"y": y, "x": x}, fetch_list=names
        )
        kept = weight.clone()
        assert (
            torch.equal(weight, model[0].weight.detach())
            and not weight.requires_grad
            and not loss.requires_grad
        )
        assert (
            torch.equal(fed, x)
            and grad.shape == (8, 6)
            and hidden.shape == (5, 8)
            and int(step) == 1
        )
        assert torch.equal(average, optimizer.state[model[0].weight]["exp_avg"])
        assert (
            executor.run(program, feed=batch())
            == []
            == executor.run(program, feed=batch(), fetch_list=[])
        )
        assert torch.equal(weight, kept) and not torch.equal(kept, model[0].weight.detach())


def test_an_unknown_fetch_names_close_ones(captured):
    """A name that the program lacks is refused with names like it; a text instead of a list too."""
    _, _, program, _ = captured
    with Executor() as executor:
        with pytest.raises(ValueError, match="no variable 'los'; close names: loss"):
            executor.run(program, feed=batch(), fetch_list=["los"])
        with pytest.raises(TypeError, match="list of names"):
            executor.run(program, feed=batch(), fetch_list="loss")


def test_gradients_of_the_user_are_left_alone(captured):
    """Running a program neither reads nor changes p.grad, also when it fails."""
    model, _, program, _ = captured
    model[0].weight.grad = grad = torch.full((8, 6), 3.0)
    with Executor() as executor:
        executor.run(program, feed=batch())
        with pytest.raises(
            IndexError, match=r"While executing aten.nll_loss_forward at test_executor.py:\d+"
        ):
            executor.run(program, feed=(torch.randn(2, 6), torch.tensor([0, 9])))
    assert model[0].weight.grad is grad and torch.equal(grad, torch.full((8, 6), 3.0))
    assert model[2].weight.grad is None


def test_the_users_optimizer_keeps_state_and_hooks(captured):
    """The live optimizer steps: its state is current, its hooks run, and a rate moved by hand
    counts from the next run on.
    """
    model, optimizer, program, _ = captured
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with Executor() as executor:
        executor.run(program, feed=batch())
        before = model[0].weight.detach().clone()
        optimizer.param_groups[0]["lr"] = 0.0
        executor.run(program, feed=batch())
    assert torch.equal(before, model[0].weight.detach()) and len(calls) == 2
    assert int(optimizer.state_dict()["state"][0]["step"]) == 2


@pytest.mark.parametrize("clip", [None, ClipGradByGlobalNorm(0.1)], ids=["plain", "clipped"])
def test_a_saved_program_trains_on_without_its_script(tmp_path, clip):
    """A program that was saved and loaded trains to the same bits as the captured one, with
    optimizers made from its ops.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    groups = [
        {"params": model[2].parameters(), "lr": 0.01},
        {"params": model[0].parameters(), "weight_decay": 0.1},
    ]
    program, startup = capture(
        model, classify, torch.optim.AdamW(groups, lr=0.05), batch(), grad_clip=clip
    )
    program.save(tmp_path / "main")
    loaded = Program.load(tmp_path / "main")
    with Executor() as first, Executor() as second:
        first.run(startup)
        for seed in range(4):
            fed = batch(seed + 2)
            names = ["loss", "0.weight", "2.bias", "0.weight@exp_avg_sq"]
            torch.manual_seed(seed)
            expected = first.run(program, feed=fed, fetch_list=names)
            torch.manual_seed(seed)
            came = second.run(loaded, feed=fed, fetch_list=names)
            assert all(torch.equal(a, b) for a, b in zip(expected, came, strict=True))


def test_a_received_program_needs_its_startup_program(captured):
    """A program without values is refused until a startup program in the same Executor has bound
    them.
    """
    _, _, program, startup = captured
    received = Program.from_proto(program.to_proto())
    with Executor() as executor:
        with pytest.raises(
            ValueError, match="no value for '0.weight'; run its startup program first"
        ):
            executor.run(received, feed=batch())
        executor.run(startup)
        (loss,) = executor.run(received, feed=batch(), fetch_list=["loss"])
    assert loss.isfinite()


def test_code_of_a_program_goes_with_the_program(captured):
    """Generated code is kept per program and forgotten when the program is."""
    model, optimizer, program, _ = captured
    with Executor() as executor:
        other, _ = capture(model, classify, optimizer, batch())
        executor.run(program, feed=batch())
        executor.run(other, feed=batch())
        assert len(executor._loaded) == 2
        # the default programs hold the last captured one
        capture(model, classify, optimizer, batch())
        del other
        gc.collect()
        assert len(executor._loaded) == 1


def test_devices_are_checked():
    """A device that does not exist, or is of another kind, is refused when the Executor is made."""
    for device in ("nonsense", "meta", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(ValueError, match="Executor: expected"):
            Executor(device=device)


def test_a_closed_executor_runs_nothing(captured):
    """After close, or the end of its with block, an Executor says that it is closed."""
    _, _, program, _ = captured
    executor = Executor()
    executor.close()
    executor.close()
    with pytest.raises(ValueError, match="closed"):
        executor.run(program, feed=batch())
    with pytest.raises(TypeError, match="expected a Program, got int"):
        Executor().run(3)


class Recording(Executor):
    """An Executor whose communication ops note that they ran, and with what."""

    def __init__(self, compile: bool) -> None:
        super().__init__(compile=compile)
        self.seen: list[tuple[str, float]] = []

    def _kernels_for(self, program: Program) -> dict[str, Kernel]:
        def send(op, x, endpoints, trainer_id):
            self.seen.append(("send", float(x[0].sum())))

        def recv(op, param, endpoints):
            self.seen.append(("recv", 0.0))
            return [torch.full((2,), 10.0)]

        return {"send": send, "recv": recv}


@pytest.mark.processes
@pytest.mark.parametrize(
    "compile", [False, pytest.param(True, marks=pytest.mark.long)], ids=["eager", "compiled"]
)
def test_communication_keeps_its_place_among_compute(compile):
    """send and recv run in the order of the program, between the ops around them, also when compute
    is compiled.
    """
    if compile and shutil.which("c++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    ops = (
        Op("aten.add.Tensor", {"self": Ref("x"), "other": 1}, ("y",)),
        Op("send", {"x": (Ref("y"),), "endpoints": ("h:1",), "trainer_id": 0}),
        Op("aten.mul.Tensor", {"self": Ref("y"), "other": 3}, ("z",)),
        Op("send", {"x": (Ref("z"),), "endpoints": ("h:1",), "trainer_id": 0}),
        Op("recv", {"param": "w", "endpoints": ("h:1",)}, ("w",)),
        Op("aten.add.Tensor", {"self": Ref("z"), "other": Ref("w")}, ("end",)),
    )
    kinds = {
        "x": Role.INPUT,
        "y": Role.TEMPORARY,
        "z": Role.TEMPORARY,
        "w": Role.TEMPORARY,
        "end": Role.OUTPUT,
    }
    variables = {name: Variable(name, (2,), "float32", role) for name, role in kinds.items()}
    with Recording(compile) as executor:
        (end,) = executor.run(
            Program((Block(0, variables, ops),)), feed=(torch.ones(2),), fetch_list=["end"]
        )
        assert executor.seen == [("send", 4.0), ("send", 12.0), ("recv", 0.0)]
    assert torch.equal(end, torch.full((2,), 16.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_on_a_gpu_equals_training_on_the_cpu():
    """The Executor moves the module to its device; five steps there equal five on the CPU within
    1e-4.
    """
    results = []
    for device in ("cpu", "cuda:0"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        program, startup = capture(
            model, classify, torch.optim.Adam(model.parameters(), lr=0.01), batch()
        )
        with Executor(device=device) as executor:
            executor.run(startup)
            for seed in range(5):
                torch.manual_seed(seed)
                executor.run(program, feed=batch(8))
        assert next(model.parameters()).device == torch.device(device)
        results.append([parameter.detach().cpu() for parameter in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*results, strict=True))


def test_a_script_may_say_which_trainer_it_takes_itself_for(captured):
    """Numbers that are not the program's are refused before anything runs."""
    _, _, program, startup = captured
    with Executor() as executor:
        executor.run(startup)
        executor.run(program, batch(), trainer_id=0, num_trainers=1)
        with pytest.raises(
            ValueError, match="num_trainers: expected that of a program .* 1, got 2"
        ):
            executor.run(program, batch(), trainer_id=0, num_trainers=2)
        with pytest.raises(ValueError, match="trainer_id: expected that of a program .* 0, got 1"):
            executor.run(program, batch(), trainer_id=1)
        with pytest.raises(TypeError, match="trainer_id: expected a whole number, got '0'"):
            executor.run(program, batch(), trainer_id="0")
