"""A launched job has a secret: its processes have it, its user's commands find it, and nothing
shows it or keeps it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import load
from tests.support.launched import LAUNCH, environment

SCRIPT = """
import glob
import json
import os
import torch
from pathlib import Path
from pserver.__main__ import main
from trainer import fleet

fleet.init()
model = fleet.distributed_model(torch.nn.Linear(4, 4))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

endpoint = os.environ["PSERVER_ENDPOINTS"]
role, _, own = Path(os.environ["PSERVER_TOKEN_FILE"]).read_text().strip().partition(":")
with_trainers = main(["reset", endpoint])
del os.environ["PSERVER_TOKEN_FILE"]  # as in another terminal of the same user
status, reset = main(["status", endpoint]), main(["reset", endpoint])
place = Path(os.environ["XDG_RUNTIME_DIR"]) / "pserver"
files = [path for path in place.rglob("*") if path.is_file()]
secrets = [own, *(path.read_text().strip().partition(":")[2] for path in files)]
shown = []
for name in glob.glob("/proc/[0-9]*/cmdline") + glob.glob("/proc/[0-9]*/environ"):
    try:
        text = Path(name).read_bytes()
    except OSError:  # it has ended
        continue
    shown += [name for secret in secrets if secret.encode() in text]
found = dict(
    role=role,
    statuses=[with_trainers, status, reset],
    modes=sorted({oct(path.stat().st_mode & 0o777) for path in files}),
    files=sorted(path.name.replace(endpoint.rpartition(":")[2], "PORT") for path in files),
    secrets=secrets,
    shown=shown,
)
Path("found.json").write_text(json.dumps(found))
fleet.finish()
"""
pytestmark = pytest.mark.processes


def test_a_launched_job_has_a_secret_that_its_user_finds_and_nobody_sees(tmp_path: Path) -> None:
    """Its trainer has a trainer's key; a command without one finds the operator's by the port; no
    command line, environment or log has it; in the end the files are gone.
    """
    (tmp_path / "script.py").write_text(SCRIPT)
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    done = load.run(
        [*LAUNCH, "--servers", "1", "--trainers", "1", "script.py"],
        cwd=tmp_path,
        env=environment(XDG_RUNTIME_DIR=str(run), COLUMNS="200"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    said = done.stdout + done.stderr + "".join(p.read_text() for p in tmp_path.glob("logs/*"))

    assert found["role"] == "trainer"
    assert found["statuses"] == [1, 0, 1]  # the last: a job runs
    assert "Reset needs the operator's key, got the trainer's" in said
    assert "Reset, with the job's secret, as its operator" in said and "a job runs here" in said
    assert found["files"] == ["PORT.token", "operator.token", "trainer.token"]
    assert found["modes"] == ["0o600"] and found["shown"] == []
    assert len(set(found["secrets"])) == 2
    assert not [secret for secret in found["secrets"] if secret in said]
    assert list((run / "pserver").iterdir()) == []
