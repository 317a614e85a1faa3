"""Pairs of a strategy's properties: digits are learnt as without them, or the pair is refused, by
both names.

``make check-pairs`` runs every property and every pair, with servers and without, in processes.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import strategy_pair
from tests.support.launched import launched
from tests.support.matrix import crossed

JOBS = {
    "servers": ["--servers", "2", "--trainers", "2", "train.py"],
    "collective": ["--nccl2", "--trainers", "2", "train.py", "--collective"],
}
PAIRS = [
    " + ".join(names)
    for count in (1, 2)
    for names in itertools.combinations(strategy_pair.PROPERTIES, count)
]
CALLED = {"k-step": r"k_steps|localsgd"}  # what a property is called in a message
REFUSED = {"servers": {"fp16_allreduce", "sharding"}, "collective": set[str]()}  # alone, too
PLAIN = 0.981  # what momentum reaches here without any property


@pytest.mark.processes
@crossed("strategies", diagonal=False, pair=["plain", *PAIRS], job=JOBS)
def test_two_properties_train_together_or_exclude_each_other(
    tmp_path: Path, record_property: Callable[[str, object], None], pair: str, job: str
) -> None:
    """Within a point of the plain job; a refusal names both, or the one that is refused alone."""
    names = [] if pair == "plain" else pair.split(" + ")
    (tmp_path / "train.py").write_text(Path(strategy_pair.__file__).read_text(encoding="utf-8"))
    log = launched(tmp_path, "", *JOBS[job], *names).log
    found = re.findall(r"^(accuracy [\d.]+|raises: .*)$", log, re.MULTILINE)
    assert len(found) == 1, log

    said = found[0]
    record_property("result", said.replace("|", "/"))
    if said.startswith("raises"):
        for name in REFUSED[job].intersection(names) or names:
            assert re.search(CALLED.get(name, name), said), said
    else:
        assert float(said.split()[1]) >= PLAIN - 0.01, said
