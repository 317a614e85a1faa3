"""Datasets in real jobs: each file has one trainer, samples change trainers, a trainer that dies is
noticed, and a job that is started again goes on at the very sample.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support.processes import Processes
from tests.support.tiers import RARE

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
from trainer import fleet
from trainer.data.datasets import SampleExchange

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class Counts(torch.nn.Module):
    # a step adds 1 for each of its samples: the rate makes up for the mean over 2 trainers

    def __init__(self):
        super().__init__()
        self.times = torch.nn.Parameter(torch.zeros(40))

    def forward(self, ids):
        return -self.times[ids].sum()

fate, kind = sys.argv[1:]
strategy = fleet.DistributedStrategy()
if os.environ.get("PSERVER_ENDPOINTS"):
    strategy.a_sync, strategy.a_sync_configs = False, {"lost_trainer": "stop"}
fleet.init(strategy=strategy)
rank = fleet.worker_index()
model = fleet.distributed_model(Counts())
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=2.0))
dataset = getattr(fleet, kind)()
dataset.init(batch_size=4, use_var=[fleet.Slot("id")])
dataset.set_filelist([f"part-{n}" for n in range(4)])
if kind == "InMemoryDataset":
    dataset.load_into_memory()
first, position = 0, Path(f"position-{rank}")
if fate == "goes on":
    fleet.load("saved")
    dataset.load_state_dict(json.loads(position.read_text()))
    first = 1
for epoch in range(first, 2):
    if kind == "InMemoryDataset" and fate != "goes on":
        dataset.global_shuffle()
        assert dataset.get_memory_data_size(everywhere=True) == 40
    for number, batch in enumerate(dataset, 1):
        model(batch["id"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        print("seen", json.dumps([epoch, batch["id"].tolist()]), flush=True)
        if fate == "dies once" and (rank, optimizer.steps) == (1, 9) and not Path("died").exists():
            Path("died").touch()
            die()
        if fate == "saves" and (epoch, number) == (1, 3):
            fleet.save("saved")
            position.write_text(json.dumps(dataset.state_dict()))
            break
if fate == "dies in the exchange":
    whole = SampleExchange._swapped
    if rank == 1:
        SampleExchange._swapped = lambda *_: die()
    try:
        dataset.global_shuffle()
    except Exception as error:
        # in one piece: the launcher may end this process at any moment
        said = f"raised {type(error).__name__} {dataset.get_memory_data_size()} {error}\\n"
        os.write(1, said.encode())
        os._exit(3)
print("times", json.dumps(model.times.tolist()), flush=True)
fleet.finish()
"""
JOBS = {"servers": ("--servers", "1"), "collective": ("--nccl2",)}


def run(processes: Processes, job: str, fate: str, kind: str, *flags: str) -> tuple[int, list[str]]:
    """A job of two trainers: its exit status, and what they said."""
    for index in range(4):
        text = "".join(f"1 {index * 10 + n}\n" for n in range(10))
        (processes.path / f"part-{index}").write_text(text)
    (processes.path / "script.py").write_text(SCRIPT)
    launch = ("-m", "pserver", "launch", "--trainers", "2", *JOBS[job], *flags, "script.py")
    started = processes.python(f"{fate}{flags}", *launch, fate, kind, GLOO_SOCKET_IFNAME="lo")
    return started.status(patience=200), started.lines


def seen(lines: list[str]) -> dict[tuple[str, int], list[list[int]]]:
    """The batches of each trainer and epoch."""
    found: dict[tuple[str, int], list[list[int]]] = {}
    for line in lines:
        trainer, _, words = line.partition(" | ")
        if words.startswith("seen"):
            epoch, batch = json.loads(words.removeprefix("seen"))
            found.setdefault((trainer.strip(), epoch), []).append(batch)
    return found


@pytest.mark.parametrize("job", ["servers", RARE("collective")])
def test_samples_change_trainers_until_one_dies(processes: Processes, job: str) -> None:
    """Each epoch every sample is on one trainer, another one than before for many, and both have
    equally many batches; when one dies in an exchange the other's call raises, and loses nothing.
    """
    flags = ("--heartbeat-timeout", "3") if job == "servers" else ()
    status, lines = run(processes, job, "dies in the exchange", "InMemoryDataset", *flags)
    assert status != 0, lines
    found = seen(lines)

    epochs = [[sum(found[f"trainer {rank}", n], []) for rank in (0, 1)] for n in (0, 1)]
    for first, second in epochs:
        assert sorted(first + second) == list(range(40))
    assert 4 < len({*epochs[0][0]} & {*epochs[1][0]}) < len(epochs[0][0]) - 4
    counts = {key: len(batches) for key, batches in found.items()}
    assert counts["trainer 0", 0] == counts["trainer 1", 0]
    assert all(1 <= len(batch) <= 4 for batches in found.values() for batch in batches)

    (said,) = [line for line in lines if "| raised " in line]
    kind, size = said.partition("raised ")[2].split()[:2]
    assert kind in ("TrainerLost", "JobFailed") and int(size) == len(epochs[1][0]), said
    assert "trainer 1" in said


def times(lines: list[str]) -> list[list[float]]:
    """How often each sample was trained on, as each trainer's parameters say at the end."""
    return [json.loads(line.partition("times ")[2]) for line in lines if "| times " in line]


@pytest.mark.long  # test_restarted_trainers stands for it
@pytest.mark.parametrize("kind", ["InMemoryDataset", RARE("QueueDataset")])
def test_a_job_started_again_goes_on_at_the_very_sample(processes: Processes, kind: str) -> None:
    """A trainer dies in the middle of an epoch.  The parameters and the position come from one
    checkpoint: they count each sample once in each epoch.
    """
    saving = ("--checkpoint", "saved", "--every", "0.01", "--max-restarts", "1")
    status, lines = run(processes, "servers", "dies once", kind, *saving)
    assert status == 0 and Path(processes.path, "died").exists(), lines

    assert times(lines) == [[2.0] * 40] * 2
    found, again = seen(lines), [0, 0]  # batches of each trainer that were given twice
    for epoch in (0, 1):
        parts = [found[f"trainer {rank}", epoch] for rank in (0, 1)]
        once = [[each for n, each in enumerate(part) if each not in part[:n]] for part in parts]
        assert sorted(sum(sum(once, []), [])) == list(range(40))
        again = [n + len(part) - len(own) for n, part, own in zip(again, parts, once, strict=True)]
    assert max(again) < 9, "it began anew: how much is given again is what was not saved yet"


@pytest.mark.parametrize("kind", [RARE("InMemoryDataset"), RARE("QueueDataset")])
def test_a_script_goes_on_at_the_position_it_saved(processes: Processes, kind: str) -> None:
    """Saved by the script after three batches of the second epoch: a new job gives the others,
    and with those before them each sample was there once.
    """
    status, before = run(processes, "servers", "saves", kind)
    assert status == 0, before
    status, after = run(processes, "servers", "goes on", kind)
    assert status == 0, after

    found, rest = seen(before), seen(after)
    assert {epoch for _, epoch in rest} == {1}
    given = {rank: (found[rank, 1], rest[rank, 1]) for rank in ("trainer 0", "trainer 1")}
    assert all(len(first) == 3 and second for first, second in given.values())
    every = [each for first, second in given.values() for each in first + second]
    assert sorted(sum(every, [])) == list(range(40))
    assert times(after) == [[2.0] * 40] * 2


ONE_FILE = """
import json, sys
import torch
from trainer import DistributedEmbedding, fleet
from trainer.nn.functional import string_ids

class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = DistributedEmbedding(1, name="words")
        self.out = torch.nn.Linear(1, 1)

    def forward(self, ids):
        return self.out(self.words(ids))

strategy = fleet.DistributedStrategy()
strategy.a_sync = sys.argv[1] == "async"
fleet.init(strategy=strategy)
model = fleet.distributed_model(Words())
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))

def seen(batch):
    sys.stdout.write(f"seen {json.dumps(batch)}\\n")  # at once: a log line may come between two

def read(kind, path):
    made = getattr(fleet, kind)()
    slots = [fleet.Slot("id"), fleet.Slot("word", "string")]
    made.init(batch_size=4, parser="tsv", use_var=slots, on_error="skip")
    made.set_filelist([path])
    if kind == "InMemoryDataset":
        made.load_into_memory()
    return made

for kind in ("InMemoryDataset", "QueueDataset"):
    dataset = read(kind, "train-*.tsv.gz")
    for batch in dataset:
        assert torch.equal(batch["word"], string_ids([f"w {n}" for n in batch["id"].tolist()]))
        model(batch["word"]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen([f"train {kind}", batch["id"].tolist()])
    print(f"wrong lines: {dataset.get_wrong_lines(everywhere=True)}", flush=True)
    with torch.no_grad():
        for batch in read(kind, "held-out.tsv"):
            model(batch["word"])
            seen([f"test {kind}", batch["id"].tolist()])
fleet.save("saved")
fleet.finish()
"""


@pytest.mark.parametrize("mode", ["async", RARE("sync")])
def test_one_file_is_enough_for_two_trainers(processes: Processes, mode: str) -> None:
    """In memory or from a queue, compressed, with texts: each sample is trained on and evaluated
    once, on either trainer, without a shuffle, and the job ends with its save.  The file's wrong
    line counts once for both.
    """
    for name, samples in (("train-0.tsv.gz", 41), ("held-out.tsv", 9)):
        rows = "".join(f"{n}\tw {n}\n" for n in range(samples))
        rows += "wrong\n" if name.startswith("train") else ""
        packed = gzip.compress if name.endswith(".gz") else bytes
        (processes.path / name).write_bytes(packed(("id\tword\n" + rows).encode()))
    (processes.path / "one_file.py").write_text(ONE_FILE)
    launch = ("-m", "pserver", "launch", "--servers", "1", "--trainers", "2", "one_file.py", mode)
    started = processes.python("launch", *launch)

    assert started.status(patience=200) == 0, started.lines
    assert (processes.path / "saved").exists()
    found = dict[str, list[list[int]]]()
    for (_, what), batches in seen(started.lines).items():
        found.setdefault(str(what), []).append(sum(batches, []))
    for kind in ("InMemoryDataset", "QueueDataset"):
        assert sorted(sum(found[f"train {kind}"], [])) == list(range(41)), found
        assert sorted(found[f"test {kind}"]) == [[0, 1, 2, 3], [4, 5, 6, 7, 8]], found
    assert len(found["train InMemoryDataset"]) == 2
    wrong = [line for line in started.lines if "| wrong lines: " in line]
    assert len(wrong) == 4 and all(line.endswith(": 1") for line in wrong), wrong


RESUMED = """
import json, sys
from pathlib import Path
import torch
from trainer import fleet

kind, first = sys.argv[1], not Path("position").exists()
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
fleet.init(strategy=strategy)
model = fleet.distributed_model(torch.nn.Linear(1, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
dataset = getattr(fleet, kind)()
dataset.init(batch_size=4, parser="csv", use_var=[fleet.Slot("id")])
dataset.set_filelist(["one.csv.gz"])
if kind == "InMemoryDataset":
    dataset.load_into_memory()
if not first:
    fleet.load("saved")
    dataset.load_state_dict(json.loads(Path("position").read_text()))
for number, batch in enumerate(dataset, 1):
    model(batch["id"].float()[:, None]).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print("seen", json.dumps([0, batch["id"].tolist()]), flush=True)
    if first and number == 3:
        fleet.save("saved")
        if fleet.is_first_worker():
            Path("position").write_text(json.dumps(dataset.state_dict()))
        break
fleet.finish()
"""


@pytest.mark.long  # test_leased_files, in one process, stands for it
@pytest.mark.parametrize("kind", ["QueueDataset", RARE("InMemoryDataset")])
def test_a_pass_over_one_file_goes_on_with_fewer_trainers(processes: Processes, kind: str) -> None:
    """Two trainers share a file, save in the middle of the pass, and leave; one goes on: each
    sample is given once.
    """
    rows = "".join(f"{n}\n" for n in range(41))
    (processes.path / "one.csv.gz").write_bytes(gzip.compress(("id\n" + rows).encode()))
    (processes.path / "script.py").write_text(RESUMED)
    found = list[list[int]]()
    for trainers in ("2", "1"):
        launch = ("-m", "pserver", "launch", "--servers", "1", "--trainers", trainers)
        started = processes.python(trainers, *launch, "script.py", kind)
        assert started.status(patience=200) == 0, started.lines
        found.append([n for batches in seen(started.lines).values() for n in sum(batches, [])])

    assert 0 < len(found[0]) < 41 and sorted(sum(found, [])) == list(range(41)), found
