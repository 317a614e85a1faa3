"""The fuzzer without sockets: inputs on jobs in all of their states, in this process."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from pserver.errors import PServerError
from pserver.telemetry.memory import trim_memory
from tests.fuzz.inputs import Inputs
from tests.fuzz.sandbox import MODES, STATES, Bug, Sandbox

BLOCK = 200  # inputs on one sandbox, at most
STUCK_SECONDS = 60.0
SHOWN = 2000  # characters of an input: its seed and number give the whole of it
# what anybody may do where no key is asked for; see pserver/security
ANYBODYS = ("Drain", "Reset", "Announce", "Join")
WRONG = ("", "0" * 32, "x")  # sessions that nobody holds


class Progress:
    """Where the fuzzer is; a thread of its own ends the process where it does not get on.

    Attributes:
        number: of the input.
        shown: that input.
        counts: frames and calls, by kind, state and mode.
        total: all of them.
    """

    def __init__(self, seed: int) -> None:
        self.seed, self.number, self.shown = seed, 0, ""
        self.counts: Counter[str] = Counter()
        self.total = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def count(self, name: str, box: Sandbox) -> None:
        """Counts a frame or a call."""
        self.total += 1
        for each in (name, f"state {box.state}", f"mode {box.mode}"):
            self.counts[each] += 1

    def _watch(self) -> None:
        before, since = -1, time.monotonic()
        while not self._over.wait(1.0):
            if self.number != before:
                before, since = self.number, time.monotonic()
            elif time.monotonic() - since > STUCK_SECONDS:
                print(
                    f"fuzz: stuck at --seed {self.seed} input {self.number}: {self.shown[:SHOWN]}"
                )
                faulthandler.dump_traceback(all_threads=True)
                sys.stdout.flush()
                os._exit(1)

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def resident() -> int:
    """This process's memory, in bytes, when what is free has been given back."""
    gc.collect()
    trim_memory()
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


def fuzz(seed: int, seconds: float, first: int = 0, say: Callable[[str], None] = print) -> Progress:
    """Tries inputs for so long.

    Args:
        first: the number of the first input; a multiple of ``BLOCK``.

    Raises:
        Bug: the server failed at one; the message has the seed and the input.
    """
    progress, end, block = Progress(seed), time.monotonic() + seconds, first // BLOCK
    told = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            while time.monotonic() < end:
                _block(progress, block, scratch)
                block += 1
                if time.monotonic() - told > 5:
                    told = time.monotonic()
                    say(f"in process: {progress.total} inputs")
    except Exception as error:
        raise Bug(
            f"--seed {seed} --first {block * BLOCK}, input {progress.number}: {error}\n"
            f"{progress.shown[:SHOWN]}"
        ) from error
    finally:
        progress.close()
    return progress


def _block(progress: Progress, block: int, scratch: str) -> None:
    """One sandbox, and inputs on it: of a stranger, or of one who has the trainer's session."""
    state, mode = STATES[block % len(STATES)], MODES[block // len(STATES) % len(MODES)]
    stranger = block // (len(STATES) * len(MODES)) % 2 == 0
    box = Sandbox(state, mode, scratch)
    sessions = WRONG if stranger else (*WRONG, box.session, box.session, box.observed())
    before = box.values()
    for number in range(block * BLOCK, (block + 1) * BLOCK):
        progress.number = number
        _one(progress, box, Inputs(progress.seed, number, sessions), stranger)
        if not stranger and box.moved:
            box = Sandbox(state, mode, scratch)
            sessions = (*WRONG, box.session, box.session, box.observed())
    if stranger and before and state != "failed":
        _check_unharmed(box, before)


def _one(progress: Progress, box: Sandbox, inputs: Inputs, stranger: bool) -> None:
    if inputs.random.random() < 0.6:
        call = inputs.call(ANYBODYS) if stranger else inputs.call((), ANYBODYS)
        progress.shown = repr(call)
        progress.count(f"call {call.name}", box)
        box.try_call(call)
        return
    frames = inputs.frames()
    if not stranger and inputs.random.random() < 0.8:
        follows = inputs.random.random() < 0.2
        frames.insert(0, box.follower_hello() if follows else box.hello())
    progress.shown = repr(frames)
    for frame in frames:
        progress.count(f"frame {frame.kind}", box)
    box.try_frames(frames)


def _check_unharmed(box: Sandbox, before: dict[str, torch.Tensor]) -> None:
    """After a stranger's inputs the job holds what it held, and goes on."""
    after = box.values()
    for name, value in before.items():
        if not torch.equal(after[name], value):
            raise Bug(f"{name} is another: {after[name]}, was {value}")
    if box.state in ("serving", "stepped"):
        try:
            box.say(*box.step())
        except PServerError as error:
            raise Bug(f"a good step was refused: {error}") from error
