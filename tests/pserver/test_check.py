"""Promises of ``pserver check``: it names each line of a script that uses PaddlePaddle, with what
the index says to write, and runs nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pserver.__main__ import main
from pserver.cli.check import Use, check
from tests.support.fork_server import finished
from tests.support.pages import PAGES, ROOT, fences
from tests.support.pages import name as page_name
from transpiler.names.names import member

FLEET = """\
import os
import paddle
import paddle.nn as nn
import paddle.nn.functional as F
from paddle.distributed import fleet
from paddle.optimizer import Adam

fleet.init()
strategy = fleet.DistributedStrategy()
strategy.a_sync_configs = {"k_steps": 10, "use_ps_gpu": 1}
strategy.sparse_table_configs = {}


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.add_sublayer("fc", nn.ReLU())

    def forward(self, x):
        return F.relu(x)


net = fleet.distributed_model(Net())
optimizer = fleet.distributed_optimizer(Adam(learning_rate=0.1), strategy)


def train(model, given):
    loss = model(paddle.to_tensor([1.0])).sum()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
    given.set_lr(0.1)


fleet.save_persistables(None, os.environ["PADDLE_TRAINER_ID"])
fleet.stop_worker()
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scripts lie in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def uses(text: str) -> list[Use]:
    Path("train.py").write_text(text)
    return check("train.py").uses


def test_each_line_is_named() -> None:
    """Names of modules, methods of objects, keys, and variables of the environment; what the line
    of an import covers is not named again.
    """
    found = [(use.line, use.used, use.write.partition("(")[0]) for use in uses(FLEET)]

    assert found == [
        (2, "import paddle", "import torch"),
        (3, "import paddle.nn as nn", "import torch.nn as nn"),
        (4, "import paddle.nn.functional as F", "import torch.nn.functional as F"),
        (5, "from paddle.distributed import fleet", "from pserver import fleet"),
        (6, "from paddle.optimizer import Adam", "torch.optim.Adam"),
        (10, "a_sync_configs['use_ps_gpu']", ""),
        (11, "strategy.sparse_table_configs", "pserver.DistributedEmbedding"),
        (14, "nn.Layer", "torch.nn.Module"),
        (17, "self.add_sublayer", "model.add_module"),
        (24, "Adam", "torch.optim.Adam"),
        (24, "fleet.distributed_optimizer", "fleet.distributed_optimizer"),
        (28, "paddle.to_tensor", "torch.tensor"),
        (31, "optimizer.clear_grad", "optimizer.zero_grad"),
        (32, "given.set_lr", 'for group in optimizer.param_groups: group["lr"] = lr'),
        (35, "PADDLE_TRAINER_ID", "TRAINER_ID"),
        (35, "fleet.save_persistables", "fleet.save"),
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "import paddle.fluid as fluid\nfluid.layers.fc(1)",
            "fluid.layers.fc: write torch.nn.Linear",
        ),
        (
            "import paddle\npaddle.fluid.layers.fc(1)",
            "paddle.fluid.layers.fc: write torch.nn.Linear",
        ),
        ("from paddle.nn import *", "from paddle.nn import *: write import torch.nn"),
        ("from paddle.utils import zzqqxx", "import zzqqxx: is not known. The index has no entry"),
        ("from paddle import fluid as f\nf.CPUPlace()", 'f.CPUPlace: write torch.device("cpu")'),
        (
            "import paddle.distributed.fleet as fl\nfl.save_persistables(1)",
            "fl.save_persistables: write fleet.save(path)",
        ),
        ("from trainer import fleet\nfleet.util", "fleet.util: write fleet.all_reduce"),
        ("import pserver\npserver.fleet.util", "pserver.fleet.util: write fleet.all_reduce"),
        ("from trainer.fleet import fc", "from trainer.fleet import fc: write torch.nn.Linear"),
        (
            "import paddle.fluid as fluid\nt = fluid.DistributeTranspiler()\nt.transpile(0)",
            "fluid.DistributeTranspiler: write pserver.DistributeTranspiler",
        ),
        (
            "import paddle.fluid as fluid\nt = fluid.DistributeTranspiler()\nt.transpile(0)",
            "t.transpile: stays. program and startup_program",
        ),
        (
            "import paddle.static\npaddle.static.default_main_program().global_block()",
            "paddle.static.default_main_program().global_block: write program.main",
        ),
        (
            "from paddle.fluid import DatasetFactory\n"
            "d = DatasetFactory().create_dataset('QueueDataset')\nd.set_pipe_command('cat')",
            "d.set_pipe_command: write",
        ),
        (
            "import paddle\npaddle.zzqqxx(1)",
            "paddle.zzqqxx: write torch.zzqqxx. The index has no entry",
        ),
        (
            "import paddle.nn as nn\nnn.Embedding(9, 4, sparse=True)",
            "nn.Embedding(sparse=...): write pserver.DistributedEmbedding(",
        ),
        ("import paddle\npaddle.reader.shuffle(f, 9)", "paddle.reader.shuffle: write torch.utils."),
        ("import paddle\nf = 1\nf.loss.numpy()", "f.loss.numpy: write tensor.detach().numpy()"),
        (
            "from paddle.distributed.fleet.base.role_maker import Role\nRole.WORKER",
            "from paddle.distributed.fleet.base.role_maker import Role: write fleet.Role",
        ),
    ],
)
def test_imports_are_followed(text: str, line: str) -> None:
    """By any name, and into the packages of ours, where a script has swapped the import."""
    assert [use for use in map(str, uses(text)) if line in use]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "from pserver import fleet, DistributedEmbedding\nfleet.metrics()\nfleet.save('x')",
        "from trainer import fleet\nfleet.shard([])\nfleet.load('x')\nfleet.Slot('x', 'int64')",
        "import torch\nloss = torch.ones(1)\nloss.backward()\nloss.numpy()",
        "import numpy as np\nnp.ones(1).astype('int')",
        "from pserver import Executor\nExecutor().run()",
        "from pserver import fleet\nnet = fleet.distributed_model(1)\nnet(1).backward()",
        "from torch import nn\nclass N(nn.Module): pass\nN()(1).backward()",
        "from transpiler.clip import ClipGradByValue\nfrom trainer.job.job import distributed",
        "from pserver import fleet\ndef f(x): return x.astype('int64')",
        "from .paddle import fleet\nfleet.util",
        "import pserver.nn.functional\npserver.nn.functional.sequence_pool(1)",
        "from pserver import nn\nnn.functional.nce(1)",
        "from pserver.nn import functional as F\nF.sequence_pool(1)",
        "from pserver.lr import NoamLR\nNoamLR(1)",
    ],
)
def test_a_script_of_ours_has_nothing_to_change(text: str) -> None:
    """Nor one of torch alone."""
    assert uses(text) == []
    assert main(["check", "train.py"]) == 0


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_what_our_pages_show_has_nothing_to_change(page: Path) -> None:
    """But what a page shows of Paddle's own."""
    shown = [fence for fence in fences(page) if fence.language == "python"]
    for fence in shown:
        if "from paddle" not in fence.text:
            assert uses(fence.text) == [], fence


SCRIPTS = ROOT / "tests" / "testdata" / "paddle"
PORTED = {  # what the answers about a static script that fleet trains begin with
    "from paddle.distributed.fleet.base import role_maker": "from pserver import fleet",
    "static.nn.sparse_embedding": "pserver.DistributedEmbedding(",
    "static.nn.sparse_embedding(param_attr=...)": "pserver.DistributedEmbedding(",
    "paddle.nn.functional.cross_entropy(use_softmax=...)": "torch.nn.functional.nll_loss(p.log()",
    "static.auc": "pserver.metrics.AUC()",
    "role_maker.PaddleCloudRoleMaker": "fleet.CloudRoleMaker()",
    "static.Program": "",
    "static.program_guard": "torch.nn.Module",
    "static.data": "fleet.Slot(",
    "static.data(lod_level=...)": "fleet.Slot(name, dtype, width=None)",
    "fleet.distributed_optimizer": "fleet.distributed_optimizer",
    "optimizer.minimize": "loss.backward()",
    "static.Executor": "",
    "exe.run": "loss.backward()",
    "dataset.init(input_type=...)": "",
    "dataset.init(pipe_command=...)": "dataset.init(parser=function)",
    "fleet.util.get_file_shard": "dataset.set_filelist(files)",
    "exe.train_from_dataset": "for batch in dataset: ",
    "fleet.save_inference_model": "fleet.export(path)",
}


def test_a_static_script_of_fleet_becomes_a_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """No answer of it is about programs, which fleet does not train, and each name is known."""
    found = check(str(SCRIPTS / "static_fleet.py"))
    writes = {use.used: use.write for use in found.uses}

    assert {used: writes.get(used, "?")[: len(begin)] for used, begin in PORTED.items()} == PORTED
    assert not [str(use) for use in found.uses if "is not known" in str(use)]
    assert not [use.used for use in found.uses if use.write == "" and "Delete" not in str(use)][1:]
    assert main(["check", str(SCRIPTS / "static_fleet.py")]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    change = {use.line for use in found.uses if not use.stays}
    stay = {use.line for use in found.uses} - change
    assert f": {len(change)} lines to change, {len(stay)} stay; a static program " in last
    assert len(stay) == 4 and "a torch.nn.Module and a loop over batches: docs" in last


@pytest.mark.processes
def test_the_ported_script_runs() -> None:
    """As the answers say, in one round: it trains, and nothing of PaddlePaddle is left."""
    script = SCRIPTS / "static_fleet_ported.py"
    Path("data").mkdir()
    line = "2 {0} 7 1 {0} 3 1 2 {0} 4 0.5 1 0 0.25 1 {1}\n"
    for part in range(2):
        lines = [line.format(n, n % 2) for n in range(1, 65)]
        Path("data", f"part-{part}").write_text("".join(lines))
    done = finished([str(script)], cwd=Path.cwd())

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("epoch ") == 2 and Path("inference").exists()
    assert check(str(script)).uses == []


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("fleet.DistributeTranspiler()", ". Its last line is executor.close(). Then: {} --servers"),
        ("fleet.init(is_collective=True)\nfleet.distributed_optimizer(1)", ". Then: {} --nccl2 "),
        ("fleet.distributed_optimizer(1)", ". Its last line is fleet.finish(). Then: {} --servers"),
        ("fleet.distributed_optimizer(1)\nfleet.stop_worker()", ", 1 stays. Then: {} --servers 2 "),
        ("fleet.init()", ": 1 line to change. Then: {} --servers 2 --trainers 2 train.py"),
    ],
)
def test_how_the_script_is_started(text: str, end: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without servers where it asks for that; it leaves its job where there are some."""
    Path("train.py").write_text(f"from paddle.distributed import fleet\n{text}\n")
    main(["check", "train.py"])

    assert end.format("pserver launch") in capsys.readouterr().out.splitlines()[-1]


def test_a_script_with_a_transpiler_captures_a_step() -> None:
    """The minimized loss becomes the step of pserver.capture; its inputs stay inputs."""
    found = uses(
        "import paddle.fluid as fluid\nx = fluid.layers.data(name='x', shape=[4], lod_level=1)\n"
        "fluid.clip.set_gradient_clip(clip)\nfluid.layers.accuracy(x, x)\n"
        "fluid.optimizer.SGD(0.1).minimize(x)\nt = fluid.DistributeTranspiler()\n"
        "fluid.default_startup_program()\n"
    )
    names = (use.used.removesuffix("(lod_level=...)") for use in found)
    short = (name.rpartition(".")[2] for name in names)
    writes = {name: use.write.partition("(")[0] for name, use in zip(short, found, strict=True)}

    assert {use.used for use in found} >= {"fluid.layers.data(lod_level=...)"}
    assert writes == {
        "fluid as fluid": "import torch",
        "data": "pserver.data",
        "SGD": "torch.optim.SGD",
        "minimize": "pserver.capture",
        "DistributeTranspiler": "pserver.DistributeTranspiler",
        "default_startup_program": "DistributeTranspiler.get_startup_program",
        "set_gradient_clip": "pserver.capture",
        "accuracy": "torch.eq",
    }


LOOP = """\
import paddle
import paddle.nn as nn
from paddle.distributed import fleet
from paddle.io import DataLoader, DistributedBatchSampler
from paddle.metric import Auc

fleet.init(is_collective=True)
net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1, bias_attr=False))
clip = nn.ClipGradByGlobalNorm(1.0)
adam = paddle.optimizer.AdamW(0.1, parameters=net.parameters(), grad_clip=clip)
sampler = DistributedBatchSampler(data, 8)
loader = DataLoader(data, batch_sampler=sampler, return_list=True)
auc = Auc()
for epoch in range(2):
    sampler.set_epoch(epoch)
    print(auc.accumulate())
"""


def test_arguments_that_torch_lacks_are_named() -> None:
    """Of optimizers, layers and loaders by their class; a job without servers keeps its rows in the
    model.
    """
    found = {(use.line, use.used): use.write.partition("(")[0] for use in uses(LOOP)}
    writes = {
        (8, "nn.Embedding(sparse=...)"): "",
        (8, "nn.Linear(bias_attr=...)"): "torch.nn.Linear",
        (10, "paddle.optimizer.AdamW(grad_clip=...)"): "fleet.distributed_optimizer",
        (12, "DataLoader(return_list=...)"): "",
        (15, "sampler.set_epoch"): "",
        (16, "auc.accumulate"): "metric.compute",
    }
    assert {used: found.get(used) for used in writes} == writes

    found = {(use.line, use.used): use.write for use in uses(LOOP.replace("True", "False", 1))}
    rows = "pserver.DistributedEmbedding(embedding_dim, num_embeddings=n)"
    assert found[8, "nn.Embedding(sparse=...)"] == rows


def test_a_generator_of_batches_is_the_loop() -> None:
    """A loader of a static script is none here, and neither is the module of static programs."""
    found = uses(
        "import paddle\nimport paddle.static as static\nfrom paddle.distributed import fleet\n"
        "x = static.data('x', [-1, 1])\n"
        "loader = paddle.io.DataLoader.from_generator(feed_list=[x], capacity=8)\n"
        "loader.set_batch_generator(batches)\n"
        "made().minimize(x)\n"
        "fleet.distributed_optimizer(paddle.optimizer.SGD(0.1))\n"
    )
    writes = {use.used: use.write for use in found}

    assert writes["import paddle.static as static"] == ""
    assert writes["paddle.io.DataLoader.from_generator"] == ""
    assert writes["loader.set_batch_generator"].startswith("for batch in generator(): ")
    assert writes["made().minimize"].startswith("loss.backward()")


def test_files_beside_the_script(capsys: pytest.CaptureFixture[str], here: Path) -> None:
    """A trainer.py matters to a script that imports our package by that name, a pserver.py always;
    a folder without ``__init__.py`` hides nothing.
    """
    Path("transpiler").mkdir()
    Path("trainer.py").write_text("")
    Path("train.py").write_text("from pserver import fleet\nfleet.init()\n")
    assert main(["check", "train.py"]) == 0
    assert (
        "train.py: trainer.py beside it hides our package of that name" in capsys.readouterr().out
    )
    Path("train.py").write_text("from trainer import fleet\nfleet.init()\n")
    assert main(["check", str(here / "train.py")]) == 1
    (here / "pserver").mkdir()
    (here / "pserver" / "__init__.py").write_text("")
    Path("train.py").write_text("from pserver import fleet\nfleet.init()\n")
    assert main(["check", "train.py"]) == 1
    assert "pserver/ beside it hides our package: rename it" in capsys.readouterr().out


def test_several_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its lines and a summary; as JSON each is a line."""
    Path("a.py").write_text("import paddle\npaddle.enable_static()\n")
    Path("b.py").write_text("")
    assert main(["check", "a.py", "b.py"]) == 1
    text = capsys.readouterr().out.splitlines()
    assert text[1].startswith("a.py:2: paddle.enable_static: has no counterpart. There is no such")
    assert text[2].startswith("a.py: 2 lines to change; a static program becomes a torch.nn.Module")
    assert text[3:] == ["b.py: nothing of PaddlePaddle is left"]
    assert main(["check", "--json", "a.py", "b.py"]) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["script"], each["change"]) for each in found] == [("a.py", True), ("b.py", False)]
    assert found[0]["uses"][1]["used"] == "paddle.enable_static"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("nothing.py", None, "nothing.py: No such file"),
        ("old.py", b"print 'x'\n", "old.py, line 1: no Python 3: Missing parentheses"),
        ("odd.py", b"x = '\xff'\n", "odd.py: no Python 3: "),
        ("zero.py", b"x = 1\x00\n", "zero.py"),
    ],
)
def test_what_is_no_script_is_one_line(
    name: str, content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With exit status 2, before anything is said of the other scripts."""
    if content is not None:
        Path(name).write_bytes(content)
    Path("a.py").write_text("import paddle\n")
    assert main(["check", "a.py", name]) == 2
    out, err = capsys.readouterr()

    assert out == "" and err.count("\n") == 1 and message in err


def test_the_answers_are_those_of_the_index() -> None:
    """For every name of fleet: the same text as in the error of our package."""
    for name in ("util", "save_persistables", "collective_perf"):
        entry = member("fleet", name)
        (use,) = uses(f"from pserver import fleet\nfleet.{name}")
        assert entry is not None and (use.write, use.note) == (entry.write, entry.note)


@pytest.mark.processes
def test_torch_is_not_imported() -> None:
    """The command needs no second."""
    Path("a.py").write_text("import paddle\n")
    line = "import sys; from pserver.__main__ import main; main(['check', 'a.py'])"
    line += "; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True)

    assert done.stdout.splitlines()[-1] == "False False", done.stderr
