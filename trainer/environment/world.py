"""The place of a process among trainers without servers, by torchrun's variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.environment.values import number_of

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class World:
    """A process's place among the trainers of a collective job: torchrun's variables.

    Attributes:
        rank, size: this trainer's number, and how many there are.
        local_rank: its number on its host, which picks its GPU.
        address, port: of the store of the trainers' rendezvous; "" in a world of one that no other
            process knows of.
        served: the store is there already (torchrun's agent, or ``spawn``, keeps it); otherwise
            rank 0 keeps it.
        attempt: how often torchrun has started the job again.
        all_here: every trainer is on this host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0
    served: bool = False
    attempt: int = 0
    all_here: bool = False

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"WORLD_SIZE: expected 1 or more, got {self.size}")
        for name, number in (("RANK", self.rank), ("LOCAL_RANK", self.local_rank)):
            if not 0 <= number < self.size:
                raise ValueError(f"{name}: expected 0 to {self.size - 1}, got {number}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"MASTER_PORT: expected 0 to 65535, got {self.port}")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> World:
        """RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT: a world of one without them,
        otherwise all five.

        Raises:
            ValueError: one of them is missing, or holds something else than it should; the message
                names it.
        """
        environ = os.environ if environ is None else environ
        if not is_collective(environ):
            return cls()
        missing = [name for name in TORCHRUN if not environ.get(name)]
        if missing:
            given = ", ".join(name for name in TORCHRUN if name not in missing)
            raise ValueError(
                f"{', '.join(missing)}: not set, and a trainer of a collective job ({given} set) "
                f"needs {'it' if len(missing) == 1 else 'them'}; to train alone, unset {given}"
            )
        rank, size, local_rank, port = (
            number_of(environ, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
        )
        served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = number_of(environ, "TORCHELASTIC_RESTART_COUNT", "0")
        all_here = environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]
        return cls(rank, size, local_rank, environ["MASTER_ADDR"], port, served, attempt, all_here)

    def enter(self) -> None:
        """Makes this process that trainer: sets the variables of its environment."""
        if self.address == "127.0.0.1" and sys.platform == "linux":
            # the host's own name need not resolve
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.update(
            {
                "RANK": str(self.rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_RANK": str(self.local_rank),
                "MASTER_ADDR": self.address,
                "MASTER_PORT": str(self.port),
                "TORCHELASTIC_USE_AGENT_STORE": str(self.served),
                "TORCHELASTIC_RESTART_COUNT": str(self.attempt),
            }
        )


def is_collective(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment makes this process one of torchrun's: some of its variables are set.
    All must be: see :meth:`World.from_environment`.
    """
    environ = os.environ if environ is None else environ
    return any(environ.get(name) for name in TORCHRUN)
