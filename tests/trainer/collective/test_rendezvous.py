"""Trainers without servers: they meet, they are one another's process group, and whoever ends is
named to the others.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from pserver.errors import JobFailed, PServerError, Refused, TimedOut, TrainerLost, Unreachable
from pserver.launcher.cluster import free_port
from tests.support import ranks
from trainer import fleet, init_parallel_env, new_group, spawn
from trainer.collective import rendezvous
from trainer.collective import spawn as spawning
from trainer.collective import world as parallel_env
from trainer.collective.rendezvous import (
    MainThreadGuard,
    Peers,
    TrainerEnd,
    TrainerHeartbeats,
    first_line,
)
from trainer.collective.world import _meet, leave_parallel_env
from trainer.environment.environment import Connection, World

cuda = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    yield
    fleet.finish()
    leave_parallel_env()


# ---- spawn ----


def said(path: Path) -> tuple[float, str]:
    """After how many seconds trainer 0 heard of trainer 1's end, and what it raised."""
    seconds, _, text = (path / "said").read_text().partition(" ")
    return float(seconds), text


@pytest.mark.processes
def test_an_exception_of_a_child_reaches_the_parent_with_its_traceback(tmp_path: Path) -> None:
    """Not that of the trainer that then failed because of it, which has been told the reason within
    seconds.
    """
    with pytest.raises(ProcessRaisedException, match="trainer 1 ended with") as raised:
        spawn(ranks.end, (str(tmp_path), "raise"), nprocs=2)

    assert (
        'raise ValueError("no data for trainer 1")' in str(raised.value)
        and raised.value.error_index == 1
    )
    seconds, text = said(tmp_path)
    assert text == "JobFailed: trainer 1 failed: ValueError: no data for trainer 1" and seconds < 10


@pytest.mark.processes
def test_a_killed_child_is_named_to_the_parent_and_to_the_others(tmp_path: Path) -> None:
    """kill -9 leaves no message: its connection says so, and the exit code has the signal."""
    with pytest.raises(ProcessExitedException, match="trainer 1 was ended by SIGKILL") as raised:
        spawn(ranks.end, (str(tmp_path), "kill"), nprocs=2, start_method="forkserver")

    assert raised.value.exit_code == -9 and raised.value.signal_name == "SIGKILL"
    seconds, text = said(tmp_path)
    assert (
        re.fullmatch(
            "TrainerLost: trainer 1 is lost: its connection ended without a goodbye.*", text
        )
        and seconds < 10
    )


def test_gloo_rests_before_a_job_gives_up_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, too: a world of one has a group, and threads of gloo's."""
    order: list[str] = []
    destroy = dist.destroy_process_group
    init_parallel_env()
    monkeypatch.setattr(parallel_env, "wait_for_rest", lambda: order.append("rests"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: order.append("ends") or destroy())
    leave_parallel_env()

    assert order == ["rests", "ends"] and not dist.is_initialized()


@pytest.mark.processes
def test_an_interrupt_ends_the_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process alone, as a notebook's is."""

    def interrupted(children: spawning.SpawnedProcesses, timeout: float | None = None) -> bool:
        started.append(children)
        raise KeyboardInterrupt

    started: list[spawning.SpawnedProcesses] = []
    monkeypatch.setattr(spawning.SpawnedProcesses, "join", interrupted)
    monkeypatch.setattr(spawning, "SETTLE_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        spawn(time.sleep, (300.0,), nprocs=2, start_method="forkserver")

    (children,) = started
    assert [process.is_alive() for process in children.processes] == [False, False]


@pytest.mark.processes
@pytest.mark.long
def test_an_exit_code_of_a_child_reaches_the_parent(tmp_path: Path) -> None:
    """Started without waiting, the children are waited for by ``join``, which gives up after its
    time.
    """
    children = spawn(ranks.end, (str(tmp_path), "exit"), nprocs=2, join=False)
    assert children is not None and not children.join(timeout=0.01)
    with pytest.raises(ProcessExitedException, match="trainer 1 ended with exit code 7") as raised:
        children.join()

    assert raised.value.exit_code == 7 and not any(
        process.is_alive() for process in children.processes
    )
    assert said(tmp_path)[1] == "JobFailed: trainer 1 failed: SystemExit: 7"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(nprocs=0), ValueError, "nprocs: expected -1, or 1 or more, got 0"),
        (
            dict(start_method="fork"),
            ValueError,
            "start_method: expected one of spawn, forkserver, got 'fork'",
        ),
        (dict(gpus="0,1"), TypeError, "no other options than daemon and start_method, got gpus"),
    ],
)
def test_an_option_without_effect_is_refused(
    options: dict[str, object], error: type[Exception], words: str
) -> None:
    """No process is started."""
    with pytest.raises(error, match=words):
        spawn(ranks.first_example, **options)  # type: ignore[arg-type]


# ---- a world of one ----


def test_an_error_of_nccl_says_what_nccl_says() -> None:
    """Without torch's stack, which stands between and behind."""
    told = (
        "NCCL error in: NCCLUtils.cpp:93, invalid usage, NCCL version 2.28.9\n"
        "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
        "Last error:\nDuplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"
    )
    first, *_, last = told.splitlines()
    assert first_line(RuntimeError(told)) == f"{first}: {last}"
    assert first_line(RuntimeError("it broke\nframe #0")) == "it broke"
    assert first_line(RuntimeError("it broke\nLast error:")) == "it broke"
    assert first_line(ValueError()) == "ValueError"


def test_alone_it_is_a_world_of_one() -> None:
    """No variable is needed; a second call has no effect; collectives work."""
    init_parallel_env()
    init_parallel_env()
    value = torch.ones(2)
    dist.all_reduce(value, group=new_group([0]))

    assert dist.get_world_size() == 1 and value.tolist() == [1, 1]


@pytest.mark.parametrize("chosen", [[0, 1], [], [0, 0], [-1]])
def test_a_group_of_others_than_there_are_is_refused(chosen: list[int]) -> None:
    """The message has the ranks that there are, and those that were asked for."""
    with pytest.raises(
        ValueError, match=re.escape(f"ranks: expected some of 0 to 0, each once, got {chosen}")
    ):
        new_group(chosen)


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=cuda)])
def test_on_a_gpu_the_group_has_nccl_and_gloo(device: str) -> None:
    """In a world of one, which proves no communication: each tensor takes its backend, and the
    device is this trainer's.
    """
    init_parallel_env()
    for value in (torch.ones(2, device=device), torch.ones(2)):
        dist.all_reduce(value)
        assert value.tolist() == [1, 1]

    assert torch.cuda.current_device() == 0 and dist.get_backend_config() == "cpu:gloo,cuda:nccl"


# ---- rendezvous ----


def worlds(count: int, port: int, served: bool = False) -> list[World]:
    return [World(rank, count, rank, "127.0.0.1", port, served) for rank in range(count)]


def meet(present: list[World], seconds: float) -> list[str]:
    """What each of them raises who is there."""

    def one(world: World) -> str:
        try:
            _meet(world, Connection(start_timeout_seconds=seconds), 1).close("the test is over")
            return "met"
        except PServerError as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(len(present)) as pool:
        return list(pool.map(one, present))


@pytest.fixture
def store() -> TCPStore:
    return TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
    )


def test_trainers_that_never_come_are_named_to_all_who_wait() -> None:
    """Within the deadline, and by trainer 0 to those whose clocks began later."""
    present = worlds(4, free_port())

    assert set(meet([present[0], present[2]], 1.0)) == {
        "TimedOut: rendezvous: expected 4 trainers, and after 1 s these are missing: "
        "trainer 1, trainer 3"
    }
    assert issubclass(TimedOut, PServerError)


def test_without_trainer_0_the_others_name_it() -> None:
    """Which keeps the store, so that nobody else can be counted."""
    port = free_port()
    said = meet(worlds(2, port)[1:], 1.0)

    assert len(said) == 1 and said[0].startswith(
        f"Unreachable: trainer 1 waited 1 s for trainer 0 (127.0.0.1:{port}), which does not answer"
    )
    assert issubclass(Unreachable, PServerError)


def test_two_processes_with_one_number_are_refused(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second to come is told."""
    pids = count()  # the logging module asks, too
    monkeypatch.setattr("trainer.collective.rendezvous.os.getpid", lambda: next(pids))
    present = worlds(2, store.port, served=True)
    said = sorted(meet([present[0], present[1], present[1]], 5.0))

    assert said[0].startswith("Refused: trainer 1: expected one process, got two: ")
    assert said[1:] == ["met"] * 2 and issubclass(Refused, PServerError)


def test_who_has_answered_counts_as_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow trainer gets the answer of one that has left since: trainer 0, which serves the store,
    closes it when all have ended their connections, and then its port is free.
    """
    port, looked = free_port(), threading.Event()
    with ThreadPoolExecutor(3) as pool:
        first, second = pool.map(lambda world: _meet(world, Connection(), 1), worlds(2, port))
        check = Peers.check

        def late(self: Peers, needed: Collection[int] = ()) -> None:
            needed = list(needed)  # who is missing now
            if self is second:
                looked.set()
                assert self.membership is not None and self.membership.cause(20.0) is not None
            check(self, needed)

        monkeypatch.setattr(Peers, "check", late)
        answer = pool.submit(second.meet, "a topic", "of 1", range(2))
        assert looked.wait(20)
        assert first.meet("a topic", "of 0", range(2)) == ["of 0", "of 1"]
        first.leave("it finished after 3 steps")
        waits = pool.submit(first.wait_for_all)
        assert answer.result(20) == ["of 0", "of 1"]
        assert not waits.done()
        second.close("it finished after 3 steps")
        waits.result(20)
        first.close("it finished after 3 steps")
    socket.create_server(("127.0.0.1", port)).close()


# ---- who is there ----


def star(store: TCPStore, count: int, deadline: float) -> list[TrainerHeartbeats]:
    with ThreadPoolExecutor(count) as pool:
        return list(
            pool.map(
                lambda rank: TrainerHeartbeats(rank, count, "127.0.0.1", store.clone(), deadline),
                range(count),
            )
        )


def error_of(one: TrainerHeartbeats) -> PServerError:
    event = one.cause()
    assert event is not None
    return event.error()


def test_everyone_hears_from_whom_a_failure_came(store: TCPStore) -> None:
    """From a trainer to trainer 0, and from there to all others; what follows from it changes
    nothing.
    """
    first, second, third = star(store, 3, 20.0)
    second.announce("failed", "ValueError: no data")
    heard = [error_of(one) for one in (first, third)]
    third.announce("failed", "a consequence")

    assert [(type(error), str(error)) for error in heard] == [
        (JobFailed, "trainer 1 failed: ValueError: no data")
    ] * 2
    assert str(error_of(first)) == "trainer 1 failed: ValueError: no data"
    for one in (first, second, third):
        one.close("the test is over")


def test_who_has_left_is_to_blame_only_if_nobody_is_lost(store: TCPStore) -> None:
    """Leaving is no failure; it is the reason for those who still need that trainer."""
    first, second = star(store, 2, 20.0)
    first.check()
    second.close("it finished after 5 steps")
    error = error_of(first)
    first.check()

    assert (
        isinstance(error, TrainerLost)
        and str(error) == "trainer 1 has left the job: it finished after 5 steps"
    )
    with pytest.raises(TrainerLost, match="trainer 1 has left"):
        first.check([1])
    first.close("the test is over")


def test_a_silent_trainer_is_lost_after_the_deadline_and_a_stranger_is_turned_away(
    store: TCPStore,
) -> None:
    """One that connects and never beats; before it, one that does not know the token."""
    joined = threading.Event()

    def pretend() -> socket.socket:
        port, token = store.clone().get("membership").decode().split()
        with socket.create_connection(("127.0.0.1", int(port))) as stranger:
            stranger.sendall(b'{"rank": 1, "token": "guessed"}\n')
            assert stranger.recv(1) == b""
        silent = socket.create_connection(("127.0.0.1", int(port)))
        silent.sendall(json.dumps({"rank": 1, "token": token}).encode() + b"\n")
        joined.set()
        return silent

    with ThreadPoolExecutor(1) as pool:
        pretender = pool.submit(pretend)
        first = TrainerHeartbeats(0, 2, "127.0.0.1", store, heartbeat_timeout=0.4)
        with pretender.result(timeout=10):
            began = time.monotonic()
            assert str(error_of(first)) == "trainer 1 is lost: silent for 0.4 s"
    assert joined.is_set() and time.monotonic() - began < 3
    first.close("the test is over")


def test_who_waits_in_vain_and_cannot_be_woken_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The main thread has stood in one place since a trainer was lost: the process says why, and
    where, and ends.
    """
    ends: list[int] = []
    monkeypatch.setattr(rendezvous, "STUCK_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous.os, "_exit", ends.append)
    over = threading.Event()
    guard = MainThreadGuard(lambda: TrainerEnd("lost", 1, "silent for 1 s"))

    def look() -> None:
        while not ends:
            guard.look()
            over.wait(0.01)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(look).result(timeout=20)
    text = capsys.readouterr().err

    assert (
        ends == [1]
        and "TrainerLost: trainer 1 is lost: silent for 1 s; this trainer is blocked on "
        "the lost trainer:"
        in text
    )
    assert "test_who_waits_in_vain" in text


def test_what_the_main_thread_left_is_let_go() -> None:
    """A frame of the main thread is held from look to look, but not once the guard is closed: torch
    aborts a process that ends while another thread frees the frame's tensors.
    """
    guard = MainThreadGuard(lambda: TrainerEnd("lost", 1, "silent for 1 s"))

    def waits_in_vain() -> weakref.ref[torch.Tensor]:
        operand = torch.ones(1)
        threads = ThreadPoolExecutor(1)
        threads.submit(guard.look).result(timeout=20)
        return weakref.ref(operand)

    operand = waits_in_vain()
    guard.close()
    guard.look()
    assert operand() is None
