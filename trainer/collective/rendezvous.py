"""The collective mode's beginning: the trainers meet, and become one process group of
torch.distributed.

::

    init_parallel_env()                       # one of torchrun's, launch's or spawn's processes; or alone, a world of one
    model = DataParallel(Net())

Every trainer announces itself in a store before the process group comes up, so that whoever waits
too long can say for whom. Tensors on GPUs travel by NCCL, those in main memory by gloo.
"""

from __future__ import annotations

import atexit
import logging
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from pserver.config import START_TIMEOUT_SECONDS
from pserver.errors import PServerError, Refused, TimedOut, Unreachable
from trainer.collective.membership import Membership
from trainer.role import Connection, World

NOTICE_SECONDS = 5.0
LINGER_SECONDS = 2.0
POLL_SECONDS = 0.05
# how torch's errors of it read
_COMMUNICATION = re.compile("gloo|NCCL|TCPStore|Connection|timed out", re.IGNORECASE)

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Environment:
    """What :func:`init_parallel_env` has made.

    Attributes:
        store: where the trainers leave one another short messages.
        presence: who is still there; None in a world of one.
    """

    world: World
    store: Store
    presence: Membership | None
    # to wait for trainers that are there, but not yet where the others are
    seconds: float = START_TIMEOUT_SECONDS

    def check(self, needed: Collection[int] = ()) -> None:
        """Raises what has happened to another trainer; see :meth:`Membership.check`."""
        if self.presence is not None:
            self.presence.check(needed)

    def exchange(self, topic: str, text: str, ranks: Sequence[int]) -> list[str]:
        """Each of these trainers says something, and hears what all have said.

        Args:
            topic: another one for each exchange, the same for all.

        Raises:
            TimedOut: some have not spoken; the message says which.
            PServerError: what became of one of them.
        """
        keys = {rank: f"{topic}/{rank}" for rank in ranks}
        self.store.set(keys[self.world.rank], text)
        began = time.monotonic()
        noticed = began
        while silent := [rank for rank, key in keys.items() if not self.store.check([key])]:
            now = time.monotonic()
            self.check(silent)
            if now - began > self.seconds:
                raise TimedOut(
                    f"{topic}: {_trainers(silent)} did not come here within {self.seconds:g} s"
                )
            if now - noticed > NOTICE_SECONDS:
                noticed = now
                log.warning(
                    "%s: waiting for %s since %.0f s", topic, _trainers(silent), now - began
                )
            time.sleep(POLL_SECONDS)
        return [self.store.get(key).decode() for key in keys.values()]


_environment: Environment | None = None
# that this process has met the others: each time they leave their messages in another place of the
# store
_times = 0


def init_parallel_env() -> None:
    """Brings up the process group of all trainers; a second call has no effect.

    Reads torchrun's variables, which ``pserver launch --nccl2``, ``torchrun`` and
    :func:`trainer.spawn` set; without them this is a world of one.  Where there are GPUs, the one
    with the number LOCAL_RANK becomes the current device.

    Raises:
        ValueError: a variable is missing, or holds something else than it should.
        TimedOut: a trainer has not come up within PSERVER_START_TIMEOUT; the message says which.
        Unreachable: trainer 0, which keeps the store, cannot be reached.
        Refused: another process has this trainer's number.
    """
    global _environment, _times
    if dist.is_initialized():
        return
    _times += 1
    world, connection = World.from_environment(), Connection.from_environment()
    seconds = connection.start_timeout_seconds
    store: Store = HashStore() if world.size == 1 else _meet(world, seconds)
    if torch.cuda.is_available():
        if world.local_rank < torch.cuda.device_count():
            torch.cuda.set_device(world.local_rank)
        else:
            log.warning(
                "trainer %d: LOCAL_RANK is %d and there are %d GPUs: none is its own",
                world.rank,
                world.local_rank,
                torch.cuda.device_count(),
            )
    backend = (
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    )
    presence = None
    if world.size > 1:
        try:
            presence = Membership(
                world.rank, world.size, world.address, store, connection.heartbeat_timeout_seconds
            )
        except OSError as error:
            raise Unreachable(
                f"trainer {world.rank} and trainer 0 at {world.address} cannot reach one another: "
                f"{error}"
            ) from error
    _environment = Environment(world, store, presence, seconds)
    with named():
        dist.init_process_group(
            backend, store=PrefixStore("group", store), rank=world.rank, world_size=world.size
        )
    sys.excepthook = _Hook(sys.excepthook)
    atexit.register(leave_parallel_env)


def leave_parallel_env(text: str = "its script has ended") -> None:
    """Takes the process group down, and tells the others that this trainer has left.  Done at exit,
    too.

    Args:
        text: what others are told who still need this trainer.
    """
    global _environment
    environment, _environment = _environment, None
    if environment is None:
        return
    atexit.unregister(leave_parallel_env)
    if isinstance(sys.excepthook, _Hook):
        sys.excepthook = sys.excepthook.before
    if environment.presence is not None:
        environment.presence.close(text)
    if dist.is_initialized():
        dist.destroy_process_group()


def environment() -> Environment:
    """What :func:`init_parallel_env` has made; in a process that nobody else trains with it is made
    now.

    Raises:
        RuntimeError: there are other trainers, and it has not been called.
    """
    if _environment is not None:
        return _environment
    if dist.is_initialized():  # by the script itself: nobody watches its trainers
        return Environment(
            World(dist.get_rank(), dist.get_world_size()),
            dist.distributed_c10d._get_default_store(),
            None,
        )
    if World.from_environment().size > 1:
        raise RuntimeError("call init_parallel_env() or fleet.init(is_collective=True) first")
    init_parallel_env()
    return environment()


def new_group(ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """A group of some of the trainers.  Every trainer of the job calls this, in the same order,
    with the same ranks.

    Args:
        ranks: which; None: all.

    Returns:
        The group; to trainers that are not in it, a mark that collectives refuse.

    Raises:
        ValueError: there is no such trainer, or one is named twice.
    """
    world = environment().world
    chosen = list(range(world.size)) if ranks is None else list(ranks)
    if (
        not chosen
        or len(set(chosen)) < len(chosen)
        or not all(rank in range(world.size) for rank in chosen)
    ):
        raise ValueError(f"ranks: expected some of 0 to {world.size - 1}, each once, got {chosen}")
    with named():
        group: dist.ProcessGroup = dist.new_group(sorted(chosen))
    return group


@contextmanager
def named() -> Iterator[None]:
    """Errors of communication inside are raised anew under the name of the trainer that caused
    them.

    Raises:
        PServerError: what became of that trainer.
    """
    try:
        yield
    except RuntimeError as error:
        found = blamed(error)
        if found is None:
            raise
        raise found from error


def blamed(error: BaseException) -> PServerError | None:
    """Who caused an error of communication; None for another error, and where nobody is known."""
    presence = _environment.presence if _environment is not None else None
    if presence is None or isinstance(error, PServerError) or not _COMMUNICATION.search(str(error)):
        return None
    event = presence.cause()
    return None if event is None else event.error()


class _Hook:
    """sys.excepthook: an error that ends this trainer is told to the others, and one that another
    caused says so.
    """

    def __init__(
        self, before: Callable[[type[BaseException], BaseException, TracebackType | None], Any]
    ) -> None:
        self.before = before

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.before(kind, error, trace)
        found = blamed(error)
        if found is not None:
            print(
                f"{type(found).__module__}.{type(found).__name__}: {found}",
                file=sys.stderr,
                flush=True,
            )
        elif not isinstance(error, PServerError):
            fail(error)


def fail(error: BaseException) -> None:
    """Tells the others that this trainer ends with an error of its own."""
    if _environment is not None and _environment.presence is not None:
        _environment.presence.tell("failed", f"{type(error).__name__}: {error}")


# ---- meeting ----


def _meet(world: World, seconds: float) -> Store:
    """The store, as soon as every trainer is there."""
    end = time.monotonic() + seconds
    place = f"{world.address}:{world.port}"
    keeps = world.rank == 0 and not world.served
    try:
        tcp = TCPStore(
            world.address,
            world.port,
            is_master=keeps,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        if keeps:
            raise Unreachable(
                f"trainer 0 cannot listen at {place} (MASTER_ADDR, MASTER_PORT): "
                f"{_first_line(error)}"
            ) from error
        keeper = "the store of the job" if world.served else "trainer 0"
        raise Unreachable(f"{keeper} did not come up at {place} within {seconds:g} s") from error
    store = PrefixStore(f"pserver/{world.attempt}/{_times}", tcp)
    try:
        if store.add(f"here/{world.rank}", 1) > 1:
            raise Refused(
                f"RANK: two processes say that they are trainer {world.rank} of {world.size}"
            )
        _wait_for_all(store, world, end, seconds)
    except dist.DistError as error:
        raise Unreachable(
            f"trainer 0, which keeps the store at {place}, left before all trainers were there"
        ) from error
    return store


def _wait_for_all(store: Store, world: World, end: float, seconds: float) -> None:
    store.add("count", 1)
    began = noticed = time.monotonic()
    while store.add("count", 0) < world.size:
        now = time.monotonic()
        if store.check(["gave up"]):
            store.set(f"told/{world.rank}", "")
            raise TimedOut(store.get("gave up").decode())
        if now > end:
            raise TimedOut(_give_up(store, world, seconds))
        if now - noticed > NOTICE_SECONDS:
            noticed = now
            log.warning(
                "waiting for %s since %.0f s", _trainers(_missing(store, world)), now - began
            )
        time.sleep(POLL_SECONDS)


def _missing(store: Store, world: World) -> list[int]:
    return [rank for rank in range(world.size) if not store.check([f"here/{rank}"])]


def _give_up(store: Store, world: World, seconds: float) -> str:
    """Says to the others who is missing; whoever keeps the store stays until they have read it."""
    missing = _missing(store, world)
    text = f"{_trainers(missing)} of {world.size} did not come up within {seconds:g} s"
    store.set("gave up", text)
    store.set(f"told/{world.rank}", "")
    others = [f"told/{rank}" for rank in range(1, world.size) if rank not in missing]
    end = time.monotonic() + LINGER_SECONDS
    while world.rank == 0 and others and not store.check(others) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    return text


def _trainers(ranks: Sequence[int]) -> str:
    return f"trainer{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
