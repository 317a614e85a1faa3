"""Steps that Ctrl-C interrupts, as in a notebook.

Real servers in this process.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.jobs import HOW, How, Script, Servers, end_all, join


@pytest.fixture(autouse=True)
def no_trainer_stays() -> Iterator[None]:
    """After a failed test, too."""
    yield
    end_all()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("mode", ["sync", "async, one slot"])
def test_no_step_follows_one_whose_answers_were_not_taken_in(
    servers: Servers, monkeypatch: pytest.MonkeyPatch, mode: str, how: How
) -> None:
    """The next one says so, and what to do; the job can still end."""
    script = Script("dense", steps=3)
    trainer = join(script, mode, servers(1), how=how)
    first, second, third = script.data()
    trainer.step(first)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(trainer.communicator.lanes[0], "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            trainer.step(second)
    with pytest.raises(RuntimeError, match="step 2 was interrupted.*begin again from a checkpoint"):
        trainer.step(third)
    trainer.leave("interrupted")
