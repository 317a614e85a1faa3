"""What the page of ``pserver web`` lets an operator do."""

from __future__ import annotations

from pathlib import Path

from pserver.checkpoint import checkpoint
from pserver.config import ServerConfig
from pserver.operations.page_actions import actions
from pserver.service.server import Server
from tests.support.one_parameter import Trainer


def test_save_and_drain(tmp_path: Path) -> None:
    """Each save has a folder of its own; a drained server takes no further trainer."""
    with Server(ServerConfig()) as server:
        trainer = Trainer(server.endpoint)
        trainer.step(1, 1.0)
        offered = actions([server.endpoint], str(tmp_path))
        said = offered["save"]()
        (folder,) = tmp_path.iterdir()

        assert said == f"saved step 1 of the running job, 1 tensors: {folder}"
        assert checkpoint.reading(str(folder)).meta["step"] == 1
        assert offered["drain"]() == f"{server.endpoint}: drains, and then ends"
        assert server.job.lifecycle.draining
        trainer.client.leave()
