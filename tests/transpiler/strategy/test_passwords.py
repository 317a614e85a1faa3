"""A strategy's password: in a file for its owner, and in nothing that is printed."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import stat
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer import fleet
from transpiler import DistributedStrategy

PASSWORD = "sesame"


def strategy() -> DistributedStrategy:
    """One with a password, alone and in an address."""
    made = DistributedStrategy()
    made.fs_client_param = {"uri": f"hdfs://ann:{PASSWORD}@host:9000", "passwd": PASSWORD}
    return made


def wrong_type(value: Any) -> Callable[[], object]:
    """Assigns a password of another type."""

    def assign() -> None:
        DistributedStrategy().fs_client_param = {"passwd": value}

    return assign


def not_a_dict() -> None:
    DistributedStrategy().fs_client_param = [("passwd", PASSWORD)]


def job(is_collective: bool, given_late: bool) -> Callable[[], object]:
    """A whole job, as far as it comes: a setting without effect may be refused."""

    def run() -> None:
        fleet.init(is_collective=is_collective, strategy=None if given_late else strategy())
        model = fleet.distributed_model(nn.Linear(2, 1))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = fleet.distributed_optimizer(sgd, strategy() if given_late else None)
        print(optimizer, fleet)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    return run


def parse(line: str) -> Callable[[], object]:
    """Reads a file with a mistake beside the password, or in it."""

    def read() -> None:
        path = Path("strategy.prototxt")
        path.write_text(line)
        DistributedStrategy().load_from_prototxt(path)

    return read


WALK: dict[str, Callable[[], object]] = {
    "str": lambda: print(strategy(), repr(strategy()), f"{strategy()}"),
    "settings": lambda: print(
        strategy().fs_client_param, repr(strategy().fs_client_param), [strategy().fs_client_param]
    ),
    "log": lambda: logging.warning("%s %r", strategy(), strategy().fs_client_param),
    "copy": lambda: print(copy.deepcopy(strategy()), pickle.loads(pickle.dumps(strategy()))),
    "unsupported": lambda: print(strategy().unsupported(())),
    "a number": wrong_type([PASSWORD]),
    "bytes": wrong_type(PASSWORD.encode()),
    "no dict": not_a_dict,
    "no text": parse(f"fs_client_param {{ passwd: {PASSWORD} }}"),
    "open": parse(f"fs_client_param {{ passwd: '{PASSWORD} }}"),
    "unknown": parse(f"fs_client_param {{ passwd: '{PASSWORD}' pass: '{PASSWORD}' }}"),
    "job": job(False, False),
    "job, late": job(False, True),
    "collective": job(True, False),
    "collective, late": job(True, True),
}


@pytest.mark.parametrize("name", WALK)
def test_nothing_that_is_printed_logged_or_raised_has_the_password(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    name: str,
) -> None:
    """Output, log records at every level, and errors with all their causes."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    raised = io.StringIO()
    try:
        WALK[name]()
    except (ValueError, TypeError) as error:
        lines = traceback.TracebackException.from_exception(error, capture_locals=False)
        raised.write("".join(line for line in lines.format() if "File" not in line))
        raised.write(str(error))
    finally:
        fleet.finish()
    captured = capfd.readouterr()
    said = captured.out + captured.err + caplog.text + raised.getvalue()

    assert said.strip() and PASSWORD not in said, said


def test_a_saved_strategy_is_for_its_owner(tmp_path: Path) -> None:
    """Whatever mode the file had before; and it is read again, with the password."""
    path = tmp_path / "strategy.prototxt"
    path.write_text("")
    path.chmod(0o644)
    strategy().save_to_prototxt(path)
    read = DistributedStrategy()
    read.load_from_prototxt(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read == strategy() and read.fs_client_param["passwd"] == PASSWORD
    assert [each.name for each in tmp_path.iterdir()] == ["strategy.prototxt"]
