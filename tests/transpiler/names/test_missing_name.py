"""Promises about a name that a package lacks: the error says what to write, and nothing is read
before.
"""

from __future__ import annotations

import importlib
import pickle
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer import DataParallel, Executor, fleet
from trainer.collective.world import leave_parallel_env
from transpiler import (
    DistributedStrategy,
    DistributeTranspiler,
    DistributeTranspilerConfig,
    Program,
)
from transpiler.names.names import entry_of, member, members, missing, names, suggestion

ROOMS = ("nn", "nn.functional", "metrics", "lr", "fleet")
MODULES = ("transpiler", "trainer", *(f"trainer.{room}" for room in ROOMS))
UNREAD = """
import importlib, sys
import transpiler, trainer
from trainer import fleet, lr, metrics, nn
from transpiler.names.names import names
for module in (transpiler, trainer, nn, nn.functional, metrics, lr, fleet):
    assert not hasattr(module, "Nothing")
    assert getattr(module, "fc", None) is None
try:
    transpiler.Nothing
except AttributeError:
    pass
assert names.cache_info().currsize == 0 and "tomllib" in sys.modules
try:
    transpiler.abs
except AttributeError as error:
    print(error)
assert names.cache_info().currsize == 1
"""


@pytest.mark.parametrize("module", MODULES)
def test_an_import_says_what_to_write(module: str) -> None:
    """It is an ImportError, and carries the module's name."""
    with pytest.raises(ImportError) as found:
        exec(f"from {module} import abs")

    assert str(found.value) == f"cannot import name 'abs' from '{module}': for abs write torch.abs"
    assert found.value.name == module


@pytest.mark.parametrize("module", MODULES)
def test_an_attribute_says_what_to_write(module: str) -> None:
    """It is an AttributeError; ``hasattr`` and ``getattr`` find nothing."""
    found = importlib.import_module(module)

    assert not hasattr(found, "abs") and getattr(found, "abs", 3) == 3
    with pytest.raises(AttributeError) as error:
        _ = found.abs
    said = f"module '{module}' has no attribute 'abs': for abs write torch.abs"
    assert str(error.value) == said
    assert traceback.format_exception_only(error.value)[-1].endswith(f"{said}\n")
    assert str(pickle.loads(pickle.dumps(error.value))) == said


@pytest.mark.parametrize("module", MODULES)
def test_a_name_like_ours_is_suggested(module: str) -> None:
    """The name that was meant, with the letters in another case too."""
    ours = importlib.import_module(module).__all__[0]
    for wrong in (f"{ours}s", ours.swapcase()):
        with pytest.raises(ImportError, match=rf"(?i)did you mean {ours}\?"):
            exec(f"from {module} import {wrong}")


def test_a_module_is_to_be_imported() -> None:
    """A module that nothing has imported is no attribute of its package yet."""
    error = missing("trainer", "lightning", ["Executor"])

    assert (
        str(error)
        == "module 'trainer' has no attribute 'lightning': import trainer.lightning first"
    )
    assert "first" not in str(missing("trainer.fleet", "lightning"))


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("trainer", "auc", "trainer.metrics"),
        ("transpiler", "nce", "trainer.nn.functional"),
        ("trainer", "QueueDataset", "trainer.fleet"),
        ("trainer.nn", "DistributedEmbedding", "trainer"),
    ],
)
def test_another_package_has_the_name(module: str, name: str, home: str) -> None:
    """The error says which."""
    with pytest.raises(ImportError, match=f": write {home}.{name}$"):
        exec(f"from {module} import {name}")
    with pytest.raises(AttributeError, match=f": write {home}.{name}$"):
        getattr(importlib.import_module(module), name)


def test_a_name_like_nothing_is_only_missing() -> None:
    """No suggestion is better than a wrong one."""
    with pytest.raises(ImportError, match="^cannot import name 'zzqqxx' from 'transpiler'$"):
        exec("from transpiler import zzqqxx")


@pytest.mark.parametrize("module", MODULES)
def test_everything_can_be_imported(module: str) -> None:
    """``*`` gives what the module exports; submodules are imported as before."""
    scope: dict[str, object] = {}
    exec(f"from {module} import *", scope)

    assert set(importlib.import_module(module).__all__) <= set(scope)
    exec("from trainer import communicator, fleet, nn\nfrom transpiler import plan, passes", scope)
    with pytest.raises(ModuleNotFoundError, match="No module named 'transpiler.fc'"):
        exec("import transpiler.fc")


def test_a_declined_name_has_its_reason() -> None:
    """The reason stands in the message."""
    declined = next(entry for entry in names().values() if entry.kind == "declined")

    assert suggestion(declined.name) == f"{declined.name} is not here: {declined.note}"


def test_two_names_that_are_like_one() -> None:
    """A semicolon parts them, and no full stop stands before it."""
    said = suggestion("sequence_poool", ["SequencePool"])

    assert said.startswith("for sequence_pool write trainer.nn.functional.sequence_pool. ")
    assert said.endswith("; did you mean SequencePool?") and ".;" not in said


def test_a_recipe_says_where_its_lines_are() -> None:
    """What is to be written may be one line of several: the page has all."""
    where = "docs/index_of_names.md#add_n has all lines"

    assert suggestion("add_n") == f"for add_n write sum(tensors); {where}"


@pytest.mark.processes
def test_nothing_is_read_before_a_message_is() -> None:
    """Importing, ``hasattr``, and an error that nobody prints read no table."""
    done = subprocess.run([sys.executable, "-c", UNREAD], capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "module 'transpiler' has no attribute 'abs': for abs write torch.abs\n"


PAGE = Path(__file__).parents[3] / "docs" / "coming_from" / "fluid.md"


@pytest.mark.parametrize("name", sorted(set(members()["fleet"]) - set(fleet.__all__)))
def test_fleet_says_what_to_write(name: str) -> None:
    """For every name of the original's fleet that ours lacks, in both kinds of statement."""
    said = str(member("fleet", name))
    assert said and not hasattr(fleet, name)
    with pytest.raises(AttributeError, match=f"no attribute {name!r}: ") as error:
        getattr(fleet, name)
    assert str(error.value).endswith(said)
    with pytest.raises(ImportError) as failed:
        exec(f"from trainer.fleet import {name}")
    assert str(failed.value).endswith(said)


def test_the_page_for_users_of_fluid_says_the_same() -> None:
    """Where a row of its table has such a word, its answer has what the error says first."""
    told = 0
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = line.split("|")
        if len(cells) != 4:
            continue
        for word in re.findall(r"`(?:\w+\.)*(\w+)[^`]*`", cells[1]):
            entry = entry_of(word, "fleet")
            if entry is not None and entry.owner and entry.kind != "declined":
                first = re.findall(r"[A-Za-z_]\w*", entry.write)
                kept = word in first and re.search(r"the same|exist", cells[2])
                said = kept or any(part in cells[2] for part in first if len(part) > 3)
                assert said, (word, line)
                told += 1
    assert told >= 3


@pytest.mark.parametrize("name", ["minimize", "clear_grad", "set_lr", "get_lr", "set_state_dict"])
def test_an_optimizer_says_what_to_write(name: str) -> None:
    """For methods of Paddle's optimizers; another name is only missing, and hasattr finds none."""
    fleet.init()
    model = fleet.distributed_model(torch.nn.Linear(2, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert not hasattr(optimizer, name) and not hasattr(optimizer, "zzqqxx")
    with pytest.raises(AttributeError, match=f"no attribute '{name}': for {name} write "):
        getattr(optimizer, name)
    with pytest.raises(AttributeError, match="object has no attribute 'zzqqxx'$"):
        _ = optimizer.zzqqxx
    fleet.finish()


def objects() -> list[tuple[object, str]]:
    """Objects of ours, and a name of the original's class that each of them lacks."""
    program = Program(())
    return [
        (DistributeTranspiler(), "missing"),
        (DistributedStrategy(), "sparse_table_configs"),
        (DistributedStrategy(), "is_fl_ps_mode"),
        (program, "global_block"),
        (Executor(), "start_heter_trainer"),
        (fleet.InMemoryDataset(), "set_pipe_command"),
        (fleet.QueueDataset(), "slots_shuffle"),
        (DataParallel(torch.nn.Linear(2, 1)), "apply_collective_grads"),
        (DataParallel(torch.nn.Linear(2, 1)), "add_sublayer"),
    ]


@pytest.fixture
def world_of_one() -> Iterator[None]:
    """DataParallel brings one up; other tests ask for what is without it."""
    yield
    leave_parallel_env()


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("number", range(9))
def test_an_object_says_what_to_write(number: int) -> None:
    """A class of ours raises for a method, or a field, of the original's class."""
    found, name = objects()[number]
    assert not hasattr(found, name)
    with pytest.raises(AttributeError) as error:
        getattr(found, name)
    entry = member(type(found).__name__, name)

    assert entry is None or str(error.value).endswith(str(entry))
    assert (entry is None) == (name == "missing") and name in str(error.value)
    assert str(pickle.loads(pickle.dumps(str(error.value)))) == str(error.value)


@pytest.mark.parametrize("config", ["a_sync_configs", "sharding_configs", "hybrid_configs"])
def test_a_key_of_a_strategy_says_what_to_write(config: str) -> None:
    """For every key of the original's that ours lacks."""
    for name, entry in members()[config].items():
        with pytest.raises(ValueError, match=f"{config} has no {name!r}: ") as error:
            setattr(DistributedStrategy(), config, {name: 1})
        assert str(error.value).endswith(str(entry))
    with pytest.raises(ValueError, match="did you mean"):
        DistributeTranspilerConfig(sync_modes=True)


@pytest.mark.parametrize("name", ["utl", "fles", "tmp", "zeta"])
def test_short_words_are_like_nothing(name: str) -> None:
    """One letter of four that differs makes another word."""
    assert suggestion(name) == ""
