"""The examples in every mode, as real processes: what they learn, they learn in each.

``make check-examples`` runs these; ``make test`` has the examples in the modes that they are shown
in (``test_examples.py``, ``test_ctr.py``).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.in_mode import MODES
from tests.support.launched import EXAMPLES, accuracy, launched
from tests.support.matrix import crossed
from trainer.examples.ctr import MODES as CTR_MODES

IN_MODE = str(Path(__file__).with_name("in_mode.py"))
SMALL = (
    "--samples 12800 --batch 64 --categories 20 --dim 4 --hidden 16 --rate 0.03 "
    "--linear-rate 0.1 --every 50"
).split()
EAGER = [name for name in MODES if name != "split at run time"]
PROGRAM = [name for name, (_, fields) in MODES.items() if name == "sync" or fields]

CLUSTERS = ["1 x 1", "2 x 2"]  # servers x trainers
# the least share that is learned; some processors' sums leave DiLoCo at 94.7 %
LEAST = {"diloco": 0.94}

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@crossed("examples", diagonal=False, mode=EAGER, cluster=CLUSTERS)
def test_digits_learns(tmp_path: Path, mode: str, cluster: str) -> None:
    """Eagerly, on a cluster: at least 95 % of the digits, or nearly."""
    log = launched(tmp_path, cluster, IN_MODE, mode, str(EXAMPLES / "digits.py")).log

    assert accuracy(log) >= LEAST.get(mode, 0.95)


@crossed("examples", diagonal=False, mode=PROGRAM, cluster=CLUSTERS)
def test_digits_learns_as_a_program(tmp_path: Path, mode: str, cluster: str) -> None:
    """Captured and transpiled."""
    script = str(EXAMPLES / "digits.py")
    log = launched(tmp_path, cluster, IN_MODE, mode, script, "--program").log

    assert accuracy(log) >= LEAST.get(mode, 0.95)


@crossed("examples", diagonal=False, mode=CTR_MODES, model=["deepfm", "wide_deep"])
def test_clicks_are_learned(tmp_path: Path, mode: str, model: str) -> None:
    """Two trainers with tables: near the truth's AUC."""
    words = [*SMALL, "--mode", mode, "--model", model]
    log = launched(tmp_path, "2 x 2", str(EXAMPLES / "ctr.py"), *words).log

    found = re.search(r"test auc (0\.\d+) \(the truth itself: (0\.\d+)\)", log)
    assert found is not None and float(found[2]) - float(found[1]) <= 0.06, log


@crossed("examples", diagonal=False, mode=PROGRAM, cluster=CLUSTERS)
def test_a_line_is_fitted(tmp_path: Path, mode: str, cluster: str) -> None:
    """The transpiler by hand: slope and bias to two digits."""
    script = str(EXAMPLES / "transpiler_by_hand.py")
    log = launched(tmp_path, cluster, IN_MODE, mode, script).log

    found = re.search(r"weight (\S+), (\S+)  bias (\S+)", log)
    assert found is not None, log
    assert [float(number) for number in found.groups()] == pytest.approx([3, -2, 1], abs=0.01)


@crossed("examples", diagonal=False, script=["digits.py"], trainers=[1, 2])
def test_digits_learns_without_servers(tmp_path: Path, script: str, trainers: int) -> None:
    """``pserver launch --nccl2``: trainers that average their gradients among themselves."""
    words = ["--nccl2", "--trainers", str(trainers), str(EXAMPLES / script)]
    log = launched(tmp_path, "", *words).log

    assert accuracy(log) >= 0.95


@crossed("examples", diagonal=False, script=["digits.py", "transpiler_by_hand.py", "ctr.py"])
def test_alone(tmp_path: Path, script: str) -> None:
    """Plain ``python``: the same script in one process."""
    words = SMALL if script == "ctr.py" else []
    launched(tmp_path, "", str(EXAMPLES / script), *words, command=())
