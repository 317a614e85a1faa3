"""What a step costs, counted and not timed: at both ends the Python calls, the acquired locks, the
system calls, and the voluntary switches.

[Note: counted costs]  A time says what else the machine did; a count says what the code does.  Some
things make counts depend on time all the same, and are taken away:

- How much has arrived when a socket is read.  A read without a known length waits until all counted
  threads have come to rest, so that everything that is sent meanwhile has been sent.
- In which order trainers come.  They begin a step one after the other, each when the one before it
  rests.
- Waits that look up by the clock, to see whether the job still runs: they do not.

What is left is the median of equal steps: of one trainer the same numbers however busy the machine
is.  Where many trainers wait at once for one lock, who gets it first is chance, and a few calls
with it.  Switches depend on the machine even so: they are counted in a job of their own, which
nothing observes, and a step is taken for what the cheapest of many needs.

Calls are those of the packages and of the standard library: how torch is written inside is not
ours.  Both ends run in this process.  A thread belongs to an end by its name; threads that tick by
the clock belong to none, and a thread of an unknown name is an error.
"""

from __future__ import annotations

import select
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

from tests.support.load import Deadline, result

FEW = (8, 7)  # steps of one trainer that do not count, and that do: 9 to 15
MANY = (4, 3)  # likewise, of many trainers; memory is trimmed after steps 1, 2, 4, 8, 16
SWITCHES = 20  # steps whose switches are counted
LOOKS = (
    "LOOK_SECONDS",
    "PROBE_SECONDS",
    "WORKING_SECONDS",
    "WAKE_SECONDS",
)  # between two looks of a wait
NEVER = 600.0
REST_SECONDS, CALM = 0.002, 2  # between two looks; so many have to find that nobody does anything
SECONDS = 60.0
ENDS = {  # by what a thread's name begins with
    "trainer ": "trainer",
    "_inbox ": "trainer",
    "_outbox ": "trainer",
    "lane ": "trainer",
    "exchange ": "server",
    "update": "server",
}
TICKING = (
    "MainThread",
    "Thread-",  # gRPC's own
    "accepts ",
    "control ",
    "heartbeat ",
    "probes",
    "proxy ",
    "pserver clock",
    "running clock",
    "termination",
)
SYSTEM_CALLS = {
    *("send", "sendall", "sendmsg", "recv", "recv_into", "recvmsg", "recvmsg_into"),
    *("poll", "select", "read", "readv", "write", "writev", "pread", "pwrite", "sleep"),
}
KINDS = ("Python calls", "locks", "system calls", "voluntary switches")
_HERE = __file__


class _Thread:
    """What one thread has done."""

    def __init__(self, end: str) -> None:
        self.end = end
        self.counts = [0, 0, 0]  # of KINDS
        self.steps = True  # whether what it does counts
        self.rests = False  # it waits until all others do
        self._state = Path(f"/proc/self/task/{threading.get_native_id()}/stat")

    @property
    def runs(self) -> bool:
        """Whether it does something, or could if it had a processor."""
        try:
            return self._state.read_text().rpartition(")")[2].split()[0] not in "SI"
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            return False


class Counts:
    """Counts what the threads of both ends do, from the moment in which they start."""

    def __init__(self) -> None:
        self.unknown: set[str] = set()  # names of threads that belong to no end
        self._threads: list[_Thread] = []
        self._mine = threading.local()
        self._ours: dict[CodeType, bool] = {}

    def thread(self) -> _Thread | None:
        """This thread's counts; None where it ticks by the clock."""
        try:
            return self._mine.thread
        except AttributeError:
            name = threading.current_thread().name
            end = end_of(name)
            if end is None and not name.startswith(TICKING):
                self.unknown.add(name)
            self._mine.thread = found = None if end is None else _Thread(end)
            if found is not None:
                found.steps = not name.startswith("trainer ")
                self._threads.append(found)
            return found

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """See ``sys.setprofile``."""
        if event not in ("call", "c_call") or frame.f_code.co_filename == _HERE:
            return
        if (thread := self.thread()) is None or not thread.steps:
            return
        if event == "call":
            thread.counts[0] += self._is_ours(frame.f_code)
        elif getattr(argument, "__name__", "") in SYSTEM_CALLS and _enters(argument):
            thread.counts[2] += 1

    def _is_ours(self, code: CodeType) -> bool:
        if (ours := self._ours.get(code)) is None:
            ours = self._ours[code] = "site-packages" not in code.co_filename
        return ours

    def here(self) -> _Thread | None:
        """This thread's counts, if it has some already."""
        return getattr(self._mine, "thread", None)

    def add(self, kind: int) -> None:
        """One more, of this thread."""
        if (thread := self.here()) is not None and thread.steps:
            thread.counts[kind] += 1

    def totals(self) -> dict[str, list[int]]:
        """By end, of each kind."""
        found = {"trainer": [0, 0, 0], "server": [0, 0, 0]}
        for thread in list(self._threads):
            for kind, count in enumerate(thread.counts):
                found[thread.end][kind] += count
        return found

    def rest(self) -> None:
        """Returns when no counted thread does anything."""
        deadline, calm, before = Deadline(SECONDS), 0, self.totals()
        while calm < CALM:
            assert not deadline.over, "the threads do not come to rest"
            time.sleep(REST_SECONDS)
            now = self.totals()
            running = any(each.runs for each in list(self._threads) if not each.rests)
            calm = 0 if running or now != before else calm + 1
            before = now

    @contextmanager
    def step(self) -> Iterator[None]:
        """While this thread takes a step, it counts."""
        thread = self.thread()
        assert thread is not None
        thread.steps = True
        try:
            yield
        finally:
            thread.steps = False


def end_of(name: str) -> str | None:
    """The end to which a thread of this name belongs, if to one."""
    return next((end for begin, end in ENDS.items() if name.startswith(begin)), None)


def _enters(function: Any) -> bool:
    owner = getattr(function, "__self__", None)
    return isinstance(owner, socket.socket) or type(owner).__name__ in ("module", "poll", "epoll")


class _Counted:
    """A lock that counts how often it is taken."""

    counts: Counts

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.release = lock.release
        for name in ("locked", "_release_save", "_acquire_restore", "_is_owned"):
            if hasattr(lock, name):
                setattr(self, name, getattr(lock, name))

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self.counts.add(1)
        return bool(self._lock.acquire(blocking, timeout))

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def without_looks() -> Iterator[None]:
    """Waits end when they are woken, and not before."""
    with pytest.MonkeyPatch.context() as patch:
        for module in _modules():
            for name in LOOKS:
                if isinstance(getattr(module, name, None), float):
                    patch.setattr(module, name, NEVER)
        yield


def _modules() -> list[Any]:
    """Those of the packages that are there."""
    named = [(getattr(each, "__name__", ""), each) for each in list(sys.modules.values())]
    return [each for name, each in named if name.partition(".")[0] in ("pserver", "trainer")]


@contextmanager
def counted() -> Iterator[Counts]:
    """Counts what threads do that start meanwhile."""
    counts = Counts()
    lock, again = threading.Lock, threading.RLock
    received = socket.socket.recv_into

    def receive(self: socket.socket, *arguments: Any, **named: Any) -> int:
        thread = counts.here()
        if thread is not None and thread.steps and not named.get("flags"):
            thread.steps = False  # what follows is ours
            waiting = select.poll()
            waiting.register(self, select.POLLIN)
            waiting.poll()
            thread.rests = True
            counts.rest()
            thread.steps, thread.rests = True, False
        counts.add(2)
        return received(self, *arguments, **named)

    kind = type("Counted", (_Counted,), {"counts": counts})
    with pytest.MonkeyPatch.context() as patch:
        made = {lock: lambda: kind(lock()), again: lambda: kind(again())}
        patch.setattr(threading, "Lock", made[lock])
        patch.setattr(threading, "RLock", made[again])
        for module in _modules():
            for name, value in list(vars(module).items()):
                if value is lock or value is again:
                    patch.setattr(module, name, made[value])
        patch.setattr(socket.socket, "recv_into", receive, raising=False)
        threading.setprofile(counts.profile)
        try:
            yield counts
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]


Step = Callable[[], None]  # of one trainer, until it has been answered


class Crew:
    """Trainers, each in a thread of its own."""

    def __init__(self, count: int) -> None:
        self._pools = [ThreadPoolExecutor(1, f"trainer {number}") for number in range(count)]

    def each(self, acts: Sequence[Step], between: Callable[[], None] = lambda: None) -> None:
        """Every trainer's act; they begin one after the other."""
        running = []
        for pool, act in zip(self._pools, acts, strict=True):
            running.append(pool.submit(act))
            between()
        for future in running:
            result(future, SECONDS)

    def end(self) -> None:
        """Ends the threads."""
        for pool in self._pools:
            pool.shutdown()


def step_counts(counts: Counts, crew: Crew, steps: Sequence[Step]) -> dict[str, list[int]]:
    """By end, the median of each kind over equal steps."""

    def counting(step: Step) -> Step:
        def act() -> None:
            with counts.step():
                step()

        return act

    found: dict[str, list[list[int]]] = {"trainer": [], "server": []}
    warm, counted = FEW if len(steps) == 1 else MANY
    for number in range(warm + counted):
        counts.rest()
        before = counts.totals()
        crew.each([counting(step) for step in steps], counts.rest)
        counts.rest()
        if number >= warm:
            for end, after in counts.totals().items():
                found[end].append([n - b for n, b in zip(after, before[end], strict=True)])
    return {
        end: [round(statistics.median(each)) for each in zip(*rows, strict=True)]
        for end, rows in found.items()
    }


def step_switches(crew: Crew, steps: Sequence[Step]) -> dict[str, int]:
    """By end, the fewest voluntary switches of a step among equal ones."""
    found: dict[str, list[int]] = {"trainer": [], "server": []}
    for _ in range(SWITCHES):
        before = switches()
        crew.each(steps)
        for end, after in switches().items():
            found[end].append(after - before[end])
    return {end: min(each) for end, each in found.items()}


def switches() -> dict[str, int]:
    """By end, the voluntary switches of its threads until now."""
    found = {"trainer": 0, "server": 0}
    for thread in threading.enumerate():
        if (end := end_of(thread.name)) is not None:
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                text = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
                found[end] += int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return found
